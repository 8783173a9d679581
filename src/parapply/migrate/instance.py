"""Objects of a server that a migration of several databases needs: tablespaces, and the databases.

In: a session in each database of the publisher, and one on the target outside of them. Out: `DatabaseFacts`, and what
is missing on the target made like the publisher's. An object that exists stays as it is.

A database is made under another name, and gets its own one in the transaction that gives it owner, privileges and
settings. So a database of that name is complete, wherever the command was killed; a tablespace likewise.

Source: PostgreSQL manual, "CREATE DATABASE", "CREATE TABLESPACE", "pg_database"; `pg_dumpall.c`.
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import msgspec
from psycopg import sql

from parapply import failpoints
from parapply.errors import ParapplyError, TargetRefused
from parapply.quoting import identifier, literal, setting, shown
from parapply.source.slot import read_rows, source_errors
from parapply.target.session.settings import rows, target_errors

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from parapply.migrate.options import Choice
    from parapply.source.slot import Connection
    from parapply.target.session.settings import Connection as TargetConnection

_HERE: Final = "(SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())"
#: As jsonb: the names of the locale's columns differ from version to version.
_DATABASE: Final = f"""
SELECT pg_catalog.pg_get_userbyid(d.datdba), CURRENT_USER, pg_catalog.pg_encoding_to_char(d.encoding),
       pg_catalog.to_jsonb(d) ->> 'datlocprovider', d.datcollate, d.datctype,
       COALESCE(pg_catalog.to_jsonb(d) ->> 'datlocale', pg_catalog.to_jsonb(d) ->> 'daticulocale', ''),
       COALESCE(pg_catalog.to_jsonb(d) ->> 'daticurules', ''), d.datconnlimit, t.spcname,
       COALESCE(pg_catalog.shobj_description(d.oid, 'pg_database'), ''), pg_catalog.pg_database_size(d.oid)
  FROM pg_catalog.pg_database AS d JOIN pg_catalog.pg_tablespace AS t ON t.oid = d.dattablespace
 WHERE d.oid = {_HERE}"""  # noqa: S608  a constant
_GRANTED: Final = """
(SELECT CASE grantee WHEN 0 THEN NULL ELSE pg_catalog.pg_get_userbyid(grantee) END, privilege_type,
        bool_or(is_grantable) FROM pg_catalog.aclexplode({}) GROUP BY 1, 2) AS a (grantee, privilege, is_grantable)"""
_GRANTS: Final = f"""
SELECT a.* FROM pg_catalog.pg_database AS d CROSS JOIN LATERAL {_GRANTED.format("d.datacl")}
 WHERE d.oid = {_HERE} ORDER BY 1, 2"""  # noqa: S608  a constant
_SETTINGS: Final = f"""
SELECT CASE s.setrole WHEN 0 THEN NULL ELSE pg_catalog.pg_get_userbyid(s.setrole) END, one
  FROM pg_catalog.pg_db_role_setting AS s CROSS JOIN LATERAL pg_catalog.unnest(s.setconfig) AS one
 WHERE s.setdatabase = {_HERE} ORDER BY 1, 2"""  # noqa: S608  a constant
_TABLESPACES: Final = f"""
SELECT t.spcname, pg_catalog.pg_get_userbyid(t.spcowner), pg_catalog.pg_tablespace_location(t.oid),
       COALESCE(t.spcoptions, '{{}}'), ARRAY(SELECT pg_catalog.to_jsonb(a) FROM {_GRANTED.format("t.spcacl")})
  FROM pg_catalog.pg_tablespace AS t
 WHERE t.spcname !~ '^pg_' AND {_HERE} IN (SELECT pg_catalog.pg_tablespace_databases(t.oid)) ORDER BY 1"""  # noqa: S608  a constant
#: By pg_database.datlocprovider: the option that names the locale, and server_version_num since which it exists.
_PROVIDERS: Final = {"i": ("icu", "ICU_LOCALE", 150000), "b": ("builtin", "BUILTIN_LOCALE", 170000)}
_RULES_SINCE: Final = 160000
#: In the database outside of those that are made.
_LOCK: Final = (
    "SELECT pg_catalog.pg_advisory_lock(pg_catalog.hashtextextended('parapply migrate several databases', 7809632))"
)
_BY_HAND: Final = "make the database there by hand, with the locale that you want, and run the same command"


class Grant(msgspec.Struct, frozen=True):
    """A privilege, without the role that gave it."""

    grantee: str | None  # None: PUBLIC
    privilege: str
    is_grantable: bool


class Tablespace(msgspec.Struct, frozen=True, kw_only=True):
    """A tablespace of the publisher that a database uses."""

    name: str
    owner: str
    location: str
    options: tuple[str, ...]  # name=value
    grants: tuple[Grant, ...]


class DatabaseFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A database of the publisher, without its content."""

    owner: str
    reader: str  # the role of this session
    encoding: str
    provider: str  # c: libc, i: ICU, b: built-in
    collate: str
    ctype: str
    locale: str  # of the provider; empty with libc
    rules: str  # of ICU
    connection_limit: int
    tablespace: str
    comment: str
    size_bytes: int
    grants: tuple[Grant, ...]  # empty: the default ones
    settings: tuple[tuple[str | None, str], ...]  # role, or None for all; name=value
    tablespaces: tuple[Tablespace, ...]

    def words(self) -> str:
        """Return its properties in a few words."""
        locale = self.locale or self.collate
        limit = "" if self.connection_limit < 0 else f", {self.connection_limit} connections"
        where = "" if self.tablespace == "pg_default" else f", tablespace {self.tablespace}"
        provider, *_ = _PROVIDERS.get(self.provider, ("libc",))
        return f"owner {self.owner}, {self.encoding}, {provider} {locale}{limit}{where}"


async def look(conn: Connection) -> DatabaseFacts:
    """Read the database of a session; raise SourceRefused or SourceLost if it could not be read."""
    with source_errors("reading the database's properties"):
        (row,) = await read_rows(conn, _DATABASE)
        grants = await read_rows(conn, _GRANTS)
        settings = await read_rows(conn, _SETTINGS)
        spaces = await read_rows(conn, _TABLESPACES)
    names = [field.name for field in msgspec.structs.fields(DatabaseFacts)]
    return DatabaseFacts(
        **dict(zip(names, row, strict=False)),
        grants=tuple([Grant(*grant) for grant in grants]),
        settings=tuple([(role, text) for role, text in settings]),
        tablespaces=tuple([_tablespace(*space) for space in spaces]),
    )


def _tablespace(name: str, owner: str, location: str, options: list[str], grants: list[dict[str, Any]]) -> Tablespace:
    given = tuple([Grant(one["grantee"], one["privilege"], one["is_grantable"]) for one in grants])
    return Tablespace(name=name, owner=owner, location=location, options=tuple(options), grants=given)


async def lock(target: TargetConnection) -> None:
    """Return when no other command makes objects of the server; the session keeps the lock until it ends."""
    with target_errors("waiting for another migration"):
        await rows(target, sql.SQL(_LOCK))


async def databases(target: TargetConnection) -> frozenset[str]:
    """Return the names of the target's databases; raise TargetRefused or TargetLost if they could not be read."""
    return await _names(target, "databases", "SELECT datname FROM pg_catalog.pg_database")


async def missing_tablespaces(target: TargetConnection, wanted: Collection[DatabaseFacts]) -> list[Tablespace]:
    """Return the tablespaces of databases that the target does not have."""
    known = await _names(target, "tablespaces", "SELECT spcname FROM pg_catalog.pg_tablespace")
    found = {space.name: space for facts in wanted for space in facts.tablespaces if space.name not in known}
    return [found[name] for name in sorted(found)]


async def _names(target: TargetConnection, of: str, query: str) -> frozenset[str]:
    with target_errors(f"reading the names of the {of}"):
        return frozenset([name for (name,) in await rows(target, sql.SQL(query))])


async def make_tablespace(target: TargetConnection, space: Tablespace, choice: Choice) -> None:
    """Make a tablespace in the folder that it has on the publisher."""
    known = await _known_roles(target, space.owner, space.grants, choice, reader=None)
    new = _new_name(space.name)
    make = f"CREATE TABLESPACE {identifier(new)} LOCATION {literal(space.location)}"
    has_new = new in await _names(target, "tablespaces", "SELECT spcname FROM pg_catalog.pg_tablespace")
    try:
        with target_errors(f"making the tablespace {space.name!r} in {space.location!r}"):
            if not has_new:
                await target.execute(make.encode())
            async with target.transaction():
                for text in _finishing("TABLESPACE", space.name, space.owner, space.grants, choice, known):
                    await target.execute(text.encode())
                for one in space.options:
                    name, _, value = one.partition("=")
                    text = f"ALTER TABLESPACE {identifier(space.name)} SET ({identifier(name)} = {literal(value)})"
                    await target.execute(text.encode())
    except TargetRefused as error:
        error.hint = (
            f"make the tablespace {shown(space.name)} there by hand, in a folder that the target's server may write,"
            " and run the same command; or --no-tablespaces"
        )
        raise


async def make_database(target: TargetConnection, name: str, facts: DatabaseFacts, choice: Choice) -> list[str]:
    """Make a database like the publisher's, without content; return the settings that it lacks, with the reasons.

    Raises:
        TargetRefused, TargetLost: it could not be made; nothing of it is left.
    """
    known = await _known_roles(target, facts.owner, facts.grants, choice, reader=facts.reader)
    new = _new_name(name)
    create = _create(new, facts, target.info.server_version, has_tablespace=choice.has_tablespaces)
    doing = f"making the database {name!r}"
    try:
        with target_errors(doing):
            # Of a command that was killed: nothing is in it.
            await target.execute(f"DROP DATABASE IF EXISTS {identifier(new)}".encode())
            await target.execute(create.encode())
        failpoints.probe(failpoints.MIGRATE_DATABASE)
    except TargetRefused as error:
        error.hint = error.hint or _BY_HAND
        raise
    try:
        with target_errors(doing):
            async with target.transaction():
                for text in _finishing("DATABASE", name, facts.owner, facts.grants, choice, known):
                    await target.execute(text.encode())
                if facts.connection_limit >= 0:
                    limit = f"ALTER DATABASE {identifier(name)} CONNECTION LIMIT {facts.connection_limit:d}"
                    await target.execute(limit.encode())
                if facts.comment:
                    comment = f"COMMENT ON DATABASE {identifier(name)} IS {literal(facts.comment)}"
                    await target.execute(comment.encode())
                return await _set(target, name, facts, known)
    except TargetRefused:
        # The refusal is reported; one that is left is found by the next command.
        with suppress(ParapplyError), target_errors(doing):
            await target.execute(f"DROP DATABASE IF EXISTS {identifier(new)}".encode())
        raise


async def _set(target: TargetConnection, name: str, facts: DatabaseFacts, known: Collection[str]) -> list[str]:
    left_out = []
    for role, one in facts.settings:
        parameter, _, value = one.partition("=")
        whose = parameter if role is None else f"{parameter} of {role}"
        if role is not None and role not in known:
            left_out.append(f"{whose}: the role is missing")
            continue
        head = "" if role is None else f"ROLE {identifier(role)} IN "
        try:
            text = f"ALTER {head}DATABASE {identifier(name)} SET {setting(parameter, value)}"
            with target_errors(f"setting {parameter}"):
                async with target.transaction():
                    await target.execute(text.encode())
        except (TargetRefused, ValueError) as error:
            left_out.append(f"{whose}: {error}")
    return left_out


async def _known_roles(
    target: TargetConnection, owner: str, grants: Sequence[Grant], choice: Choice, *, reader: str | None
) -> frozenset[str]:
    """Return the target's roles; refuse if one lacks that owns or has privileges, but for the role that reads here."""
    known = await _names(target, "roles", "SELECT rolname FROM pg_catalog.pg_roles")
    wanted = [owner] if choice.has_owners else []
    if choice.has_privileges:
        wanted += [one.grantee for one in grants if one.grantee is not None and one.grantee not in {reader, owner}]
    if absent := [role for role in dict.fromkeys(wanted) if role not in known]:
        raise TargetRefused(
            f"target: roles of the publisher are missing: {', '.join(absent)}",
            hint="--roles makes them; or --no-owner and --no-privileges leave owners and privileges out",
        )
    return known


def _finishing(  # noqa: PLR0913, PLR0917  its properties
    kind: str, name: str, owner: str, grants: Sequence[Grant], choice: Choice, known: Collection[str]
) -> Iterator[str]:
    """Yield statements of one transaction that give a new object its name, owner and privileges."""
    quoted = identifier(name)
    yield f"ALTER {kind} {identifier(_new_name(name))} RENAME TO {quoted}"
    if choice.has_owners:
        yield f"ALTER {kind} {quoted} OWNER TO {identifier(owner)}"
    if not (choice.has_privileges and grants):
        return
    its_owner = identifier(owner) if choice.has_owners else "CURRENT_USER"
    yield f"REVOKE ALL ON {kind} {quoted} FROM PUBLIC, {its_owner}"
    for one in grants:
        if one.grantee == owner:
            who = its_owner
        elif one.grantee is None:
            who = "PUBLIC"
        elif one.grantee in known:
            who = identifier(one.grantee)
        else:
            continue
        more = " WITH GRANT OPTION" if one.is_grantable and one.grantee != owner else ""
        yield f"GRANT {one.privilege} ON {kind} {quoted} TO {who}{more}"


def _new_name(name: str) -> str:
    """Return the name under which an object is made."""
    return f"parapply_new_{sha256(name.encode('utf-8', 'surrogateescape')).hexdigest()[:24]}"


def _create(new: str, facts: DatabaseFacts, version_num: int, *, has_tablespace: bool) -> str:
    """Return the statement that makes an empty database."""
    words = [
        f"CREATE DATABASE {identifier(new)} TEMPLATE template0 ENCODING {literal(facts.encoding)}",
        f"LC_COLLATE {literal(facts.collate)} LC_CTYPE {literal(facts.ctype)}",
    ]
    provider, option, since = _PROVIDERS.get(facts.provider, ("libc", "", 0))
    if version_num < max(since, _RULES_SINCE if facts.rules else 0):
        like = f"{provider} with rules" if facts.rules else provider
        raise TargetRefused(f"target: its version has no locale like the publisher's ({like})", hint=_BY_HAND)
    words.append(f"LOCALE_PROVIDER {provider}")
    if option:
        words.append(f"{option} {literal(facts.locale)}")
    if facts.rules:
        words.append(f"ICU_RULES {literal(facts.rules)}")
    if has_tablespace:
        words.append(f"TABLESPACE {identifier(facts.tablespace)}")
    return " ".join(words)

"""Roles of the publisher that the target does not have, made there with their attributes, memberships and settings.

Passwords come over as the verifiers that the publisher keeps, where its role may read them (a superuser); they are in
the target's log where `log_statement` has DDL in it, as with pg_dumpall. An existing role stays as it is.

Source: PostgreSQL manual, "CREATE ROLE", "pg_authid"; `pg_dumpall.c`, dumpRoles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from psycopg import sql

from parapply.printable import printable
from parapply.quoting import identifier, literal, setting
from parapply.source.slot import read_rows, source_errors
from parapply.target.session.settings import rows, target_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.connect import Connections

_ROLES: Final = """
SELECT r.rolname, r.rolsuper, r.rolinherit, r.rolcreaterole, r.rolcreatedb, r.rolcanlogin, r.rolreplication,
       r.rolbypassrls, r.rolconnlimit, r.rolvaliduntil::text, COALESCE(s.setconfig, '{}')
  FROM pg_catalog.pg_roles AS r
  LEFT JOIN pg_catalog.pg_db_role_setting AS s ON s.setrole = r.oid AND s.setdatabase = 0
 WHERE r.rolname !~ '^pg_' ORDER BY 1"""
# Of several grantors all grants hold together. An older server has no such options: its members may SET ROLE, and
# inherit as the role's own attribute says.
_MEMBERS: Final = """
SELECT g.rolname, m.rolname, bool_or(a.admin_option),
       bool_or(COALESCE((pg_catalog.to_jsonb(a) ->> 'inherit_option')::bool, m.rolinherit)),
       bool_or(COALESCE((pg_catalog.to_jsonb(a) ->> 'set_option')::bool, true)), bool_or(m.rolinherit)
  FROM pg_catalog.pg_auth_members AS a
  JOIN pg_catalog.pg_roles AS g ON g.oid = a.roleid JOIN pg_catalog.pg_roles AS m ON m.oid = a.member
 GROUP BY 1, 2 ORDER BY 1, 2"""
#: Each role, and the roles whose member it is, also through others.
_GROUPS: Final = """
WITH RECURSIVE within(member, roleid) AS (
  SELECT member, roleid FROM pg_catalog.pg_auth_members
   UNION SELECT w.member, a.roleid FROM within AS w JOIN pg_catalog.pg_auth_members AS a ON a.member = w.roleid)
SELECT m.rolname, array_agg(g.rolname::text) FROM within AS w
  JOIN pg_catalog.pg_roles AS g ON g.oid = w.roleid JOIN pg_catalog.pg_roles AS m ON m.oid = w.member GROUP BY 1"""
#: Begins as `_ROLES`.
_KNOWN: Final = """
SELECT rolname, rolsuper, rolinherit, rolcreaterole, rolcreatedb, rolcanlogin, rolreplication, rolbypassrls
  FROM pg_catalog.pg_roles"""
#: server_version_num of the first server whose memberships have options.
_OPTIONS_SINCE: Final = 160000
_ATTRIBUTES: Final = ("SUPERUSER", "INHERIT", "CREATEROLE", "CREATEDB", "LOGIN", "REPLICATION", "BYPASSRLS")
#: Attributes that only a superuser gives, by column.
_HIGH: Final = ("SUPERUSER", "REPLICATION", "BYPASSRLS")


class RolesMade(msgspec.Struct, frozen=True, kw_only=True):
    """The roles that were made, and the parts that they lack."""

    made: tuple[str, ...]
    without_password: tuple[str, ...]  # that may log in
    without_attributes: tuple[str, ...]  # role and what it lacks
    left_out: tuple[str, ...]  # memberships and settings that the target cannot have as they are


async def missing(ends: Connections) -> list[str]:
    """Return the names of the roles that `bring` would make."""
    with source_errors("reading the roles"):
        there = await read_rows(ends.source, _ROLES)
    with target_errors("reading the roles"):
        known = {row[0] for row in await rows(ends.target, sql.SQL(_KNOWN))}
    return [row[0] for row in there if row[0] not in known]


async def bring(ends: Connections) -> RolesMade:
    """Make the roles that are missing, in one transaction."""
    with source_errors("reading the roles"):
        there = await read_rows(ends.source, _ROLES)
        members = await read_rows(ends.source, _MEMBERS)
        here = await read_rows(ends.source, _GROUPS)
        ((may_read,),) = await read_rows(
            ends.source, "SELECT pg_catalog.has_table_privilege('pg_catalog.pg_authid', 'SELECT')"
        )
        verifiers: dict[str, str | None] = {}
        if may_read:
            verifiers = dict(await read_rows(ends.source, "SELECT rolname, rolpassword FROM pg_catalog.pg_authid"))
    rights = _rights(there, here)
    made: list[str] = []
    lacking: list[str] = []
    bare: list[str] = []
    left_out: list[str] = []
    with target_errors("making the roles"):
        known = _rights(await rows(ends.target, sql.SQL(_KNOWN)), await rows(ends.target, sql.SQL(_GROUPS)))
        ((is_superuser,),) = await rows(
            ends.target, sql.SQL("SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = CURRENT_USER")
        )
        async with ends.target.transaction():
            for row in there:
                if row[0] in known:
                    continue
                made.append(row[0])
                text, lacks = _make(row, verifiers.get(row[0]), is_superuser=is_superuser)
                lacking += [f"{row[0]}: {one}" for one in lacks]
                if row[5] and not verifiers.get(row[0]):
                    bare.append(row[0])
                await ends.target.execute(text.encode())
                for one in row[10]:
                    name, _, value = one.partition("=")
                    try:
                        text = f"ALTER ROLE {identifier(row[0])} SET {setting(name, value)}"
                    except ValueError as error:
                        left_out.append(f"{row[0]}: {name} ({error})")
                        continue
                    await ends.target.execute(text.encode())
            has_options = ends.target.info.server_version >= _OPTIONS_SINCE
            for group, member, *options, inherits in members:
                if member not in made:
                    continue
                grant = _grant(options, inherits=inherits, has_options=has_options)
                # A role of the same name may be another one there, which may more.
                if grant is None or (group not in made and not known.get(group, {group}) <= rights.get(group, set())):
                    left_out.append(f"{member}: membership in {group}")
                    continue
                await ends.target.execute(f"GRANT {identifier(group)} TO {identifier(member)}{grant}".encode())
    return RolesMade(
        made=tuple(made), without_password=tuple(bare), without_attributes=tuple(lacking), left_out=tuple(left_out)
    )


def say(made: RolesMade) -> None:
    """Print the attributes that the roles lack."""
    for text, names in (
        ("without a password, set one before they log in", made.without_password),
        ("without what only a superuser gives", made.without_attributes),
        ("left out, as the target cannot have it without giving more", made.left_out),
    ):
        if names:
            click.echo(printable(f"roles: {text}: {', '.join(names)}"), err=True)


def _rights(found: Sequence[tuple[Any, ...]], groups: Sequence[tuple[Any, ...]]) -> dict[str, set[str]]:
    """Return which rights each role has that its members may come by; its ownership and grants are not looked at."""
    rights = {name: {f"IN ROLE {group}" for group in within} for name, within in groups}
    for row in found:
        has = {word for word, is_set in zip(_ATTRIBUTES, row[1:8], strict=True) if is_set}
        rights.setdefault(row[0], set()).update(has - {"INHERIT", "LOGIN"})
    return rights


def _grant(options: Sequence[bool], *, inherits: bool, has_options: bool) -> str | None:
    """Return the end of a GRANT that gives no more than the publisher's; None if every one would."""
    is_admin, is_inherited, may_set = options
    if has_options:
        words = (("ADMIN", is_admin), ("INHERIT", is_inherited), ("SET", may_set))
        return " WITH " + ", ".join(f"{word} {str(has).upper()}" for word, has in words)
    if not may_set or (inherits and not is_inherited):
        return None
    return " WITH ADMIN OPTION" if is_admin else ""


def _make(row: tuple[Any, ...], verifier: str | None, *, is_superuser: bool) -> tuple[str, list[str]]:
    name, superuser, inherits, makes_roles, makes_databases, logs_in, replicates, bypasses, limit, until, _ = row
    high = dict(zip(_HIGH, (superuser, replicates, bypasses), strict=True))
    words = [
        *[word for word, has in high.items() if has and is_superuser],
        "INHERIT" if inherits else "NOINHERIT",
        *[
            word
            for word, has in (("CREATEROLE", makes_roles), ("CREATEDB", makes_databases), ("LOGIN", logs_in))
            if has
        ],
        *([f"CONNECTION LIMIT {limit:d}"] if limit >= 0 else []),
    ]
    text = f"CREATE ROLE {identifier(name)} {' '.join(words)}"
    if verifier:
        text += f" PASSWORD {literal(verifier)}"
    if until:
        text += f" VALID UNTIL {literal(until)}"
    return text, [word for word, has in high.items() if has and not is_superuser]

"""The publisher's schema brought to the target with pg_dump, where it is installed.

In: the way to the publisher, and a session on the target. Out: what pg_dump prints, run on the target in the caller's
transaction; the target's role owns what it makes. Secrets go through the environment, never through the command line,
which every user of the machine can read.

Source: PostgreSQL manual, "pg_dump", "Environment Variables" of libpq.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
from typing import TYPE_CHECKING, Any

import msgspec
import psycopg
from psycopg import conninfo, sql

from parapply.errors import ConfigError, SourceRefused, TargetRefused
from parapply.logs import SECRETS
from parapply.quoting import identifier, qualified
from parapply.source.ddl_automatic import TRIGGERS
from parapply.source.slot import source_errors
from parapply.target.session.settings import rows, target_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from parapply.login import Login
    from parapply.target.session.settings import Connection

#: Not what belongs to replication: the target has its own.
_OPTIONS = ("--no-publications", "--no-subscriptions", "--no-sync")
#: All of the schema, without what belongs to roles.
_ALL = ("--schema-only", "--no-owner", "--no-privileges")
#: The session that runs the script takes UTF-8.
_ENCODING = "--encoding=UTF8"
#: Lines of pg_dump's complaint that are shown: the first names the host and the port, or the table.
_MOST_LINES = 4


class DumpedStatement(msgspec.Struct, frozen=True):
    """A statement of a script."""

    title: str  # from the dump's comment before it; empty: the statement goes on with what came before
    text: str
    skeleton: str  # with one space between words, and without what stands in quotes
    begin: int  # in the script
    end: int  # after its semicolon


# The cut is at semicolons that stand in no quotes and no parentheses, never at a line's form: a comment may hold any
# text, the form of a dump's own lines included, and what it holds must not be run, and must come over as it is.
def statements(text: str) -> Iterator[DumpedStatement]:
    """Yield a script's statements in their order; raise ValueError if it ends within a statement."""
    has_escapes = "\nSET standard_conforming_strings = off;" in text.partition("\n-- Name: ")[0]
    position = depth = begin = 0
    title = ""
    parts: list[str] = []
    skeleton: list[str] = []
    while position < len(text):
        found = _TOKEN.match(text, position)
        assert found is not None
        kind, piece = found.lastgroup, found[0]
        if has_escapes and kind == "string" and (old := _OLD_STRING.match(text, position)):
            piece = old[0]
        position += len(piece)
        if kind == "comment":
            if not parts and (header := _HEADER.match(piece)):
                title = f"{header['type'].lower()} {header['name']}"
            continue
        if kind == "other" and piece in "'\"":
            raise ValueError("a quote that does not end")
        depth += {"(": 1, ")": -1}.get(piece, 0)
        if piece == ";" and not depth:
            yield DumpedStatement(title, "".join(parts).strip(), "".join(skeleton).strip(), begin, position)
            title, parts, skeleton = "", [], []
        elif parts or kind != "space":
            begin = begin if parts else position - len(piece)
            parts.append(piece)
            skeleton.append(_SHOWN.get(kind or "", piece))
    if parts:
        raise ValueError("a statement that does not end")


def edited(text: str, edit: Callable[[DumpedStatement], str | None]) -> str:
    """Return a script in which some statements are replaced, and everything else is as it was.

    Raises:
        ValueError: the script ends within a statement.
    """
    kept, position = [], 0
    for one in statements(text):
        new = edit(one)
        if new is not None:
            kept += [text[position : one.begin], new]
            position = one.end
    return "".join([*kept, text[position:]])


#: Words are tokens, so that a dollar sign or an E within a name begins no quotes.
_TOKEN = re.compile(
    r"""(?P<comment>--[^\n]*|/\*.*?\*/)
      | (?P<escapes>[eE]'(?:[^'\\]|\\.|'')*')
      | (?P<word>[A-Za-z_\x80-\U0010ffff][\w$]*)
      | (?P<string>'(?:[^']|'')*')
      | (?P<name>"(?:[^"]|"")*")
      | (?P<dollars>\$(?P<tag>(?:[A-Za-z_\x80-\U0010ffff]\w*)?)\$.*?\$(?P=tag)\$)
      | (?P<space>\s+)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
#: As `_TOKEN`, for a database whose plain strings have escapes.
_OLD_STRING = re.compile(r"'(?:[^'\\]|\\.|'')*'", re.DOTALL)
#: Placeholder of each token in a skeleton.
_SHOWN = {"space": " ", "string": "''", "escapes": "''", "dollars": "''", "name": '"n"'}
_HEADER = re.compile(r"-- Name: (?P<name>.*); Type: (?P<type>[A-Z ]+); Schema: ")


def find_pg_dump(path: str | None) -> str:
    """Return the program's path; raise ConfigError if the program is missing."""
    found = shutil.which(path or "pg_dump")
    if found is None:
        raise ConfigError(
            f"{path or 'pg_dump'}: no such program",
            hint="install PostgreSQL's client programs of the publisher's version or newer, or name one with --pg-dump"
            " (init) or its folder with --pg-bin (migrate)",
        )
    return found


async def connection(login: Login, environ: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return a connection string without secrets, and the variables with which it leads where the DSN leads.

    Parameters that the DSN leaves open come from libpq's own variables and files, as they do for the daemon.

    Raises:
        ConfigError: the DSN cannot be parsed, or has a secret that no variable can carry.
    """
    try:
        parameters: dict[str, Any] = conninfo.conninfo_to_dict(login.dsn)
    except Exception as error:
        raise ConfigError("source.dsn: not a connection string of PostgreSQL") from error
    password = parameters.pop("password", None)
    if shown := [name for name in SECRETS if parameters.get(name)]:
        raise ConfigError(
            f"source.dsn: {shown[0]} cannot be handed to pg_dump without showing it to everybody on the machine",
            hint="run pg_dump --schema-only by hand, and init without --schema",
        )
    variables = dict(environ)
    if login.command is not None:
        with source_errors("asking for pg_dump's password"):
            # pg_dump cannot ask for another one.
            password = await login.command.password(is_new=True)
    if password:
        variables["PGPASSWORD"] = str(password)
    return conninfo.make_conninfo(**parameters), variables


async def check_version(program: str, source_version_num: int) -> None:
    """Refuse a pg_dump that is older than the publisher, before it is needed.

    Raises:
        ConfigError: it is, or it does not report its version.
    """
    process = await asyncio.create_subprocess_exec(
        program, "--version", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    said, _ = await process.communicate()
    found = re.search(rb"\(PostgreSQL\) (\d+)", said)
    major = source_version_num // 10_000
    if found is None or int(found[1]) < major:
        is_what = f"is of version {int(found[1])}" if found else "does not report its version"
        raise ConfigError(
            f"{program} {is_what}, the publisher is of version {major}",
            hint="install PostgreSQL's client programs of the publisher's version or newer, and name their folder",
        )


def without_tables(tables: Sequence[tuple[str, str]]) -> list[str]:
    """Return pg_dump's options that leave tables out, by schema and name as they are."""
    # In double quotes a pattern is taken as it is.
    return [f"--exclude-table={qualified(*name)}" for name in tables]


async def dump(program: str, source: Login, *, without: Sequence[str], options: Sequence[str] = _ALL) -> bytes:
    """Return the publisher's schema as a script of SQL, without psql's own commands, and without some schemas.

    Raise ConfigError if the DSN cannot be handed on, SourceRefused if pg_dump failed.
    """
    text, variables = await connection(source, os.environ)
    key = await _restrict_key(program)
    process = await asyncio.create_subprocess_exec(
        program,
        *_OPTIONS,
        *options,
        _ENCODING,
        *([f"--restrict-key={key}"] if key else []),
        *[f"--exclude-schema={identifier(name)}" for name in without],
        f"--dbname={text}",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=variables,
    )
    script, errors = await process.communicate()
    if process.returncode:
        raise _failed(errors.decode(errors="replace"), process.returncode)
    try:
        return edited(_without_key(script.decode(), key), _edit).encode()
    except ValueError as error:
        raise unknown(error) from error


async def _restrict_key(program: str) -> str:
    """Return a key for the commands of psql by which pg_dump restricts it, empty where pg_dump writes none."""
    process = await asyncio.create_subprocess_exec(
        program, "--help", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    said, _ = await process.communicate()
    return secrets.token_hex(16) if b"--restrict-key" in said else ""


def _without_key(script: str, key: str) -> str:
    r"""Return a script without its first `\restrict` and its last `\unrestrict`, which only psql knows.

    Every other line of that form is text of the publisher's, which must come over as it is.
    """
    if not key:
        return script
    before, _, after = script.partition(f"\\restrict {key}\n")
    within, _, end = after.rpartition(f"\\unrestrict {key}\n")
    return before + within + end


def _edit(one: DumpedStatement) -> str | None:
    if _OWN_TRIGGERS.match(one.skeleton):
        return ""
    # Every target has it, and a dump makes it only where the publisher's differs.
    return "CREATE SCHEMA IF NOT EXISTS public;" if one.skeleton == "CREATE SCHEMA public" else None


def unknown(error: ValueError) -> ConfigError:
    """Return the error for a script that cannot be cut up."""
    return ConfigError(
        f"pg_dump has written {error}",
        hint="take a pg_dump of a version from 15 to 18, or run pg_dump and psql by hand, and go on with --from",
    )


def _failed(said: str, code: int | None) -> SourceRefused:
    """Return the error for what pg_dump wrote to its standard error."""
    lines = [line.strip().removeprefix("pg_dump: ").removeprefix("error: ") for line in said.splitlines()]
    lines = [line for line in lines if line]
    if "version mismatch" in said:
        hint = (
            "pg_dump must be of the publisher's version or newer: name one with --pg-dump, or its folder with --pg-bin"
        )
    elif "permission denied" in said:
        hint = "pg_dump locks and reads every table of the database, published or not: GRANT SELECT on them"
    else:
        hint = "pg_dump connects as parapply does, by source.dsn and libpq's own variables and files"
    return SourceRefused(f"pg_dump failed: {'; '.join(lines[:_MOST_LINES]) or f'exit code {code}'}", hint=hint)


async def make(target: Connection, script: bytes, *, is_migration: bool = False) -> None:
    """Run a script of `dump` on the target, inside the caller's transaction; nothing for an empty one.

    With `is_migration` later steps make the rest; else it is of `init --copy --schema`.

    Raises:
        TargetRefused: an object exists already, a privilege is missing, or the target is too old for it.
    """
    if not script:
        return
    text = fitting(script.decode(), await known_settings(target))
    try:
        with target_errors("making the schema"):
            await target.execute(text.encode())
            # The dump sets settings for its session.
            await target.execute("SET search_path = pg_catalog, pg_temp; SET row_security = off")
    except TargetRefused as error:
        raise refused(error, text, is_migration=is_migration) from error


async def known_settings(target: Connection) -> frozenset[str]:
    """Return the names of a server's settings; raise TargetRefused or TargetLost if they could not be read."""
    with target_errors("reading the settings"):
        found = await rows(target, sql.SQL("SELECT name FROM pg_catalog.pg_settings"))
    return frozenset([str(name) for (name,) in found])


def fitting(script: str, known: Collection[str]) -> str:
    """Return a dump without the settings of its head that a server does not know.

    A newer pg_dump begins with the settings of its own version; the definitions come after the first comment that names
    an object.
    """
    kept, position = [], 0
    for one in statements(script):
        if one.title:
            break
        if (found := _SETTING.match(one.skeleton)) and found[1] not in known:
            kept.append(script[position : one.begin])
            position = one.end
    return "".join([*kept, script[position:]])


def refused(error: TargetRefused, script: str, *, is_migration: bool) -> TargetRefused:
    """Return the error with the line of the script that the server did not take, and what to do."""
    cause = error.__cause__
    if not isinstance(cause, psycopg.Error):
        return error
    position = int(cause.diag.statement_position or 0)
    begin = script.rfind("\n", 0, max(0, position - 1)) + 1
    if script.startswith(")", begin):
        # The mistake is in the line before, because the server stumbles over its end.
        begin = script.rfind("\n", 0, max(0, begin - 1)) + 1
    statement = script[begin:].partition("\n")[0].strip() if position else ""
    hint = error.hint
    by_hand = _BY_HAND_MIGRATING if is_migration else _BY_HAND
    if cause.sqlstate == _NO_PRIVILEGE:
        hint = (
            f"nothing was changed; make the schema as the role that shall own it, {by_hand}, or GRANT CREATE ON SCHEMA"
            " and ON DATABASE to the target's role, which owns the tables then"
        )
    elif (cause.sqlstate or "").startswith(_THERE_ALREADY):
        hint = _EMPTY if is_migration else "leave out --schema if the tables exist; nothing was changed"
    elif cause.sqlstate == _NO_SCHEMA:
        hint = (
            "nothing was changed; the dump expects this schema, as it does public: CREATE SCHEMA it on the target, and"
            " run the same command again"
        )
    elif not hint or cause.sqlstate == _NO_TABLE:
        hint = f"nothing was changed; make the schema by hand with what the target does not take left out: {by_hand}"
    return TargetRefused(f"{error} in the dump's line: {statement}" if statement else str(error), hint=hint)


#: Event triggers of `init --ddl=automatic`, whose functions are in a schema that is left out.
_OWN_TRIGGERS = re.compile(
    rf"(CREATE|ALTER|COMMENT ON|SECURITY LABEL FOR \S+ ON) EVENT TRIGGER ({'|'.join(TRIGGERS)})\b"
)
_SETTING = re.compile(r"SET (\w+) = ")
_NO_PRIVILEGE, _NO_SCHEMA, _NO_TABLE = "42501", "3F000", "42P01"
#: duplicate_table, duplicate_schema, duplicate_function, duplicate_object.
_THERE_ALREADY = ("42P07", "42P06", "42723", "42710")
_BY_HAND = "`pg_dump --schema-only --no-privileges`, then psql"
_BY_HAND_MIGRATING = "`pg_dump --section=pre-data --no-privileges`, then psql, and go on with --from copy"
_EMPTY = (
    "nothing was changed; give an empty database as the target, or drop the objects in it if nothing needs them, and"
    " the same command goes on"
)

"""The target as a server, and findings that would keep the daemon from working there.

In: a read-only session on the target. Out: `Server` and findings. Changes nothing.

Source: PostgreSQL manual, "Access Privilege Inquiry Functions", "Replication Progress Tracking".
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from psycopg import sql

from parapply.amounts import few
from parapply.check.kinds import Code, Finding
from parapply.check.server import Server, read_server
from parapply.config_fleet import CONTROL_CONNECTIONS
from parapply.conflict.policies import Rules
from parapply.errors import TargetRefused
from parapply.source.slot import read_rows
from parapply.target.session import origins, prepared
from parapply.target.session.settings import SHARED_ORIGINS_SINCE, may_take_role, target_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from parapply.check.source import SourceSide
    from parapply.config import Config
    from parapply.target.session.settings import Connection

#: Locale providers as pg_database names them.
_PROVIDERS: Final = {"c": "libc", "i": "ICU", "b": "built-in", "d": "default"}

#: Origins of a copy's sessions keep no place of the server.
_ORIGINS: Final = f"""
SELECT (SELECT pg_catalog.count(*) FROM pg_catalog.pg_replication_origin WHERE roname !~ '^parapply_[0-9]+_copy_'),
  ({origins.MAY_USE_SQL})"""  # noqa: S608  constants

_STATE: Final = """
SELECT pg_catalog.has_schema_privilege(n.oid, 'USAGE') AND pg_catalog.has_schema_privilege(n.oid, 'CREATE'),
  EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.relnamespace = n.oid AND c.relname = 'schema_version')
FROM pg_catalog.pg_namespace n WHERE n.nspname = $1"""

_TEMPORARY: Final = "SELECT pg_catalog.has_database_privilege(pg_catalog.current_database(), 'TEMPORARY')"


class TargetSide(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of the target as a server, just read."""

    server: Server
    announced_pid: int  # of the session, at connection
    n_origins: int
    may_make_origins: bool
    may_set_role: bool  # session_replication_role, to what is configured
    may_make_temporary: bool  # tables
    state: tuple[tuple[bool, bool], ...]  # of the state schema if it exists: may be used and added to; has a version
    extensions: dict[str, str]  # version by name
    two_phase_error: str  # why prepared transactions cannot be applied; empty: they can, or need not


async def read_target(conn: Connection, config: Config) -> TargetSide:
    """Read the target as a server; raise TargetLost if the connection broke."""
    with target_errors("checking the target"):
        server = await read_server(conn)
        ((n_origins, may_make_origins),) = await read_rows(conn, _ORIGINS)
        state = await read_rows(conn, _STATE, [config.target.state_schema])
        ((may_make_temporary,),) = await read_rows(conn, _TEMPORARY)
        may_set_role = await may_take_role(conn, config.target.session_replication_role)
        extensions = dict(await read_rows(conn, "SELECT extname::text, extversion FROM pg_catalog.pg_extension"))
    two_phase_error = ""
    if config.source.two_phase:
        try:
            await prepared.check_possible(conn)
        except TargetRefused as error:
            two_phase_error = str(error)
    return TargetSide(
        server=server, announced_pid=conn.info.backend_pid, n_origins=n_origins, may_make_origins=may_make_origins,
        may_set_role=may_set_role, may_make_temporary=may_make_temporary, state=tuple(state), extensions=extensions,
        two_phase_error=two_phase_error,
    )  # fmt: skip


def findings_of_target(target: TargetSide, config: Config, source: SourceSide, *, is_known: bool) -> list[Finding]:
    """Return the faults of the target as a server; the slot is followed already if it `is_known`. Pure."""
    server = target.server
    findings = list(_of_session(target))
    role = sql.Identifier(server.role).as_string(None)
    if not target.may_set_role:
        findings.append(
            Finding(
                Code.REPLICATION_ROLE,
                f"role {role} may not set session_replication_role",
                role,
                f"GRANT SET ON PARAMETER session_replication_role TO {role};",
            )
        )
    findings += _of_state(config, server, target.state)
    findings += _of_two_phase(config, source.server, target)
    if config.source.on_lost_slot == "heal" and not target.may_make_temporary:
        database = sql.Identifier(server.database).as_string(None)
        findings.append(
            Finding(
                Code.HEAL_TEMPORARY,
                f"role {role} may not make temporary tables",
                role,
                f"GRANT TEMPORARY ON DATABASE {database} TO {role};",
            )
        )
    findings += _of_room(config, server)
    findings += _of_origins(config, target, is_known=is_known)
    findings += _of_locale(source.server, server)
    findings += _of_extensions(source, target.extensions)
    return findings


def _of_session(target: TargetSide) -> Iterator[Finding]:
    server = target.server
    if server.backend_pid != target.announced_pid:
        yield Finding(
            code=Code.TARGET_POOLER,
            found=f"the session's process {server.backend_pid} is not the one announced at connection"
            f" ({target.announced_pid}): a connection pooler is between",
        )
    if server.is_in_recovery:
        yield Finding(Code.TARGET_READ_ONLY, "the target is a standby (in recovery)")
    if not server.is_tested:
        yield Finding(Code.TARGET_VERSION, f"the target is PostgreSQL {server.version}")


def _of_state(config: Config, server: Server, state: Sequence[tuple[bool, bool]]) -> Iterator[Finding]:
    role = sql.Identifier(server.role).as_string(None)
    schema = sql.Identifier(config.target.state_schema).as_string(None)
    if not state and not server.may_create_schema:
        database = sql.Identifier(server.database).as_string(None)
        yield Finding(
            Code.STATE_SCHEMA,
            f"role {role} may not create schema {schema} in the database",
            role,
            f"GRANT CREATE ON DATABASE {database} TO {role};",
        )
    elif state and state[0] == (False, False):
        yield Finding(
            Code.STATE_SCHEMA,
            f"role {role} may not create tables in schema {schema}",
            schema,
            f"GRANT USAGE, CREATE ON SCHEMA {schema} TO {role};",
        )


def _of_two_phase(config: Config, source: Server, target: TargetSide) -> Iterator[Finding]:
    if not config.source.two_phase:
        return
    most, here = (server.number("max_prepared_transactions") for server in (source, target.server))
    fix = f"ALTER SYSTEM SET max_prepared_transactions = {max(most, 1)};  -- then restart"
    if target.two_phase_error:
        yield Finding(Code.TWO_PHASE, target.two_phase_error, fix=fix)
    elif here < most:
        found = f"max_prepared_transactions is {here} here and {most} on the publisher"
        yield Finding(Code.TWO_PHASE_FEWER, found, fix=fix)


def _of_room(config: Config, server: Server) -> Iterator[Finding]:
    apply = config.apply
    # Later workers of "auto" make do with the free ones, and the daemon's log says so.
    needed, free = apply.first_workers + CONTROL_CONNECTIONS, server.free_connections()
    if free < needed:
        role = sql.Identifier(server.role).as_string(None)
        yield Finding(
            code=Code.TARGET_CONNECTIONS, object=role,
            found=f"apply.workers = {apply.workers} needs {needed} connections, and role {role} can open"
            f" {max(free, 0)}",
        )  # fmt: skip


def _of_origins(config: Config, target: TargetSide, *, is_known: bool) -> Iterator[Finding]:
    server, n_origins = target.server, target.n_origins
    role = sql.Identifier(server.role).as_string(None)
    needing = Rules(config.conflict).needing()
    if needing and server.settings.get("track_commit_timestamp") != "on":
        yield Finding(
            Code.COMMIT_TIMESTAMPS,
            f"{needing} needs commit timestamps, and track_commit_timestamp is off",
            fix="ALTER SYSTEM SET track_commit_timestamp = on;  -- then restart",
        )
    what = needing or ('source.origin = "none"' if config.source.origin == "none" else "")
    if not target.may_make_origins:
        functions = ", ".join(f"pg_catalog.{name}" for name in origins.FUNCTIONS)
        yield Finding(
            Code.ORIGINS_NEEDED if what else Code.ORIGINS_MISSING,
            f"role {role} may not set up replication origins" + (f", which {what} needs" if what else ""),
            role,
            f"GRANT EXECUTE ON FUNCTION {functions} TO {role};",
        )
    name = "max_active_replication_origins"
    name = name if name in server.settings else "max_replication_slots"
    most, needed = server.number(name), 1 if server.version_num >= SHARED_ORIGINS_SINCE else config.apply.first_workers
    if most < n_origins + needed:
        yield Finding(
            # Some of those that exist may be its own.
            code=Code.ORIGINS_NEEDED if what and not is_known else Code.ORIGINS_EXHAUSTED,
            found=f"{n_origins} replication origins exist, {needed} more are needed"
            + (f" for {what}" if what else "") + f", and {name} is {most}",
            fix=f"ALTER SYSTEM SET {name} = {n_origins + needed};  -- then restart",
        )  # fmt: skip


def _of_locale(source: Server, target: Server) -> Iterator[Finding]:
    encodings = f"the publisher's database is in {source.encoding}, the target's in {target.encoding}"
    if source.encoding == "SQL_ASCII":
        yield Finding(code=Code.ENCODING, found=f"{encodings}: only texts in UTF8 can be applied")
    elif target.encoding not in {"UTF8", source.encoding}:
        unchecked = ": nothing checks what its bytes mean" if target.encoding == "SQL_ASCII" else ""
        yield Finding(code=Code.ENCODING, found=f"{encodings}{unchecked}")
    if target.collation_version != target.actual_collation_version and target.actual_collation_version:
        database = sql.Identifier(target.database).as_string(None)
        yield Finding(
            code=Code.COLLATION_VERSION, object=database,
            found=f"the target's database was made with collation version {target.collation_version}, and"
            f" {target.actual_collation_version} is in use",
            fix=f"REINDEX DATABASE {database}; ALTER DATABASE {database} REFRESH COLLATION VERSION;",
        )  # fmt: skip
    pairs = [
        ("locale provider", _PROVIDERS.get(source.locale_provider), _PROVIDERS.get(target.locale_provider)),
        ("LC_COLLATE", source.collate, target.collate),
        ("LC_CTYPE", source.ctype, target.ctype),
        *((name, source.settings.get(name), target.settings.get(name)) for name in ("lc_numeric", "lc_time")),
    ]
    differing = [f"{name} {here} there, {there} here" for name, here, there in pairs if here != there]
    if differing:
        yield Finding(Code.LOCALE, f"the databases differ: {'; '.join(differing)}")


def _of_extensions(source: SourceSide, extensions: dict[str, str]) -> Iterator[Finding]:
    by_name: dict[str, list[str]] = {}
    versions = {}
    for type_, each in source.types.items():
        if each.extension:
            by_name.setdefault(each.extension, []).append(type_)
            versions[each.extension] = each.extension_version
    for name, types in sorted(by_name.items()):
        quoted = sql.Identifier(name).as_string(None)
        here = extensions.get(name)
        if here is None:
            yield Finding(
                Code.EXTENSION_MISSING,
                f"extension {quoted} is missing ({few(types)})",
                quoted,
                f"CREATE EXTENSION {quoted};",
            )
        elif here != versions[name]:
            yield Finding(
                Code.EXTENSION_VERSION,
                f"extension {quoted} has version {versions[name]} on the publisher and {here} here",
                quoted,
            )


def findings_of_machine(config: Config) -> Iterator[Finding]:
    """Look at the disk for transactions in progress, on the machine that runs this command; make nothing there."""
    wanted = config.apply.spill_dir or Path(tempfile.gettempdir())
    # The daemon makes the directory, so the nearest existing one decides.
    try:
        there = _nearest(wanted.absolute())
    except OSError as error:
        yield Finding(Code.SPILL_DIR, f"{error.filename}: {error.strerror}", str(wanted))
        return
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield Finding(Code.SPILL_DIR, f"nothing can be written in {there}", str(wanted))
        return
    free_bytes = shutil.disk_usage(there).free
    if free_bytes < config.apply.spill_limit_bytes:
        yield Finding(
            code=Code.SPILL_SPACE, object=str(wanted),
            found=f"apply.spill_limit_bytes is {config.apply.spill_limit_bytes:,}, and {free_bytes:,} bytes are free"
            f" in {there}",
        )  # fmt: skip


def _nearest(wanted: Path) -> Path:
    """Return a path or the lowest directory above it that exists; raise OSError if that cannot be seen."""
    for path in (wanted, *wanted.parents):
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
            return path
    return wanted

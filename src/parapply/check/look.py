"""One look at both ends: reads them, and returns what would fail or hurt.

In: the configuration and options, and sessions of `init` or its own. Out: a `Report`. Makes nothing on either
server: while it looks, its sessions are read-only. It waits for a locked table only briefly, and then says so.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec
import psycopg
from psycopg import sql

from parapply import sharing
from parapply.amounts import few
from parapply.check.kinds import Code, End, Finding, Severity
from parapply.check.providers import ProviderEnd, Ruling, Status, rulings, with_fixes
from parapply.check.source import read_source
from parapply.check.tables import read_tables
from parapply.check.target import findings_of_machine, findings_of_target, read_target
from parapply.config import settings_without_table
from parapply.connect import Connections, check_apart, check_back, check_ddl_role, known_position
from parapply.copy.published import PublishedTable
from parapply.errors import SourceLost, SourceRefused, TargetLost, TargetRefused
from parapply.plan.table import TablePlan
from parapply.source import refusals, slot
from parapply.source.slot import read_rows, source_errors
from parapply.target.session import prepared, settings
from parapply.target.session.settings import target_errors
from parapply.target.state import cutovers
from parapply.target.state import slots as state

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractContextManager

    from parapply.check.server import Server
    from parapply.check.source import CheckOptions, SourceSide
    from parapply.config import Config

_FINE, _WARNED = 0, 1
_ORDER = list(Code)
#: Findings that matter only while the slot is still to be made or adopted.
_OF_NEW_SLOT = frozenset(
    {
        Code.SLOT_ADOPTED,
        Code.SLOT_IN_USE,
        Code.SLOT_READ,
        Code.SLOT_REFUSED,
        Code.SLOTS_EXHAUSTED,
        Code.OPEN_TRANSACTION,
    }
)
#: How long a question waits for a locked table.
_LOCK_TIMEOUT: Final = "2s"

# Neither asks for a lock on a table itself. A prepared transaction has no process.
_LOCKED: Final = """
SELECT pg_catalog.format('%I.%I', n.nspname, c.relname), l.pid
FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_class c ON c.oid = l.relation AND c.relkind IN ('r', 'p')
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE l.granted AND l.mode = 'AccessExclusiveLock'
  AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())
ORDER BY 1"""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check."""

    slot: str
    is_known: bool  # the target's state knows the slot: `init` has been here
    published: tuple[PublishedTable, ...] = ()  # what a copy would read
    findings: tuple[Finding, ...]  # worst first
    plans: tuple[TablePlan, ...]  # how each table would be applied
    rulings: tuple[Ruling, ...] = ()  # on the rules of the providers, if any is given

    def of(self, severity: Severity) -> list[Finding]:
        """Return the findings of one severity."""
        return [each for each in self.findings if each.code.value.severity is severity]

    @property
    def exit_code(self) -> int:
        """Return 0 if all is fine, 1 with warnings, and the exit code of `init` if something would be refused."""
        if refused := self.of(Severity.REFUSED):
            is_source = any(each.code.value.end is End.SOURCE for each in refused)
            return (SourceRefused if is_source else TargetRefused).exit_code
        is_broken = any(each.status is Status.BROKEN for each in self.rulings)
        return _WARNED if is_broken or self.of(Severity.WARNING) else _FINE


async def look(config: Config, options: CheckOptions) -> Report:
    """Look at both ends by new sessions, whatever state the ends are in.

    Raises:
        SourceLost, SourceRefused, TargetLost, TargetRefused: an end cannot be reached, does not let this role in, or
            has locked tables.
    """
    name = f"parapply check {config.source.slot}"
    conn = await slot.connect(config.source.login, application_name=name)
    async with conn:
        target = await settings.connect_reader(config.target.login, name)
        async with target:
            facts = await slot.inspect(conn, config.source.slot)
            known, of_state = await _known(config, facts, target)
            return await look_at(Connections(conn, target), config, options, facts, known, of_state=of_state)


async def look_at(  # noqa: PLR0913  what is known by now
    ends: Connections,
    config: Config,
    options: CheckOptions,
    facts: slot.SourceFacts,
    known: state.SlotState | None,
    *,
    of_state: Sequence[Finding] = (),
) -> Report:
    """Look at both ends by open sessions; they can write again afterwards if nothing was raised."""
    async with _reading(ends.source, source_errors), _reading(ends.target, target_errors):
        try:
            return await _look_at(ends, config, options, facts, known, of_state)
        except (SourceLost, TargetLost) as error:
            if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
                await _tell_locks(ends, error)
            raise


@asynccontextmanager
async def _reading(
    conn: psycopg.AsyncConnection[Any], errors: Callable[[str], AbstractContextManager[None]]
) -> AsyncIterator[None]:
    """Keep a session from writing and from waiting for locks; if the block fails it stays so, for the command ends."""
    doing = "pinning session settings"
    with errors(doing):
        await conn.execute(f"SET default_transaction_read_only = on; SET lock_timeout = '{_LOCK_TIMEOUT}'".encode())
    yield
    with errors(doing):
        await conn.execute(b"SET default_transaction_read_only = off; SET lock_timeout = 0")


async def _tell_locks(ends: Connections, error: SourceLost | TargetLost) -> None:
    """Raise what names the locked tables of the end that `error` is about, unless they are free by now."""
    is_source = isinstance(error, SourceLost)
    conn: psycopg.AsyncConnection[Any] = ends.source if is_source else ends.target
    with source_errors("asking for locks") if is_source else target_errors("asking for locks"):
        locked = await read_rows(conn, _LOCKED)
    if not locked:
        return
    names = few([f"{table} (process {pid})" if pid else f"{table} (a prepared transaction)" for table, pid in locked])
    raise type(error)(
        f"{'source' if is_source else 'target'}: could not look at every table within {_LOCK_TIMEOUT}, because tables"
        f" are locked: {names}",
        hint="end the transactions that hold them, or wait for their end, and run the command again",
    ) from error


async def _look_at(  # noqa: PLR0913, PLR0917  what is known by now
    ends: Connections,
    config: Config,
    options: CheckOptions,
    facts: slot.SourceFacts,
    known: state.SlotState | None,
    of_state: Sequence[Finding],
) -> Report:
    await check_apart(config, ends, facts)
    # Both have ended when this goes on: neither reads on in a session that is about to be closed.
    source, there = await asyncio.gather(
        read_source(ends.source, config, facts, options), read_target(ends.target, config), return_exceptions=True
    )
    if isinstance(source, BaseException):
        raise source
    if isinstance(there, BaseException):
        raise there
    of_source = [*source.findings, *of_state]
    is_known = known is not None or bool(of_state)
    if is_known:
        of_source = [each for each in of_source if each.code not in _OF_NEW_SLOT]
    if known is not None:
        of_source += await _of_known_slot(config, ends, source, known)
    plans, of_tables = await read_tables(ends.target, config, source, options, is_known=is_known)
    of_sharing = [] if of_state else await _of_sharing(ends.target, config, source, known)
    findings = [
        *of_source,
        *findings_of_target(there, config, source, is_known=is_known),
        *of_tables,
        *_of_settings(config, source),
        *await _of_ddl_role(config, ends.target, brings_roles=options.brings_roles),
        *of_sharing,
        *findings_of_machine(config),
    ]
    places = _places(ends, options, source.server, there.server)
    for place in places:
        findings = with_fixes(findings, place)
    severities = list(Severity)
    findings.sort(key=lambda each: (severities.index(each.code.value.severity), _ORDER.index(each.code), each.object))
    return Report(
        slot=config.source.slot,
        is_known=is_known,
        published=source.tables,
        findings=tuple(findings),
        plans=tuple(plans),
        rulings=tuple(ruling for place in places for ruling in rulings(place, findings, config)),
    )


def _of_settings(config: Config, source: SourceSide) -> list[Finding]:
    """Return the settings that name a table which is not published."""
    published = [*source.schema_only, *[relation.qualified_name for relation in source.relations]]
    return [
        Finding(code, what, section)
        for code, unknown in (
            (Code.SETTING_WITHOUT_TABLE, settings_without_table(config, published)),
            (Code.SCHEMA_ONLY_UNKNOWN, config.mapping.schema_only_unknown(published)),
            (Code.REPLACED_UNKNOWN, config.mapping.replaced_unknown(published)),
        )
        for section, what in unknown.items()
    ]


async def _of_sharing(
    target: settings.Connection, config: Config, source: SourceSide, known: state.SlotState | None
) -> list[Finding]:
    """Return the tables in which only rows of other slots have constants."""
    if not await state.has_schema(target, config.target.state_schema):
        return []
    taken = await sharing.others(target, config.target.state_schema, known.slot_id if known else 0)
    names = [relation.full_name for relation in source.relations]
    return [Finding(Code.TABLE_SHARED, found) for found in sharing.problems(config, names, taken)]


def _places(ends: Connections, options: CheckOptions, source: Server, target: Server) -> list[ProviderEnd]:
    """Return the servers whose provider is given."""
    given = (
        (options.provider, End.SOURCE, source, ends.source.info),
        (options.target_provider, End.TARGET, target, ends.target.info),
    )
    return [
        ProviderEnd(provider=provider, end=end, server=server, address=f"{info.host}:{info.port}")
        for provider, end, server, info in given
        if provider is not None
    ]


async def _known(
    config: Config, facts: slot.SourceFacts, target: settings.Connection
) -> tuple[state.SlotState | None, list[Finding]]:
    """Return the target's state of the slot, None if it has none, and why it cannot be read."""
    schema = config.target.state_schema
    try:
        if not await state.has_schema(target, schema):
            return None, []
        return await state.load(target, schema, config.source.slot, facts.system_identifier), []
    except TargetRefused as error:
        name = sql.Identifier(schema).as_string(None)
        return None, [Finding(Code.STATE_SCHEMA, str(error), name, error.hint)]


async def _of_known_slot(
    config: Config, ends: Connections, source: SourceSide, found: state.SlotState
) -> list[Finding]:
    """Return the reasons why a slot that is already followed cannot continue."""
    login, name, schema = config.source.login, config.source.slot, config.target.state_schema
    position = await known_position(ends.target, schema, found)
    findings = []
    try:
        await cutovers.check_may_write(ends.target, schema, found.slot_id, name)
    except TargetRefused as error:
        findings.append(Finding(Code.CUT_OVER, str(error), name, error.hint))
    try:
        prepared.check_ending(
            await prepared.pending(ends.target, schema, found.slot_id),
            await prepared.proved_lsns(ends.target, schema, found.slot_id),
            two_phase=config.source.two_phase,
        )
    except TargetRefused as error:
        findings.append(Finding(Code.PREPARED_PENDING, str(error), name, error.hint))
    try:
        await check_back(config, ends.source, source.facts)
        await refusals.check(ends.source, source.facts, login, name, position, two_phase=config.source.two_phase)
    except SourceRefused as error:
        if not any(each.code in {Code.WAL_LEVEL, Code.SOURCE_STANDBY} for each in source.findings):
            findings.append(Finding(Code.SLOT_REFUSED, str(error), name, error.hint))
    return findings


async def _of_ddl_role(config: Config, target: settings.Connection, *, brings_roles: bool) -> list[Finding]:
    try:
        await check_ddl_role(config, target)
    except TargetRefused as error:
        # The server's code for a role that does not exist.
        if brings_roles and isinstance(error.__cause__, psycopg.errors.InvalidParameterValue):
            return []
        return [Finding(Code.DDL_ROLE, str(error), sql.Identifier(config.ddl.role).as_string(None), error.hint)]
    return []

"""Opens both servers for one command, and takes a slot over that the target does not know yet.

The daemon opens its own sessions, in the order that makes them safe (``runtime/sessions.py``).
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import click
import msgspec
from psycopg import sql

from parapply.amounts import few
from parapply.config import SAME_ROLE
from parapply.conflict.policies import Rules
from parapply.errors import ParapplyError, SourceRefused, TargetRefused
from parapply.logs import redact_text
from parapply.printable import printable
from parapply.source import failover, history, options, refusals, slot, waits
from parapply.target.session import lease, origins, prepared, settings
from parapply.target.state import cutovers
from parapply.target.state import slots as state
from parapply.vocabulary import CutoverStep

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from parapply.blocked import BlockedSession
    from parapply.config import Config
    from parapply.plan.copy_starts import Name

#: Seconds for the last word of a daemon: its end, or its next attempt, waits for that.
SHOW_LIMIT_S = 4.0


class Connections(msgspec.Struct, frozen=True):
    """A session on both ends."""

    source: slot.Connection
    target: settings.Connection


@asynccontextmanager
async def open_both(
    config: Config, command: str, tell: Callable[[BlockedSession], None] | None = None
) -> AsyncIterator[Connections]:
    """Open a plain session on the publisher and a control session on the target.

    Waits of any session on the publisher are reported until the block ends, by default on standard error.
    """
    name = f"parapply {command} {config.source.slot}"
    login = config.source.login
    source = await slot.connect(login, application_name=name)
    async with source, waits.looked_after(login, tell or _tell_waiting):
        target = await open_target(config, command)
        async with target:
            yield Connections(source, target)


def _tell_waiting(one: BlockedSession) -> None:
    click.echo(f"source: {one.line()}", err=True)


async def open_target(config: Config, command: str) -> settings.Connection:
    """Open a control session on the target."""
    return await settings.connect_control(
        config.target.login,
        role=config.target.session_replication_role,
        application_name=f"parapply {command} {config.source.slot}",
    )


async def check_apart(config: Config, ends: Connections, facts: slot.SourceFacts) -> None:
    """Raise TargetRefused for a target that is the publisher's own database: each change would come back, without end.

    Two servers may be copies of one cluster, and have one system identifier; a standby has its primary's, and replays
    its primary's timeline.
    """
    timeline, started_us, is_copied = await _identity(ends.target, facts)
    if not is_copied:
        return
    if facts.is_in_recovery:
        facts = await refusals.with_timeline(ends.source, facts, config.source.login)
    if started_us == facts.started_us or (facts.is_in_recovery and timeline in {0, facts.timeline}):
        where = "a standby of it" if facts.is_in_recovery else "the same server"
        raise TargetRefused(
            f"target: source.dsn and target.dsn lead to one database, {facts.database!r} (source.dsn to {where}): what"
            " is applied there would come again, without end",
            hint="correct one of the two",
        )


async def _identity(target: settings.Connection, facts: slot.SourceFacts) -> tuple[int, int, bool]:
    """Return a target's timeline (0: in recovery), its start, and whether it has the publisher's identity."""
    query = sql.SQL(
        "SELECT system_identifier, pg_catalog.current_database(),"
        " CASE WHEN pg_catalog.pg_is_in_recovery() THEN 0 ELSE ('x' || pg_catalog.substr(pg_catalog.pg_walfile_name("
        "pg_catalog.pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int END,"
        " (extract(epoch FROM pg_catalog.pg_postmaster_start_time()) * 1000000)::bigint"
        " FROM pg_catalog.pg_control_system()"
    )
    with settings.target_errors("identifying the target"):
        ((identifier, database, timeline, started_us),) = await settings.rows(target, query)
    is_copied = (str(identifier & 0xFFFF_FFFF_FFFF_FFFF), database) == (facts.system_identifier, facts.database)
    return int(timeline), int(started_us), is_copied


@asynccontextmanager
async def state_schema(target: settings.Connection, schema: str) -> AsyncIterator[None]:
    """Make the state schema if it is missing; drop it again if the block is refused and no slot is noted in it."""
    is_new = await state.ensure_schema(target, schema)
    try:
        yield
    except (SourceRefused, TargetRefused):
        if is_new:
            # The refusal is reported; a schema that is left is found by the next init.
            with suppress(ParapplyError):
                await state.drop_schema(target, schema)
        raise


async def show_state(config: Config, shown: str, reason: str, limit_s: float = SHOW_LIMIT_S) -> None:
    """Show a daemon's state on the target when its epoch could not, as far as that can be done within `limit_s`.

    Where the slot is another daemon's, nothing is shown, because that daemon shows its own. A state that cannot be
    written here is in the log.
    """
    schema, name = config.target.state_schema, config.source.slot
    with suppress(ParapplyError, TimeoutError):
        async with asyncio.timeout(limit_s), await open_target(config, "farewell") as conn:
            # Raises for a layout of another version, which is not this program's to write in.
            await state.has_schema(conn, schema)
            slot_id = await state.find_slot(conn, schema, name)
            # The session of the epoch that has ended may still be on its way out.
            await lease.take_lease(conn, slot_id, limit_s / 2)
            await state.set_state(conn, schema, slot_id, shown, redact_text(reason))


def raise_all(errors: Sequence[ParapplyError]) -> None:
    """Print all but the last error, and raise that one; do nothing without any."""
    if not errors:
        return
    *others, last = errors
    for error in others:
        click.echo(f"parapply: {redact_text(error.line())}", err=True)
    raise last


async def known_state(config: Config, target: settings.Connection, system_identifier: str) -> state.SlotState | None:
    """Return the state of the slot, None if the target has none of it; no schema is made.

    Raises:
        TargetRefused: the state is of another version, or belongs to another publisher.
    """
    schema = config.target.state_schema
    if not await state.check_schema(target, schema):
        return None
    return await state.load(target, schema, config.source.slot, system_identifier)


async def known_position(
    conn: settings.Connection, schema: str, found: state.SlotState | None
) -> refusals.KnownPosition | None:
    """Return the target's state for the slot check, as read and as prepared; None if no state exists."""
    if found is None:
        return None
    # A daemon that was killed between a PREPARE and its record leaves it above everything that is recorded. So does a
    # copy of a table while the daemon is behind, or one that read what a standby does not have yet.
    pending = await prepared.pending(conn, schema, found.slot_id)
    return refusals.KnownPosition(
        system_identifier=found.system_identifier,
        timeline=found.timeline,
        low_lsn=found.low_lsn,
        high_lsn=max([found.high_lsn, found.copied_lsn, *[end_lsn for _, end_lsn in pending.values()]]),
        confirmed_flush_lsn=found.confirmed_flush_lsn,
        source_started_us=found.source_started_us,
    )


async def check_history(config: Config, conn: slot.Connection, version: int, found: state.SlotState) -> str:
    """Refuse a publisher that was put back, has written since, and does not have what was applied.

    The slot is read again, because the process that sent its stream before may have taken one more report. None may
    take any now.

    Returns:
        Why that is not proved; empty: it has everything.

    Raises:
        SlotLost, SourceRefused, SlotBusy: as `source.history.check`.
    """
    source = config.source
    facts = await slot.read_slot(conn, source.slot)
    slot_lsn = (facts.confirmed_flush_lsn if facts else None) or 0
    is_two_phase = facts is not None and facts.is_two_phase
    why = ""
    # The watermark has not moved where it is the begin; the way back of a cut-over begins past its slot.
    if slot_lsn < found.high_lsn and found.high_lsn > found.begin_lsn:
        if found.has_forgotten:
            return "no record of what is applied is left"
        if source.two_phase and not is_two_phase:
            return "the slot does not send prepared transactions yet"
        start = options.start_options(version, source.publications, source.origin, two_phase=is_two_phase)
        why = await history.check(
            conn,
            source.slot,
            slot_lsn,
            start,
            begin_lsn=found.begin_lsn,
            low_lsn=found.low_lsn,
            recorded=found.recorded,
        )
    if not why and found.copied_lsn > max(found.high_lsn, slot_lsn):
        return "a table was copied as of after all that is applied"
    return why


async def carry_origin(  # noqa: PLR0913, PLR0917  whose session writes what
    config: Config, conn: settings.Connection, slot_id: int, who: str, what: str, tables: Sequence[Name]
) -> bool:
    """Make a command's session write under an origin of the slot, as the workers do, and return whether it does.

    Without one its rows go on to each subscriber of the target: in a two-way set-up to the publisher, as a client's.

    Args:
        config: policies, and what is asked of the publisher.
        conn: writes users' rows from now on.
        slot_id: of the state.
        who: name of the session among the sessions of the slot.
        what: is to be done, for the message.
        tables: that are written, by their names on the target.

    Raises:
        TargetRefused: it does not, and something needs that.
    """
    problem = await origins.carry_origin(conn, origins.origin_name(slot_id, who))
    if problem is None:
        return True
    needing = Rules(config.conflict).needing()
    if not needing and config.source.origin == "none":
        needing = 'source.origin = "none"'
    hint = problem.hint
    if not needing and (slots := await origins.followers(conn, tables)):
        needing = f"{what}, which slot {slots[0]!r} on the target would send on as changes of a client,"
        hint = f"{hint}; or drop that slot first if nothing follows it"
    if needing:
        raise TargetRefused(f"target: {needing} needs replication origins: {problem.text}", hint=hint)
    return False


def new_slot(config: Config, facts: slot.SourceFacts, low_lsn: int) -> state.NewSlot:
    """Return the state of a slot of which everything that commits after an LSN is to be applied."""
    return state.NewSlot(
        slot_name=config.source.slot,
        system_identifier=facts.system_identifier,
        timeline=facts.timeline,
        database_name=facts.database,
        publications=tuple(config.source.publications),
        low_lsn=low_lsn,
        commit_order=config.apply.commit_order,
        workers=config.apply.most_workers,
    )


async def check_back(config: Config, source: slot.Connection, facts: slot.SourceFacts, *, copies: bool = False) -> None:
    """Refuse the slot of the way back of a cut-over under way: the stream ahead runs, and rows would go round.

    Args:
        config: slot.
        source: session on the publisher, which a cut-over makes the one that takes over.
        facts: of the publisher. Its facts of the slot are no newer than the state that is read here.
        copies: tables are to be copied, which the last look of the cut-over would take for late writes of clients.

    Raises:
        SourceRefused: the cut-over has not come to the step at which the way back begins.
    """
    if not facts.state_schemas:
        return
    name = config.source.slot
    until = CutoverStep.DONE if copies else cutovers.BACK_BEGINS
    with slot.source_errors("looking for cut-overs"):
        open_ones = await cutovers.readable(source, facts.state_schemas)
    for schema, owner in open_ones:
        place = f"the schema {schema!r} of the role {owner!r}"
        with slot.source_errors(f"looking for a cut-over in {place}"):
            step = await cutovers.step_before_back(source, schema, name, until=until)
        if step:
            raise SourceRefused(
                f"source: slot {name!r} is the way back of a cut-over that is under way there, at the step {step}, says"
                f" {place}",
                hint="go on with `parapply cutover`, or take it back (--undo); the way back is started once that is"
                " done",
            )


async def check_ddl_role(config: Config, target: settings.Connection) -> None:
    """Refuse a role for commands of the publisher that this one may not take, or that does not exist."""
    ddl = config.ddl
    if ddl.apply and ddl.role and ddl.role != SAME_ROLE:
        try:
            with settings.target_errors(f"ddl.role = {ddl.role!r}"):
                async with target.transaction():
                    await target.execute(sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(ddl.role)))
        except TargetRefused as error:
            role, own = (sql.Identifier(name).as_string(None) for name in (ddl.role, target.info.user))
            error.hint = f"GRANT {role} TO {own};"
            raise


async def adopt(config: Config, ends: Connections, *, is_new: bool = False) -> state.SlotState:
    """Write the state of a slot that the target does not know, from the slot's position; no session has read a new one.

    Raises:
        SourceRefused: the slot cannot be read, or a publication is missing.
        TargetRefused, TargetLost: the target is a physical copy of the publisher, or a subscription has yet to copy
            rows; or a table that values or rows are kept from is not published, or the state could not be written.
    """
    name, schema = config.source.slot, config.target.state_schema
    facts = await slot.inspect(ends.source, name)
    facts = await refusals.with_timeline(ends.source, facts, config.source.login)
    refusals.check_slot(facts, name, None, two_phase=config.source.two_phase)
    if not is_new and (await _identity(ends.target, facts))[2]:
        raise TargetRefused(
            f"target: the server is a physical copy of the publisher, and slot {name!r} would bring again what was"
            " committed before the copy's end",
            hint="`parapply seed` joins the copy where it ends",
        )
    if not is_new:
        await _check_copied(ends.target, name)
    if facts.slot is not None and facts.slot.is_two_phase and not is_new:
        await prepared.check_no_orphans(ends.target)
        await refusals.check_undecided(ends.source, facts)
    await slot.check_publications(ends.source, config.source.publications)
    await _check_names(config, ends.source)
    await failover.ensure(config.source, facts)
    start_lsn = (facts.slot.confirmed_flush_lsn if facts.slot else None) or 0
    await state.create(ends.target, schema, new_slot(config, facts, start_lsn))
    found = await state.load(ends.target, schema, name, facts.system_identifier)
    if found is None:
        raise TargetRefused(f"the state of slot {name!r} vanished while it was made", hint="run one init at a time")
    return found


async def _check_copied(target: settings.Connection, slot_name: str) -> None:
    """Refuse the slot of a subscription that is still copying tables: their rows of before do not come through it."""
    query = sql.SQL(
        "SELECT s.subname::text, r.srrelid::regclass::text FROM pg_catalog.pg_subscription AS s"
        " JOIN pg_catalog.pg_subscription_rel AS r ON r.srsubid = s.oid AND r.srsubstate <> 'r'"
        " WHERE s.subslotname = $1"
        " AND s.subdbid = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())"
        " ORDER BY 1, 2"
    )
    with settings.target_errors("looking for a subscription"):
        found = await settings.rows(target, query, [slot_name])
    if found:
        names = printable(few([str(table) for _, table in found]))
        raise TargetRefused(
            f"target: subscription {found[0][0]!r}, whose slot {slot_name!r} is, has tables left to copy: {names}",
            hint="enable it until pg_subscription_rel shows srsubstate 'r' of each; or drop it without its slot, and"
            " `parapply init --copy --truncate`",
        )


async def _check_names(config: Config, source: slot.Connection) -> None:
    """Refuse names without a table of which rows or values are to be kept away: all of the table meant would come.

    Only before anything is applied. Later a name may be of a table that was renamed, or that is yet to be published.
    """
    mapping = config.mapping
    if not (mapping.masks or mapping.schema_only):
        return
    published = [".".join(name) for name in await slot.tables_to_expect(source, config.source.publications)]
    if unknown := mapping.schema_only_unknown(published) | mapping.replaced_unknown(published):
        names = "; ".join(f"{key}: {what}" for key, what in unknown.items())
        raise TargetRefused(f"[mapping] would have no effect: {names}", hint="correct it, or publish the table first")

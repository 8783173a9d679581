"""Every reason not to read a slot, as pure checks of facts against the target's state.

In: `SourceFacts` and `KnownPosition`. Out: nothing, or `SourceRefused` with what to do. Also timelines: the check
that recorded positions still name the same transactions after a failover (trap F14).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from parapply.driver import parameters_of
from parapply.errors import SlotBusy, SlotGone, SlotLost, SourceLost, SourceRefused
from parapply.model import format_lsn, parse_lsn
from parapply.source.slot import connect, position, read_rows, replayed_timeline, source_errors
from parapply.source.standby import is_awaited

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import LiteralString

    from parapply.config import SourceConfig
    from parapply.login import Login
    from parapply.source.slot import Connection, SlotFacts, SourceFacts

#: server_version_num of the first standby that decodes WAL.
STANDBY_SINCE: Final = 160000
#: The same, with WAL for logical decoding as soon as a logical slot exists. A standby has the level of its primary.
RAISES_LEVEL_SINCE: Final = 190000

_GAP_HINT = (
    "transactions are missing on the target and the slot cannot give them: `parapply heal` makes another slot and "
    "copies what differs; or restore the target to a state at or after the slot's position"
)
_REUSED_HINT = (
    "the same LSN may now name another transaction: bring the newer state of the publisher back, or `parapply heal` "
    "makes another slot and copies what differs"
)
_LOST_HINT = (
    "`parapply heal` makes another slot and copies what differs; a larger max_slot_wal_keep_size keeps slots longer"
)


class KnownPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The slot according to the target's state."""

    system_identifier: str
    timeline: int
    low_lsn: int  # the permanent watermark
    high_lsn: int  # nothing of after it is recorded, prepared or copied here; it may be above the watermark
    confirmed_flush_lsn: int = 0  # the last but one report at the earliest; the watermark may be reported since
    source_started_us: int | None = None  # start of the server that was last known to have all; None: not known


async def check(  # noqa: PLR0913
    conn: Connection,
    facts: SourceFacts,
    login: Login,
    slot_name: str,
    known: KnownPosition | None,
    *,
    two_phase: bool = False,
) -> SourceFacts:
    """Check everything on facts just read, and return them with a standby's present timeline.

    The history of the timelines is fetched if the timeline went on. The facts are older than `known` where a daemon
    runs: the slot cannot be ahead of a later look at the target.

    Args:
        conn: plain session on the publisher.
        facts: of it.
        login: to open a replication session for the history.
        slot_name: of the slot to read.
        known: from the target's state; None if it knows nothing of the slot.
        two_phase: prepared transactions are applied as such.

    Raises:
        SourceRefused: the stream must not start.
    """
    facts = await with_timeline(conn, facts, login)
    if known and known.high_lsn > facts.flush_lsn:
        # The WAL's end must be read after the target: the daemon may have gone on in between.
        facts = msgspec.structs.replace(facts, flush_lsn=(await position(conn)).flush_lsn)
    history: Mapping[int, int] = {}
    if known and facts.system_identifier == known.system_identifier and facts.timeline > known.timeline:
        history = await timeline_history(login, facts.timeline)
    check_slot(facts, slot_name, known, history, two_phase=two_phase)
    return facts


async def with_timeline(conn: Connection, facts: SourceFacts, login: Login) -> SourceFacts:
    """Return facts with the timeline that a standby replays now."""
    if not facts.is_in_recovery:
        return facts
    return msgspec.structs.replace(facts, timeline=await replayed_timeline(conn, login))


def check_slot(
    facts: SourceFacts,
    slot_name: str,
    known: KnownPosition | None,
    history: Mapping[int, int] | None = None,
    *,
    two_phase: bool = False,
) -> None:
    """Refuse a publisher, a slot or a position that cannot continue what is on the target.

    A slot in use is not refused here, because START_REPLICATION reports it (SlotBusy).

    Args:
        facts: the publisher now.
        slot_name: of the slot to read.
        known: from the target's state; None if it knows nothing of the slot (it is adopted).
        history: switch points of the publisher's timeline, needed only if it went on.
        two_phase: prepared transactions are applied as such.

    Raises:
        SourceRefused: with what was found, and what to do.
    """
    check_server(facts)
    if known and not known.low_lsn:
        raise SlotGone(
            f"slot {slot_name!r}: `parapply heal` was begun and is not complete",
            hint="run `parapply heal` again: it compares again, and copies what still differs",
        )
    if known:
        _check_cluster(facts, known, history or {})
    if facts.slot is None:
        if known:
            raise SlotGone(
                f"slot {slot_name!r} is no longer on the publisher, but the target has applied it up to "
                f"{format_lsn(known.low_lsn)}",
                hint=_LOST_HINT,
            )
        raise SourceRefused(f"slot {slot_name!r} does not exist", hint="`parapply init` creates it")
    _check_kind(facts.slot, facts.database)
    if facts.slot.is_two_phase and not two_phase:
        # A transaction prepared while it is off would come neither with its PREPARE nor with its commit.
        raise SourceRefused(
            f"slot {slot_name!r} has two_phase: prepared transactions come before their commit",
            hint="set source.two_phase = true, or choose a slot made without two_phase",
        )
    confirmed = facts.slot.confirmed_flush_lsn
    if known and confirmed is not None and confirmed > known.low_lsn:
        raise SlotLost(
            f"slot {slot_name!r} starts at {format_lsn(confirmed)}, but the target has only what ends up to "
            f"{format_lsn(known.low_lsn)}: the slot was dropped and made again or read by another process, or the "
            "target was restored",
            hint=_GAP_HINT,
        )


def decodes(facts: SourceFacts) -> bool:
    """Return whether WAL has what a logical slot reads, or will have it once one is made."""
    if facts.server_version_num < RAISES_LEVEL_SINCE:
        return facts.wal_level == "logical"
    if facts.effective_wal_level == "logical":
        return True
    return facts.wal_level == "replica" and not facts.is_in_recovery


def check_server(facts: SourceFacts) -> None:
    """Refuse a publisher that cannot serve any slot.

    Raises:
        SourceRefused: wal_level is too low, or the server is a standby that cannot decode.
    """
    if not decodes(facts):
        raised = facts.server_version_num >= RAISES_LEVEL_SINCE
        raise SourceRefused(
            f"source: {'effective_wal_level' if raised else 'wal_level'} is"
            f" {facts.effective_wal_level if raised else facts.wal_level}",
            hint="make a logical slot on the primary, or set wal_level = logical there and restart it"
            if raised and facts.is_in_recovery
            else "set wal_level = logical on the publisher and restart it",
        )
    if facts.is_in_recovery and facts.server_version_num < STANDBY_SINCE:
        raise SourceRefused(
            "source: the server is a standby (in recovery), which decodes nothing before PostgreSQL 16",
            hint="point source.dsn to the primary, for example with target_session_attrs=read-write and all hosts",
        )


async def check_undecided(conn: Connection, facts: SourceFacts) -> None:
    """Refuse to adopt a slot, not made just now, that may lie behind a PREPARE whose outcome is still to come.

    Only the outcome would come then: the reader before was sent the PREPARE. Raise SourceRefused if something is
    prepared, or that cannot be seen.
    """
    if facts.slot is None or not facts.slot.is_two_phase:
        return
    name = facts.slot.name
    if facts.is_in_recovery:
        raise SourceRefused(
            f"slot {name!r} has two_phase, and a standby does not show what is prepared: only the outcome would come of"
            " what the slot's last reader was sent as prepared",
            hint="choose the name of a slot that does not exist: `parapply init --copy` makes it, and copies the rows",
        )
    query: LiteralString = (
        "SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE database = pg_catalog.current_database() ORDER BY prepared"
    )
    with source_errors("reading what is prepared"):
        cursor = await conn.execute(query)
        gids = [str(gid) for (gid,) in await cursor.fetchall()]
    if gids:
        raise SourceRefused(
            f"slot {name!r} has two_phase, and {len(gids)} transactions are prepared on the publisher (the first is "
            f"{gids[0]!r}): only the outcome would come of what the slot's last reader was sent as prepared",
            hint="end them (COMMIT PREPARED, ROLLBACK PREPARED) and let that reader apply the outcome before the slot "
            "is taken over; if it is gone, drop the slot: `parapply init --copy --truncate` makes another",
        )


async def awaited(conn: Connection, source: SourceConfig) -> SourceRefused | None:
    """Return the error for a publisher whose commits wait for the daemon of the slot, None if they do not.

    A commit that waits holds its transaction open: a slot that is made waits for it, and would for ever where the
    daemon waits for the slot, or is away.
    """
    query: LiteralString = """
        SELECT pg_catalog.current_setting('synchronous_standby_names'), r.application_name, r.sync_state
          FROM (SELECT WHERE NOT pg_catalog.pg_is_in_recovery()) AS primary_only
          LEFT JOIN pg_catalog.pg_stat_replication AS r ON r.state = 'streaming' OR r.state IS NULL"""
    with source_errors("reading for which standbys commits wait"):
        found = await read_rows(conn, query)
    # The name in the DSN wins over ours on every session; the server may have cut it.
    has_own = "application_name" in parameters_of(source.login.dsn)
    name = conn.info.parameter_status("application_name") or "" if has_own else source.slot
    senders = [(str(one), state) for _, one, state in found if one is not None]
    if not found or not is_awaited(found[0][0], name, senders):
        return None
    return SourceRefused(
        f"source: synchronous_standby_names has commits wait for the daemon of slot {source.slot!r}, and this would"
        " wait for such commits: neither would end",
        hint="on the publisher ALTER SYSTEM RESET synchronous_standby_names and SELECT pg_reload_conf() until it is"
        " done, or name another standby that is connected",
    )


def check_primary(facts: SourceFacts, what: str) -> None:
    """Refuse a standby for a command that writes on the publisher; raise SourceRefused if it is one."""
    if facts.is_in_recovery:
        raise SourceRefused(
            f"source: the server is a standby (in recovery), and {what} writes there",
            hint="point source.dsn to the primary; `init --copy` and `run` can read a standby",
        )


def _check_cluster(facts: SourceFacts, known: KnownPosition, history: Mapping[int, int]) -> None:
    if facts.system_identifier != known.system_identifier:
        raise SourceRefused(
            f"source.dsn leads to the cluster with system identifier {facts.system_identifier}, but the target has "
            f"applied the cluster {known.system_identifier}",
            hint="correct source.dsn",
        )
    if facts.timeline < known.timeline:
        raise SourceRefused(
            f"the publisher is on timeline {facts.timeline}, the target has applied timeline {known.timeline}: this is "
            "an old primary, or a backup of it",
            hint="point source.dsn to the primary of the newest timeline",
        )
    if facts.timeline > known.timeline:
        _check_switch(facts, known, history)
    # A walsender sends only what its server has flushed, so this holds for a publisher that lost nothing. Without the
    # check it would take our position, which is in its future, and skip all that it commits until then.
    if facts.flush_lsn < known.high_lsn:
        if facts.is_in_recovery:
            # After its own restart a standby answers before it has replayed all that it had.
            raise SourceLost(
                f"source: the standby has replayed WAL up to {format_lsn(facts.flush_lsn)}, and the target has applied"
                f" it up to {format_lsn(known.high_lsn)}"
            )
        raise SlotLost(
            f"the publisher's WAL ends at {format_lsn(facts.flush_lsn)}, but the target has applied it up to "
            f"{format_lsn(known.high_lsn)}: the publisher was put back to an older state (a copy of its data "
            "directory or a snapshot of its storage), or lost WAL in a crash (fsync = off)",
            hint=_REUSED_HINT,
        )


def _check_switch(facts: SourceFacts, known: KnownPosition, history: Mapping[int, int]) -> None:
    """Refuse a newer timeline that was begun before the last transaction that is recorded here.

    A walsender outlives the promotion of its server and a standby's change to a new primary, after which it sends the
    newer timeline, and the record may still name the older one. The slot says so: what was reported last lies beyond
    the switch there. A slot that came from a primary has not been told that very position. One that was made since can
    be put there by hand, so its server must have run ever since it was known to have all.
    """
    left_at = history.get(known.timeline)
    is_same_server = facts.started_us == known.source_started_us
    if left_at is not None and is_same_server and facts.slot is not None and not facts.slot.is_synced:
        confirmed = facts.slot.confirmed_flush_lsn or 0
        if confirmed > left_at and confirmed in (known.low_lsn, known.confirmed_flush_lsn):
            return
    if left_at is None or known.high_lsn > left_at:
        left = "never was on it" if left_at is None else f"left it at {format_lsn(left_at)}"
        raise SlotLost(
            f"the target has applied timeline {known.timeline} up to {format_lsn(known.high_lsn)}, but the "
            f"publisher, now on timeline {facts.timeline}, {left}: the target has transactions that the publisher lost",
            hint=_REUSED_HINT,
        )


def _check_kind(slot: SlotFacts, database: str) -> None:
    """Refuse a slot that is lost or not for us; the first reason that holds."""
    name = slot.name
    if slot.slot_type != "logical":
        raise SourceRefused(f"slot {name!r} is a {slot.slot_type} slot", hint="choose another source.slot")
    if slot.plugin != "pgoutput":
        raise SourceRefused(f"slot {name!r} uses the plugin {slot.plugin}", hint="choose a slot with pgoutput")
    if slot.database != database:
        raise SourceRefused(
            f"slot {name!r} is in the database {slot.database!r}, source.dsn leads to {database!r}",
            hint="correct the database in source.dsn, or choose another source.slot",
        )
    if slot.is_temporary:
        raise SourceRefused(
            f"slot {name!r} is temporary: it ends with the session that made it", hint="choose another source.slot"
        )
    reason = slot.invalidation_reason or ("wal_removed" if slot.wal_status == "lost" else "")
    if not reason and slot.is_conflicting:
        reason = "a conflict with recovery"
    if reason:
        raise SlotGone(f"slot {name!r} was invalidated by the publisher ({reason})", hint=_LOST_HINT)


def check_own_and_idle(facts: SourceFacts) -> None:
    """Refuse to drop a slot that another program has made, or that a process reads.

    Raise SourceRefused if it is of another plugin or database, or temporary; SlotBusy if a process reads it.
    """
    found = facts.slot
    if found is None:
        return
    if found.plugin != "pgoutput" or found.database != facts.database or found.is_temporary:
        raise SourceRefused(
            f"slot {found.name!r} is not one of parapply's: plugin {found.plugin}, database {found.database!r}",
            hint="correct source.slot or source.dsn; drop a foreign slot with pg_drop_replication_slot",
        )
    if found.active_pid is not None:
        raise SlotBusy(
            f"slot {found.name!r} is in use by process {found.active_pid} on the publisher",
            hint="stop the daemon first",
        )


async def timeline_history(login: Login, timeline: int) -> dict[int, int]:
    """Return the switch points of a timeline: each earlier one, and the LSN where it was left.

    Raises:
        SourceRefused: the role lacks REPLICATION, or the history file is gone.
    """
    if timeline <= 1:
        return {}
    conn = await connect(login, application_name="parapply timeline", is_replication=True)
    async with conn:
        with source_errors("reading the timeline's history"):
            cursor = await conn.execute(f"TIMELINE_HISTORY {timeline:d}".encode())
        # Not through the bytea loader: the server sends the file's bytes as they are, not escaped.
        content = cursor.pgresult.get_value(0, 1) if cursor.pgresult else None
    return parse_timeline_history((content or b"").decode(errors="replace"))


def parse_timeline_history(text: str) -> dict[int, int]:
    """Return {timeline: LSN where it was left} of a timeline history file.

    Each line: number of the parent timeline, LSN of the switch, reason; blank lines and comments (#) do not count.

    Raises:
        SourceRefused: a line is something else.

    Source: PostgreSQL manual, "TIMELINE_HISTORY"; `src/backend/access/transam/timeline.c`, readTimeLineHistory.
    """
    switches = {}
    for line in text.splitlines():
        fields = line.split("#", 1)[0].split()
        if not fields:
            continue
        try:
            switches[int(fields[0])] = parse_lsn(fields[1])
        except (IndexError, ValueError) as error:
            raise SourceRefused(
                f"source: not a line of a timeline history: {line!r}", hint="see pg_wal/*.history on the publisher"
            ) from error
    return switches

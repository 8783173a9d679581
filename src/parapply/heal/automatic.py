"""The heal of a lost slot by its daemon, as `source.on_lost_slot = "heal"` asks for it.

In: the configuration. Out: another slot, and a target that equals the publisher where that slot begins.

A heal makes the target what the publisher is. If that was put back to an older state, rows would be deleted that only
the target has. `parapply heal` leaves this to the operator; here it must be proved that the publisher has all that the
target has:

- either its server has run ever since that was last proved, because one that was put back has started again. The state
  has the time of its start, which is compared with the publisher's own word only;
- or the slot is still there, and was told exactly of all that is applied.

The publisher must also be on the timeline that is applied.

The end of a heal is noted, good or bad, and for an hour there is no other. A daemon that was killed in the middle has
noted nothing, and goes on.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from parapply import connect
from parapply.errors import ParapplyError, Retry, SlotGone, SlotLost
from parapply.heal.command import HealOptions, Voice, begin
from parapply.logs import get_logger
from parapply.model import format_lsn
from parapply.target.state import heals

if TYPE_CHECKING:
    from parapply.config import Config
    from parapply.heal.command import SlotFound
    from parapply.target.state.heals import HealNotes

#: Seconds from the end of a heal to the next: a slot that is lost again and again needs an operator.
PAUSE_S: Final = 3600.0
#: Seconds for the servers to end the sessions of the daemon's last epoch.
_RELEASE_S: Final = 10.0
_MOST_CONNECTIONS: Final = 4


async def heal_lost(config: Config) -> tuple[int, int] | None:
    """Heal the slot, and return where the new one begins, and the rows that were copied.

    Returns:
        None: it is not lost any more.

    Raises:
        SlotLost: the daemon may not heal it; the message has the reason.
        LeaseHeld: another process works on the slot.
    """
    options = HealOptions(
        is_by_daemon=True,
        max_rows=config.source.heal_limit_rows,
        connections=min(_MOST_CONNECTIONS, config.apply.first_workers),
    )
    schema = config.target.state_schema
    async with connect.open_both(config, "heal", lambda one: one.log("source")) as ends:
        run = await begin(config, options, ends, Voice(_say, _warn, _say), lease_wait_s=_RELEASE_S)
        lost, slot_id = run.found.lost, run.found.slot_id
        if lost is None:
            return None
        awaited = run.found.awaited
        why = awaited.line() if awaited else why_not(run.found, await heals.notes(ends.target, schema, slot_id))
        if not isinstance(lost, SlotGone) or why:
            raise SlotLost(f"{lost}. The daemon does not heal it: {why}" if why else str(lost), hint=lost.hint)
        try:
            outcome = await run.heal(await run.tables())
        except ParapplyError as error:
            if error.retry is Retry.NEVER:
                with suppress(ParapplyError):
                    await heals.note_end(ends.target, schema, slot_id)
            raise
        await heals.note_end(ends.target, schema, slot_id)
    return outcome.start_lsn, outcome.n_rows


def why_not(found: SlotFound, notes: HealNotes) -> str:
    """Return why the daemon may not heal; empty if it may. Pure."""
    if found.kept:
        return f"changes that are not published would be made here also, and rows deleted: {found.kept}"
    facts, known = found.facts, found.known
    assert known is not None, "the target knows the slot that is lost"
    # A heal that was begun has taken the watermark back, and noted where the publisher was.
    high_lsn = known.high_lsn if known.low_lsn else notes.heal_lsn
    if facts.timeline != known.timeline:
        return f"the publisher is on timeline {facts.timeline}, and the target has applied timeline {known.timeline}"
    if facts.flush_lsn < high_lsn:
        return f"the publisher's WAL ends before {format_lsn(high_lsn)}, so it was put back to an older state"
    confirmed = facts.slot.confirmed_flush_lsn if facts.slot else None
    if confirmed != high_lsn and notes.source_started_us != facts.started_us:
        return (
            "the publisher has started again since the daemon last read the slot, so it may be an older copy of itself,"
            " and rows that only the target has would be deleted"
        )
    if notes.healed_s is not None and notes.healed_s < PAUSE_S:
        return f"it has ended a heal {notes.healed_s / 60:,.0f} minutes ago, and begins one an hour at most"
    return ""


def _say(line: str) -> None:
    get_logger().info("heal_reported", report=line)


def _warn(line: str) -> None:
    get_logger().warning("heal_reported", report=line)

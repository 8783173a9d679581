"""The limit of the WAL that the publisher keeps for the slot, and the slot given up above it if the operator said so.

A slot that is not read, or slowly, keeps the publisher's WAL until its disk is full, and then no session there can
write. `source.retained_wal_limit_bytes` sets a limit before that. Dropping a slot takes all changes with it that the
target does not have, so `give_up` goes the long way:

1. the lease is taken: no daemon applies the slot, and none begins to;
2. slot and state are read again, because WAL may have been freed since. The slot must be one of this project: known to
   the target's state, of this plugin and database, not temporary, read by no process, and where the target left it. A
   slot of the same name that was made again, or of a cut-over under way, stays;
3. the slot is dropped, and then the state says `lost`. Between the two nothing can go wrong: a daemon that starts finds
   the slot missing, refuses, and says the same.

In: the configuration. Out: whether there is too much, and the error that ends the daemon.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

from parapply import connect
from parapply.errors import SlotBusy, SlotGone
from parapply.model import format_lsn
from parapply.source import refusals, slot
from parapply.target.session import lease
from parapply.target.state import cutovers
from parapply.target.state import slots as state
from parapply.vocabulary import DaemonState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.config import Config, SourceConfig

#: Seconds for the publisher to notice that the stream was closed, and for the target to end the leader's session.
_RELEASE_S: Final = 10.0
_POLL_S: Final = 0.1

_HINT: Final = "`parapply heal` makes another slot and copies what differs"


class WalLimit(NamedTuple):
    """The limit and the reaction, as configured."""

    limit_bytes: int  # 0: none
    action: str  # warn, pause_copy, drop_slot

    def exceeded_bytes(self, found: slot.SlotFacts | None, flush_lsn: int) -> int | None:
        """Return how much WAL a slot keeps where that is above the limit, else None."""
        kept_bytes = found.retained_bytes(flush_lsn) if found is not None and self.limit_bytes else None
        return kept_bytes if kept_bytes is not None and kept_bytes > self.limit_bytes else None

    def words(self, kept_bytes: int) -> str:
        """Return the excess for people."""
        return (
            f"the slot keeps {kept_bytes:,} bytes of the publisher's WAL, and source.retained_wal_limit_bytes is"
            f" {self.limit_bytes:,}"
        )


def wal_limit(config: SourceConfig) -> WalLimit:
    """Return the limit of a configuration."""
    return WalLimit(config.retained_wal_limit_bytes, config.on_retained_wal)


async def look(conn: slot.Connection, slot_name: str) -> tuple[slot.SlotFacts | None, int]:
    """Return the slot and the end of the publisher's WAL, for commands; the daemon looks at both anyway."""
    flush_lsn = (await slot.position(conn)).flush_lsn
    return await slot.read_slot(conn, slot_name), flush_lsn


async def give_up(
    config: Config, on_wait: Callable[[Sequence[lease.Holder]], None], is_asked: Callable[[], bool] = lambda: True
) -> SlotGone | None:
    """Drop the slot if it still keeps more WAL than the limit, and return the error that says what is lost.

    The caller has closed its sessions, and holds no lock of the slot. `on_wait` gets the sessions that are waited for,
    which may take long: `is_asked` is called once more at the end.

    Returns:
        None: it keeps less by now, is not the slot that the target follows, or is not to be dropped; it stays.

    Raises:
        LeaseHeld: a daemon applies the slot.
        SlotBusy: another process reads it.
        SourceRefused, SourceLost, TargetRefused, TargetLost: an end is away, or does not allow it; the slot stays.
    """
    name, schema, limit = config.source.slot, config.target.state_schema, wal_limit(config.source)
    async with connect.open_both(config, "guard") as ends:
        facts = await slot.inspect(ends.source, name)
        found = await connect.known_state(config, ends.target, facts.system_identifier)
        if found is None or limit.action != "drop_slot":
            return None
        await lease.take_lease(ends.target, found.slot_id, _RELEASE_S)
        await lease.fence(ends.target, found.slot_id, on_wait)
        await cutovers.check_may_write(ends.target, schema, found.slot_id, name)
        facts = await _when_idle(ends.source, name)
        # Only now, because the last session of the daemon may have applied and reported more.
        found = await connect.known_state(config, ends.target, facts.system_identifier)
        kept_bytes = limit.exceeded_bytes(facts.slot, facts.flush_lsn)
        if found is None or facts.slot is None or kept_bytes is None:
            return None
        if (facts.slot.confirmed_flush_lsn or 0) > found.low_lsn or not is_asked():
            return None
        await slot.drop_slot(ends.source, name)
        lost = SlotGone(
            f"slot {name!r} was dropped: {limit.words(kept_bytes)}. All that committed on the publisher after"
            f" {format_lsn(found.low_lsn)} is missing on the target",
            hint=_HINT,
        )
        await state.set_state(ends.target, schema, found.slot_id, DaemonState.LOST, lost.line())
        return lost


async def _when_idle(source: slot.Connection, name: str) -> slot.SourceFacts:
    """Return the publisher and the slot once no process reads it; raise SlotBusy if one goes on."""
    deadline_s = asyncio.get_running_loop().time() + _RELEASE_S
    while True:
        facts = await slot.inspect(source, name)
        try:
            refusals.check_own_and_idle(facts)
        except SlotBusy:
            if asyncio.get_running_loop().time() >= deadline_s:
                raise
            await asyncio.sleep(_POLL_S)
        else:
            return facts

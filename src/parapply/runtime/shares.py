"""Shares of the slots of a process: one that has all for itself, or several that divide totals.

In: the configuration, and each second the amounts that each slot of a fleet holds and could use. Out: the limits of
each `Share`. The rule is in `engine/shares.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from parapply.config import FEWEST_WORKERS, MEMORY_LIMIT_FLOOR_BYTES
from parapply.config_fleet import CONTROL_CONNECTIONS
from parapply.engine.shares import Claim, Share, divide

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.config import ApplyConfig, FleetConfig
    from parapply.runtime.observe.gauges import Parts

#: Seconds for which a slot that could use more keeps its claim.
_CLAIM_S: Final = 5.0
#: Part of its memory that a slot uses when it could use more.
_NEARLY_FULL: Final = 0.5


def share_of(apply: ApplyConfig) -> Share:
    """Return the share of a slot that has its process for itself."""
    return Share(
        least_workers=_least_workers(apply),
        first_workers=apply.first_workers,
        most_workers=apply.most_workers,
        memory_bytes=apply.memory_limit_bytes,
    )


def _least_workers(apply: ApplyConfig) -> int:
    # With one worker no batch ever executes beside another, which is the sign that more would help.
    return FEWEST_WORKERS if apply.workers == "auto" else apply.workers


class SharedSlot:
    """The share of one slot of a fleet, and the facts that it is divided by."""

    def __init__(self, apply: ApplyConfig, memory_limit_bytes: int) -> None:
        self._pressed_s = self._full_s = -_CLAIM_S
        self._set(apply, memory_limit_bytes)
        self.share = Share(
            least_workers=self._own_workers,
            first_workers=self._own_workers,
            most_workers=self._own_workers,
            memory_bytes=MEMORY_LIMIT_FLOOR_BYTES,
        )

    def _set(self, apply: ApplyConfig, memory_limit_bytes: int) -> None:
        self._own_workers = _least_workers(apply)
        #: That its settings allow.
        self.most_workers = apply.most_workers
        self._memory_limit_bytes = memory_limit_bytes

    def use(self, apply: ApplyConfig, memory_limit_bytes: int) -> None:
        """Claim by other settings from now on; arguments as at the begin."""
        self._set(apply, memory_limit_bytes)
        self.share.least_workers = self.share.first_workers = self._own_workers
        self.share.most_workers = max(self.share.most_workers, self._own_workers)

    def claims(self, parts: Parts | None, now_s: float) -> SlotClaims:
        """Return the claims of the slot at a time of any clock that does not go back; without parts none runs."""
        own, own_bytes = self._own_workers, MEMORY_LIMIT_FLOOR_BYTES
        if parts is None:
            return SlotClaims(Claim(own, 0, own), Claim(own_bytes, 0, own_bytes))
        if parts.batcher.pool.flight.is_pressed:
            self._pressed_s = now_s
        held_bytes = parts.engine.held_bytes + parts.batcher.open_bytes
        if held_bytes >= _NEARLY_FULL * self.share.memory_bytes:
            self._full_s = now_s
        n_busy = sum([worker.job is not None for worker in parts.workers])
        wanted = self.most_workers if now_s - self._pressed_s < _CLAIM_S else n_busy
        wanted_bytes = self._memory_limit_bytes if now_s - self._full_s < _CLAIM_S else held_bytes
        return SlotClaims(Claim(own, len(parts.workers), wanted), Claim(own_bytes, held_bytes, wanted_bytes))


class SlotClaims(NamedTuple):
    """Claims of one slot."""

    workers: Claim
    memory: Claim


def share_out(totals: FleetConfig, slots: Sequence[tuple[SharedSlot, SlotClaims]]) -> None:
    """Divide the totals among all slots of a fleet."""
    workers = [claims.workers for _, claims in slots]
    if totals.max_connections:
        n_workers = divide(totals.max_connections - CONTROL_CONNECTIONS * len(slots), workers)
    else:
        n_workers = [slot.most_workers for slot, _ in slots]
    n_bytes = divide(totals.memory_limit_bytes, [claims.memory for _, claims in slots])
    for (slot, _), most_workers, memory_bytes in zip(slots, n_workers, n_bytes, strict=True):
        slot.share.most_workers = most_workers
        slot.share.memory_bytes = memory_bytes

"""Shares of slots: alone all that the settings allow, in a fleet the parts of its totals."""

from __future__ import annotations

import pytest

from parapply.config import FEWEST_WORKERS, MEMORY_LIMIT_FLOOR_BYTES, ApplyConfig, FleetConfig
from parapply.config_fleet import CONTROL_CONNECTIONS
from parapply.engine.shares import Claim
from parapply.runtime.shares import SharedSlot, SlotClaims, share_of, share_out

_LIMIT_BYTES = 10 * MEMORY_LIMIT_FLOOR_BYTES
_NO_MEMORY = Claim(MEMORY_LIMIT_FLOOR_BYTES, 0, 0)


def _slot(workers: int | str = "auto") -> SharedSlot:
    return SharedSlot(ApplyConfig(workers=workers), _LIMIT_BYTES)  # type: ignore[arg-type]


def test_alone_a_slot_has_what_its_settings_allow() -> None:
    """A number of workers is least, first and most; "auto" lies between its bounds."""
    auto, fixed = share_of(ApplyConfig()), share_of(ApplyConfig(workers=3))
    assert (auto.least_workers, auto.first_workers, auto.most_workers) == (FEWEST_WORKERS, 4, 16)
    assert (fixed.least_workers, fixed.first_workers, fixed.most_workers) == (3, 3, 3)
    assert auto.memory_bytes == ApplyConfig().memory_limit_bytes


@pytest.mark.parametrize(("workers", "own"), [("auto", FEWEST_WORKERS), (5, 5)])
def test_an_idle_slot_has_its_own_part(workers: int | str, own: int) -> None:
    """Also between two epochs, whatever the total is."""
    slot = _slot(workers)
    claims = slot.claims(None, 0.0)
    assert claims == (Claim(own, 0, own), (MEMORY_LIMIT_FLOOR_BYTES, 0, MEMORY_LIMIT_FLOOR_BYTES))
    share_out(FleetConfig(max_connections=1000), [(slot, claims)])
    share = slot.share
    assert (share.least_workers, share.first_workers, share.most_workers) == (own, own, own)
    assert share.memory_bytes == MEMORY_LIMIT_FLOOR_BYTES


def test_a_slot_with_a_backlog_has_what_the_others_leave() -> None:
    """Sessions that are no workers' count; without a total for sessions the settings are the most."""
    busy, idle = _slot(), _slot()
    slots = [
        (busy, SlotClaims(Claim(2, 2, 16), Claim(MEMORY_LIMIT_FLOOR_BYTES, 0, _LIMIT_BYTES))),
        (idle, SlotClaims(Claim(2, 2, 2), _NO_MEMORY)),
    ]
    total_bytes = 5 * MEMORY_LIMIT_FLOOR_BYTES
    share_out(FleetConfig(max_connections=2 * CONTROL_CONNECTIONS + 9, memory_limit_bytes=total_bytes), slots)
    assert (busy.share.most_workers, idle.share.most_workers) == (7, 2)
    assert (busy.share.memory_bytes, idle.share.memory_bytes) == (
        total_bytes - MEMORY_LIMIT_FLOOR_BYTES, MEMORY_LIMIT_FLOOR_BYTES,
    )  # fmt: skip
    share_out(FleetConfig(), slots)
    assert (busy.share.most_workers, idle.share.most_workers) == (16, 16)
    assert busy.share.memory_bytes == _LIMIT_BYTES


def test_other_settings_change_the_claims() -> None:
    """The number of workers of another epoch is at hand at once."""
    slot = _slot()
    slot.use(ApplyConfig(workers=7), _LIMIT_BYTES)
    assert slot.share.most_workers == slot.share.first_workers == 7
    assert slot.claims(None, 0.0).workers == Claim(7, 0, 7)

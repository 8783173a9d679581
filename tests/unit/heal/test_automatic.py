"""The rule by which a daemon heals its lost slot: the publisher has all that the target has, and an hour has passed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from parapply.errors import SlotGone
from parapply.heal.automatic import PAUSE_S, why_not
from parapply.heal.command import SlotFound
from parapply.source.refusals import KnownPosition
from parapply.source.slot import SlotFacts, SourceFacts
from parapply.target.state.heals import HealNotes

_FACTS = SourceFacts(
    system_identifier="7", timeline=2, database="app", server_version_num=180000, wal_level="logical",
    is_in_recovery=False, wal_sender_timeout_s=60.0, decoding_memory_bytes=0, flush_lsn=200, slot=None, started_us=5,
)  # fmt: skip
_KNOWN = KnownPosition(system_identifier="7", timeline=2, low_lsn=90, high_lsn=100)
_BEGUN = KnownPosition(system_identifier="7", timeline=2, low_lsn=0, high_lsn=0)
_NOTES = HealNotes(source_started_us=5, heal_lsn=0, healed_s=None)


def _why(known: KnownPosition = _KNOWN, notes: HealNotes = _NOTES, **facts: Any) -> str:  # noqa: ANN401  any fact
    changed = msgspec.structs.replace(_FACTS, **facts)
    return why_not(SlotFound(1, changed, known, SlotGone("lost")), notes)


def _slot(confirmed_lsn: int) -> SlotFacts:
    return SlotFacts(
        name="app", slot_type="logical", plugin="pgoutput", database="app", is_temporary=False, active_pid=None,
        confirmed_flush_lsn=confirmed_lsn, wal_status="lost", invalidation_reason="wal_removed", is_conflicting=False,
        is_two_phase=False,
    )  # fmt: skip


def test_a_publisher_that_has_run_ever_since_is_healed_from() -> None:
    """Its start is the one that is noted, and an hour has passed."""
    assert _why() == ""
    assert _why(notes=_NOTES._replace(healed_s=PAUSE_S)) == ""
    assert "one an hour at most" in _why(notes=_NOTES._replace(healed_s=PAUSE_S - 1))


@pytest.mark.parametrize("started_us", [None, 4])
def test_a_publisher_that_has_restarted_is_proved_by_the_slot_alone(started_us: int | None) -> None:
    """The slot must have been told exactly of what is applied: one that was made again may be ahead of it."""
    notes = _NOTES._replace(source_started_us=started_us)
    assert "older copy of itself" in _why(notes=notes)
    assert [bool(_why(notes=notes, slot=_slot(lsn))) for lsn in (90, 100, 110)] == [True, False, True]


def test_another_timeline_is_left_to_the_operator() -> None:
    """Also where nothing of the target is missing there."""
    assert "is on timeline 3, and the target has applied timeline 2" in _why(timeline=3)


def test_rows_that_the_target_keeps_on_purpose_are_left_to_the_operator() -> None:
    """An archive has rows that the publisher has deleted, and no publication brings that."""
    found = SlotFound(1, _FACTS, _KNOWN, SlotGone("lost"), kept="public.evt (delete)")
    assert "rows deleted: public.evt (delete)" in why_not(found, _NOTES)


def test_a_heal_that_was_begun_goes_on_where_the_publisher_is_no_older() -> None:
    """The watermark is gone by then; the place of the publisher at its begin stands for it."""
    notes = _NOTES._replace(heal_lsn=150)
    assert _why(_BEGUN, notes) == ""
    assert "put back to an older state" in _why(_BEGUN, notes, flush_lsn=140)
    assert _why(_BEGUN, notes._replace(source_started_us=4), slot=_slot(150)) == ""
    assert "older copy of itself" in _why(_BEGUN, notes._replace(source_started_us=4))

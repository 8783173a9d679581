"""Refused slots and publishers, and the judgement of timelines."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from parapply.errors import SourceRefused
from parapply.source.refusals import KnownPosition, check_server, check_slot, parse_timeline_history
from parapply.source.slot import SlotFacts, SourceFacts

SLOT = SlotFacts(
    name="s",
    plugin="pgoutput",
    slot_type="logical",
    database="d",
    is_temporary=False,
    active_pid=None,
    confirmed_flush_lsn=100,
    wal_status="reserved",
    invalidation_reason=None,
    is_conflicting=False,
    is_two_phase=False,
)
FACTS = SourceFacts(
    system_identifier="18446744073709551615",
    timeline=2,
    database="d",
    server_version_num=180004,
    wal_level="logical",
    is_in_recovery=False,
    decoding_memory_bytes=67_108_864,
    wal_sender_timeout_s=60.0,
    flush_lsn=200,
    slot=SLOT,
)
KNOWN = KnownPosition(system_identifier="18446744073709551615", timeline=2, low_lsn=100, high_lsn=100)


def test_a_fitting_slot_passes() -> None:
    """A slot at or behind the watermark continues; one in use is START_REPLICATION's business."""
    check_slot(FACTS, "s", KNOWN)
    check_slot(FACTS, "s", None)
    check_slot(replace(FACTS, slot=replace(SLOT, confirmed_flush_lsn=99, active_pid=7)), "s", KNOWN)


@pytest.mark.parametrize(
    ("slot", "reason"),
    [
        (replace(SLOT, slot_type="physical", plugin=None), "physical"),
        (replace(SLOT, plugin="test_decoding"), "plugin"),
        (replace(SLOT, database="e"), "database"),
        (replace(SLOT, is_temporary=True), "temporary"),
        (replace(SLOT, wal_status="lost"), "invalidated"),
        (replace(SLOT, invalidation_reason="idle_timeout"), "idle_timeout"),
        (replace(SLOT, is_conflicting=True), "invalidated"),
        (replace(SLOT, is_two_phase=True), "two_phase"),
        (replace(SLOT, confirmed_flush_lsn=101), "made again"),
        (None, "no longer"),
    ],
)
def test_an_unfit_slot_is_refused(slot: SlotFacts | None, reason: str) -> None:
    """Each reason is named, and each refusal says what to do."""
    with pytest.raises(SourceRefused, match=reason) as caught:
        check_slot(replace(FACTS, slot=slot), "s", KNOWN)
    assert caught.value.hint
    assert caught.value.exit_code == 3


def test_a_missing_slot_without_state_points_to_init() -> None:
    """Nothing was lost: the operator only has to create it."""
    with pytest.raises(SourceRefused) as caught:
        check_slot(replace(FACTS, slot=None), "s", None)
    assert "init" in caught.value.hint


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (replace(FACTS, wal_level="replica"), "wal_level"),
        (replace(FACTS, is_in_recovery=True, server_version_num=150000), "standby"),
        (replace(FACTS, system_identifier="1"), "system identifier 1"),
        (replace(FACTS, timeline=1), "old primary"),
    ],
)
def test_an_unfit_publisher_is_refused(facts: SourceFacts, reason: str) -> None:
    """Another cluster, an old primary, a standby and a low wal_level are named."""
    with pytest.raises(SourceRefused, match=reason):
        check_slot(facts, "s", KNOWN)


def test_a_newer_timeline_is_taken_up_to_its_switch_point() -> None:
    """Beyond the switch point an LSN may name another transaction, so anything recorded there is refused (F14).

    Relaxed, that is more than the watermark says.
    """
    facts = replace(FACTS, timeline=4)
    for known in (KNOWN, replace(KNOWN, low_lsn=40)):
        check_slot(replace(facts, slot=replace(SLOT, confirmed_flush_lsn=40)), "s", known, {1: 50, 2: 100, 3: 150})
        with pytest.raises(SourceRefused, match="lost"):
            check_slot(replace(facts, slot=replace(SLOT, confirmed_flush_lsn=30)), "s", known, {1: 50, 2: 39, 3: 150})
        with pytest.raises(SourceRefused, match="never was on it"):
            check_slot(facts, "s", known, {1: 50})


def test_a_stream_that_outlived_a_promotion_goes_on() -> None:
    """The slot has the very position that is recorded, beyond the switch, and the server runs since it was read.

    Not so where a primary has reported it, where the slot is elsewhere, or where it was put there on another server.
    """
    facts = replace(FACTS, timeline=3, started_us=7)
    told = replace(KNOWN, low_lsn=120, high_lsn=130, confirmed_flush_lsn=100, source_started_us=7)
    for lsn, history in ((100, {2: 99}), (120, {2: 99}), (120, {2: 110})):
        check_slot(replace(facts, slot=replace(SLOT, confirmed_flush_lsn=lsn)), "s", told, history)
    for slot, history in (
        (replace(SLOT, confirmed_flush_lsn=110), {2: 99}),
        (replace(SLOT, confirmed_flush_lsn=100), {2: 110}),
        (replace(SLOT, confirmed_flush_lsn=120, is_synced=True), {2: 99}),
    ):
        with pytest.raises(SourceRefused, match="lost"):
            check_slot(replace(facts, slot=slot), "s", told, history)
    moved = replace(facts, slot=replace(SLOT, confirmed_flush_lsn=120), started_us=8)
    with pytest.raises(SourceRefused, match="lost"):
        check_slot(moved, "s", told, {2: 99})


def test_a_publisher_whose_wal_ends_before_what_is_recorded_is_refused() -> None:
    """It came back older: on its timeline, or on one that was begun late enough and lost WAL since."""
    check_slot(FACTS, "s", replace(KNOWN, high_lsn=FACTS.flush_lsn))
    older = replace(KNOWN, high_lsn=FACTS.flush_lsn + 1)
    for facts, history in ((FACTS, {}), (replace(FACTS, timeline=3), {2: 300})):
        with pytest.raises(SourceRefused, match="WAL ends at 0/C8, but the target has applied it up to 0/C9"):
            check_slot(facts, "s", older, history)


def test_history_files_are_read_as_the_server_writes_them() -> None:
    """Comments and blank lines do not count; anything else is refused, never guessed."""
    text = "# old\n1\t0/5000000\tno recovery target specified\n\n2\t1/A0 \tbefore 2026-01-01\n"
    assert parse_timeline_history(text) == {1: 0x5000000, 2: 0x1_000000A0}
    assert parse_timeline_history("") == {}
    for bad in ("1", "x 0/1", "1 nonsense"):
        with pytest.raises(SourceRefused, match="history"):
            parse_timeline_history(bad)


@pytest.mark.parametrize(
    ("version_num", "level", "now", "is_standby", "said"),
    [
        (180004, "logical", "", False, ""),
        (180004, "replica", "", False, "wal_level is replica"),
        # The first logical slot raises the level; on a standby that is the primary's business.
        (190000, "replica", "replica", False, ""),
        (190000, "replica", "logical", False, ""),
        (190000, "minimal", "minimal", False, "effective_wal_level is minimal"),
        (190000, "replica", "logical", True, ""),
        (190000, "replica", "replica", True, "effective_wal_level is replica"),
        (190000, "logical", "replica", True, "effective_wal_level is replica"),
    ],
)
def test_the_level_of_wal_that_a_version_needs(
    version_num: int,
    level: str,
    now: str,
    is_standby: bool,  # noqa: FBT001  a parameter
    said: str,
) -> None:
    """Before 19 wal_level must be logical; from then on a primary with replica writes more as soon as it must."""
    facts = replace(
        FACTS, server_version_num=version_num, wal_level=level, effective_wal_level=now, is_in_recovery=is_standby
    )
    if not said:
        check_server(facts)
        return
    with pytest.raises(SourceRefused) as refused:
        check_server(facts)
    assert str(refused.value) == f"source: {said}"
    assert ("primary" in refused.value.hint) is is_standby

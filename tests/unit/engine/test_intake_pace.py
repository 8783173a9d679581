"""How large batches may get; and a pause of reading costs at most what it gathers, whatever a buffer holds."""

from __future__ import annotations

import pytest

from parapply.engine.intake import BatchSizing, Gathering
from parapply.engine.job import Attempts, Resume, SetJob
from parapply.plan.batch import Batch, Limits
from parapply.plan.halving import Halving
from parapply.plan.table_changes import TableChanges
from tests.unit.changes_model import PLAIN

_WANTED_S = 0.004
_MEMORY_BYTES = 256 * 1024 * 1024


def sizes(limits: Limits) -> tuple[int, int, int]:
    """Return transactions, changes and bytes."""
    return limits.transactions, limits.changes, limits.size_bytes


def job_of(limits: Limits, *, took_s: float, part: float = 1.0, is_in_order: bool = False, attempts: int = 1) -> SetJob:
    """Return a job whose batch is as large as it may be, or a part of that."""
    batch = Batch(1)
    batch.n_changes = int(limits.changes * part)
    job = SetJob(batch, {})
    if is_in_order:
        job.resume = Resume(Halving(1), {}, Attempts(stops_on_error=True))
        job.resume.n_in_order = 1
    job.attempts = attempts
    job.times.started_s, job.times.executed_s = 10.0, 10.0 + took_s
    return job


def test_full_batches_that_are_quick_double_up_to_what_is_configured() -> None:
    """Each of the three limits grows by itself, and intake's object stays the same."""
    sizing = BatchSizing(Limits(20_000, 1_000_000, 6 * 1024 * 1024), memory_bytes=_MEMORY_BYTES)
    limits = sizing.limits
    sizing.committed(job_of(limits, took_s=0.01))
    assert sizes(limits) == (5_000, 10_000, 6 * 1024 * 1024)
    for _ in range(9):
        sizing.committed(job_of(limits, took_s=0.01))
    assert sizes(limits) == (20_000, 1_000_000, 6 * 1024 * 1024)
    assert sizing.limits is limits


def test_batches_that_take_long_are_halved_to_an_eighth_of_the_first_size() -> None:
    """Locks are not held for long, and what fails is not much."""
    sizing = BatchSizing(Limits(20_000, 20_000, 8 * 1024 * 1024), memory_bytes=_MEMORY_BYTES)
    for _ in range(9):
        sizing.committed(job_of(sizing.limits, took_s=2.0))
    assert sizes(sizing.limits) == (312, 625, 512 * 1024)


@pytest.mark.parametrize("took_s", [0.01, 9.0])
@pytest.mark.parametrize(("n_tables", "is_thin"), [(63, False), (64, True), (1_000, True)])
def test_thin_batches_may_be_larger_than_others_and_say_nothing(took_s: float, n_tables: int, *, is_thin: bool) -> None:
    """Most of its time is a statement for each table, and half the batch would have nearly as many.

    Not the first one, because the target meets its tables while more is read.
    """
    sizing = BatchSizing(Limits(20_000, 20_000, 8 * 1024 * 1024), memory_bytes=_MEMORY_BYTES)
    limits = sizing.limits
    before = sizes(limits)
    job = job_of(limits, took_s=took_s)
    batch = job.batch
    batch.table_changes = [TableChanges(PLAIN.plan(0))] * n_tables
    batch.size_bytes = limits.size_bytes
    assert batch.is_thin is is_thin
    assert batch.is_full(limits)
    sizing.closed(batch)
    assert batch.is_full(limits) is not is_thin
    sizing.committed(job)
    assert (sizes(limits) == before) is is_thin
    # Enough changes for each of as many tables are not thin.
    was = batch.n_changes
    batch.n_changes = 128 * n_tables
    assert not batch.is_thin
    batch.n_changes = was
    for limit, most in (("n_changes", 80_000), ("size_bytes", 32 * 1024 * 1024)):
        was = getattr(batch, limit)
        setattr(batch, limit, most)
        assert batch.is_full(limits)
        setattr(batch, limit, was)
    assert (limits.most_transactions == 80_000) is is_thin
    batch.is_suspect = True
    assert batch.is_full(limits)


@pytest.mark.parametrize("transactions", [1, 19_999])
def test_no_batch_has_more_transactions_than_the_few_asked_for(transactions: int) -> None:
    """An operator who allows one transaction wants each commit with its own time on the target."""
    sizing = BatchSizing(Limits(transactions, 20_000, 8 * 1024 * 1024), memory_bytes=_MEMORY_BYTES)
    job = job_of(sizing.limits, took_s=0.1)
    job.batch.table_changes = [TableChanges(PLAIN.plan(0))] * 5_000
    sizing.closed(job.batch)
    assert sizing.limits.most_transactions == transactions


def test_small_limits_are_kept_as_configured() -> None:
    """With one transaction a batch nothing grows and nothing shrinks to nothing."""
    sizing = BatchSizing(Limits(1, 1, 1024), memory_bytes=_MEMORY_BYTES)
    for took_s in (0.001, 5.0, 5.0):
        sizing.committed(job_of(sizing.limits, took_s=took_s))
    assert sizes(sizing.limits)[:2] == (1, 1)
    assert sizing.limits.size_bytes >= 128


def test_only_full_sets_at_their_first_attempt_say_something() -> None:
    """A small batch is always quick; one that was repeated, or went row by row, is slow for other reasons."""
    sizing = BatchSizing(Limits(20_000, 20_000, 8 * 1024 * 1024), memory_bytes=_MEMORY_BYTES)
    before = sizes(sizing.limits)
    for job in (
        job_of(sizing.limits, took_s=0.01, part=0.5),
        job_of(sizing.limits, took_s=9.0, is_in_order=True),
        job_of(sizing.limits, took_s=9.0, attempts=2),
        job_of(sizing.limits, took_s=0.2),
    ):
        sizing.committed(job)
    assert sizes(sizing.limits) == before


def test_a_pause_that_gathers_stays() -> None:
    """A buffer that is not full at its half: as long as wanted, again and again."""
    gathering = Gathering()
    for _ in range(1000):
        assert gathering.pause_s(_WANTED_S) == _WANTED_S
        gathering.paused(_WANTED_S, has_grown=True)


def test_a_pause_that_gathers_nothing_is_left_out() -> None:
    """Full before its half, it is halved, and then left out but for a short one now and then."""
    gathering = Gathering()
    pauses = []
    for _ in range(1000):
        pauses.append(gathering.pause_s(_WANTED_S))
        if pauses[-1]:
            gathering.paused(pauses[-1], has_grown=False)
    assert pauses[:3] == [_WANTED_S, _WANTED_S / 2, 0]
    # At most a hundredth of the reads.
    assert 0 < sum(pause > 0 for pause in pauses[3:]) < 10


def test_it_comes_back_when_it_gathers_again() -> None:
    """A short one that gathers is followed by a whole one: the next messages may be smaller."""
    gathering = Gathering()
    for _ in range(2):
        gathering.paused(gathering.pause_s(_WANTED_S), has_grown=False)
    while not (pause_s := gathering.pause_s(_WANTED_S)):
        pass
    gathering.paused(pause_s, has_grown=True)
    assert gathering.pause_s(_WANTED_S) == _WANTED_S


def test_a_pause_too_short_to_judge_stays() -> None:
    """Without a backlog it is a millisecond, of which no half can be timed."""
    gathering = Gathering()
    for _ in range(2):
        gathering.paused(gathering.pause_s(_WANTED_S), has_grown=False)
    gathering.paused(0.001, has_grown=False)
    assert gathering.pause_s(0.001) == 0.001

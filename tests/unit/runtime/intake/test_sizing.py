"""How large batches may get."""

from __future__ import annotations

import pytest

from parapply.plan.batch import Batch, Limits
from parapply.plan.halving import Halving
from parapply.plan.table_changes import TableChanges
from parapply.runtime.intake.sizing import BatchSizing
from parapply.runtime.pool.job import Resume, SetJob
from parapply.runtime.pool.retry import Attempts
from tests.unit.changes_model import PLAIN


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
    sizing = BatchSizing(Limits(20_000, 1_000_000, 6 * 1024 * 1024))
    limits = sizing.limits
    sizing.committed(job_of(limits, took_s=0.01))
    assert sizes(limits) == (5_000, 10_000, 6 * 1024 * 1024)
    for _ in range(9):
        sizing.committed(job_of(limits, took_s=0.01))
    assert sizes(limits) == (20_000, 1_000_000, 6 * 1024 * 1024)
    assert sizing.limits is limits


def test_batches_that_take_long_are_halved_to_an_eighth_of_the_first_size() -> None:
    """Locks are not held for long, and what fails is not much."""
    sizing = BatchSizing(Limits(20_000, 20_000, 8 * 1024 * 1024))
    for _ in range(9):
        sizing.committed(job_of(sizing.limits, took_s=2.0))
    assert sizes(sizing.limits) == (312, 625, 512 * 1024)


@pytest.mark.parametrize("took_s", [0.01, 9.0])
@pytest.mark.parametrize(("n_tables", "is_thin"), [(63, False), (64, True), (1_000, True)])
def test_thin_batches_may_be_larger_than_others_and_say_nothing(took_s: float, n_tables: int, *, is_thin: bool) -> None:
    """What takes long is a statement for each table, and half the batch would have nearly as many."""
    sizing = BatchSizing(Limits(20_000, 20_000, 8 * 1024 * 1024))
    limits = sizing.limits
    before = sizes(limits)
    job = job_of(limits, took_s=took_s)
    batch = job.batch
    batch.table_changes = [TableChanges(PLAIN.plan(0))] * n_tables
    batch.size_bytes = limits.size_bytes
    assert batch.is_thin is is_thin
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
    batch.is_suspect = True
    assert batch.is_full(limits)


def test_small_limits_are_kept_as_configured() -> None:
    """With one transaction a batch nothing grows and nothing shrinks to nothing."""
    sizing = BatchSizing(Limits(1, 1, 1024))
    for took_s in (0.001, 5.0, 5.0):
        sizing.committed(job_of(sizing.limits, took_s=took_s))
    assert sizes(sizing.limits)[:2] == (1, 1)
    assert sizing.limits.size_bytes >= 128


def test_only_full_sets_at_their_first_attempt_say_something() -> None:
    """A small batch is always quick; one that was repeated, or went row by row, is slow for other reasons."""
    sizing = BatchSizing(Limits(20_000, 20_000, 8 * 1024 * 1024))
    before = sizes(sizing.limits)
    for job in (
        job_of(sizing.limits, took_s=0.01, part=0.5),
        job_of(sizing.limits, took_s=9.0, is_in_order=True),
        job_of(sizing.limits, took_s=9.0, attempts=2),
        job_of(sizing.limits, took_s=0.2),
    ):
        sizing.committed(job)
    assert sizes(sizing.limits) == before

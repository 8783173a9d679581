"""The times of a job, how it says that it was applied, and the pauses between attempts."""

from __future__ import annotations

from pathlib import Path

from parapply.applylog_schema import CONFLICTS_LIMIT, ConflictCount, ConflictRecord
from parapply.engine.job import Attempts, Resume, SetJob
from parapply.limits import BLOCKED_S
from parapply.plan.batch import Batch
from parapply.plan.halving import Halving
from parapply.runtime.observe.applylog_records import LogRun, batch_record
from parapply.vocabulary import Mode, Reading


def test_pauses_double_up_to_their_limits() -> None:
    """Short ones where another session is in the way, longer ones for a repair, as docs/CONFLICTS.md says."""
    attempts = Attempts(stops_on_error=False)
    pauses = [attempts.again_s() for _ in range(9)]
    assert pauses[:3] == [0.01, 0.02, 0.04]
    assert pauses[-1] == 1.0
    assert [attempts.error_s() for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    text = (Path(__file__).parents[3] / "docs" / "CONFLICTS.md").read_text(encoding="utf-8")
    assert "with pauses up to 5 s;" in text


def test_what_is_tried_again_for_long_is_told_at_growing_intervals() -> None:
    """Counted from the first time that another session was in the way, not from the transaction's begin."""
    attempts = Attempts(stops_on_error=True)
    first_s = 100.0
    times = [first_s + wait_s for wait_s in (0.0, BLOCKED_S / 2, BLOCKED_S, 2 * BLOCKED_S - 1, 2 * BLOCKED_S)]
    assert [attempts.is_long(now_s) for now_s in times] == [False, False, True, False, True]


def test_times_lie_between_the_points_that_a_job_has_passed() -> None:
    """A batch that waited for another batch did not wait for a worker."""
    times = SetJob(Batch(1), {}).times
    times.received_s, times.submitted_s, times.freed_s = 1.0, 1.5, 3.0
    times.started_s, times.executed_s, times.turn_s, times.committed_s = 4.0, 6.0, 7.0, 7.5
    assert (times.wait_dependency_s, times.queued_s, times.execute_s) == (1.5, 1.5, 2.0)
    assert (times.wait_turn_s, times.commit_s) == (1.0, 0.5)


def test_a_job_says_how_it_was_applied() -> None:
    """As sets, row by row, or not at all, as where the publisher has rolled its PREPARE back."""
    job = SetJob(Batch(1), {})
    modes = [job.mode]
    job.resume = Resume(Halving(1), {}, Attempts(stops_on_error=True))
    job.resume.n_in_order = 1
    modes.append(job.mode)
    job.counts.n_changes = 3
    job.left_out("why")
    assert [*modes, job.mode] == [Mode.SET, Mode.ROWS, Mode.OUTCOME]
    assert (job.counts.n_changes, job.error) == (0, "why")


def test_a_job_lists_the_first_conflicts_and_counts_the_rest() -> None:
    """However many rows a batch finds missing, its record stays small, and no conflict is lost in it."""
    job = SetJob(Batch(1), {})
    found = {"table": "public.a", "policy": "skip", "outcome": "skipped"}
    listed, counted = (ConflictRecord(type=kind, **found) for kind in ("insert_exists", "update_missing"))
    for lsn in range(CONFLICTS_LIMIT):
        job.add_conflict(lsn, listed)
    for _ in range(2):
        job.add_conflict(CONFLICTS_LIMIT, counted)
    job.add_conflict(CONFLICTS_LIMIT, listed)
    assert job.conflicts == [(lsn, listed) for lsn in range(CONFLICTS_LIMIT)]
    record = batch_record(job, LogRun("slot", "run", 0.0), Reading.STREAM)
    assert record.conflicts == (listed,) * CONFLICTS_LIMIT
    assert record.more_conflicts == (
        ConflictCount(type="update_missing", conflicts=2, **found),
        ConflictCount(type="insert_exists", conflicts=1, **found),
    )

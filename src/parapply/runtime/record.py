"""A committed job as a record of the apply log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.applylog import utc_text, wire_time_text
from parapply.applylog_schema import BatchRecord, WaitedFor
from parapply.model import format_lsn

if TYPE_CHECKING:
    from parapply.runtime.job import Job


def record_of(job: Job, slot: str, worker: int, unix_minus_loop_s: float) -> BatchRecord:
    """Return the record of a committed job.

    Args:
        job: committed.
        slot: its name.
        worker: number of the worker that applied it.
        unix_minus_loop_s: what to add to the event loop's clock to get seconds since 1970.
    """
    batch = job.batch
    wait = job.waited_for
    wait_dependency_s = job.freed_s - job.submitted_s
    return BatchRecord(
        slot=slot,
        seq=batch.seq,
        worker=worker,
        first_end_lsn=format_lsn(batch.first_lsn),
        end_lsn=format_lsn(batch.end_lsn),
        n_transactions=job.n_transactions,
        xids=job.xids,
        commit_time_first=wire_time_text(batch.first_commit_time_us),
        commit_time_last=wire_time_text(batch.commit_time_us),
        received_at=utc_text(job.received_s + unix_minus_loop_s),
        started_at=utc_text(job.started_s + unix_minus_loop_s),
        committed_at=utc_text(job.committed_s + unix_minus_loop_s),
        queued_s=_since(job.started_s, job.received_s + wait_dependency_s),
        wait_dependency_s=round(wait_dependency_s, 6),
        execute_s=_since(job.executed_s, job.started_s),
        wait_turn_s=_since(job.turn_s, job.executed_s),
        commit_s=_since(job.committed_s, job.turn_s),
        attempts=job.attempts,
        mode=job.mode,
        rows=job.rows,
        size_bytes=job.size_bytes,
        late_keys=sum([len(changes.late_keys) for changes in batch.table_changes]),
        waited_for=WaitedFor(seq=wait.seq, table=wait.table, kind=wait.kind, name=wait.name) if wait else None,
    )


def _since(later_s: float, earlier_s: float) -> float:
    # A large transaction starts before its last byte is received.
    return round(max(0.0, later_s - earlier_s), 6)

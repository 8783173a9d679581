"""Counts of one turn: batches, repetitions and waits, from the apply log and the daemon's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from bench.applied import Applied, read_applied, total
from parapply.applylog import utc_text
from parapply.applylog_schema import BatchRecord, WaitedFor
from parapply.demo.errors import DemoError

if TYPE_CHECKING:
    from pathlib import Path

LOG = b"""Fatal Python error: not JSON
{"event": "worker_started", "worker": 1}
{"event": "batch_retried", "reason": "23503"}
{"event": "batch_retried", "reason": "row count"}
{"event": "batch_retried", "reason": "23503"}
"""


def record(seq: int, *, attempts: int = 1, mode: str = "set", wait_s: float = 0.0, late_keys: int = 0) -> BatchRecord:
    """Return a record of one batch of ten transactions."""
    wait = WaitedFor(seq=seq - 1, table="s.t", kind="foreign key", name="t_fkey") if wait_s or late_keys else None
    at = utc_text(0)
    return BatchRecord(
        slot="turn", seq=seq, worker=0, first_end_lsn="0/1", end_lsn="0/2", n_transactions=10, xids=(1,),
        commit_time_first=at, commit_time_last=at, received_at=at, started_at=at, committed_at=at, queued_s=0,
        wait_dependency_s=wait_s, execute_s=0, wait_turn_s=0, commit_s=0, attempts=attempts, mode=mode, rows={},
        size_bytes=1, late_keys=late_keys, waited_for=wait,
    )  # fmt: skip


def write_log(directory: Path, name: str, *records: BatchRecord) -> None:
    """Write a file of an apply log."""
    (directory / name).write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in records))


def test_retries_are_the_attempts_beyond_the_first(tmp_path: Path) -> None:
    """All attempts but each batch's first are retries, over all files of the log; reasons are in the other log."""
    write_log(tmp_path, "apply-1.jsonl", record(1), record(2, attempts=3, mode="rows"))
    write_log(tmp_path, "apply-2.jsonl", record(3, attempts=2, wait_s=0.5), record(4, late_keys=7))
    applied = read_applied(tmp_path, LOG)
    assert applied == Applied(
        batches=4,
        transactions=40,
        retries=3,
        retried_batches=2,
        in_order_batches=1,
        retry_reasons={"23503": 2, "row count": 1},
        waiting_batches=1,
        waited_s=0.5,
        waits={"foreign key s.t t_fkey": 2},
        late_keys=7,
    )
    assert applied.retries_per_100_batches == 75
    assert total([applied, applied]).retries_per_100_batches == 75
    assert total([applied, applied]).retry_reasons == {"23503": 4, "row count": 2}


def test_no_batch_is_no_retry() -> None:
    """A run without a batch has no rate that divides by zero."""
    assert total([]).retries_per_100_batches == 0


def test_an_open_apply_log_is_refused(tmp_path: Path) -> None:
    """Figures of a log that may lack records are not printed."""
    write_log(tmp_path, "apply-1.jsonl.open", record(1))
    with pytest.raises(DemoError, match="left its apply log open"):
        read_applied(tmp_path, b"")

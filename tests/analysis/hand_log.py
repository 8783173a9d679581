"""A log made by hand, small enough to know every figure: three batches, five transactions, two days, two slots.

| batch | worker | started - committed | executing | transactions | rows                           |
|-------|--------|---------------------|-----------|--------------|--------------------------------|
| 1     | 1      | 0.020 - 0.120 s     | 0.060 s   | 1            | a: 1 insert                    |
| 2     | 2      | 0.050 - 0.150 s     | 0.080 s   | 3            | a: 2 updates, b: 4 inserts     |
| 3     | 1      | 12.020 - 12.070 s   | 0.030 s   | 1            | b: 1 delete, 1 TRUNCATE        |

Seconds after `BEGIN`, ten seconds before midnight: batch 3 is of the next day.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from parapply.applylog_schema import (
    BackendSample,
    BatchRecord,
    ConflictCount,
    ConflictRecord,
    IntervalRecord,
    LateKey,
    LockHolder,
    RowCounts,
    TargetName,
    TransactionRecord,
    WaitedFor,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from parapply.analysis.engine import Rows
    from parapply.applylog_schema import Record

BEGIN = datetime(2024, 11, 20, 23, 59, 50, tzinfo=UTC)
A, B = "public.a", 'public.<b>"</script>'


def at(seconds: float) -> str:
    """Return a time of the log, in seconds after `BEGIN`."""
    return (BEGIN + timedelta(seconds=seconds)).isoformat(timespec="microseconds")


def batch(seq: int, **fields: object) -> BatchRecord:
    """Return a batch of one insert into `A`, but for what is given; times are seconds after `BEGIN`."""
    values: dict[str, Any] = {
        "slot": "app", "run": "r1", "seq": seq, "worker": 1, "first_end_lsn": f"0/{seq:X}00", "end_lsn": f"0/{seq:X}80",
        "n_transactions": 1, "xids": (seq,), "commit_time_first": 0.0, "commit_time_last": 0.0, "received_at": 0.01,
        "started_at": 0.02, "committed_at": 0.12, "queued_s": 0.01, "wait_dependency_s": 0.0, "execute_s": 0.06,
        "wait_turn_s": 0.03, "commit_s": 0.01, "attempts": 1, "mode": "set", "rows": {A: RowCounts(insert=1)},
        "size_bytes": 100, **fields,
    }  # fmt: skip
    return BatchRecord(**_with_times(values))


def transaction(seq: int, batch_seq: int, **fields: object) -> TransactionRecord:
    """Return a transaction of one insert into `A`, but for what is given."""
    values: dict[str, Any] = {
        "slot": "app", "run": "r1", "seq": seq, "batch_seq": batch_seq, "worker": 1, "xid": seq, "commit_lsn": "0/1",
        "end_lsn": "0/2", "commit_time": 0.0, "received_at": 0.01, "committed_at": 0.12, "size_bytes": 100,
        "n_changes": 1, "rows": {A: RowCounts(insert=1)}, **fields,
    }  # fmt: skip
    return TransactionRecord(**_with_times(values))


def _with_times(values: dict[str, Any]) -> dict[str, Any]:
    is_time = {name: name.endswith("_at") or name.startswith("commit_time") for name in values}
    return {name: at(value) if is_time[name] else value for name, value in values.items()}


#: Records of the table above.
RECORDS: list[Record] = [
    batch(1),
    transaction(1, 1),
    batch(
        2, worker=2, n_transactions=3, xids=(2, 3, 4), commit_time_last=0.02, received_at=0.03, started_at=0.05,
        committed_at=0.15, wait_dependency_s=0.01, execute_s=0.08, wait_turn_s=0.01, attempts=3, retry_reason="40P01",
        rows={A: RowCounts(update=2), B: RowCounts(insert=4)}, size_bytes=400, late_keys=2,
        waited_for=WaitedFor(seq=1, table=A, kind="key", name="a_pkey"),
        target_names=(TargetName(table=A, target="archive.a"),),
    ),
    transaction(
        2, 2, commit_time=0.0, committed_at=0.15, rows={A: RowCounts(update=2)}, n_changes=2,
    ),
    transaction(3, 2, commit_time=0.01, committed_at=0.15, rows={B: RowCounts(insert=2)}, n_changes=2),
    transaction(
        4, 2, commit_time=0.02, committed_at=0.15, rows={B: RowCounts(insert=2)}, n_changes=2,
    ),
    batch(
        3, commit_time_first=12.0, commit_time_last=12.0, received_at=12.01, started_at=12.02, committed_at=12.07,
        execute_s=0.03, wait_turn_s=0.0, commit_s=0.02, mode="rows", rows={B: RowCounts(delete=1, truncate=1)},
        size_bytes=50, conflicts=(ConflictRecord(type="delete_missing", table=B, policy="skip", outcome="skipped"),),
    ),
    transaction(
        5, 3, commit_time=12.0, received_at=12.01, committed_at=12.07, n_changes=2,
        rows={B: RowCounts(delete=1, truncate=1)},
    ),
]  # fmt: skip


def write(folder: Path, name: str, records: Sequence[Record | str | bytes]) -> Path:
    """Write a closed file: records, and lines as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    lines = [
        line.encode() if isinstance(line, str) else line if isinstance(line, bytes) else msgspec.json.encode(line)
        for line in records
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def old_line(record: Record) -> str:
    """Return a line as it was before the log had runs, conflicts and reasons: fields with a default were not there."""
    fields = msgspec.to_builtins(record)
    for name in ("run", "retry_reason", "conflicts", "late_keys", "waited_for", "target_names"):
        fields.pop(name, None)
    return msgspec.json.encode(fields).decode()


def write_everything(folder: Path) -> None:
    """Write a log in two files with everything that a figure looks at."""
    conflict = {"type": "update_missing", "table": A, "policy": "skip", "outcome": "skipped"}
    backends = (BackendSample(wait="CPU", samples=3), BackendSample(wait="IO:WALSync", samples=1))
    locks = (LockHolder(pid=4711, role="app", relation="archive.a", mode="ShareLock"),)
    late: dict[str, Any] = {"late_keys": 1, "late_rows": (LateKey(table=A, key="ab12cd34"),)}
    write(folder, "apply-1.jsonl", RECORDS)
    write(folder, "é two.jsonl", [
        batch(1, slot="two", run="a", committed_at=0.29, commit_s=0.29, queued_s=0.0, **late),
        transaction(1, 1, slot="two", run="a"),
        IntervalRecord(
            slot="two", run="a", ended_at=at(1), length_s=1.0, workers=4, leader_cpu_s=0.1, publisher_s=0.2,
            paused_s=0.3, behind_bytes=1 << 22, backends=backends, locks=locks,
        ),
        batch(4, slot="two", run="a", conflicts=(ConflictRecord(**conflict),),
              more_conflicts=(ConflictCount(**conflict, conflicts=530),)),
        batch(5, n_transactions=-5),
        "torn", b"\xff\xfe", "", '{"record": "poem"}', '{"record": "batch", "seq": "x"}',
        old_line(batch(1, slot="old")), old_line(batch(2, slot="old")).replace('"schema_version":1,', ""),
    ])  # fmt: skip


def comparable(rows: Rows) -> list[tuple[Any, ...]]:
    """Return rows in an order that does not depend on the engine; sums of fractions depend on it in the last digit."""
    found = [tuple(float(f"{one:.9g}") if isinstance(one, float) else one for one in row.values()) for row in rows]
    return sorted(found, key=repr)

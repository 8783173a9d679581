"""The records of a synthetic apply log, file by file. Pure."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from parapply.applylog import wire_time_text
from parapply.applylog_schema import (
    XIDS_LIMIT,
    BatchRecord,
    ConflictRecord,
    RowCounts,
    TransactionRecord,
    WaitedFor,
)
from parapply.model import POSTGRES_EPOCH_US, format_lsn
from parapply.vocabulary import WaitKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.synth.shape import LogShape
    from parapply.applylog_schema import Record

#: The first commit: midnight, so that long logs begin with a whole day.
BEGIN_S: Final = datetime(2026, 11, 1, tzinfo=UTC).timestamp()
_BEGIN_LSN: Final = 0x1_0000_0000
_CHANGE_BYTES: Final = 180
#: Kinds of dependency: of a hundred, up to where each is this one.
_KINDS: Final = ((WaitKind.KEY, 84), (WaitKind.UNIQUE, 90), (WaitKind.FOREIGN_KEY, 98), (WaitKind.TABLE, 100))
_CONFLICTS: Final = (
    ("insert_exists", "error", "stopped"),
    ("update_missing", "skip", "skipped"),
    ("delete_missing", "skip", "skipped"),
    ("update_origin_differs", "apply_remote", "applied"),
)
_REASONS: Final = ("23505", "40P01", "row count")
_POOL: Final = 1 << 14
#: Different row counts of batches of one size.
_VARIANTS: Final = 8


class _Planned(NamedTuple):
    """A transaction before its batch is known."""

    rows: dict[str, RowCounts]
    n_changes: int
    conflicts: tuple[ConflictRecord, ...]


class _Pools:
    """Random numbers and rows to pick from: drawing each again would take most of the time. The same for every file."""

    def __init__(self, shape: LogShape) -> None:
        rng = random.Random(shape.seed)  # noqa: S311  no secret
        median_s = shape.execute_ms / 1000
        self.execute_s = [rng.lognormvariate(0.0, shape.execute_spread) * median_s for _ in range(_POOL)]
        self.network_s = [rng.lognormvariate(-6.0, 0.8) for _ in range(_POOL)]
        self.sizes = [1 + int(rng.expovariate(1 / max(shape.batch_transactions - 0.5, 0.1))) for _ in range(_POOL)]
        self.tables = [f"public.t{index}" for index in range(shape.tables)]
        weights = list(accumulate(0.5 ** min(index, 12) for index in range(shape.tables)))
        mean = max(shape.transaction_changes - 0.5, 0.1)
        self.rows = [_draw_rows(rng, self.tables, weights, mean) for _ in range(_POOL)]
        #: By number of transactions: some rows of batches of that size.
        self.merged: dict[int, list[tuple[dict[str, RowCounts], int]]] = {}


@lru_cache(maxsize=1)
def _pools(shape: LogShape) -> _Pools:
    return _Pools(shape)


def _draw_rows(
    rng: random.Random, tables: list[str], weights: list[float], mean: float
) -> tuple[dict[str, RowCounts], int]:
    """Return the rows of a transaction, and how many they are."""
    rows: dict[str, RowCounts] = {}
    n_changes = 1 + int(rng.expovariate(1 / mean))
    for table in rng.choices(tables, cum_weights=weights, k=n_changes):
        counts = rows.setdefault(table, RowCounts())
        kind = rng.random()
        if kind < 0.45:
            counts.insert += 1
        elif kind < 0.9:
            counts.update += 1
        else:
            counts.delete += 1
    return rows, n_changes


class FileRecords:
    """The records of one file."""

    def __init__(self, shape: LogShape, number: int) -> None:
        """Begin with the first batch of a file, counted from 0."""
        self._shape = shape
        self._pools = _pools(shape)
        self._first = number * shape.file_batches
        self._rng = random.Random(f"{shape.seed}/{number}")  # noqa: S311  no secret
        self._run = f"20261101T000000Z-{shape.seed:08x}"
        self._step_s = shape.length_s / shape.n_batches
        self._free_s = [0.0] * shape.workers
        self._committed_s = 0.0
        # Exact on average, so that the numbers of a file continue where the numbers of the one before end.
        self._seq = self._first * shape.batch_transactions
        self._next_seq = min(self._first + shape.file_batches, shape.n_batches) * shape.batch_transactions

    def records(self) -> Iterator[list[Record]]:
        """Yield the records of each batch."""
        shape, rng = self._shape, self._rng
        end = min(self._first + shape.file_batches, shape.n_batches)
        for index in range(self._first, end):
            # The remaining transactions of the file are shared by the remaining batches.
            left = (self._next_seq - self._seq) - (end - index - 1)
            n_transactions = left if index == end - 1 else max(1, min(left, self._pools.sizes[rng.getrandbits(14)]))
            yield self._batch(index, n_transactions, BEGIN_S + self._step_s * (index + rng.uniform(0.5, 1.0)))
            self._seq += n_transactions

    def _batch(self, index: int, n_transactions: int, commit_s: float) -> list[Record]:
        """Return a batch's record and its transactions' records, if they are wanted."""
        shape, rng = self._shape, self._rng
        transactions = self._transactions(n_transactions) if shape.detail == "transaction" else []
        rows, n_changes = _merged(transactions) if transactions else self._merged_rows(n_transactions)
        conflicts = tuple([conflict for one in transactions for conflict in one.conflicts])
        if not transactions and shape.conflict_rate:
            conflicts = self._conflicts(n_transactions)
        received_s = commit_s + self._pools.network_s[rng.getrandbits(14)]
        execute_s = self._pools.execute_s[rng.getrandbits(14)]
        waited_for = self._waited_for(index) if rng.random() < shape.dependency_rate else None
        waited_s = self._pools.execute_s[rng.getrandbits(14)] * 0.5 if waited_for else 0.0
        worker = self._free_s.index(min(self._free_s))
        started_s = max(received_s + waited_s, self._free_s[worker])
        turn_s = max(started_s + execute_s, self._committed_s)
        last_s = shape.execute_ms / 10_000
        committed_s = self._committed_s = self._free_s[worker] = turn_s + last_s
        is_retried = rng.random() < shape.retry_rate
        seq = self._seq
        record = BatchRecord(
            slot=shape.slot,
            run=self._run,
            seq=index + 1,
            worker=worker + 1,
            first_end_lsn=format_lsn(_lsn(seq + 1)),
            end_lsn=format_lsn(_lsn(seq + n_transactions)),
            n_transactions=n_transactions,
            xids=tuple(range(_xid(seq + 1), _xid(seq + 1) + min(n_transactions, XIDS_LIMIT))),
            commit_time_first=_text(commit_s - self._step_s * 0.4 * (n_transactions > 1)),
            commit_time_last=_text(commit_s),
            received_at=_text(received_s),
            started_at=_text(started_s),
            committed_at=_text(committed_s),
            queued_s=_round(started_s - received_s - waited_s),
            wait_dependency_s=round(waited_s, 6),
            execute_s=round(execute_s, 6),
            wait_turn_s=_round(turn_s - started_s - execute_s),
            commit_s=last_s,
            attempts=2 if is_retried else 1,
            mode="rows" if is_retried else "set",
            rows=rows,
            size_bytes=n_changes * _CHANGE_BYTES,
            late_keys=n_changes // 10 if waited_for else 0,
            waited_for=waited_for,
            retry_reason=_REASONS[index % len(_REASONS)] if is_retried else "",
            conflicts=conflicts,
        )
        return [record, *self._told(transactions, record, commit_s)]

    def _told(self, transactions: list[_Planned], batch: BatchRecord, commit_s: float) -> Iterator[TransactionRecord]:
        # Commits are spread over the same time as the record's commits.
        apart_s = self._step_s * 0.4 / max(1, len(transactions) - 1)
        for number, one in enumerate(transactions, 1):
            seq = self._seq + number
            yield TransactionRecord(
                slot=batch.slot,
                run=batch.run,
                seq=seq,
                batch_seq=batch.seq,
                worker=batch.worker,
                xid=_xid(seq),
                commit_lsn=format_lsn(_lsn(seq) - 48),
                end_lsn=format_lsn(_lsn(seq)),
                commit_time=_text(commit_s - apart_s * (len(transactions) - number)),
                received_at=batch.received_at,
                committed_at=batch.committed_at,
                size_bytes=one.n_changes * _CHANGE_BYTES,
                n_changes=one.n_changes,
                rows=one.rows,
                conflicts=one.conflicts,
            )

    def _transactions(self, count: int) -> list[_Planned]:
        shape, rng = self._shape, self._rng
        planned = []
        for _ in range(count):
            rows, n_changes = self._pools.rows[rng.getrandbits(14)]
            conflicts = self._conflicts(1) if shape.conflict_rate else ()
            planned.append(_Planned(rows, n_changes, conflicts))
        return planned

    def _waited_for(self, index: int) -> WaitedFor:
        table = self._pools.tables[int(self._rng.expovariate(0.7)) % len(self._pools.tables)]
        kind, name = self._kind(table)
        return WaitedFor(seq=max(1, index + 1 - self._rng.randint(1, self._shape.workers)),
                         table=table, kind=kind, name=name)  # fmt: skip

    def _kind(self, table: str) -> tuple[WaitKind, str]:
        """Return the kind of a dependency and the index or constraint that it is due to."""
        dice = self._rng.randrange(100)
        kind = next(kind for kind, upper in _KINDS if dice < upper)
        bare = table.rpartition(".")[2]
        return kind, {WaitKind.UNIQUE: f"{bare}_code_key", WaitKind.FOREIGN_KEY: f"{bare}_parent_fkey"}.get(kind, "")

    def _conflicts(self, n_transactions: int) -> tuple[ConflictRecord, ...]:
        rng = self._rng
        if rng.random() >= self._shape.conflict_rate * n_transactions:
            return ()
        kind, policy, outcome = rng.choice(_CONFLICTS)
        return (ConflictRecord(type=kind, table=rng.choice(self._pools.tables), policy=policy, outcome=outcome),)

    def _merged_rows(self, n_transactions: int) -> tuple[dict[str, RowCounts], int]:
        """Return the rows of so many transactions; the same few each time."""
        variants = self._pools.merged.get(n_transactions)
        if variants is None:
            # Of its own numbers: which file asks first depends on the process.
            rng = random.Random(f"{self._shape.seed}/rows/{n_transactions}")  # noqa: S311  no secret
            drawn = [[_Planned(*rng.choice(self._pools.rows), ()) for _ in range(n_transactions)]
                     for _ in range(_VARIANTS)]  # fmt: skip
            variants = self._pools.merged[n_transactions] = [_merged(each) for each in drawn]
        return variants[self._rng.randrange(_VARIANTS)]


def _merged(transactions: list[_Planned]) -> tuple[dict[str, RowCounts], int]:
    merged: dict[str, RowCounts] = {}
    n_changes = 0
    for one in transactions:
        n_changes += one.n_changes
        for table, counts in one.rows.items():
            total = merged.setdefault(table, RowCounts())
            total.insert += counts.insert
            total.update += counts.update
            total.delete += counts.delete
    return merged, n_changes


def _xid(seq: int) -> int:
    return 1000 + seq % 4_000_000_000  # of 32 bits, with room for a batch's last


def _lsn(seq: int) -> int:
    return _BEGIN_LSN + seq * 0x200


def _round(duration_s: float) -> float:
    # Sums of floating point numbers may end a little below zero.
    return round(max(duration_s, 0.0), 6)


def _text(unix_s: float) -> str:
    return wire_time_text(int(unix_s * 1e6) - POSTGRES_EPOCH_US)

"""A committed job as records of the apply log."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from parapply.applylog import utc_text, wire_time_text
from parapply.applylog_schema import (
    LATE_ROWS_LIMIT,
    BatchRecord,
    ConflictCount,
    LateKey,
    RowCounts,
    TargetName,
    TransactionRecord,
    WaitedFor,
)
from parapply.engine.job import SetJob
from parapply.model import Relation, format_lsn
from parapply.plan.steps import read_truncate
from parapply.wire.rows import DELETE, INSERT, KIND_AT, RELATION_AT, TRUNCATE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from parapply.applylog_schema import ConflictRecord
    from parapply.engine.job import Alone, Job
    from parapply.model import Transaction
    from parapply.vocabulary import Reading


def new_run() -> str:
    """Return a unique name for a run of the daemon: its begin, and random digits."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"


class TargetNames:
    """Tables with another name on the target, logged once a run and hour, so that each part of the log has them."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """Take names on the target by the publisher's names; the mapping grows with the tables announced."""
        self._names = names
        self._said: set[str] = set()
        self._hour = 0

    def take(self, tables: Iterable[str], now_s: float) -> tuple[TargetName, ...]:
        """Return the names that are to be logged now, in seconds of any clock that goes forwards, among some tables."""
        if not self._names:
            return ()
        if now_s // 3600 != self._hour:
            self._hour = int(now_s // 3600)
            self._said.clear()
        new = [name for name in tables if name in self._names and name not in self._said]
        self._said.update(new)
        return tuple([TargetName(table=name, target=self._names[name]) for name in new])


class LogRun(NamedTuple):
    """The run of a daemon that records are of."""

    slot: str
    run: str  # within which the numbers of batches count
    unix_minus_loop_s: float  # added to a time of the event loop's clock it gives seconds since 1970


def batch_record(job: Job, of: LogRun, reading: Reading, target_names: tuple[TargetName, ...] = ()) -> BatchRecord:
    """Return the record of a committed job."""
    slot, run, unix_minus_loop_s = of
    batch = job.batch
    wait = job.waited_for
    times = job.times
    is_one_flight = isinstance(job, SetJob) and job.is_one_flight
    flight_commit_s = job.flight_commit_s if isinstance(job, SetJob) else 0.0
    return BatchRecord(
        slot=slot,
        seq=batch.seq,
        run=run,
        worker=job.worker,
        first_end_lsn=format_lsn(batch.first_lsn),
        end_lsn=format_lsn(batch.end_lsn),
        n_transactions=job.counts.n_transactions,
        xids=job.counts.xids,
        commit_time_first=wire_time_text(batch.first_commit_time_us),
        commit_time_last=wire_time_text(batch.commit_time_us),
        received_at=utc_text(times.received_s + unix_minus_loop_s),
        started_at=utc_text(times.started_s + unix_minus_loop_s),
        committed_at=utc_text(times.committed_s + unix_minus_loop_s),
        queued_s=round(times.queued_s, 6),
        wait_dependency_s=round(times.wait_dependency_s, 6),
        execute_s=round(times.execute_s, 6),
        wait_turn_s=round(times.wait_turn_s, 6),
        commit_s=0.0 if is_one_flight else round(times.commit_s, 6),
        attempts=job.attempts,
        mode=job.mode.value,
        rows=job.counts.rows,
        size_bytes=job.counts.size_bytes,
        late_keys=sum([len(changes.late_keys) for changes in batch.table_changes]),
        late_rows=_late_rows(job, run),
        waited_for=WaitedFor(seq=wait.seq, table=wait.table, kind=wait.kind, name=wait.name) if wait else None,
        retry_reason=job.error,
        reading=reading.value,
        commands=tuple(job.counts.commands),
        is_one_flight=is_one_flight,
        flight_commit_s=round(flight_commit_s, 6),
        target_names=target_names,
        conflicts=tuple([conflict for _, conflict in job.conflicts]),
        more_conflicts=tuple([_counted(conflict, number) for conflict, number in job.more_conflicts.items()]),
    )


def transaction_records(job: Job, of: LogRun) -> Iterator[TransactionRecord]:
    """Yield the records of a committed job's source transactions, if they were noted; arguments as above."""
    if not job.first_transaction:
        return
    slot, run, unix_minus_loop_s = of
    conflicts = _by_transaction(job.conflicts)

    def record(seq: int, one: Transaction | Alone, received_s: float, counted: _Counted) -> TransactionRecord:
        return TransactionRecord(
            slot=slot,
            run=run,
            seq=seq,
            batch_seq=job.batch.seq,
            worker=job.worker,
            xid=one.xid,
            commit_lsn=format_lsn(one.commit_lsn),
            end_lsn=format_lsn(counted.end_lsn),
            commit_time=wire_time_text(one.commit_time_us),
            received_at=utc_text(received_s + unix_minus_loop_s),
            committed_at=utc_text(job.times.committed_s + unix_minus_loop_s),
            size_bytes=counted.size_bytes,
            n_changes=counted.n_changes,
            rows=counted.rows,
            conflicts=conflicts.get(one.commit_lsn, ()),
        )

    if job.alone is not None:
        # Counted by the worker, piece by piece.
        counts = job.counts
        counted = _Counted(job.batch.end_lsn, counts.size_bytes, counts.n_changes, counts.rows)
        yield record(job.first_transaction, job.alone, job.times.received_s, counted)
        return
    assert isinstance(job, SetJob), "every other job is alone"
    names = {oid: plan.relation.qualified_name for oid, plan in job.plans_before.items()}
    arrivals = iter(job.arrivals)
    n_arrived, received_s = next(arrivals)
    for index, transaction in enumerate(job.batch.transactions):
        if index >= n_arrived:
            n_arrived, received_s = next(arrivals)
        yield record(job.first_transaction + index, transaction, received_s, _counted_of(transaction, names))


class _Counted(NamedTuple):
    end_lsn: int
    size_bytes: int
    n_changes: int
    rows: dict[str, RowCounts]


def _counted_of(transaction: Transaction, names: dict[int, str]) -> _Counted:
    """Count the changes of a transaction; `names` of relations by OID follow its announcements."""
    rows: dict[str, RowCounts] = {}
    for change in transaction.changes:
        if isinstance(change, Relation):
            names[change.oid] = change.qualified_name
            continue
        kind = change[KIND_AT]
        if kind == TRUNCATE:
            for oid in read_truncate(change).relation_oids:
                rows.setdefault(names[oid], RowCounts()).truncate += 1
            continue
        counts = rows.setdefault(names[int.from_bytes(change[RELATION_AT : RELATION_AT + 4])], RowCounts())
        if kind == INSERT:
            counts.insert += 1
        elif kind == DELETE:
            counts.delete += 1
        else:
            counts.update += 1
    n_changes = len(transaction.changes) - len(transaction.relations)
    return _Counted(transaction.end_lsn, transaction.size_bytes, n_changes, rows)


def _late_rows(job: Job, run: str) -> tuple[LateKey, ...]:
    """Return some of the late keys, as hashes with a secret of the run, so that no key can be found by trying."""
    found: list[LateKey] = []
    for changes in job.batch.table_changes:
        if changes.late_keys:
            table = changes.plan.relation.qualified_name
            for key in islice(changes.late_keys, LATE_ROWS_LIMIT - len(found)):
                hashed = blake2b(key if isinstance(key, bytes) else b"\0".join(key), digest_size=4, key=_secret(run))
                found.append(LateKey(table=table, key=hashed.hexdigest()))
    return tuple(found)


@lru_cache(maxsize=2)
def _secret(_run: str) -> bytes:
    return secrets.token_bytes(16)


def _counted(conflict: ConflictRecord, number: int) -> ConflictCount:
    return ConflictCount(
        type=conflict.type, table=conflict.table, policy=conflict.policy, outcome=conflict.outcome, conflicts=number
    )


def _by_transaction(conflicts: list[tuple[int, ConflictRecord]]) -> dict[int, tuple[ConflictRecord, ...]]:
    found: dict[int, list[ConflictRecord]] = {}
    for commit_lsn, conflict in conflicts:
        found.setdefault(commit_lsn, []).append(conflict)
    return {commit_lsn: tuple(each) for commit_lsn, each in found.items()}

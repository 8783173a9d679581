"""The apply log's records: what a line holds, in which unit, of which version. Shared by the daemon and the report.

A line is one JSON object. Its field ``record`` says which of `RECORDS` it is, ``schema_version`` which version of it.
The rules for both sides:

- A new field with a default keeps the version: an old reader passes over it, a new one takes the default in old lines.
- A field that goes or changes its meaning raises `SCHEMA_VERSION`. A reader takes the versions in `READABLE_VERSIONS`
  and counts every other line, and every tag it does not know, as unreadable; neither is an error.

LSNs are texts like 16/B374D848, which do not sort. Times are ISO 8601 in UTC with microseconds, which do. Durations are
seconds. Tables are named ``schema.table``, as published. No record holds a value of a row, not of a key either.
"""

from __future__ import annotations

from typing import Final

import msgspec

#: Version of what is written now.
SCHEMA_VERSION: Final = 1
#: Versions that the structs below can be read from.
READABLE_VERSIONS: Final = (1,)
#: Transaction ids listed in a batch's record: enough to find one by hand, short enough for merged batches.
XIDS_LIMIT: Final = 32
#: Late keys listed in a record: a row that holds up many batches is among them soon.
LATE_ROWS_LIMIT: Final = 4
#: Sessions listed in an interval that hold locks for which workers' sessions wait.
LOCKS_LIMIT: Final = 16
#: Conflicts listed in a record, the rest is counted; all of them are in the history on the target.
CONFLICTS_LIMIT: Final = 1000


class RowCounts(msgspec.Struct, kw_only=True):
    """Rows of one table in one transaction, as the publisher sent them (before netting)."""

    insert: int = 0
    update: int = 0
    delete: int = 0
    truncate: int = 0  # statements, not rows


class LateKey(msgspec.Struct, frozen=True, kw_only=True):
    """A row that had to follow an earlier batch."""

    table: str  # schema.table
    key: str  # a hash of its key, the same within a run only: it does not reveal the key


class TargetName(msgspec.Struct, frozen=True, kw_only=True):
    """A table that has another name on the target."""

    table: str  # schema.table, as published
    target: str  # there


class WaitedFor(msgspec.Struct, frozen=True, kw_only=True):
    """The last dependency that a batch waited for, or only its late keys."""

    seq: int  # of the batch waited for
    table: str  # schema.table; empty for a barrier
    kind: str  # a `WaitKind`, or one of a later version
    name: str = ""  # of the index or constraint


class ConflictRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One change that met other data than it expected, and what was done about it."""

    type: str  # as PostgreSQL 18 logs it: insert_exists, update_missing ...
    table: str  # schema.table
    policy: str  # in force: error, skip, apply_remote, keep_local, last_update_wins
    outcome: str  # what was done


class ConflictCount(msgspec.Struct, frozen=True, kw_only=True):
    """Conflicts of one sort that a record does not list: those after the first CONFLICTS_LIMIT."""

    type: str
    table: str
    policy: str
    outcome: str
    conflicts: int  # how many


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="batch"):
    """One target transaction, written when the target has acknowledged its commit."""

    schema_version: int = SCHEMA_VERSION
    slot: str
    seq: int  # order of arrival within one run
    worker: int  # from 1
    first_end_lsn: str  # end LSN of the first source transaction in it
    end_lsn: str  # end LSN of the last
    n_transactions: int  # source transactions
    xids: tuple[int, ...]  # the first XIDS_LIMIT, in commit order; some are left out if n_transactions is larger
    commit_time_first: str  # publisher's clock
    commit_time_last: str
    received_at: str  # the last of its bytes was read; this and what follows: the daemon's clock
    started_at: str  # a worker has it
    committed_at: str  # acknowledged
    queued_s: float  # from received to started, dependency not counted
    wait_dependency_s: float  # from closed until the last dependency had committed
    execute_s: float
    wait_turn_s: float  # done but for late keys, waiting for its place in the commit order
    commit_s: float  # late keys and COMMIT
    attempts: int  # 1 where nothing had to be repeated
    mode: str  # set, rows (a part of it row by row), large, streamed, spilled (in pieces), outcome (two-phase)
    rows: dict[str, RowCounts]  # by schema.table
    size_bytes: int  # of the change messages, with what the interpreter needs for them
    late_keys: int = 0  # held by earlier batches and so applied in its turn, all others at once
    late_rows: tuple[LateKey, ...] = ()  # the first LATE_ROWS_LIMIT of them
    waited_for: WaitedFor | None = None
    run: str = ""  # of the daemon: from connected to the loss of an end, within which `seq` counts; "" in old lines
    retry_reason: str = ""  # SQLSTATE, row count, suspect ...; the last one
    conflicts: tuple[ConflictRecord, ...] = ()  # the first CONFLICTS_LIMIT
    more_conflicts: tuple[ConflictCount, ...] = ()  # the rest of them, counted
    reading: str = "stream"  # how it was read from the slot: stream or ranges
    commands: tuple[str, ...] = ()  # tags of the publisher's commands that have run in it, in order
    is_one_flight: bool = False  # statements and COMMIT were sent at once: execute_s holds both, commit_s is 0
    flight_commit_s: float = 0.0  # of execute_s then, what COMMIT took; 0: not measured, as in 15 of 16
    target_names: tuple[TargetName, ...] = ()  # of its tables; in a run's first record with each, and again each hour


class BackendSample(msgspec.Struct, frozen=True, kw_only=True):
    """Activity of the sessions of workers with a batch, by ``pg_stat_activity``."""

    wait: str  # Type:Event as there; CPU: none; client: it waits for the daemon's next message
    samples: int  # once a second and worker with a batch


class LockHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A session that is none of the workers', and holds a lock for which a worker's session waits."""

    pid: int  # on the target; 0: a prepared transaction
    role: str = ""
    relation: str = ""  # schema.table on the target; empty: not of a table, or not known
    mode: str = ""  # that the worker's session asks for


class IntervalRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="interval"):
    """About a second in which a batch was under way or held back: what the daemon and its sessions did."""

    schema_version: int = SCHEMA_VERSION
    slot: str
    run: str  # as in BatchRecord
    ended_at: str  # the daemon's clock
    length_s: float
    workers: int  # sessions
    leader_cpu_s: float  # CPU time of the leader's thread
    publisher_s: float  # the reader waited for the publisher
    paused_s: float  # reading was paused: enough was at hand
    behind_bytes: int  # of the publisher's WAL that were not read at the end
    backends: tuple[BackendSample, ...] = ()
    commit_order: str = ""  # preserve or relaxed
    max_batch_transactions: int = 0  # as configured, as the next two
    max_batch_changes: int = 0
    max_batch_bytes: int = 0
    processors: int = 0  # that the target may use, where it is on this machine; 0: not known, nor are the next three
    busy_cpu_s: float = 0.0  # CPU time of everything on it
    sessions_cpu_s: float = 0.0  # CPU time of the workers' sessions
    sender_cpu_s: float = 0.0  # CPU time of the publisher's process that sends, if it also runs there
    locks: tuple[LockHolder, ...] = ()  # the first LOCKS_LIMIT, seen once, at the end
    throttled_s: float = 0.0  # apply.max_changes_per_s held changes back


class TransactionRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="transaction"):
    """One source transaction, only at ``detail = "transaction"``; its batch's record comes just before it."""

    schema_version: int = SCHEMA_VERSION
    slot: str
    run: str  # as in BatchRecord
    seq: int  # order of arrival within the run, from 1
    batch_seq: int  # `BatchRecord.seq` of the batch that it is in
    worker: int
    xid: int
    commit_lsn: str
    end_lsn: str
    commit_time: str  # publisher's clock
    received_at: str  # the last of its bytes was read; the daemon's clock, as what follows
    committed_at: str  # of the batch
    size_bytes: int  # as in BatchRecord
    n_changes: int  # rows, and TRUNCATE statements of however many tables
    rows: dict[str, RowCounts]  # by schema.table
    conflicts: tuple[ConflictRecord, ...] = ()


Record = BatchRecord | TransactionRecord | IntervalRecord

#: The kinds of record by tag.
RECORDS: Final[dict[str, type[Record]]] = {
    "batch": BatchRecord,
    "transaction": TransactionRecord,
    "interval": IntervalRecord,
}


class UnreadableRecordError(ValueError):
    """A line that is no record of a version and kind known here; the reader counts it and continues."""


_decoder: Final[msgspec.json.Decoder[Record]] = msgspec.json.Decoder(Record)


def read_record(line: bytes | str) -> Record:
    """Return the record of one line.

    Raises:
        UnreadableRecordError: the line is torn, or of another version or kind. Count it: the next may be good.
    """
    try:
        record = _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnreadableRecordError(str(error)) from error
    if record.schema_version not in READABLE_VERSIONS:
        raise UnreadableRecordError(f"schema version {record.schema_version}")
    return record

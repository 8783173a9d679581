"""The document of `parapply status --json` as types, and the JSON Schema made of them.

The columns of state tables are described by their own comments (`target/state/schema.sql`). A field is present whether
the daemon runs or not. Within version 1 fields may be added, and none is removed or changes its meaning.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from parapply.target.state.schema import comments
from parapply.vocabulary import CopyState, DaemonState, WorkerState

_Lsn = str
_Time = str


class WorkerDocument(msgspec.Struct, kw_only=True):
    """State of one worker; none is shown while no daemon is connected."""

    worker: int
    pid: int | None
    state: WorkerState
    batch_seq: int | None
    end_lsn: _Lsn | None
    waits_for: str | None
    since: _Time
    transactions: int
    changes: int
    since_s: Annotated[float, Meta(description="Seconds since then.")]


class TableDocument(msgspec.Struct, kw_only=True):
    """How one table is applied, with counts of its changes."""

    schema_name: str
    table_name: str
    lane: str
    is_table_exclusive: bool
    reason: str
    key_columns: list[str]
    retries: int
    transactions: int
    inserts: int
    updates: int
    deletes: int
    truncates: int
    waits: int
    wait_s: float
    waits_mostly_for: str
    counted_s: Annotated[float | None, Meta(description="counted_at of the state table, in seconds since 1970.")]


class CopyDocument(msgspec.Struct, kw_only=True):
    """A table whose rows are, or will be, copied."""

    schema_name: str
    table_name: str
    state: CopyState
    start_lsn: _Lsn | None
    rows: int | None
    size_bytes: int | None
    finished_at: _Time | None
    reason: str


class CommandDocument(msgspec.Struct, kw_only=True):
    """A schema change of the publisher."""

    number: int
    commit_lsn: _Lsn
    tag: str
    source_role: str
    outcome: str
    reason: str
    recorded_at: _Time


class PreparedDocument(msgspec.Struct, kw_only=True):
    """A transaction that is prepared on the target and waits for its outcome."""

    gid: str
    source_xid: int
    end_lsn: _Lsn
    owner: str
    prepared_at: _Time
    age_s: Annotated[float, Meta(description="Seconds since it was prepared here.")]


class ConflictsDocument(msgspec.Struct, kw_only=True):
    """Number of conflicts of one kind that are kept."""

    type: Annotated[str, Meta(description="Type of the conflict, as PostgreSQL 18 names it.")]
    table: Annotated[str, Meta(description="Schema and table.")]
    outcome: Annotated[str, Meta(description="Outcome of the change.")]
    count: Annotated[int, Meta(description="Number of such conflicts.")]
    latest: Annotated[_Time, Meta(description="When the last one was recorded.")]


class StepDocument(msgspec.Struct, kw_only=True):
    """A step that `parapply migrate` has begun."""

    step: str
    state: Annotated[str, Meta(description="running (now, or interrupted: see is_worked_on), failed or done.")]
    done: int
    total: int
    unit: str
    size_bytes: int
    left_s: float | None
    detail: str
    started_at: Annotated[_Time, Meta(description="When it began.")]
    finished_at: Annotated[_Time | None, Meta(description="When it ended.")]
    seconds: Annotated[float, Meta(description="From its begin to its end, or to now.")]
    is_worked_on: Annotated[bool, Meta(description="A command works on it now.")]


class CutoverDocument(msgspec.Struct, kw_only=True):
    """The cut-over of this slot."""

    step: str
    step_at: _Time
    begun_at: _Time
    reverse_slot: str
    fence: str
    fence_lsn: _Lsn | None
    takeover_lsn: _Lsn | None
    fenced_at: _Time | None
    opened_at: _Time | None
    is_fenced: Annotated[bool, Meta(description="Writers are kept from the source.")]
    paused: Annotated[list[str], Meta(description="Poolers that may be paused: database and console of each.")]
    step_s: Annotated[float, Meta(description="Seconds in this step.")]
    gap_s: Annotated[float | None, Meta(description="Seconds in which no client could write; so far, while none can.")]
    is_worked_on: Annotated[bool, Meta(description="A command works on it now.")]


class LimitsDocument(msgspec.Struct, kw_only=True):
    """Limit of the last minutes (docs/REPORT.md, The verdict)."""

    limit: Annotated[str, Meta(description="throttle, source, publisher, leader, dependency, commit or target.")]
    detail: Annotated[str, Meta(description="Sort of the limit, or empty.")]
    share: Annotated[float, Meta(description="Part of the time, from 0 to 1.")]
    words: Annotated[str, Meta(description="One sentence, with the number.")]
    advice: Annotated[str, Meta(description="Advice for the operator.")]
    evidence: Annotated[list[str], Meta(description="Sentences that it is concluded from, the most important first.")]
    window_s: Annotated[float, Meta(description="Seconds that were looked at.")]


class BlockedDocument(msgspec.Struct, kw_only=True):
    """A session of parapply's, but no worker's, that waits for a lock, and the session that holds it."""

    session: Annotated[str, Meta(description="Its application_name.")]
    wait_s: Annotated[float, Meta(description="Seconds so far.")]
    is_making_slot: Annotated[bool, Meta(description="It waits for transactions to end; the holder is the oldest one.")]
    relation: Annotated[str | None, Meta(description="Table that is locked.")]
    mode: Annotated[str, Meta(description="Lock that it waits for, as in pg_locks.")]
    pid: Annotated[int | None, Meta(description="Of the holder; null for a prepared transaction.")]
    gid: Annotated[str | None, Meta(description="Of the prepared transaction that holds the lock.")]
    role: Annotated[str | None, Meta(description="Of the holder.")]
    application_name: Annotated[str | None, Meta(description="Of the holder.")]
    xact_start: Annotated[_Time | None, Meta(description="Begin of its transaction; null if the role may not see it.")]
    query_start: Annotated[_Time | None, Meta(description="Begin of its query.")]
    line: Annotated[str, Meta(description="The same for people.")]


class SourceDocument(msgspec.Struct, kw_only=True):
    """The publisher as the command sees it; all but `error` is null or empty where it is not reachable."""

    is_reachable: Annotated[bool, Meta(description="It answers within three seconds.")]
    error: Annotated[str | None, Meta(description="Why it is not reachable.")]
    system_identifier: Annotated[str | None, Meta(description="Cluster; unsigned 64 bits, hence text.")]
    timeline: Annotated[int | None, Meta(description="Its timeline.")]
    flush_lsn: Annotated[_Lsn | None, Meta(description="End of its WAL.")]
    lag_bytes: Annotated[int | None, Meta(description="WAL beyond lowest_remote_lsn; null of another or older one.")]
    slot_exists: Annotated[bool | None, Meta(description="The slot exists.")]
    slot_active_pid: Annotated[int | None, Meta(description="Process that reads the slot.")]
    slot_wal_status: Annotated[str | None, Meta(description="wal_status of pg_replication_slots.")]
    slot_retained_wal_bytes: Annotated[int | None, Meta(description="WAL that is kept for the slot.")]
    slot_retained_wal_limit_bytes: Annotated[
        int | None, Meta(description="source.retained_wal_limit_bytes; null if it is 0.")
    ]
    slot_safe_wal_bytes: Annotated[int | None, Meta(description="WAL that may be written before the slot can be lost.")]
    slot_invalidation_reason: Annotated[str | None, Meta(description="Why the slot is lost.")]
    slot_confirmed_flush_lsn: Annotated[_Lsn | None, Meta(description="confirmed_flush_lsn of pg_replication_slots.")]
    blocked: Annotated[
        list[BlockedDocument], Meta(description="Sessions waiting on the publisher; empty if not reachable.")
    ]


class StatusDocument(msgspec.Struct, kw_only=True):
    """One slot. Before a migration has made it, all but its name, migration and source is null or empty."""

    slot_name: str
    lowest_remote_lsn: _Lsn | None
    highest_remote_lsn: _Lsn | None
    list_remote_lsn: list[_Lsn]
    in_doubt: int
    confirmed_flush_lsn: _Lsn | None
    lag_bytes: int | None
    lag_s: Annotated[
        float | None,
        Meta(description="Seconds as of now; while no daemon writes it the most that it can be, null if not known."),
    ]
    commit_order: str | None
    worker_count: Annotated[int, Meta(description="Workers that there may be at most.")]
    state: DaemonState | None
    reason: str
    two_phase: str | None
    reading: str
    updated_at: _Time | None
    silent_s: Annotated[float, Meta(description="Seconds since the state was last written.")]
    shown_every_s: Annotated[float, Meta(description="Seconds within which a daemon that runs writes it again.")]
    system_identifier: str | None
    timeline: int | None
    database_name: str | None
    publications: list[str]
    host: str | None
    pid: int | None
    version: str | None
    limits: Annotated[LimitsDocument | None, Meta(description="Null where nothing is known of the present.")]
    started_at: _Time | None
    last_commit_time: _Time | None
    is_daemon_connected: Annotated[bool, Meta(description="A daemon holds the lease of the slot now.")]
    workers: Annotated[list[WorkerDocument], Meta(description="By number; empty while no daemon is connected.")]
    tables: Annotated[list[TableDocument], Meta(description="By name.")]
    copies: Annotated[list[CopyDocument], Meta(description="By name.")]
    ddl: Annotated[list[CommandDocument], Meta(description="Those to run still, then the latest, five at most.")]
    prepared: Annotated[list[PreparedDocument], Meta(description="The oldest first.")]
    conflicts: Annotated[list[ConflictsDocument], Meta(description="By table, type and outcome.")]
    migration: Annotated[list[StepDocument], Meta(description="In their order.")]
    cutover: Annotated[CutoverDocument | None, Meta(description="Null before the first one.")]
    blocked: Annotated[list[BlockedDocument], Meta(description="Sessions waiting on the target, the longest first.")]
    source: Annotated[SourceDocument, Meta(description="As the command itself sees it.")]


#: Whose comments describe the fields of a type.
_DESCRIBED: Final = {
    "StatusDocument": (("VIEW", "progress"), ("TABLE", "slots")),
    "WorkerDocument": (("TABLE", "workers"),),
    "TableDocument": (("TABLE", "tables"),),
    "CopyDocument": (("TABLE", "copies"),),
    "CommandDocument": (("TABLE", "ddl"),),
    "PreparedDocument": (("VIEW", "prepared"),),
    "StepDocument": (("TABLE", "migrations"),),
    "CutoverDocument": (("TABLE", "cutovers"),),
}


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12), in which each field is described."""
    made = msgspec.json.schema(StatusDocument)
    for name, objects in _DESCRIBED.items():
        for field, described in made["$defs"][name]["properties"].items():
            found = [comments()[one][1].get(field) for one in objects]
            if comment := next(filter(None, found), None):
                described.setdefault("description", comment)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "parapply status --json, version 1",
        **made,
    }

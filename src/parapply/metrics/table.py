"""Every metric: name, kind, labels, help. The one place for them, from which the reference is made.

Names follow Prometheus' conventions (prometheus.io, "Metric and label naming"): base units, ``_total`` on counters. All
carry the label ``slot`` besides their own. A name that was released never changes its meaning.
"""

from __future__ import annotations

from functools import partial
from typing import Final, Literal, NamedTuple

from parapply.vocabulary import (
    CommandOutcome,
    ConflictOutcome,
    ConflictType,
    CutoverStep,
    DaemonState,
    Mode,
    RetryReason,
    WaitKind,
    WorkerState,
)


class Metric(NamedTuple):
    """One line of the table."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds, of a histogram; +Inf comes by itself
    kind: Literal["counter", "gauge", "histogram"] = "gauge"


_counter: Final = partial(Metric, kind="counter")
_histogram: Final = partial(Metric, kind="histogram")

#: Tables that have their own series, by each name; later ones are counted under `OTHER_TABLES`.
TABLES_LIMIT: Final = 1000
OTHER_TABLES: Final = "(other)"

#: Values of labels that are known beforehand: their series exist from the start, at 0.
STATES: Final = tuple(DaemonState)
WORKER_STATES: Final = tuple(WorkerState)
WAL_STATUSES: Final = ("reserved", "extended", "unreserved", "lost")
STAGES: Final = ("queued", "dependency", "execute", "turn", "commit")
OPERATIONS: Final = ("insert", "update", "delete", "truncate")
MODES: Final = tuple(Mode)
COMMAND_OUTCOMES: Final = (CommandOutcome.APPLIED, CommandOutcome.LEFT_OUT)
ENDS: Final = ("source", "target")
#: Reasons of a retry besides the SQLSTATEs, which are an open set.
RETRY_REASONS: Final = tuple(RetryReason)
CONFLICT_TYPES: Final = tuple(ConflictType)
#: One that was repaired was counted when it stopped.
OUTCOMES: Final = tuple([outcome for outcome in ConflictOutcome if outcome is not ConflictOutcome.REPAIRED])
#: States of a step of `parapply migrate`, and the steps of `parapply cutover`, as their tables name them.
STEP_STATES: Final = ("running", "failed", "done")
CUTOVER_STEPS: Final = (*[step for step in CutoverStep if step is not CutoverStep.UNDOING], CutoverStep.UNDOING)

_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000)
_BYTES = tuple(1024 * 4**power for power in range(8))
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60)

INFO: Final = Metric("parapply_info", "Always 1.", ("version", "commit_order"))
STATE: Final = Metric("parapply_state", "1 for the state the daemon is in, 0 for the others.", ("state",))
READY: Final = Metric("parapply_ready", "1 while changes are applied, and /healthz/ready answers with 200.")

LAG_SECONDS: Final = Metric(
    "parapply_lag_seconds",
    "Age of the oldest change of the publisher that is not on the target yet, 0 if there is none. While an end is away "
    "it grows with the clock, and the next start goes on from there until it knows better.",
)
DELAY: Final = Metric(
    "parapply_apply_delay_seconds", "apply.delay_s: the part of parapply_lag_seconds that is intended."
)
LAG_BYTES: Final = Metric("parapply_lag_bytes", "WAL of the publisher beyond the watermark, as last heard.")
SLOT_RETAINED: Final = Metric(
    "parapply_slot_retained_wal_bytes",
    "WAL that the publisher keeps for the slot, from restart_lsn on; a transaction left open there also keeps it.",
)
SLOT_RETAINED_LIMIT: Final = Metric(
    "parapply_slot_retained_wal_limit_bytes", "source.retained_wal_limit_bytes; absent where it is 0."
)
SLOT_SAFE: Final = Metric(
    "parapply_slot_safe_wal_bytes",
    "WAL that the publisher may still write before the slot can be lost (safe_wal_size); absent where "
    "max_slot_wal_keep_size sets no limit.",
)
SLOT_WAL_STATUS: Final = Metric(
    "parapply_slot_wal_status",
    "1 for what pg_replication_slots.wal_status says: reserved, extended, unreserved, lost; 0 for the others.",
    ("status",),
)
LSN: Final = Metric(
    "parapply_lsn_bytes",
    "LSNs as numbers. source: end of the publisher's WAL as last heard. received: read from the stream. highest: the "
    "newest commit on the target. lowest: the watermark, everything up to here is on the target. durable: and on its "
    "disk. confirmed: reported to the publisher. prepared: the oldest PREPARE that waits for its outcome.",
    ("position",),
)

ROWS: Final = _counter(
    "parapply_rows_total",
    "Rows applied, as the publisher sent them; truncate counts statements.",
    ("table", "operation"),
)
TABLE_TRANSACTIONS: Final = _counter(
    "parapply_table_transactions_total", "Target transactions that changed the table.", ("table",)
)
TABLE_TARGET: Final = Metric(
    "parapply_table_target",
    "Always 1: target is the name that [mapping] gives the table on the target; for joins by the label table.",
    ("table", "target"),
)
TRANSACTIONS: Final = _counter(
    "parapply_transactions_total",
    "Source transactions applied. mode: set, rows (row by row at the head, where sets failed), large (in pieces), "
    "streamed (while in progress), spilled (kept on disk until its commit), outcome (of a prepared transaction).",
    ("mode",),
)
BATCHES: Final = _counter(
    "parapply_batches_total", "Target transactions committed; mode as in parapply_transactions_total.",
    ("mode",),
)  # fmt: skip
COMMANDS: Final = _counter(
    "parapply_ddl_total",
    "Commands of the publisher. outcome: applied (it has run on the target), left_out (it has not: parapply.ddl says "
    "why).",
    ("outcome",),
)
CHANGE_BYTES: Final = _counter("parapply_change_bytes_total", "Bytes of the changes applied, as held in memory.")
BATCH_TRANSACTIONS: Final = _histogram(
    "parapply_batch_transactions", "Source transactions in a target transaction.", buckets=_COUNTS
)
BATCH_CHANGES: Final = _histogram("parapply_batch_changes", "Row changes in a target transaction.", buckets=_COUNTS)
BATCH_BYTES: Final = _histogram("parapply_batch_bytes", "Bytes of changes in a target transaction.", buckets=_BYTES)
BATCH_SECONDS: Final = _histogram(
    "parapply_batch_seconds",
    "From the last byte of a target transaction's changes read to its COMMIT acknowledged; the daemon's clock.",
    buckets=_SECONDS,
)

STAGE_SECONDS: Final = _counter(
    "parapply_stage_seconds_total",
    "Where the time of target transactions went. queued: for a worker. dependency: for an earlier one to commit. "
    "execute: statements. turn: for its place in the commit order, or for the holders of its late keys. commit: late "
    "keys and COMMIT.",
    ("stage",),
)
WAITS: Final = _counter(
    "parapply_dependency_waits_total",
    f"Target transactions that waited for an earlier one, whole or with their late keys. kind: {', '.join(WaitKind)}. "
    "A barrier has no table.",
    ("table", "kind"),
)
WAIT_SECONDS: Final = _counter(
    "parapply_dependency_wait_seconds_total", "Seconds they waited before they could start.", ("table", "kind")
)

RETRIES: Final = _counter(
    "parapply_retries_total",
    "Repetitions that target transactions needed before they committed. reason: SQLSTATE, row count, suspect, skip, "
    "refused, code (a trigger, rule or table that its plans did not know), or yield (it made room for an earlier one).",
    ("reason",),
)
CONFLICTS: Final = _counter(
    "parapply_conflicts_total",
    "Changes that met other rows than expected. type: as PostgreSQL 18 names it, or skipped. outcome: stopped, "
    "skipped, kept_local, applied_remote.",
    ("type", "outcome"),
)
TABLE_CONFLICTS: Final = _counter(
    "parapply_table_conflicts_total",
    "The same by table. A series begins with the first conflict, so an alarm must use parapply_conflicts_total.",
    ("type", "table", "outcome"),
)
CONFLICTS_KEPT: Final = Metric(
    "parapply_conflicts_kept",
    "Rows of parapply.conflicts, read once a minute. No counter has conflicts of a COMMIT without an answer.",
    ("type", "outcome"),
)
RECONNECTS: Final = _counter(
    "parapply_reconnects_total", "Attempts to connect after an end was lost, by that end.", ("end",)
)
HEALS: Final = _counter("parapply_heals_total", "Lost slots that the daemon has healed (source.on_lost_slot).")
FAILURES: Final = _counter(
    "parapply_slot_failures_total", "Ends of the slot with an error, in a daemon of several, which begins it again."
)

WORKERS: Final = Metric("parapply_workers", "Workers by activity; none while an end is away.", ("state",))
QUEUE_BATCHES: Final = Metric("parapply_queue_batches", "Target transactions in hand, not committed.")
QUEUE_BYTES: Final = Metric("parapply_queue_bytes", "Bytes of changes in memory, not committed.")
QUEUE_LIMIT: Final = Metric("parapply_queue_limit_bytes", "apply.memory_limit_bytes.")
READING: Final = Metric(
    "parapply_reading",
    "1 for how the slot is read: stream, or ranges (of WAL, by query, with much to catch up); 0 for the other.",
    ("reader",),
)
READING_PAUSED: Final = Metric(
    "parapply_reading_paused",
    "1 while nothing is read: memory or queue are full, a copy is awaited, or the next transaction is not due.",
)
THROTTLED: Final = _counter(
    "parapply_throttled_seconds_total",
    "Seconds in which apply.max_changes_per_s held changes back that had come. Its rate is the part of the time.",
)
BLOCKED_SECONDS: Final = Metric(
    "parapply_blocked_seconds",
    "How long a batch has waited for a lock of a foreign session or prepared transaction on the target; 0: none waits.",
)
SESSION_BLOCKED: Final = Metric(
    "parapply_session_blocked_seconds",
    "How long a session that is no worker's had waited for a lock at the last look, every few seconds; 0: none waits. "
    "On the publisher also a new slot that waits for transactions to end.",
    ("end",),
)
STREAMS: Final = Metric("parapply_streams_open", "Transactions in progress on the publisher, as far as sent.")
SPILL_BYTES: Final = Metric("parapply_spill_bytes", "Bytes of them on disk.")
SPILL_LIMIT: Final = Metric("parapply_spill_limit_bytes", "apply.spill_limit_bytes.")
PREPARED: Final = Metric(
    "parapply_prepared_transactions", "Transactions prepared on the target that wait for their outcome."
)
TABLES_WAITING: Final = Metric(
    "parapply_tables_waiting",
    "Tables that are published and not applied, until `parapply refresh` copies them, or `resume` what is paused.",
)
APPLYLOG_DROPPED: Final = _counter(
    "parapply_applylog_dropped_total", "Records of the apply log that were lost: disk full or too slow."
)

MIGRATION_STEP: Final = Metric(
    "parapply_migration_step",
    "1 for the state of each step that `parapply migrate` has begun: running (or interrupted), failed, done; 0 for the "
    "others.",
    ("step", "state"),
)
MIGRATION_SECONDS: Final = Metric(
    "parapply_migration_step_seconds", "From the begin of the step to its end, or until now.", ("step",)
)
MIGRATION_DONE: Final = Metric(
    "parapply_migration_done", "Part of the step that is done, in its unit.", ("step", "unit")
)
MIGRATION_EXPECTED: Final = Metric(
    "parapply_migration_expected",
    "Estimated size of the whole step, in its unit; absent where it is not known.",
    ("step", "unit"),
)
MIGRATION_BYTES: Final = Metric(
    "parapply_migration_bytes", "Bytes that the step has copied since it was last begun.", ("step",)
)
MIGRATION_LEFT: Final = Metric(
    "parapply_migration_left_seconds",
    "Seconds that the step will still take, about; absent where that is not known.",
    ("step",),
)
CUTOVER_STEP: Final = Metric(
    "parapply_cutover_step",
    "1 for the step that `parapply cutover` is at, 0 for the others; absent before the first one. reverse_slot: of the "
    "way back.",
    ("step", "reverse_slot"),
)
CUTOVER_STEP_SECONDS: Final = Metric("parapply_cutover_step_seconds", "Since that step began.")
CUTOVER_FENCED: Final = Metric("parapply_cutover_fenced", "1 while clients are kept from writing to the source.")
CUTOVER_GAP: Final = Metric(
    "parapply_cutover_gap_seconds",
    "Seconds in which no client could write so far; absent before the fence, and once it was lifted.",
)

#: All of them, in this order.
METRICS: Final = tuple([one for one in [*globals().values()] if isinstance(one, Metric)])

#: Of the process, as every Prometheus client names them; without the label slot. Linux only.
PROCESS_METRICS: Final = (
    Metric("process_resident_memory_bytes", "Resident memory."),
    Metric("process_virtual_memory_bytes", "Virtual memory."),
    _counter("process_cpu_seconds_total", "CPU time of the daemon, which is the leader's process."),
    Metric("process_start_time_seconds", "Start of the daemon, in seconds since 1970."),
    Metric("process_open_fds", "File descriptors in use."),
    Metric("process_max_fds", "File descriptors allowed."),
)

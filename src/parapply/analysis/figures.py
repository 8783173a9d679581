"""The meaning of each figure: the one place with definitions. The page and the manual repeat them.

A figure is a table. The Parquet file under ``tables/`` and the query (`queries_work`, `queries_time`) have its name,
and the query has its columns. The tests hold the three together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A table of the report."""

    name: str  # of the table
    title: str  # for people
    meaning: str  # what one row is and how it is computed
    columns: dict[str, str]  # what each column says, in the table's order. Seconds end in ``_s``, bytes in ``_bytes``.
    needs: str = "batch"  # kind of record it is computed from


def _of_slot(name: str, title: str, meaning: str, /, *, needs: str = "batch", **columns: str) -> Figure:
    """Return a table with rows of each slot."""
    columns = {"slot": "replication slot", **columns}
    return Figure(name=name, title=title, meaning=meaning, columns=columns, needs=needs)


_AT: Final = {"at": "beginning of the interval, UTC; by the commit on the target"}
_PERCENTILES: Final = {
    "p50_s": "half of them took at most this",
    "p90_s": "90 % at most this",
    "p95_s": "95 %",
    "p99_s": "99 %",
    "p999_s": "99.9 %",
}

FIGURES: Final[tuple[Figure, ...]] = (
    _of_slot(
        "summary",
        "The whole log",
        "One row a slot, over all records.",
        first_at="first commit on the target, UTC",
        last_at="last commit on the target, UTC",
        batches="target transactions",
        transactions="source transactions",
        row_changes="rows inserted, updated and deleted, as the publisher sent them",
        size_bytes="of the change messages",
        workers="different workers that committed something",
        runs="connections of the daemon, each from its start to the loss of an end",
        repeated_batches="batches with more than one attempt",
        conflicts="conflicts recorded in batches",
        transaction_records="records at detail = transaction",
        doubled_records="records that the log has once more, in a copy of a file: each counts once",
        highest_end_lsn="highest end LSN of a source transaction: parapply.progress.highest_remote_lsn",
    ),
    _of_slot(
        "slots",
        "All slots",
        "One row a slot: how late it is, what it waits for and what limits it.",
        last_at="last commit on the target, UTC; null for a slot without a batch in the report's time",
        transactions="source transactions",
        delay_p50_s="of each transaction, else of the oldest transaction of each batch: half within this",
        delay_p99_s="the same, 99 %",
        conflicts="recorded in batches",
        wait="largest part of the time from received to committed, as in waits",
        wait_share="of this time",
        limit="the verdict; null where nothing was measured",
        limit_words="the verdict in one sentence",
    ),
    _of_slot(
        "over_time",
        "Throughput and delay over time",
        "One row a slot and interval. Intervals without a commit have none. Rates are per second of interval.",
        **_AT,
        batches="target transactions",
        transactions="source transactions",
        row_changes="rows, before changes of one row were merged",
        size_bytes="of the change messages",
        transactions_per_s="source transactions / length of the interval",
        rows_per_s="rows / length of the interval",
        repeated_batches="batches with more than one attempt",
        oldest_p50_s="commit on the publisher to commit on the target, oldest transaction of each batch: half",
        oldest_p99_s="the same, 99 %",
        oldest_max_s="the same, the longest",
        delivery_p50_s="commit on the publisher until the daemon has read it: half",
        delivery_floor_s="the shortest of these: network, decoding and the difference of the two clocks",
    ),
    _of_slot(
        "tables",
        "Rows by table and operation over time",
        "One row a slot, interval and table.",
        **_AT,
        table="schema.table, as published",
        batches="target transactions that changed it",
        inserts="rows",
        updates="rows",
        deletes="rows",
        truncates="statements",
    ),
    _of_slot(
        "target_names",
        "Names on the target",
        "One row a slot and table that has another name there ([mapping]), and each such name.",
        table="schema.table, as published",
        target="schema.table on the target",
    ),
    _of_slot(
        "workers",
        "Work by worker over time",
        "One row a slot, interval and worker. Seconds are counted in the interval of the commit.",
        **_AT,
        worker="number, from 1",
        batches="target transactions",
        transactions="source transactions",
        row_changes="rows",
        execute_s="statements on the target",
        wait_turn_s="done, waiting for its place in the commit order",
        commit_s="COMMIT, and rows that had to follow an earlier batch",
    ),
    _of_slot(
        "latency",
        "How long it took",
        "One row a slot and stage, over all records. Stages of a batch count each batch once; the stage "
        "'each transaction' counts source transactions and needs detail = transaction. Percentiles are values that "
        "occurred, their rank exact to 1 in 10,000. The first three stages compare two machines' clocks.",
        stage="see below",
        n="batches, or transactions",
        mean_s="arithmetic mean",
        **_PERCENTILES,
        max_s="the longest",
    ),
    _of_slot(
        "waits",
        "Where the time went",
        "One row a slot and part: seconds between received and committed, summed over batches. Statements that a "
        "transaction executed while it was still coming are before that, and not included.",
        part="no worker free, dependency, executing, commit turn, committing",
        batches="batches for which it was longer than 0",
        seconds="sum over all batches; several are under way at once",
        share="part of the sum of all five",
    ),
    _of_slot(
        "dependencies",
        "Dependencies that batches waited for",
        "One row a slot, table, kind and key: the last dependency that a batch waited for, by its record.",
        table="schema.table; empty for a barrier",
        kind="key, unique, foreign key, table or barrier",
        name="index or constraint",
        batches="batches that waited for it, as a whole or with some rows",
        seconds="waited before they could start",
        late_batches="of these, batches that started and left only some rows for later",
        late_keys="such rows",
    ),
    _of_slot(
        "batch_sizes",
        "Sizes of batches",
        "One row a slot and class of size: 1, 2 to 3, 4 to 7, 8 to 15 ... source transactions in a batch.",
        at_least="smallest number of the class; the largest is twice that less one",
        batches="target transactions",
        transactions="source transactions in them",
        mean_bytes="of change messages in a batch",
    ),
    _of_slot(
        "retries",
        "Repeated batches",
        "One row a slot, way of applying and reason, over batches with more than one attempt.",
        mode="how it was applied in the end: set, rows or large",
        reason="of the last repetition only: an SQLSTATE, or a wrong count of rows",
        batches="repeated batches",
        repeats="attempts after the first; row by row, each conflicting row is one",
    ),
    _of_slot(
        "conflicts",
        "Conflicts",
        "One row a slot, interval, type, table, policy and outcome, over the conflicts in batch records.",
        **_AT,
        type="as PostgreSQL names it",
        table="schema.table",
        policy="in force",
        outcome="what was done",
        conflicts="how many",
    ),
    _of_slot(
        "parallelism",
        "Parallelism reached",
        "One row a slot, interval and state: the time with a number of batches at workers (from start to commit), "
        "and a number of these executing statements. Time without any batch has no row.",
        **_AT,
        held="batches that workers had at once",
        executing="of these, batches whose statements were running",
        seconds="length of that state in the interval",
    ),
    _of_slot(
        "what_if",
        "With more workers",
        "One row a slot, commit order and number of workers, and one for each --what-if (docs/WHATIF.md): a "
        "prediction by the daemon's engine, and what the latest run with enough batches says of the target.",
        question="as --what-if asks it; empty in the other rows",
        commit_order="preserve or relaxed",
        workers="0: as many as there is work for",
        seconds="from the first start to the last commit",
        least_s="the shortest time that the log does not rule out",
        most_s="the longest",
        speed_up="against one worker",
        limit="what keeps it from being faster",
        units="batches that it was learned from",
        until="last commit of the run that they are of, UTC",
    ),
    _of_slot(
        "moments",
        "The state at each moment",
        "One row a slot and state; the first that is true of a moment counts. 'nothing': no batch is under way, "
        "between two of a run. 'dependency': a worker is free, and a batch waits for another one's commit. "
        "'worker free': a worker has nothing to do. All workers have a batch in the other three: 'executing' "
        "statements half of them at least, 'late rows' being applied, or 'commit' and its order being waited for.",
        state="nothing, dependency, worker free, executing, late rows, commit",
        seconds="of it",
    ),
    _of_slot(
        "reading",
        "Reading and the leader",
        "One row a slot, over the intervals of about a second with work. Logs of before have none.",
        intervals="records",
        workers="sessions in the last one",
        seconds="length of the intervals",
        leader_cpu_s="CPU time of the leader's thread",
        publisher_s="the reader waited for the publisher",
        paused_s="reading was paused: enough was at hand",
        throttled_s="apply.max_changes_per_s held changes back",
        behind_s="not paused, while more than 1 MiB of the publisher's WAL was not read",
        behind_cpu_s="leader_cpu_s of those intervals",
        behind_publisher_s="publisher_s of those intervals",
        last_behind_bytes="of the publisher's WAL, not read at the end of the last interval",
    ),
    _of_slot(
        "backends",
        "Waits of the target's sessions",
        "One row a slot and wait, as pg_stat_activity shows it, sampled once a second of workers with a batch. "
        "'CPU': it waited for nothing; 'client': for the daemon, or for the way to it.",
        wait="Type:Event, CPU or client",
        samples="how many",
    ),
    _of_slot(
        "locks",
        "Sessions that held locks",
        "One row a slot, session on the target, table and mode: sessions, none of the daemon's workers, that held "
        "a lock for which a worker's session waited, seen once a second; the 100 of each slot that did for longest.",
        pid="of the session; 0: a prepared transaction",
        role="its role",
        relation="schema.table on the target; empty: not of a table, or not known",
        mode="of the lock that the worker's session asked for",
        seconds="length of the intervals at whose ends it was seen",
        first_at="end of the first of them",
        last_at="end of the last one",
    ),
    _of_slot(
        "hot_keys",
        "Rows that batches waited for",
        "One row a slot, run and row, by a hash that does not reveal its key: the 100 of each slot that were late "
        "in most batches, counting the first four late rows of each.",
        run="connection of the daemon; another one has other hashes",
        table="schema.table",
        key="hash of its key",
        batches="batches in which it had to follow an earlier one",
    ),
    _of_slot(
        "blockers",
        "Batches that waited for others",
        "One row a batch that waited for another: the 20 longest of each slot.",
        run="connection of the daemon",
        seq="batch that waited",
        end_lsn="of its last transaction",
        xid="of its first transaction, on the publisher",
        holder_seq="batch that it waited for last",
        holder_end_lsn="of that one's last transaction",
        holder_xid="of that one's first transaction",
        table="schema.table; empty for a barrier",
        kind="key, unique, foreign key, table or barrier",
        name="index or constraint",
        at="commit of the batch that waited, UTC",
        wait_s="before it could start, or with the rest executed, for its late rows",
    ),
    _of_slot(
        "days",
        "Days",
        "One row a slot and day (UTC, of the commit on the target): the whole log, whatever the report is of.",
        day="as 2026-11-21",
        batches="target transactions",
        transactions="source transactions",
        row_changes="rows",
        size_bytes="of change messages",
        oldest_p50_s="delay of the oldest transaction of a batch, half of the batches",
        oldest_p99_s="99 % of them",
        oldest_max_s="the longest",
        execute_s="statements on the target, all workers together",
        repeated_batches="batches with more than one attempt",
        conflicts="recorded",
    ),
    _of_slot(
        "comparison",
        "Compared",
        "One row a slot and figure, over the report's span and the span of --compare.",
        what="figure",
        unit="number, s or share",
        then="value in the span of --compare; null: none",
        now="value in the report's own",
        change="part by which it is more",
    ),
    _of_slot(
        "slow_batches",
        "Slowest batches",
        "One row a batch: the 20 of each slot that took longest from received to committed.",
        run="connection of the daemon",
        seq="number of the batch within the run",
        worker="number, from 1",
        at="commit on the target, UTC",
        end_lsn="of its last transaction",
        xid="of its first transaction, on the publisher",
        transactions="source transactions in it",
        row_changes="rows",
        tables="that it changed",
        mode="how it was applied: set, rows, large, streamed, spilled or outcome",
        total_s="from received to committed",
        stage="the part that took longest, as in waits",
        stage_s="of it",
    ),
    _of_slot(
        "slow_transactions",
        "Slowest transactions",
        "One row a source transaction: the 20 of each slot that took longest from the publisher's commit to the "
        "target's. It compares two machines' clocks.",
        needs="transaction",
        run="connection of the daemon",
        seq="number of the transaction within the run",
        batch_seq="number of its batch",
        worker="number, from 1",
        at="commit on the target, UTC",
        commit_lsn="on the publisher",
        end_lsn="on the publisher",
        xid="on the publisher",
        row_changes="rows and TRUNCATE statements",
        tables="that it changed",
        total_s="from commit to commit",
        delivery_s="of it, until the daemon had read it",
    ),
    _of_slot(
        "chain",
        "The chain to the longest wait",
        "One row a batch, the last first: the batch that waited longest for another, the one that it waited for, "
        "the one that this waited for, and so on, 50 at most.",
        run="connection of the daemon",
        seq="number of the batch",
        end_lsn="of its last transaction",
        xid="of its first transaction, on the publisher",
        transactions="source transactions in it",
        worker="number, from 1",
        execute_s="statements on the target",
        commit_s="COMMIT, and rows that had to follow an earlier batch",
        holder_seq="batch that it waited for last",
        table="because of this one; empty for a barrier",
        kind="key, unique, foreign key, table or barrier",
        name="index or constraint",
        at="commit on the target, UTC",
    ),
    _of_slot(
        "runs",
        "Connections of the daemon",
        "One row a slot and run: from connected to the loss of an end, or to the end of the daemon.",
        run="connection of the daemon",
        first_at="start of its first batch, UTC",
        last_at="commit of its last batch, UTC",
        batches="target transactions",
        transactions="source transactions",
        workers="that have committed something",
    ),
    _of_slot(
        "lanes",
        "The latest batches of each worker",
        "One row a batch: the latest 600 of each slot.",
        run="connection of the daemon",
        worker="number, from 1",
        seq="number of the batch",
        first_at="a worker had it, UTC",
        at="commit on the target, UTC",
        execute_s="statements on the target",
        wait_turn_s="done, waiting for its place in the commit order",
        commit_s="COMMIT, and rows that had to follow an earlier batch",
        transactions="source transactions in it",
    ),
    _of_slot(
        "limits",
        "Limits",
        "One row a slot and cause, the largest first; the verdict is the first row. Made from the five tables "
        "before: see 'The verdict' in docs/REPORT.md.",
        cause="throttle, source, publisher, leader, dependency, commit or target",
        detail="of the target: CPU, disk, locks or network; of commits: flush or order",
        seconds="of the time from the first batch to the last",
        share="part of it",
    ),
    _of_slot(
        "gaps",
        "Records that are missing",
        "One row a slot, run and gap in the numbers of its batches: those records are not in the log, so no figure "
        "contains them. They were dropped (disk full), removed by retention before a report read them, or their "
        "file is not there. The end of a run has no number after it: what is lost there is not seen.",
        run="connection of the daemon",
        after_seq="number of the record before; 0 at the beginning of a run",
        before_seq="number of the record after",
        missing="numbers in between",
        at="commit of the record after, UTC",
    ),
    Figure(
        name="ignored_files",
        title="Files not read",
        meaning="One row a file below the log's folder that is in no figure.",
        columns={"file": "below the log's folder", "size_bytes": "now", "reason": "why it is not read"},
    ),
    Figure(
        name="files",
        title="Files read",
        meaning="One row a closed file of the log, each converted once.",
        columns={
            "file": "below the log's folder",
            "size_bytes": "when it was read",
            "records": "lines that are records",
            "bad": "lines that are none",
        },
    ),
    Figure(
        name="bad_lines",
        title="Lines that could not be read",
        meaning="One row a file and reason. Bad lines are counted and left out; no figure contains them.",
        columns={
            "file": "below the log's folder",
            "reason": "why it is no record",
            "lines": "how many",
            "example": "beginning of one of them, if it was not JSON",
        },
    ),
)

#: Stages of `latency`: the expression in columns of a batch's record, and what it says. Seconds.
STAGES: Final[dict[str, tuple[str, str]]] = {
    "oldest transaction of a batch": (
        "committed_at - commit_time_first",
        "from the publisher's commit to the target's, for the transaction that waited longest",
    ),
    "newest transaction of a batch": (
        "committed_at - commit_time_last",
        "the same for the last transaction of the batch",
    ),
    "delivery": (
        "received_at - commit_time_last",
        "from the publisher's commit until the daemon had read all: decoding, network, waiting to be read",
    ),
    "no worker free": ("queued_s", "could start, but every worker was busy or the batch was still open"),
    "dependency": ("wait_dependency_s", "waited until an earlier batch had committed"),
    "executing": ("execute_s", "statements on the target; also the COMMIT of a small batch sent in one flight"),
    "commit turn": ("wait_turn_s", "done, waiting for its place in the commit order"),
    "committing": ("commit_s", "COMMIT, with rows that had to follow an earlier batch"),
}
#: The stage that is computed from transactions' records.
EACH_TRANSACTION: Final = (
    "each transaction",
    "committed_at - commit_time",
    "from the publisher's commit to the target's, every source transaction",
)
#: Stages whose sum is the time between received and committed, in the order in which they happen, each with its column
#: in the view `batches`.
PARTS: Final = {
    "no worker free": "queued_s",
    "dependency": "depending_s",
    "executing": "executing_s",
    "commit turn": "wait_turn_s",
    "committing": "commit_s",
}

"""Counts committed jobs into the figures: once for each target transaction, nothing for a change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.engine.job import SetJob
from parapply.target.state.display import TableCounts
from parapply.vocabulary import CommandOutcome, Mode, RetryReason

if TYPE_CHECKING:
    from parapply.engine.job import Job
    from parapply.metrics.figures import Figures

#: Tables whose counts are written to the target at one time, so that thousands of them cost no more than that.
_TABLES = 200


def count(figures: Figures, job: Job) -> None:
    """Add a job that the target has just acknowledged."""
    if isinstance(job, SetJob) and job.mode is Mode.ROWS:
        figures.transactions[Mode.ROWS] += job.n_in_order
        figures.transactions[Mode.SET] += job.counts.n_transactions - job.n_in_order
    else:
        figures.transactions[job.mode] += job.counts.n_transactions
    figures.batches[job.mode] += 1
    figures.commands[CommandOutcome.APPLIED] += len(job.counts.commands)
    figures.commands[CommandOutcome.LEFT_OUT] += job.counts.n_left_out
    figures.change_bytes += job.counts.size_bytes
    figures.batch_transactions.observe(job.counts.n_transactions)
    figures.batch_changes.observe(job.counts.n_changes)
    figures.batch_bytes.observe(job.counts.size_bytes)
    times, stages = job.times, figures.stages
    figures.batch_seconds.observe(max(0.0, times.committed_s - times.received_s))
    stages.queued_s += times.queued_s
    stages.dependency_s += times.wait_dependency_s
    stages.execute_s += times.execute_s
    stages.turn_s += times.wait_turn_s
    stages.commit_s += times.commit_s
    for name, rows in job.counts.rows.items():
        table = figures.table(name)
        table.transactions += 1
        counts = table.rows
        counts.insert += rows.insert
        counts.update += rows.update
        counts.delete += rows.delete
        counts.truncate += rows.truncate
    wait = job.waited_for
    if wait is not None:
        table = figures.table(wait.table) if wait.table else figures.barriers
        table.waits[wait.kind] += 1
        table.wait_s[wait.kind] += times.wait_dependency_s
    if job.attempts > 1:
        figures.retries[job.error or RetryReason.YIELD] += job.attempts - 1


def take_counts(figures: Figures) -> list[TableCounts]:
    """Return the counts of tables that have changed since they were last taken, for the state schema; of many, some."""
    counts = []
    for name in figures.take_changed(_TABLES):
        table = figures.tables.get(name)
        if table is None:
            continue
        mostly = max(table.waits, key=lambda kind: table.waits[kind], default="")
        counts.append(
            TableCounts(
                name=name,
                transactions=table.transactions,
                inserts=table.rows.insert,
                updates=table.rows.update,
                deletes=table.rows.delete,
                truncates=table.rows.truncate,
                waits=sum(table.waits.values()),
                wait_s=sum(table.wait_s.values(), 0.0),
                waits_mostly_for=mostly,
            )
        )
    return counts

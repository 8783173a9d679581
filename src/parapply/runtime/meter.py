"""Counts what a committed job says into the figures: once for each target transaction, nothing for a change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.target.display import TableCounts

if TYPE_CHECKING:
    from parapply.metrics.figures import Figures
    from parapply.runtime.job import Job

#: Tables whose counts are written to the target in one look, so that thousands of them cost no more than that.
_TABLES = 200
#: Why a job was repeated that met no error: it had to roll back for an earlier one.
_YIELDED = "yield"


def count(figures: Figures, job: Job) -> None:
    """Add a job that the target has just acknowledged."""
    figures.transactions[job.mode] += job.n_transactions
    figures.batches[job.mode] += 1
    figures.change_bytes += job.size_bytes
    figures.batch_transactions.observe(job.n_transactions)
    figures.batch_changes.observe(job.n_changes)
    figures.batch_bytes.observe(job.size_bytes)
    figures.batch_seconds.observe(max(0.0, job.committed_s - job.received_s))
    dependency_s = job.freed_s - job.submitted_s
    stages = figures.stages
    # A large transaction starts before its last byte is received.
    stages.queued_s += max(0.0, job.started_s - job.received_s - dependency_s)
    stages.dependency_s += dependency_s
    stages.execute_s += max(0.0, job.executed_s - job.started_s)
    stages.turn_s += max(0.0, job.turn_s - job.executed_s)
    stages.commit_s += max(0.0, job.committed_s - job.turn_s)
    for name, rows in job.rows.items():
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
        table.wait_s[wait.kind] += dependency_s
    if job.attempts > 1:
        figures.retries[job.error or _YIELDED] += job.attempts - 1


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

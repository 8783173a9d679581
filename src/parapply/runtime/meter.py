"""Counts what a committed job says into the figures: once for each target transaction, nothing for a change."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parapply.metrics.figures import Figures
    from parapply.runtime.job import Job

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

"""What the apply log says of single source transactions, as they come: ``applylog.detail = "transaction"``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.errors import ParapplyError
from parapply.lineage.graph import TransactionGraph
from parapply.plan.plans import Plans
from parapply.runtime.pool.job import OutcomeJob
from parapply.vocabulary import BarrierReason

if TYPE_CHECKING:
    from parapply.model import Transaction
    from parapply.plan.table import TablePlan
    from parapply.runtime.pool.job import Job, SetJob
    from parapply.runtime.tables.plans import TablePlans


class Trace:
    """Written by intake only; belongs to one epoch."""

    def __init__(self, tables: TablePlans, table_lock_threshold: int) -> None:
        """Start with nothing seen."""
        self._tables = tables
        self._lineage = TransactionGraph(table_lock_threshold)
        self._before: dict[int, TablePlan] | None = None
        #: In force before the next transaction; moves on with what they announce, as intake's own.
        self._plans = Plans()

    def arrived(self, job: SetJob) -> None:
        """Note when the transactions came that a job has got since the last call."""
        job.arrivals.append((len(job.batch.transactions), job.times.received_s))

    def batch(self, job: SetJob) -> None:
        """Take the transactions of a closed batch, in source order."""
        if job.plans_before is not self._before:
            self._before = job.plans_before
            self._plans = self._tables.plans_from(job.plans_before)
            self._lineage.use(self._plans.current)
        try:
            alone = BarrierReason.TWO_PHASE if job.prepare is not None else None
            for transaction in job.batch.transactions:
                job.traced.append(self._lineage.add(transaction, self._plans, alone=alone))
        except ParapplyError:
            # Its worker meets the same error and reports it; what is never committed need not be in the apply log.
            return

    def alone(self, job: Job, event: Transaction) -> None:
        """Take a job that runs alone and whose rows are not in hand.

        Args:
            job: just submitted.
            event: the first piece of a large transaction, or what ended one in progress or prepared.
        """
        why = BarrierReason.TWO_PHASE if isinstance(job, OutcomeJob) else BarrierReason.LARGE
        job.traced.append(self._lineage.add_alone(event, why))

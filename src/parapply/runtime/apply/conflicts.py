"""Answers for workers whose transaction cannot be applied as it is: conflicts to keep, transactions to skip.

One for each epoch. The workers ask only about failures at the head, never before (trap T-69). Settled conflicts are
written to the history inside the transaction. The conflict that stopped it is written by a separate session after the
rollback (trap T-68).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from parapply.applylog_schema import ConflictRecord
from parapply.conflict.changes import key_of_truncate, read_change
from parapply.conflict.history import ConflictHistory
from parapply.conflict.kinds import Conflict, Policy, Source
from parapply.conflict.policies import Rules
from parapply.engine.job import LargeJob, StreamJob
from parapply.engine.stalls import executed_now
from parapply.logs import get_logger
from parapply.model import format_lsn
from parapply.plan.steps import TruncateStep
from parapply.vocabulary import ConflictOutcome, ConflictType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from parapply.config import ConflictConfig
    from parapply.conflict.kinds import ConflictStop
    from parapply.conflict.settle import Settler
    from parapply.conflict.skips import Skips
    from parapply.engine.job import Job
    from parapply.metrics.figures import Figures
    from parapply.model import Transaction
    from parapply.plan.table import TablePlan
    from parapply.runtime.tables.control_pool import ControlPool
    from parapply.target.session.session import WorkerSession
    from parapply.target.session.settings import Connection

#: Changes of a skipped transaction written to the history in one flight.
_PORTION = 500
#: Seconds between two checks whether the history has grown too long.
_PRUNE_S = 60.0


class ConflictHandler:
    """`skips` is written here; read by workers and the monitor."""

    def __init__(self, config: ConflictConfig, skips: Skips, control_pool: ControlPool, figures: Figures) -> None:
        """Start with nothing known; `look` reads the operator's requests.

        Args:
            config: policies, and how long conflicts are kept.
            skips: of the slot.
            control_pool: sessions for records that must survive a rollback.
            figures: where conflicts are counted; one that stops a transaction counts once in an epoch.
        """
        self.rules = Rules(config)
        self.skips = skips
        self.figures = figures
        self._config = config
        self._control_pool = control_pool
        self._history = ConflictHistory(skips.schema, skips.slot_id)
        self._has_stopped: bool | None = None  # not known yet
        self._stopped: set[tuple[int, int, ConflictType]] = set()
        self._asked = asyncio.Event()
        self._later: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._clock = asyncio.get_running_loop().time
        self._pruned_s = -_PRUNE_S
        self._log = get_logger()

    async def keep(self, session: WorkerSession, settler: Settler) -> list[Conflict]:
        """Write the settled conflicts into the history, inside the open transaction, and return them.

        Raises:
            StatementFailed, TargetLost: as `WorkerSession.run`.
        """
        settled = settler.take_settled()
        if settled:
            await self._history.write_inside(session, settled)
        return settled

    async def name_by_end(
        self, session: WorkerSession, last: Transaction, kept: Sequence[Conflict] = ()
    ) -> list[Conflict]:
        """Give the conflicts of a large transaction its end LSN, inside the open transaction; return the ones named.

        Raises:
            StatementFailed, TargetLost: as `WorkerSession.run`.
        """
        await session.run(self._history.naming_end(last.commit_lsn, last.end_lsn))
        source = source_of(last)
        return [msgspec.structs.replace(conflict, source=source) for conflict in kept]

    def count(self, job: Job, conflicts: Sequence[Conflict]) -> None:
        """Count and log the conflicts of one transaction, which has committed; none where it was left out."""
        if job.is_left_out:
            return
        told: Counter[tuple[ConflictType, str, str, str]] = Counter()
        for conflict in conflicts:
            table = f"{conflict.schema}.{conflict.table}"
            self.figures.count_conflict(conflict.type.value, table, conflict.outcome.value)
            entry = entry_of(conflict)
            job.add_conflict(conflict.source.commit_lsn, entry)
            if conflict.type is not ConflictType.SKIPPED:
                told[conflict.type, table, conflict.policy.value, conflict.outcome.value] += 1
        for (kind, table, policy, outcome), n_changes in told.items():
            source = conflicts[0].source
            self._log.warning(
                "conflicts_settled",
                conflict_type=kind.value,
                relation=table,
                n_changes=n_changes,
                xid=source.xid,
                end_lsn=format_lsn(source.lsn),
                policy=policy,
                outcome=outcome,
            )

    async def stopped(self, stop: ConflictStop, source: Source) -> None:
        """Write a conflict that stops its transaction into the history, durably; the transaction is rolled back by now.

        Args:
            stop: with the conflict.
            source: of it, whose end is known by now.
        """
        conflict = msgspec.structs.replace(stop.conflict, source=source)
        async with self._control_pool.session() as conn:
            await self._history.write(conn, conflict)
        self._has_stopped = True
        name = (source.lsn, conflict.change_no, conflict.type)
        if name not in self._stopped:
            self._stopped.add(name)
            table = f"{conflict.schema}.{conflict.table}"
            self.figures.count_conflict(conflict.type.value, table, ConflictOutcome.STOPPED.value)
            # The names of indexes, never values.
            self._log.warning(
                "conflict_stopped",
                conflict_type=conflict.type.value,
                relation=table,
                constraints=list(conflict.constraints),
                xid=source.xid,
                end_lsn=format_lsn(source.lsn),
                policy=conflict.policy.value,
            )

    async def write_skipped(
        self,
        session: WorkerSession,
        source: Source,
        changes: Sequence[tuple[TablePlan, bytes] | TruncateStep],
        first_no: int = 1,
    ) -> list[Conflict]:
        """Keep the changes of a skipped transaction, or of a piece of it, inside the open transaction.

        Raises:
            StatementFailed, TargetLost: as `WorkerSession.run`.
            ProtocolError: a change cannot be read.
        """
        kept: list[Conflict] = []
        for at in range(0, len(changes), _PORTION):
            portion = list(_skipped(source, changes[at : at + _PORTION], first_no + at))
            await self._history.write_inside(session, portion)
            kept += portion
        return kept

    async def finish_skip(self, session: WorkerSession, end_lsn: int, xid: int) -> bool:
        """Say inside the open transaction that it is skipped; return False if it is to be applied after all.

        Raises:
            StatementFailed, TargetLost: as `WorkerSession.run`.
        """
        marking, settling = self.skips.finishing(end_lsn, xid)
        if not await session.fetch(marking):
            self.skips.done(end_lsn)
            return False
        await session.run([settling])
        return True

    def is_to_skip(self, job: Job) -> bool:
        """Return whether a transaction that is executed now, alone or merged, is, or may be, one to be skipped."""
        if not self.skips:
            return False
        if isinstance(job, StreamJob):
            end = job.stream.end
            return end is not None and self.skips.find(end.commit_lsn, end.end_lsn) is not None
        if isinstance(job, LargeJob):
            is_wanted = self.skips.find(job.commit_lsn, job.batch.end_lsn) is not None
            return is_wanted or (not job.batch.end_lsn and self.skips.may_find(job.commit_lsn))
        return any(self.skips.find(one.commit_lsn, one.end_lsn) is not None for one in executed_now(job))

    def skipped(self, end_lsn: int, xid: int) -> None:
        """Count and log a skipped transaction, whose record has committed."""
        self.skips.done(end_lsn)
        self._log.warning("transaction_skipped", end_lsn=format_lsn(end_lsn), xid=xid)

    async def learn(self, transaction: Transaction) -> None:
        """Record the commit LSN of a large transaction that is to be skipped when it comes again."""
        async with self._control_pool.session() as conn:
            await self.skips.learn(conn, transaction.commit_lsn, transaction.end_lsn)

    async def begin(self, conn: Connection, low_lsn: int) -> None:
        """Read the operator's requests before the first batch.

        Args:
            conn: the leader's, free before its tasks start. The pool's reads the catalogue, while the stream is read.
            low_lsn: everything that ends here or before is applied.
        """
        await self.skips.look(conn, low_lsn, lambda _: False)

    async def look(self, low_lsn: int, is_committing: Callable[[int], bool]) -> None:
        """Read the operator's requests, and tidy the history; once a second.

        Args:
            low_lsn: everything that ends here or before is applied.
            is_committing: as `Skips.look`.
        """
        async with self._control_pool.session() as conn:
            if await self.skips.look(conn, low_lsn, is_committing):
                self._tell_waiting()
            if self._has_stopped is None:
                self._has_stopped = await self._history.has_stopped(conn)
            if self._has_stopped:
                self._has_stopped = await self._history.mark_repaired(conn, low_lsn)
            if self._clock() - self._pruned_s >= _PRUNE_S:
                self._pruned_s = self._clock()
                await self._history.prune(conn, self._config.keep_s, self._config.keep_rows)
                none = dict.fromkeys(self.figures.conflicts, 0)
                self.figures.conflicts_kept = none | await self._history.kept(conn)

    def later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call back after a while, or as soon as the operator asks to skip a transaction; never after `close`."""
        self._later[callback] = asyncio.get_running_loop().call_later(delay_s, self._call_back, callback)

    def _call_back(self, callback: Callable[[], None]) -> None:
        self._later.pop(callback).cancel()
        callback()

    def close(self) -> None:
        """Drop the pending callbacks."""
        for handle in self._later.values():
            handle.cancel()
        self._later.clear()

    def _tell_waiting(self) -> None:
        self._asked.set()
        for callback in list(self._later):
            self._call_back(callback)

    async def wait(self, delay_s: float) -> None:
        """Wait before a failed transaction is tried again, at most until the operator asks to skip one."""
        self._asked.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._asked.wait()


def source_of(transaction: Transaction) -> Source:
    """Return a transaction's facts for the history; a piece of a large one may have no end LSN yet, which is 0 then."""
    return Source(
        xid=transaction.xid,
        commit_lsn=transaction.commit_lsn,
        end_lsn=transaction.end_lsn,
        commit_time_us=transaction.commit_time_us,
    )


def entry_of(conflict: Conflict) -> ConflictRecord:
    """Return a conflict as the apply log has it: without values."""
    return ConflictRecord(
        type=conflict.type.value,
        table=f"{conflict.schema}.{conflict.table}",
        policy=conflict.policy.value,
        outcome=conflict.outcome.value,
    )


def _skipped(
    source: Source, changes: Sequence[tuple[TablePlan, bytes] | TruncateStep], first_no: int
) -> Iterator[Conflict]:
    for change_no, change in enumerate(changes, first_no):
        plan = change.plans[0] if isinstance(change, TruncateStep) else change[0]
        read = None if isinstance(change, TruncateStep) else read_change(*change)
        yield Conflict(
            type=ConflictType.SKIPPED,
            schema=plan.relation.schema,
            table=plan.relation.name,
            operation=read.operation if read else "truncate",
            key=key_of_truncate(change) if isinstance(change, TruncateStep) else read_change(*change).key(),
            remote_row=read.remote_row() if read else None,
            is_complete=read.is_complete if read else True,
            local_rows=(),
            source=source,
            change_no=change_no,
            policy=Policy.SKIP,
            outcome=ConflictOutcome.SKIPPED,
        )

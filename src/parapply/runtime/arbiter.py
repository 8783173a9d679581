"""What the workers ask when a transaction cannot be applied as it is: settle its conflicts, skip it, or stop.

One for each epoch. The workers come here with what failed at the head, never before (trap T-69); what was settled goes
into the history inside the transaction, what stopped it by a session of its own after the rollback (trap T-68).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING

from parapply.applylog_schema import CONFLICTS_LIMIT
from parapply.applylog_schema import Conflict as ConflictEntry
from parapply.conflict.changes import read_change
from parapply.conflict.history import History
from parapply.conflict.kinds import Conflict, ConflictType, Outcome, Policy, Source
from parapply.conflict.local import LocalRows
from parapply.conflict.rules import Rules
from parapply.conflict.settle import Settler
from parapply.conflict.skips import Skips
from parapply.logs import get_logger
from parapply.model import format_lsn
from parapply.plan.steps import TruncateStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from parapply.config import ConflictConfig
    from parapply.conflict.kinds import ConflictStop
    from parapply.model import Transaction
    from parapply.plan.table import TablePlan
    from parapply.runtime.desk import Desk
    from parapply.runtime.job import Job
    from parapply.target.commands import CommandBuilder
    from parapply.target.session import Proof, Record, WorkerSession

#: Changes of a skipped transaction written to the history in one flight.
_PORTION = 500
#: Seconds between two looks whether the history has grown too long.
_PRUNE_S = 60.0


class Arbiter:
    """`skips` and `troubles` are written here; read by workers, the monitor and whoever shows figures."""

    def __init__(  # noqa: PLR0913  one place makes it
        self, config: ConflictConfig, builder: CommandBuilder, desk: Desk, schema: str, slot_id: int, *,
        tracks_commits: bool, counts: Counter[tuple[str, str, str]],
    ) -> None:  # fmt: skip
        """Know of nothing yet; `look` reads what was asked for.

        Args:
            config: policies, and how long conflicts are kept.
            builder: of the leader.
            desk: sessions for what must survive a rollback.
            schema: state schema.
            slot_id: of the state.
            tracks_commits: the target knows when and by whom rows were written.
            counts: of conflicts by type, schema.table and outcome; a stopped one counts once in an epoch.
        """
        self.rules = Rules(config)
        self.skips = Skips(schema, slot_id)
        self._counts = counts
        #: Why workers keep trying a batch, by its number.
        self.troubles: dict[int, str] = {}
        self._config = config
        self._builder = builder
        self._desk = desk
        self._tracks_commits = tracks_commits
        self._history = History(schema, slot_id)
        self._has_stopped: bool | None = None  # not known yet
        self._stopped: set[tuple[int, int, ConflictType]] = set()
        self._local: dict[int, LocalRows] = {}
        self._asked = asyncio.Event()
        self._later: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._clock = asyncio.get_running_loop().time
        self._pruned_s = -_PRUNE_S
        self._log = get_logger()

    @property
    def trouble(self) -> str:
        """Return why the earliest batch that fails is tried again, for people; empty if none does."""
        return self.troubles[min(self.troubles)] if self.troubles else ""

    def settler(self, session: WorkerSession, source: Source) -> Settler:
        """Return what applies a transaction, or its pieces, with its conflicts settled."""
        local = self._local.get(id(session))
        if local is None:
            local = self._local[id(session)] = LocalRows(session, tracks_commits=self._tracks_commits)
        return Settler(session, local, self._builder, self.rules, source)

    def forget(self, session: WorkerSession) -> None:
        """Have the catalogue read again for a session's next conflict."""
        self._local.pop(id(session), None)

    async def keep(self, session: WorkerSession, settler: Settler) -> list[Conflict]:
        """Write what was settled into the history, inside the open transaction, and return it.

        Raises:
            StatementFailed, TargetLost: as `WorkerSession.run`.
        """
        settled = settler.take_settled()
        if settled:
            await session.run([self._history.writing(conflict) for conflict in settled])
        return settled

    async def name_by_end(self, session: WorkerSession, last: Transaction) -> None:
        """Give the conflicts of a large transaction its end LSN, inside the open transaction.

        Raises:
            StatementFailed, TargetLost: as `WorkerSession.run`.
        """
        await session.run(self._history.naming_end(last.commit_lsn, last.end_lsn))

    def count(self, job: Job, conflicts: Sequence[Conflict]) -> None:
        """Count and tell conflicts of one transaction, which has committed."""
        told: Counter[tuple[ConflictType, str, str, str]] = Counter()
        for conflict in conflicts:
            table = f"{conflict.schema}.{conflict.table}"
            self._counts[conflict.type.value, table, conflict.outcome.value] += 1
            if len(job.conflicts) < CONFLICTS_LIMIT:
                job.conflicts.append((conflict.source.commit_lsn, entry_of(conflict)))
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
        """Write a conflict into the history that lets nothing pass, durably; its transaction is rolled back by now.

        Raises:
            TargetRefused, TargetLost: it could not be written.
        """
        conflict = stop.conflict
        async with self._desk.session() as conn:
            await self._history.write(conn, conflict)
        self._has_stopped = True
        name = (source.lsn, conflict.change_no, conflict.type)
        if name not in self._stopped:
            self._stopped.add(name)
            self._counts[conflict.type.value, f"{conflict.schema}.{conflict.table}", Outcome.STOPPED.value] += 1
            # The names of indexes, never values.
            self._log.warning(
                "conflict_stopped",
                conflict_type=conflict.type.value,
                relation=f"{conflict.schema}.{conflict.table}",
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
            await session.run([self._history.writing(conflict) for conflict in portion])
            kept += portion
        return kept

    async def skip(
        self,
        session: WorkerSession,
        record: Record | Proof,
        transaction: Transaction,
        changes: Sequence[tuple[TablePlan, bytes] | TruncateStep],
        end_lsn: int,
    ) -> list[Conflict]:
        """Begin a target transaction that records a source transaction as done without applying it.

        The caller commits.

        Raises:
            StatementFailed, TargetLost, ProtocolError: as `write_skipped`.
        """
        await session.begin_recorded(record)
        kept = await self.write_skipped(session, source_of(transaction), changes)
        await session.run(self.skips.finishing(end_lsn, transaction.xid))
        return kept

    def skipped(self, end_lsn: int, xid: int) -> None:
        """Take note that the skipping of a transaction has committed."""
        self.skips.done(end_lsn)
        self._log.warning("transaction_skipped", end_lsn=format_lsn(end_lsn), xid=xid)

    async def learn(self, transaction: Transaction) -> None:
        """Write down the commit LSN of a large transaction that is to be skipped when it comes again.

        Raises:
            TargetRefused, TargetLost: as `Skips.learn`.
        """
        async with self._desk.session() as conn:
            await self.skips.learn(conn, transaction.commit_lsn, transaction.end_lsn)

    async def look(self, low_lsn: int, is_committing: Callable[[int], bool]) -> None:
        """Read what the operator asked for, and tidy the history; once a second, and before the first batch.

        Args:
            low_lsn: everything that ends here or before is applied.
            is_committing: as `Skips.look`.

        Raises:
            TargetRefused, TargetLost: as everywhere.
        """
        async with self._desk.session() as conn:
            if await self.skips.look(conn, low_lsn, is_committing):
                self._tell_waiting()
            if self._has_stopped is None:
                self._has_stopped = await self._history.has_stopped(conn)
            if self._has_stopped:
                self._has_stopped = await self._history.mark_repaired(conn, low_lsn)
            if self._clock() - self._pruned_s >= _PRUNE_S:
                self._pruned_s = self._clock()
                await self._history.prune(conn, self._config.keep_s, self._config.keep_rows)

    def later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call back after a while, or as soon as somebody wants a transaction skipped; never after `close`."""
        self._later[callback] = asyncio.get_running_loop().call_later(delay_s, self._call_back, callback)

    def _call_back(self, callback: Callable[[], None]) -> None:
        self._later.pop(callback).cancel()
        callback()

    def close(self) -> None:
        """Forget who is to be called back."""
        for handle in self._later.values():
            handle.cancel()
        self._later.clear()

    def _tell_waiting(self) -> None:
        self._asked.set()
        for callback in list(self._later):
            self._call_back(callback)

    async def wait(self, delay_s: float) -> None:
        """Wait before a failed transaction is tried again; not longer than until somebody wants one skipped."""
        self._asked.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._asked.wait()


def source_of(transaction: Transaction, end_lsn: int = 0) -> Source:
    """Return what the history says of a transaction; a piece of a large one may know its end only later."""
    return Source(
        xid=transaction.xid,
        commit_lsn=transaction.commit_lsn,
        end_lsn=transaction.end_lsn or end_lsn,
        commit_time_us=transaction.commit_time_us,
    )


def entry_of(conflict: Conflict) -> ConflictEntry:
    """Return a conflict as the apply log has it: without values."""
    return ConflictEntry(
        type=conflict.type.value,
        table=f"{conflict.schema}.{conflict.table}",
        policy=conflict.policy.value,
        outcome=conflict.outcome.value,
    )


def _names(change: tuple[TablePlan, bytes] | TruncateStep) -> list[str]:
    return [plan.relation.qualified_name for plan in change.plans] if isinstance(change, TruncateStep) else []


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
            key=read.key() if read else {"tables": ", ".join(_names(change))},
            remote_row=read.remote_row() if read else None,
            is_complete=read.is_complete if read else True,
            local_rows=(),
            source=source,
            change_no=change_no,
            policy=Policy.SKIP,
            outcome=Outcome.SKIPPED,
        )

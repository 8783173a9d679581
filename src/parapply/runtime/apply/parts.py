"""A batch that failed, at the head: whole once more, then in halves, at last one source transaction alone.

Everything earlier has committed, so most batches succeed unchanged, because only the parallelism had failed. A batch
that still fails is tried in smaller parts (`plan/halving.py`), each a target transaction with its own record. A kill
between two of them leaves whole source transactions committed, in order, and the state says which. A failure counts as
a conflict, or is reported as an error of the data, only where a single transaction fails row by row (`serial.py`, trap
T-69).

A batch of transactions for which code runs on the target (`Batch.is_serial`) is applied here from the beginning, each
of them a target transaction, or all of them one.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from parapply import failpoints
from parapply.engine.job import Resume, TryLater
from parapply.errors import ProtocolError, StatementFailed, TargetRefused
from parapply.logs import get_logger
from parapply.model import format_lsn
from parapply.plan.batch import Batch
from parapply.plan.downgrade import Level
from parapply.plan.halving import BatchPart, Form, Halving
from parapply.plan.steps import is_serial, may_join, ordered_changes
from parapply.plan.table import Lane
from parapply.runtime.apply.failure import FailureClass, classify
from parapply.runtime.apply.serial import SerialApply
from parapply.runtime.apply.transaction import SetCommands, found_code, record_at_head, record_of_run
from parapply.target.sql.commands import code_check
from parapply.vocabulary import RetryReason, WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from parapply.engine.job import SetJob
    from parapply.model import Relation, Transaction
    from parapply.plan.table import Plans
    from parapply.runtime.apply.repair import Repair
    from parapply.runtime.apply.transaction import TargetTransaction, WorkerKit
    from parapply.target.sql.commands import Command, CommandBuilder

#: Where more than this share of a batch is exact in source order only, its table does better row by row from the start.
_MANY_IN_ORDER = 1 / 32
#: Bytes and changes of a transaction above which a round trip for it alone is nothing beside its statements.
_EACH_BYTES = 1024 * 1024
_EACH_CHANGES = 64
#: Forms in which a serial batch begins; they find out themselves which of its transactions must be alone.
_FROM_THE_START = (Form.EACH, Form.JOINED)


class PartApply:
    """Used by one worker, for one batch at a time."""

    def __init__(self, target: TargetTransaction, repair: Repair, kit: WorkerKit) -> None:
        """Apply nothing yet."""
        self._target = target
        self._session = target.session
        self._serial = SerialApply(target, repair, kit)
        self._kit = kit
        self._pool = kit.pool
        self._skips = kit.conflict_handler.skips
        self._log = get_logger()

    async def apply(self, job: SetJob, why: str) -> bool:
        """Apply a batch at the head that was not tried as sets; False if it was given back: it resumes where it was.

        Args:
            job: not begun, or given back.
            why: for people.

        Raises:
            ApplyFailed: a transaction of it fails, and on_error is "stop".
        """
        if job.resume is None:
            if job.batch.is_suspect:
                relations = [changes.plan.relation for changes in job.batch.table_changes]
                self._kit.tables.count_retry(relations, was_predictable=True)
            self._begin(job, why, has_failed=job.batch.is_suspect)
        return await self._apply(job, None)

    async def apply_each(self, job: SetJob) -> bool:
        """Apply a serial batch, whose turn it is; False if it was given back: it resumes where it was.

        Raises:
            ApplyFailed, TargetLost, TargetRefused, ProtocolError: as `apply`.
        """
        if job.resume is None:
            form = Form.JOINED if may_join(job.batch.steps) else Form.EACH
            halving = Halving(len(job.batch.transactions), form=form)
            job.resume = Resume(halving, dict(job.plans_before), self._kit.new_attempts())
        return await self._apply(job, None)

    async def repeat(self, job: SetJob, sets: SetCommands, failure: StatementFailed, *, was_at_head: bool) -> bool:
        """Repeat a batch at the head; False if it was given back before it was done: it resumes where it was.

        Args:
            job: rolled back.
            sets: that failed.
            failure: as met.
            was_at_head: everything earlier had committed before it began, so the same would fail again.

        Raises:
            ApplyFailed, TargetLost, TargetRefused, ProtocolError: as `apply`.
        """
        suspects = sets.suspects(failure)
        self._kit.tables.count_retry(suspects)
        # Late keys are the last: values that they free come too late for the others. At the head none needs to be late.
        is_same = not sets.late
        self._begin(job, sets.why_failed(failure), has_failed=was_at_head and is_same)
        assert job.resume is not None, "it has just begun"
        if not (was_at_head and is_same):
            job.resume.overtook = suspects
        # Where the tables or the rights have changed, the same statements are of no use either.
        is_stale = classify(failure) is FailureClass.STALE
        if found_code(failure, sets.all):
            await self._kit.tables.refresh_written(sets.all)
            is_stale = True
        if sets.may_not_change_role(failure):
            self._kit.builder.may_change_role, is_stale = False, True
        return await self._apply(job, sets if is_same and not is_stale and not was_at_head else None)

    def _begin(self, job: SetJob, why: str, *, has_failed: bool) -> None:
        job.attempts += 1
        job.error = why
        halving = Halving(len(job.batch.transactions), form=Form.SETS if job.prepare is None else Form.ALONE)
        if has_failed and job.prepare is None:
            halving.failed()
        job.resume = Resume(halving, dict(job.plans_before), self._kit.new_attempts())

    async def _apply(self, job: SetJob, sets: SetCommands | None) -> bool:
        resume = job.resume
        assert resume is not None, "it has begun"
        halving = resume.halving
        if halving.part.form not in _FROM_THE_START:
            self._target.show(WorkerState.RETRYING)
        if self._pool.flight.state.is_relaxed and self._pool.flight.state.head is not job:
            self._pool.park(job)
            return False
        await self._pool.head_turn(job)
        if halving.part.form not in _FROM_THE_START:
            self._tell(job, resume)
        while not halving.is_done:
            part = halving.part
            self._target.show(WorkerState.EXECUTING if part.form in _FROM_THE_START else WorkerState.RETRYING)
            try:
                await self._part(job, resume, part, sets)
            except TryLater as later:
                self._pool.park(job)
                self._kit.conflict_handler.later(later.delay_s, partial(self._pool.unpark, job))
                return False
            sets = None  # of the whole batch
        if resume.is_told:
            self._learn(job, resume)
        job.times.executed_s = job.times.turn_s = asyncio.get_running_loop().time()
        return True

    def _tell(self, job: SetJob, resume: Resume) -> None:
        """Log once that a batch is repeated."""
        if resume.is_told:
            return
        resume.is_told = True
        end_lsn = format_lsn(job.batch.end_lsn)
        self._log.warning("batch_retried", seq=job.batch.seq, worker=job.worker, end_lsn=end_lsn, reason=job.error)

    async def _part(self, job: SetJob, resume: Resume, part: BatchPart, sets: SetCommands | None) -> None:
        """Commit a part, or have less of it tried next.

        Raises:
            TryLater: a single transaction fails, and another job can use the worker.
            ApplyFailed, TargetLost, TargetRefused, ProtocolError: as `apply`.
        """
        transactions = job.batch.transactions[part.start : part.end]
        if part.form is Form.ALONE:
            resume.suspects = []
            resume.committed(await self._serial.apply(job, transactions[0], resume), self._kit.new_attempts())
            if resume.is_told:
                resume.n_in_order += 1
            return
        is_asked = self._skips and part.form not in _FROM_THE_START
        for number, transaction in enumerate(transactions, part.start) if is_asked else ():
            if self._is_wanted(transaction):
                resume.halving.isolate(number)
                return
        if part.form is Form.EACH:
            await self._each(job, resume, transactions)
        elif part.form is Form.JOINED:
            await self._joined(job, resume, transactions)
        elif part.form is Form.ORDERED:
            await self._ordered(job, resume, part, transactions)
        else:
            await self._sets(job, resume, part, transactions, sets)

    async def _each(self, job: SetJob, resume: Resume, transactions: Sequence[Transaction]) -> None:
        """Commit transactions one by one, up to the first that fails or must be tried alone, which is noted."""
        run = _Each(transactions, self._kit.tables.plans_from(resume.plans), self._kit.builder, self._is_wanted)
        show = partial(self._target.show, WorkerState.EXECUTING)
        recorded = ((record_at_head(transaction), commands) for transaction, commands in run)
        n_committed, failure = await self._session.execute_each(recorded, on_sent=show)
        if n_committed:
            # Only the first one may have announced anything.
            resume.plans = dict(run.plans.current)
            resume.halving.passed(n_committed)
        if failure is not None:
            await self._session.rollback()
            commands = run.commands_of(n_committed)
            job.attempts += 1
            job.error = failure.sqlstate or RetryReason.ROW_COUNT
            self._tell(job, resume)
            if 0 <= failure.statement < len(commands):
                plan = commands[failure.statement].plan
                if plan.facts.triggers and not failure.sqlstate:
                    self._kit.builder.vetoed(plan)
                else:
                    self._kit.tables.count_retry([plan.relation])
        if failure is not None or not n_committed:
            resume.halving.isolate(resume.halving.n_done)

    async def _joined(self, job: SetJob, resume: Resume, transactions: Sequence[Transaction]) -> None:
        """Commit transactions as one, up to the first that must be tried alone; or have them tried one by one."""
        together = self._joinable(transactions)
        if not together:
            resume.halving.isolate(resume.halving.n_done)
            return
        run = _Each(together, self._kit.tables.plans_from(resume.plans), self._kit.builder, self._is_wanted)
        record = record_of_run(together)
        show = partial(self._target.show, WorkerState.EXECUTING)
        made: list[Command] = []
        try:
            await self._session.execute_ahead(record, self._checked(run, made), on_sent=show)
            # By the plans of now: since the batch was read, code may have come that is not trusted with several.
            is_whole = run.n_made == len(together) and _are_joined(made)
            if is_whole and not (self._skips and any(map(self._is_wanted, together))):
                self._target.show(WorkerState.COMMITTING)
                await self._target.end(job, record)
                resume.plans = dict(run.plans.current)
                resume.halving.passed(len(together))
                return
            await self._session.rollback()
        except StatementFailed as failure:
            await self._failed(job, resume, failure)
            is_code = found_code(failure, made)
            job.error = RetryReason.CODE if is_code else failure.sqlstate or RetryReason.ROW_COUNT
            self._tell(job, resume)
            if is_code:
                await self._kit.tables.refresh_written(made)
            is_whole = False
        if not is_whole:
            resume.halving.failed()

    def _checked(self, run: _Each, made: list[Command]) -> Iterator[Command]:
        """Yield the commands of transactions, and note them; then those that find code on tables that have none."""
        for _, commands in run:
            made += commands
            yield from commands
        check = code_check(made, self._kit.tables.role)
        made += check
        yield from check

    def _joinable(self, transactions: Sequence[Transaction]) -> Sequence[Transaction]:
        """Return the transactions before the first that must be alone, as `_Each` says."""
        is_asked = bool(self._skips)
        for number, transaction in enumerate(transactions):
            is_wanted = is_asked and self._is_wanted(transaction)
            if is_wanted or (number and transaction.relations) or _is_large(transaction):
                return transactions[:number]
        return transactions

    async def _sets(
        self,
        job: SetJob,
        resume: Resume,
        part: BatchPart,
        transactions: Sequence[Transaction],
        sets: SetCommands | None,
    ) -> None:
        plans = self._kit.tables.plans_from(resume.plans)
        is_whole = len(transactions) == len(job.batch.transactions)
        # Those given are of the whole batch: under the record of a part the others would be applied twice.
        if sets is None or not is_whole:
            sets = await self._planned(job, resume, part, plans)
            if sets is None:
                return
        record = record_of_run(transactions)
        try:
            if sets.fit_one_flight:
                self._target.show(WorkerState.COMMITTING)
                await self._session.execute_and_commit(record, sets.all)
            elif not await self._execute(job, transactions, sets.all):
                return
        except StatementFailed as failure:
            await self._failed(job, resume, failure)
            if found_code(failure, sets.all):
                await self._kit.tables.refresh_written(sets.all)
            elif classify(failure) is FailureClass.FINAL:
                resume.suspects = sets.suspects(failure) if failure.statement >= 0 else []
            resume.halving.failed()
            return
        resume.is_whole |= is_whole
        resume.committed(dict(plans.current), self._kit.new_attempts())

    async def _planned(self, job: SetJob, resume: Resume, part: BatchPart, plans: Plans) -> SetCommands | None:
        """Return the sets of a part; None if it must be smaller, which is noted.

        Raises:
            ProtocolError: a change cannot be read.
        """
        batch = Batch(job.batch.seq)
        try:
            for number, transaction in enumerate(job.batch.transactions[part.start : part.end], part.start):
                if is_serial(transaction, plans):
                    resume.halving.isolate(number)
                    return None
                batch.add(transaction, plans)
                if batch.is_suspect:
                    break
            batch.close()
            if not batch.is_suspect:
                return await SetCommands.made(batch, self._kit.builder, self._kit.tables.role)
        except TargetRefused:
            pass  # the changes before the refused one are applied first; alone it is refused again
        resume.halving.failed()
        return None

    async def _ordered(self, job: SetJob, resume: Resume, part: BatchPart, transactions: Sequence[Transaction]) -> None:
        plans = self._kit.tables.plans_from(resume.plans)
        commands: list[Command] = []
        owners: list[int] = []
        for number, transaction in enumerate(transactions, part.start):
            made: list[Command] | None = None
            try:
                if not is_serial(transaction, plans):
                    made = self._kit.builder.in_order(ordered_changes(transaction, plans))
            except TargetRefused:
                pass  # refused again alone, when the changes before it have committed
            if made is None:
                resume.halving.isolate(number)
                return
            commands += made
            owners += [number] * len(made)
        commands += code_check(commands, self._kit.tables.role)
        try:
            if not await self._execute(job, transactions, commands):
                return
        except StatementFailed as failure:
            await self._failed(job, resume, failure)
            if found_code(failure, commands):
                await self._kit.tables.refresh_written(commands)
            if 0 <= failure.statement < len(owners):
                resume.halving.isolate(owners[failure.statement])
            else:
                resume.halving.failed()
            return
        for relation in resume.suspects:
            resume.out_of_order[relation] = resume.out_of_order.get(relation, 0) + len(transactions)
        resume.n_in_order += len(transactions)
        resume.committed(dict(plans.current), self._kit.new_attempts())

    async def _execute(self, job: SetJob, transactions: Sequence[Transaction], commands: Sequence[Command]) -> bool:
        """Execute and commit; False if the operator has asked since to skip a transaction: nothing was done then.

        Raises:
            StatementFailed, TargetLost: as `WorkerSession.execute` and `commit`.
        """
        record = record_of_run(transactions)
        await self._target.execute(job, record, commands)
        if any(map(self._is_wanted, transactions)):
            await self._session.rollback()
            return False
        self._target.show(WorkerState.COMMITTING)
        await self._target.end(job, record)
        return True

    async def _failed(self, job: SetJob, resume: Resume, failure: StatementFailed) -> None:
        await self._session.rollback()
        job.attempts += 1
        resume.suspects = []
        if classify(failure) is FailureClass.AGAIN:
            await asyncio.sleep(resume.attempts.again_s())

    def _is_wanted(self, transaction: Transaction) -> bool:
        """Return whether a transaction is to be skipped."""
        return self._skips.find(transaction.commit_lsn, transaction.end_lsn) is not None

    def _learn(self, job: SetJob, resume: Resume) -> None:
        """Distrust tables according to the part that failed and the form that then succeeded."""
        n_transactions = len(job.batch.transactions)
        if resume.is_whole:
            self._kit.tables.distrust(resume.overtook, Level.ALONE)
            return
        many: list[Relation] = [
            relation for relation, count in resume.out_of_order.items() if count >= n_transactions * _MANY_IN_ORDER
        ]
        self._kit.tables.distrust(many, Level.IN_ORDER)
        self._log.info(
            "batch_split",
            seq=job.batch.seq,
            worker=job.worker,
            n_transactions=n_transactions,
            n_in_order=resume.n_in_order,
            attempts=job.attempts,
        )


def _are_joined(commands: Sequence[Command]) -> bool:
    plans = [plan for command in commands for plan in command.plans]
    return all(plan.is_joined for plan in plans if plan.lane is Lane.SERIAL)


def _is_large(transaction: Transaction) -> bool:
    return transaction.size_bytes > _EACH_BYTES or len(transaction.changes) > _EACH_CHANGES


class _Each:
    """Transactions with their commands, made as they are asked for, up to one that must be alone.

    Such a transaction is to be skipped, cannot be applied, or has row counts that the server cannot check. So is one
    that announces tables, unless it is the first, so that the plans in force after the committed ones are always known.
    """

    def __init__(
        self,
        transactions: Sequence[Transaction],
        plans: Plans,
        builder: CommandBuilder,
        is_wanted: Callable[[Transaction], bool],
    ) -> None:
        """Make nothing yet.

        Args:
            transactions: in source order, at least one.
            plans: in force before the first.
            builder: makes the commands.
            is_wanted: returns whether a transaction is to be skipped.
        """
        self.plans = plans
        self._transactions = transactions
        self._builder = builder
        self._is_wanted = is_wanted
        self._made: list[list[Command]] = []

    def __iter__(self) -> Iterator[tuple[Transaction, list[Command]]]:
        if failpoints.armed in (failpoints.DML_SENT, failpoints.BEFORE_COMMIT):
            return  # no such place is passed here
        for number, transaction in enumerate(self._transactions):
            if number and transaction.relations:
                return
            commands = self._commands(transaction)
            if commands is None:
                return
            self._made.append(commands)
            yield transaction, commands

    @property
    def n_made(self) -> int:
        """Return the number of transactions that were asked for, and may go with others."""
        return len(self._made)

    def commands_of(self, number: int) -> list[Command]:
        """Return the commands of a transaction that was asked for."""
        return self._made[number]

    def _commands(self, transaction: Transaction) -> list[Command] | None:
        if _is_large(transaction) or self._is_wanted(transaction):
            return None
        try:
            commands = self._builder.in_order(ordered_changes(transaction, self.plans), asks_first=False)
        except (TargetRefused, ProtocolError):
            return None  # refused again alone, when the changes before it have committed
        # PostgreSQL counts no rows for a statement where rules act.
        return None if any(command.plan.facts.rules for command in commands) else commands

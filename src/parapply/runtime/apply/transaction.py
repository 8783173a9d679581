"""The target transactions of one worker: the commands of each, its record and its end, and the rules for all of them.

A target transaction writes its record first, or last if its end LSN is not known before. One that will be prepared
writes a proof instead, and its record when it is prepared (`pool/two_phase.py`).

A batch, or a piece of a large transaction, becomes statements that work on sets of rows. Making them copies every value
once, and the copy of a row of hundreds of megabytes takes a good part of a second. So a thread makes them where the
copies would take long enough for the publisher to miss its answers.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from parapply import failpoints
from parapply.config import SAME_ROLE
from parapply.engine.flight import ONE_FLIGHT
from parapply.engine.job import Attempts
from parapply.errors import ProtocolError, TargetRefused
from parapply.runtime.apply.failure import NO_PRIVILEGE, FailureClass, classify
from parapply.target.session.pipeline import do_nothing
from parapply.target.session.session import Proof, Record
from parapply.target.sql.commands import SET_BYTES, CommandBuilder, code_check
from parapply.target.sql.references import by_references
from parapply.target.sql.statements import Sql
from parapply.target.state.commands import command_sql
from parapply.vocabulary import RetryReason, WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.config import Config, DdlConfig
    from parapply.engine.job import AppliedJob, LargeJob, SetJob, StreamJob
    from parapply.errors import StatementFailed
    from parapply.model import Relation, Transaction
    from parapply.plan.batch import Batch
    from parapply.runtime.apply.conflicts import ConflictHandler
    from parapply.runtime.pool.pool import WorkerPool
    from parapply.runtime.pool.two_phase import TwoPhase
    from parapply.runtime.tables.plans import TablePlans
    from parapply.target.session.session import WorkerSession
    from parapply.target.sql.commands import Command, Operation
    from parapply.wire.ddl_queue import QueuedCommand
    from parapply.wire.messages import Prepare, StreamPrepare

#: Commands of one change that is one row's: its own, and the check for code.
_LONE: Final = 2
#: SQLSTATE of a trigger that finds no parent.
_FOREIGN_KEY: Final = "23503"


class Ahead:
    """The commands of one batch that waits for another to commit, made while the target works. One for all workers.

    Where batches of a table follow one another, leader and target would take turns otherwise. Written and read by the
    workers; of a smaller batch the commands are made faster than a message goes there and back.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._batch: Batch | None = None
        self._commands: list[Command] = []
        self._has_prepared = False

    def make(self, job: SetJob, builder: CommandBuilder, role: str) -> None:
        """Make the commands of a closed job, unless they are already made or the worker will need other ones."""
        batch = job.batch
        is_wanted = not (batch.is_serial or batch.is_suspect or batch.has_late_keys) and job.resume is None
        if batch is self._batch or not is_wanted or batch.n_changes <= ONE_FLIGHT or batch.size_bytes > SET_BYTES:
            return
        try:
            commands = builder.of_steps(batch.steps, batch.size_bytes)
        except (ProtocolError, TargetRefused):
            return  # the worker that takes the job gets this error again
        self._batch, self._commands = batch, _checked(commands, builder, role)
        self._has_prepared = builder.has_prepared()

    def take(self, batch: Batch, builder: CommandBuilder) -> list[Command] | None:
        """Return the commands of a batch, as `commands_of` would now; None if they were not made."""
        if batch is not self._batch:
            return None
        commands, self._batch, self._commands = self._commands, None, []
        # Rows that are found by all their columns go one by one while a transaction is prepared.
        return commands if builder.has_prepared() is self._has_prepared else None


class SetCommands:
    """The commands of one batch; they stay the same for every attempt."""

    def __init__(self, batch: Batch, commands: list[Command], late: list[Command], *, may_commit: bool) -> None:
        """Keep the commands; see `made`."""
        self._batch = batch
        self._may_commit = may_commit
        #: Commands that need no turn.
        self.first = commands
        #: Commands of the late keys, which need the turn.
        self.late = late
        self.all = [*commands, *late] if late else commands

    @classmethod
    async def made(
        cls, batch: Batch, builder: CommandBuilder, role: str, ahead: Ahead | None = None, *, may_commit: bool = True
    ) -> SetCommands:
        """Return the commands of a batch.

        Args:
            batch: as for `commands_of`.
            builder: as for `commands_of`.
            role: as for `commands_of`.
            ahead: commands that were made before, if any were.
            may_commit: it ends with a commit; False: it is prepared.

        Raises:
            ProtocolError, TargetRefused: as `CommandBuilder.of_steps`.
        """
        commands = ahead.take(batch, builder) if ahead is not None else None
        if commands is None:
            commands = await commands_of(batch, builder, role)
        late: list[Command] = []
        if batch.has_late_keys:
            late = builder.of_late_keys(batch.steps, batch.size_bytes)
            late += code_check(late, role)
        return cls(batch, commands, late, may_commit=may_commit)

    @property
    def fit_one_flight(self) -> bool:
        """Return whether the batch may be executed and committed at once, if it has its turn."""
        return self._batch.n_changes <= ONE_FLIGHT and self._are_checked(self.all)

    @property
    def in_turn(self) -> list[Command]:
        """Return the commands of a batch that fits one flight, if all earlier ones have committed and no later one has.

        Of one change that is the same as to apply it row by row in source order, which asks for no code either: that
        sees what it would see there, as every column that came is set.
        """
        is_lone = self._batch.n_changes == 1 and len(self.all) <= _LONE
        return [one for one in self.all if one.operation != "code"] if is_lone else self.all

    @property
    def late_fit_one_flight(self) -> bool:
        """Return whether the late keys may be applied and committed at once, at the head."""
        return sum([command.expected for command in self.late]) <= ONE_FLIGHT and self._are_checked(self.late)

    def _are_checked(self, commands: Sequence[Command]) -> bool:
        """Return whether the server can check the commands' row counts, and commit without asking back."""
        return (
            self._may_commit
            and all(command.prepared.is_set for command in commands)
            and failpoints.armed not in (failpoints.DML_SENT, failpoints.BEFORE_COMMIT)
        )

    def why_failed(self, failure: StatementFailed) -> str:
        """Return for people why the batch is repeated: SQLSTATE or a `RetryReason`."""
        if found_code(failure, self.all):
            return RetryReason.CODE
        if not failure.sqlstate and self._operation(failure) == "reference":
            return _FOREIGN_KEY
        return failure.sqlstate or RetryReason.ROW_COUNT

    def may_not_change_role(self, failure: StatementFailed) -> bool:
        """Return whether a session was refused the role `replica`, which it could have when the daemon started."""
        return failure.sqlstate == NO_PRIVILEGE and self._operation(failure) == "role"

    def _operation(self, failure: StatementFailed) -> Operation | None:
        is_command = 0 <= failure.statement < len(self.all)
        return self.all[failure.statement].operation if is_command else None

    def suspects(self, failure: StatementFailed | None) -> list[Relation]:
        """Return the tables because of which the batch may have to be repeated.

        Args:
            failure: as met; None where it had to yield.
        """
        if failure is not None and (classify(failure) is FailureClass.STALE or found_code(failure, self.all)):
            return []  # the tables have changed: that says nothing about keys
        if failure is not None and 0 <= failure.statement < len(self.all):
            return [self.all[failure.statement].plan.relation]
        plans = [changes.plan for changes in self._batch.table_changes]
        # Tables where code runs, or where not every unique key is predicted.
        known = [plan for plan in plans if plan.facts.unique or plan.facts.foreign_keys or plan.facts.triggers]
        return [plan.relation for plan in known or plans]


def found_code(failure: StatementFailed, commands: Sequence[Command]) -> bool:
    """Return whether commands failed because their tables have code that the plans do not know: see `code_check`."""
    is_count = not failure.sqlstate and 0 <= failure.statement < len(commands)
    return is_count and commands[failure.statement].operation == "code"


async def commands_of(batch: Batch, builder: CommandBuilder, role: str) -> list[Command]:
    """Return the commands of a closed batch's steps, in order, without its late keys, and `code_check` at the end.

    Args:
        batch: not changed until this returns.
        builder: the leader's. A thread gets a separate one.
        role: session_replication_role of the workers.

    Raises:
        ProtocolError, TargetRefused: as `CommandBuilder.of_steps`.
    """
    if batch.size_bytes <= SET_BYTES:
        commands = builder.of_steps(batch.steps, batch.size_bytes)
    else:
        commands = await asyncio.to_thread(builder.for_thread().of_steps, batch.steps, batch.size_bytes)
    return _checked(commands, builder, role)


def _checked(commands: list[Command], builder: CommandBuilder, role: str) -> list[Command]:
    return (by_references(commands) if builder.may_change_role else commands) + builder.code_check(commands, role)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRules:
    """How commands run, and where it is noted; made by the epoch.

    Attributes:
        config: names the role.
        note: the statement of `target/state/commands.py`.
        slot_id: of the state.
    """

    config: DdlConfig
    note: Sql
    slot_id: int


def role_of(config: DdlConfig, command: QueuedCommand) -> str:
    """Return the role that runs a command here; empty: the daemon's own."""
    return command.role_name if config.role == SAME_ROLE else config.role


def command_rules(config: Config, slot_id: int) -> CommandRules:
    """Return the rules of an epoch, as `CommandRules` has them."""
    text = command_sql(config.target.state_schema).encode()
    note = Sql(name=b"ddl", text=text, n_parameters=10, is_set=False, positions=())
    return CommandRules(config=config.ddl, note=note, slot_id=slot_id)


#: Source transactions that a record names one by one; of more it names the first and the last.
_MEMBERS = 64


class TargetTransaction:
    """One after the other, on one session. Owned by a worker, and used by the parts that it calls for its job."""

    def __init__(self, session: WorkerSession, kit: WorkerKit) -> None:
        """Start idle, with no open transaction."""
        self.session = session
        #: State of the worker, and its beginning by the event loop's clock. Written by `show`; read by the stall check,
        #: the watchdog, the monitor and metrics.
        self.state = WorkerState.IDLE
        self._pool = kit.pool
        self._two_phase = kit.two_phase
        self._clock = asyncio.get_running_loop().time
        self.since_s = self._clock()

    def show(self, state: WorkerState) -> None:
        """Show the worker's state from now on."""
        self.state = state
        self.since_s = self._clock()

    def record_of(self, job: SetJob) -> Record:
        """Return the record of a target transaction that holds a whole batch."""
        batch = job.batch
        members: tuple[int, ...] = ()
        if not self._pool.flight.state.is_relaxed or self._pool.flight.state.head is job:
            # Everything earlier is committed, or will be before this.
            low_lsn = batch.end_lsn
        else:
            low_lsn = self._pool.flight.state.watermark.low_lsn
            members = tuple([one.end_lsn for one in batch.transactions[: _MEMBERS + 1]])
        return Record(
            batch.first_lsn,
            batch.end_lsn,
            batch.commit_time_us,
            len(batch.transactions),
            low_lsn,
            members if len(members) <= _MEMBERS else (),
        )

    async def begin(self, job: SetJob, record: Record) -> None:
        """Begin one, recorded, whose changes come in pieces.

        Raises:
            StatementFailed, TargetLost: as `WorkerSession.begin_recorded`.
        """
        await self.session.begin_recorded(self._first(job, record))

    async def execute(
        self, job: SetJob, record: Record, commands: Sequence[Command], on_sent: Callable[[], None] = do_nothing
    ) -> None:
        """Begin one, recorded, and execute commands; `end` commits it.

        Args:
            job: of which batch.
            record: of it.
            commands: of it.
            on_sent: called while the target executes them.

        Raises:
            StatementFailed, TargetLost: as `WorkerSession.execute`.
        """
        await self.session.execute(self._first(job, record), commands, on_sent=on_sent)

    async def end(self, job: AppliedJob, record: Record) -> None:
        """Commit the open transaction, or prepare it and then record that.

        Raises:
            StatementFailed, TargetLost: as `WorkerSession.commit` and `TwoPhase.prepare`.
        """
        if job.prepare is None:
            await self.session.commit()
        else:
            await self._two_phase.prepare(self.session, job.prepare, record)

    async def finish(self, job: LargeJob | StreamJob, end: Transaction) -> None:
        """Record and end the open transaction, which was begun without a record.

        Args:
            job: whose it is.
            end: the last piece or the event that ends it on the publisher.

        Raises:
            StatementFailed, TargetLost: as `WorkerSession.record` and `end`.
        """
        record = record_at_head(end)
        await self.session.record(self._first(job, record))
        job.times.executed_s = job.times.turn_s = self._clock()
        self.show(WorkerState.COMMITTING)
        await self.end(job, record)

    async def leave_out(self, job: AppliedJob, message: Prepare | StreamPrepare, end: Transaction) -> None:
        """Record a PREPARE that the publisher has rolled back, without preparing anything; no transaction is open.

        Raises:
            TargetLost: the connection ended.
        """
        await self._two_phase.leave_out(self.session, message, record_at_head(end))
        job.left_out("rolled back on the publisher")

    def _first(self, job: AppliedJob, record: Record) -> Record | Proof:
        """Return the record of the target transaction of a job."""
        return record if job.prepare is None else Proof(self._two_phase.gid(job.prepare), record)


def record_at_head(end: Transaction) -> Record:
    """Return the record of a single source transaction's target transaction, with everything earlier committed.

    Args:
        end: the transaction, or the piece or event that ends it.
    """
    return record_of_run([end])


def record_of_run(transactions: Sequence[Transaction]) -> Record:
    """Return the same of consecutive source transactions, at least one, that are one target transaction."""
    last = transactions[-1]
    return Record(transactions[0].end_lsn, last.end_lsn, last.commit_time_us, len(transactions), low_lsn=last.end_lsn)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyRules:
    """Conditions under which an epoch applies.

    Attributes:
        commands: rules of the publisher's commands that may run.
        piece_bytes: bytes of changes of a streamed transaction that are applied at once.
        stops_on_error: on_error is "stop".
        tracks_commits: the target knows when rows were written and by which origin.
        times_commits: True with an apply log, which has the time of COMMIT.
    """

    commands: CommandRules
    piece_bytes: int
    stops_on_error: bool
    tracks_commits: bool = False
    times_commits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKit:
    """Made by the epoch, with nothing of a single worker or session.

    Attributes:
        pool: gives out the jobs and the turns to commit.
        builder: of commands; used in the event loop's thread only.
        tables: how each announced table is applied.
        conflict_handler: knows the transactions to skip, and keeps conflicts.
        two_phase: knows the prepared transactions.
        rules: conditions of the epoch.
        is_applied: returns whether the transaction that ends at an LSN was committed before the epoch.
        ahead: commands of a batch that waits for another.
    """

    pool: WorkerPool
    builder: CommandBuilder
    tables: TablePlans
    conflict_handler: ConflictHandler
    two_phase: TwoPhase
    rules: ApplyRules
    is_applied: Callable[[int], bool]
    ahead: Ahead = field(default_factory=Ahead)

    def new_attempts(self) -> Attempts:
        """Return the count of a source transaction that was not tried at the head yet."""
        return Attempts(stops_on_error=self.rules.stops_on_error)

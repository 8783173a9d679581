"""A batch, or a piece of a large transaction, as statements that work on sets of rows.

Making the statements copies every value once, and the copy of a row of hundreds of megabytes takes a good part of a
second. So a thread makes them where the copies would take long enough for the publisher to miss its answers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from parapply import failpoints
from parapply.engine.turns import ONE_FLIGHT
from parapply.errors import ProtocolError, TargetRefused
from parapply.runtime.apply.failure import NO_PRIVILEGE, FailureClass, classify
from parapply.target.sql.commands import SET_BYTES, CommandBuilder, code_check
from parapply.target.sql.references import by_references
from parapply.vocabulary import RetryReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.engine.job import SetJob
    from parapply.errors import StatementFailed
    from parapply.model import Relation
    from parapply.plan.batch import Batch
    from parapply.target.sql.commands import Command, Operation


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
    def late_fit_one_flight(self) -> bool:
        """Return whether the late keys may be applied and committed at once, at the head."""
        return sum([command.expected for command in self.late]) <= ONE_FLIGHT and self._are_checked(self.late)

    def _are_checked(self, commands: Sequence[Command]) -> bool:
        """Return whether the server can check the commands' row counts, and commit without asking back."""
        return (
            self._may_commit
            and all(command.prepared.is_set for command in commands)
            and not failpoints.is_armed(failpoints.DML_SENT, failpoints.BEFORE_COMMIT)
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

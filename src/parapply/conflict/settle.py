"""Apply changes of one source transaction in order, and settle every conflict by its policy, inside the transaction.

    run of changes ── SAVEPOINT, one flight ──► all applied ──► next run
                            │ one failed
                            ▼
    ROLLBACK TO; earlier changes again; then this change alone:
      look at the local rows, locked ──► no conflict: the failure is the caller's, as without policies
                            │
                            ▼
      policy ──► stop: ConflictStop, the caller rolls everything back
             ──► drop: next change
             ──► apply: its statements instead, which may find the next conflict of the same change

Used at the head only: everything earlier has committed, so nothing of ours can be the cause (trap T-69).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from parapply.conflict.changes import read_change
from parapply.conflict.kinds import EXISTS, ORIGIN_DIFFERS, Conflict, ConflictStop, LocalRow, Policy
from parapply.conflict.policies import Action, Facing, decide, outcome
from parapply.conflict.statements import only, statement
from parapply.errors import StatementFailed
from parapply.plan.steps import TruncateStep
from parapply.quoting import identifier, literal
from parapply.target.session.pipeline import ANY_COUNT
from parapply.target.sql.commands import Command, guards
from parapply.target.sql.conditions import types_unaltered
from parapply.target.sql.statements import Sql, Statements
from parapply.vocabulary import ConflictOutcome, ConflictType
from parapply.wire.rows import text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.conflict.changes import RowChange
    from parapply.conflict.kinds import LocalRow, Source
    from parapply.conflict.local import LocalRows
    from parapply.conflict.policies import Rules
    from parapply.plan.table import TablePlan
    from parapply.target.session.session import WorkerSession
    from parapply.target.sql.commands import CommandBuilder, Operation

#: Changes after one savepoint: they are executed again when one of them conflicts.
_RUN: Final = 64
#: A change may have one conflict after another: another writer's row, a row in the way, one that has come since.
_ROUNDS: Final = 8
_UNIQUE: Final = "23505"
_DIVISION_BY_ZERO: Final = "22012"


def may_be_conflict(failure: StatementFailed, commands: Sequence[Command]) -> bool:
    """Return whether a failure can be a conflict: a unique violation, a row not found, a row of another writer."""
    if not 0 <= failure.statement < len(commands):
        return False  # of the record or the commit: a deferred check is no conflict in PostgreSQL either
    operation = commands[failure.statement].operation
    if failure.sqlstate == _UNIQUE:
        return operation in ("insert", "update")
    return not failure.sqlstate and operation in ("update", "delete", "exists", "origin")


class Settler:
    """Applies one source transaction, or one piece of a large one after the other. Used once."""

    def __init__(
        self, session: WorkerSession, local: LocalRows, builder: CommandBuilder, rules: Rules, source: Source
    ) -> None:
        """Start with nothing applied; the session is inside the target transaction."""
        self._session = session
        self._local = local
        self._builder = builder
        self._rules = rules
        self._source = source
        #: The commands that a StatementFailed counts in.
        self.commands: list[Command] = []
        #: Settled so far, by change and type: a change that is tried again must not count twice.
        self._settled: dict[tuple[int, ConflictType], Conflict] = {}

    def take_settled(self) -> list[Conflict]:
        """Return the conflicts that were settled since the last call."""
        settled = list(self._settled.values())
        self._settled.clear()
        return settled

    async def apply(self, changes: Sequence[tuple[TablePlan, bytes] | TruncateStep], first_no: int = 1) -> None:
        """Apply changes in source order, of which the first has the number `first_no` in its transaction.

        Raise ConflictStop if a policy stops the transaction, and StatementFailed if that is no conflict; `commands` is
        what it counts in.
        """
        # Outside of the savepoints below: to go back to one gives up the locks that were taken behind it.
        self.commands = guards(
            [plan for one in changes for plan in (one.plans if isinstance(one, TruncateStep) else one[:1])]
        )
        if self.commands:
            await self._session.run(self.commands)
        at = 0
        while at < len(changes):
            run = changes[at : at + _RUN]
            failed = await self._run(run)
            if failed is None:
                at += len(run)
                continue
            index, failure = failed
            # They were applied a moment ago. One that fails now, because of another session, is judged first.
            while index and (failed := await self._run(run[:index])) is not None:
                index, failure = failed
            change = run[index]
            if isinstance(change, TruncateStep):
                await self._empty(change)
            else:
                await self._settle(change, first_no + at + index, failure)
            at += index + 1

    async def _run(
        self, changes: Sequence[tuple[TablePlan, bytes] | TruncateStep]
    ) -> tuple[int, StatementFailed] | None:
        """Apply changes after a savepoint; return the index of the one whose failure may be a conflict."""
        self.commands = []
        owners: list[int] = []
        for index, change in enumerate(changes):
            made = self._builder.in_order([change])
            self.commands += made
            owners += [index] * len(made)
        try:
            # Else an error of the server would be reported before the count of an earlier change, though that change
            # comes first, and may be what the error follows from.
            await self._session.piece(self.commands, counts_on_server=True)
        except StatementFailed as failure:
            await self._session.undo_piece()
            # A wrong count, or a division of the user's: the change alone shows which.
            is_count = failure.sqlstate == _DIVISION_BY_ZERO and failure.statement in self._counted()
            if not (is_count or may_be_conflict(failure, self.commands)):
                raise
            return owners[failure.statement], failure
        return None

    def _counted(self) -> list[int]:
        """Return which of the commands in hand must find a number of rows."""
        return [index for index, command in enumerate(self.commands) if command.expected != ANY_COUNT]

    async def _empty(self, step: TruncateStep) -> None:
        """Apply a TRUNCATE that failed again; raise if a foreign key still would cascade, which is no conflict."""
        failed = await self._tried(self._builder.in_order([step]))
        if failed is not None:
            raise failed

    async def _settle(self, change: tuple[TablePlan, bytes], change_no: int, failure: StatementFailed) -> None:
        """Apply one change that failed, or leave it out, as the policies say."""
        row_change = read_change(*change)
        own = self._builder.in_order([change])
        # A change that failed as part of a run is first tried alone, because what was in its way may be gone.
        commands = own
        for _ in range(_ROUNDS):
            failed = await self._tried(commands)
            if failed is None:
                return
            failure = failed
            if not may_be_conflict(failure, self.commands):
                raise failure
            found = await self._look(row_change, failure)
            if found is None:
                commands = own  # it existed a moment ago; try again
                continue
            conflict, first_by_key = found
            action = self._decided(conflict)
            conflict = msgspec.structs.replace(conflict, outcome=outcome(conflict.policy, action), change_no=change_no)
            if action is Action.STOP:
                raise ConflictStop(conflict, failure, self.commands[failure.statement], _why(conflict))
            self._settled[change_no, conflict.type] = conflict
            if action is Action.DROP:
                self._left_out(change_no, conflict.outcome)
                return
            if conflict.type in ORIGIN_DIFFERS:
                own = [command for command in own if command.operation != "origin"]
            if conflict.type is ConflictType.UPDATE_MISSING:
                own = [inserting(row_change)]
            commands = remote_wins(conflict.type, row_change, conflict.local_rows, first_by_key=first_by_key, own=own)
        raise failure

    async def _tried(self, commands: Sequence[Command]) -> StatementFailed | None:
        """Execute the commands of one change; return the failure, undone."""
        self.commands = list(commands)
        # Whose row it is must be known before its new values are looked at, as in the built-in subscription.
        n_looks = max((at for at, command in enumerate(commands, 1) if command.operation == "origin"), default=0)
        for at, part in ((0, self.commands[:n_looks]), (n_looks, self.commands[n_looks:])):
            try:
                if part:
                    await self._session.piece(part)
            except StatementFailed as failure:
                await self._session.undo_piece()
                failure.statement += at if failure.statement >= 0 else 0
                return failure
        return None

    def _left_out(self, change_no: int, done: ConflictOutcome) -> None:
        """Correct the outcome of a change's earlier conflicts, undone when a later one left the change out."""
        for (number, kind), conflict in list(self._settled.items()):
            if number == change_no:
                self._settled[number, kind] = msgspec.structs.replace(conflict, outcome=done)

    async def _look(self, change: RowChange, failure: StatementFailed) -> tuple[Conflict, bool] | None:
        """Return the conflict that a failure means, None if nothing is in the way now; raise it if it is none."""
        subject = await self._local.subject(change) if change.operation != "insert" else None
        if failure.sqlstate == _UNIQUE:
            return await self._look_for_rows_in_the_way(change, subject, failure)
        if change.operation == "insert":
            return None  # the row that was to be overwritten or deleted was not found: none of its own is missing
        is_delete = change.operation == "delete"
        if subject is None:
            if is_delete and change.plan.may_go_with_parent:
                return None
            kind = ConflictType.DELETE_MISSING if is_delete else ConflictType.UPDATE_MISSING
            return self._conflict(kind, change, ()), False
        is_origin = self.commands[failure.statement].operation == "origin"
        if is_origin and _is_foreign(subject, change.plan):
            kind = ConflictType.DELETE_ORIGIN_DIFFERS if is_delete else ConflictType.UPDATE_ORIGIN_DIFFERS
            return self._conflict(kind, change, (subject,)), False
        # It exists, yet was not found as it should be, because of an identity column that SQL cannot set (T-50), or
        # because it has just come.
        if not is_origin and any(column.is_identity_always for column in change.plan.columns):
            raise failure
        return None

    async def _look_for_rows_in_the_way(
        self, change: RowChange, subject: LocalRow | None, failure: StatementFailed
    ) -> tuple[Conflict, bool] | None:
        rows, first_by_key = await self._local.in_the_way(change, subject, failure)
        if not rows:
            return None
        names = {name for row in rows for name in row.constraints}
        # An update whose row was missing has become an insert.
        is_insert = subject is None
        kind = ConflictType.INSERT_EXISTS if is_insert else ConflictType.UPDATE_EXISTS
        if len(names) > 1:
            kind = ConflictType.MULTIPLE_UNIQUE_CONFLICTS
        return self._conflict(kind, change, rows), first_by_key

    def _conflict(self, kind: ConflictType, change: RowChange, rows: tuple[LocalRow, ...]) -> Conflict:
        relation = change.plan.relation
        policy = self._rules.policy(kind, relation.qualified_name)
        return Conflict(
            type=kind,
            schema=relation.schema,
            table=relation.name,
            operation=change.operation,
            key=change.key(),
            remote_row=change.remote_row(),
            is_complete=change.is_complete,
            local_rows=rows,
            source=self._source,
            change_no=0,
            policy=policy,
            outcome=ConflictOutcome.STOPPED,
        )

    def _decided(self, conflict: Conflict) -> Action:
        times = [row.commit_time_us for row in conflict.local_rows if row.commit_time_us is not None]
        facing = Facing(
            type=conflict.type,
            is_complete=conflict.is_complete,
            remote_time_us=self._source.commit_time_us,
            local_time_us=max(times, default=None),
            is_remote_greater=_is_greater(conflict),
        )
        return decide(conflict.policy, facing)


def _is_foreign(row: LocalRow, plan: TablePlan) -> bool:
    """Return whether another origin wrote a row last, as `Statements.row_foreign` asks."""
    return row.origin is not None and not row.origin.startswith(plan.own_origins)


def _is_greater(conflict: Conflict) -> bool:
    """Compare the published columns of both rows as text; a column that was not sent has the local row's value."""
    remote = conflict.remote_row or {}
    if conflict.operation == "delete" or not conflict.local_rows:
        return False
    local = conflict.local_rows[0].values
    return _sorted(remote) > _sorted({name: local.get(name) for name in remote})


def _sorted(row: dict[str, str | None]) -> list[tuple[str, bool, str]]:
    return [(name, value is not None, value or "") for name, value in sorted(row.items())]


def _why(conflict: Conflict) -> str:
    """Return why a policy other than error stops."""
    if conflict.policy is Policy.ERROR:
        return ""
    return "the publisher did not send its unchanged large columns, so its row can be neither made nor compared"


def remote_wins(
    kind: ConflictType, change: RowChange, rows: Sequence[LocalRow], *, first_by_key: bool, own: Sequence[Command]
) -> list[Command]:
    """Return the commands that make the target hold the publisher's row.

    - Of the rows in the way of an insert one becomes the new row, the one with its key if there is one; so columns that
      only the target has keep their values. All others are deleted.
    - Rows in the way of an update are deleted, then the update is executed.
    - A row last written by another session or origin is updated or deleted as if it were ours; a missing one is
      inserted.

    Args:
        kind: of the conflict.
        change: that met it.
        rows: in the way.
        first_by_key: the first of them has the new row's key.
        own: commands of the change itself, which ignore who wrote the row; of an update whose row is missing the
            insert.
    """
    if kind not in EXISTS:
        return [*own]
    if change.operation == "update":
        return [*(_delete(change, row) for row in rows), *own]
    if len(rows) > 1 and not first_by_key:
        # None is surely the same row, so it is not known whose target-only columns to keep.
        return [*(_delete(change, row) for row in rows), *own]
    if any(column.is_identity_always for column in change.plan.columns) or not change.plan.columns:
        # SQL cannot set such a column (T-50).
        return [*(_delete(change, row) for row in rows), *own]
    return [*(_delete(change, row) for row in rows[1:]), _overwrite(change, rows[0])]


def inserting(change: RowChange) -> Command:
    """Return the insert of a change's new row, which is complete."""
    plan = change.plan
    prepared = Statements(plan).row_insert(tuple(range(len(plan.columns))))
    parameters = _values(change, prepared.positions)
    return Command(prepared, parameters, expected=_expected(change), operation="insert", plan=plan)


def _delete(change: RowChange, row: LocalRow) -> Command:
    text = f"DELETE FROM {only(change.plan)} AS t WHERE t.ctid = $1::tid AND t.tableoid = {_table(row)}"  # noqa: S608  quoted
    return _command(text, [row.ctid.encode()], "delete", change)


def _overwrite(change: RowChange, row: LocalRow) -> Command:
    columns = change.plan.columns
    statements = Statements(change.plan)
    assigned = statements.assigned(range(len(columns)))
    texts, positions = statements.row_values(assigned, first=2)
    pairs = zip(assigned, texts, strict=True)
    sets = ", ".join(f"{identifier(columns[position].name)} = {text}" for position, text in pairs)
    text = f"UPDATE {only(change.plan)} AS t SET {sets} WHERE t.ctid = $1::tid AND t.tableoid = {_table(row)}"  # noqa: S608  quoted
    text += f" AND {types_unaltered(change.plan.facts, columns)}"
    return _command(text, [row.ctid.encode(), *_values(change, positions)], "update", change)


def _values(change: RowChange, positions: Sequence[int]) -> list[bytes | None]:
    new = change.new or []
    return [None if (value := new[position]) is None else text_of(value) for position in positions]


def _table(row: LocalRow) -> str:
    return f"{literal(row.table)}::pg_catalog.regclass"


def _command(text: str, parameters: list[bytes | None], operation: Operation, change: RowChange) -> Command:
    made = statement(text, parameters).prepared
    assert isinstance(made, Sql)
    return Command(made, parameters, expected=_expected(change), operation=operation, plan=change.plan)


def _expected(change: RowChange) -> int:
    return ANY_COUNT if change.plan.facts.triggers else 1

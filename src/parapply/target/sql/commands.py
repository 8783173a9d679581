"""Commands that execute a batch: its steps as statements with parameters and the row counts they must have.

In: steps of the plan. Out: `Command`s in the order to execute them. Must never decide what is right: a count that
differs is the session's to notice and the worker's to retry.

On the hot path (sets) no object is made per column: values are the slices of the plan's rows, joined once per column
and statement. A binary ``text[]`` is a header and the length-prefixed values as pgoutput sent them; the compiled twin
makes arrays of some other types as well (`wire/rows.py`), so that the target need not parse them.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Literal

from parapply.errors import ProtocolError
from parapply.model import FRAME_HEADER_BYTES
from parapply.plan.foreign_keys import deleted_last, parents_first, ties
from parapply.plan.steps import OrderedStep, TablesStep, TruncateStep
from parapply.plan.table import table_name
from parapply.plan.table_changes import (
    NET_ABSENT,
    NET_DELETE,
    NET_INSERT,
    NET_REPLACE,
    NET_UPDATE,
    InsertSegment,
    NetSegment,
    RowSegment,
)
from parapply.target.session.pipeline import ANY_COUNT, Statement
from parapply.target.sql.moves import can_move, runs_of_moves
from parapply.target.sql.statements import (
    CHECK_LATER,
    CHECK_NOW,
    NO_ACTING_KEYS,
    NO_FOREIGN_CODE,
    Sql,
    Statements,
    acting_code,
    emptying,
    lock_table,
)
from parapply.target.sql.whole_rows import net_rows
from parapply.wire.rows import (
    BINARY_TYPES,
    DELETE,
    INSERT,
    KIND_AT,
    UNCHANGED,
    Row,
    by_columns,
    columns_of,
    has_unchanged,
    read_delete,
    read_insert,
    read_update,
    text_of,
    texts_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from parapply.plan.steps import Step
    from parapply.plan.table import TablePlan
    from parapply.plan.table_changes import Effects, TableChanges
    from parapply.target.sql.whole_rows import Group
    from parapply.wire.rows import KeptRow

Operation = Literal[
    "insert", "update", "delete", "truncate", "exists", "origin", "incomplete", "code", "guard", "role", "reference",
    "cascade",
]  # fmt: skip

_INT4: Final = 23
_OID: Final = 26
#: Of the elements of arrays that a set form takes as text.
TEXT_OID: Final = 25
_array_head = struct.Struct(">iiIii").pack
_length = struct.Struct(">i").pack
_oid = struct.Struct(">I").pack

#: Bytes of rows in one set statement at most: far below the gigabyte that one parameter may have (trap T-45).
SET_BYTES: Final = 32 * 1024 * 1024
#: Bytes of rows in one set statement where rows are large. The target keeps a statement's parameters three times: in
#: its message, as elements and as an array. With many more, glibc gives memory back to the kernel after each statement
#: (mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD), and the faults for each page of the next one took a quarter of
#: the target's CPU with rows of 4 kB, a sixth with 0.8 kB. With half as many the statements cost leader and target more
#: than that spares, with twice as many nothing is gained. With small rows the cost of a statement counts for more.
RUN_BYTES: Final = 256 * 1024
#: Bytes of a row, on average over a set, from which rows are large.
LARGE_ROW_BYTES: Final = 512
#: Tables of a step from which few rows of one are inserted by their values: more changes than go in one flight, for
#: which the server would have to check the counts of set forms.
_MANY_TABLES: Final = 256
#: Rows that are few: of more a set form costs the target less, also where it is not prepared.
_FEW_ROWS: Final = 32
#: Rows that get other keys; below this number single statements cost no more than a set.
_FEW_MOVES: Final = 4
#: Commands of a batch up to which its `code_check` is kept, and how many are.
_FEW_COMMANDS: Final = 8
_CHECKS: Final = 1024


class Command(Statement):
    """One statement of a batch, what it is for, and the number of rows it must report."""

    __slots__ = ("expected", "operation", "others", "plan")

    prepared: Sql

    def __init__(
        self,
        prepared: Sql,
        parameters: Sequence[bytes | None],
        *,
        expected: int,
        operation: Operation,
        plan: TablePlan,
    ) -> None:
        """Keep the arguments; for a truncate of several tables `plan` is the first one's, and `others` come later."""
        super().__init__(prepared, parameters, is_binary=prepared.is_set)
        self.expected = expected
        self.operation: Operation = operation
        self.plan = plan
        self.others: tuple[TablePlan, ...] = ()

    @property
    def plans(self) -> tuple[TablePlan, ...]:
        """Return the plans of all tables that it writes to."""
        return self.plan, *self.others


def code_check(commands: Sequence[Command], role: str) -> list[Command]:
    """Return commands that fail if code unknown to the plans acts on a table; they follow the commands of a batch.

    Sets write net changes, in the order of the keys: a trigger that was enabled since the catalogue was read would see
    these instead of every change in source order. So would one of a table that has taken the name of the one planned,
    and a row trigger whose function has changed. A batch that fails is repeated row by row, in order.

    Args:
        commands: of the batch; none, if they are none.
        role: session_replication_role of the session.
    """
    plans = {id(plan): plan for command in commands for plan in command.plans}
    facts = [plan.facts for plan in plans.values()]
    unaware = {(one.oid, table_name(one)): one for one in facts if not (one.triggers or one.rules)}
    if not unaware:
        return []
    prepared = acting_code(role, is_partitioned=any(one.is_partitioned for one in unaware.values()))
    known = text_array([each.version for one in unaware.values() for each in one.row_triggers])
    parameters = [oid_array([oid for oid, _ in unaware]), text_array([name for _, name in unaware]), known]
    return [Command(prepared, parameters, expected=0, operation="code", plan=commands[0].plan)]


def guards(plans: Iterable[TablePlan]) -> list[Command]:
    """Return first commands, which fail if a table has code of an owner who may not become the role that applies.

    The lock of each keeps triggers, constraints and the like away until the end of the transaction, or until it goes
    back to an earlier savepoint.
    """
    tables = {(plan.facts.oid, plan.relation): plan for plan in plans if plan.facts.foreign is not None}
    made: list[Command] = []
    for plan in tables.values():
        columns = [*plan.columns, *[one.column for one in plan.constants]]
        sent = text_array([column.name for column in columns])
        names = [name.encode("utf-8", "surrogateescape") for name in (plan.facts.schema, plan.facts.name)]
        for prepared, parameters in ((lock_table(plan.facts), []), (NO_FOREIGN_CODE, [*names, sent])):
            made.append(Command(prepared, parameters, expected=ANY_COUNT, operation="guard", plan=plan))
    return made


class CommandBuilder:
    """Turns steps into commands. Keeps the statements of each plan; one builder serves all workers of a leader."""

    def __init__(
        self,
        has_prepared: Callable[[], bool] = lambda: False,
        *,
        may_change_role: bool = False,
        may_lock_rows: bool = True,
    ) -> None:
        """Start without statements.

        Args:
            has_prepared: returns whether a transaction is prepared on the target. It may hold one of several equal
            rows, and its outcome may be waiting for a change of another: then a row is chosen that none holds.
            may_change_role: sessions of the role `origin` may take the role `replica` (`target/sql/references.py`).
            may_lock_rows: as of `Statements`.
        """
        self.has_prepared = has_prepared
        self._may_lock_rows = may_lock_rows
        #: Written by the worker whose session was refused.
        self.may_change_role = may_change_role
        # By identity: hashing a plan's facts for every batch would cost more than its statements. Each entry keeps
        # its plan alive, so an identity cannot come back for another.
        self._statements: dict[int, Statements] = {}
        #: `code_check` of batches of few commands by the identities of their plans, and the plans, to keep them alive.
        self._checks: dict[tuple[int, ...], tuple[list[TablePlan], list[Command]]] = {}
        #: Target tables with a trigger that seems to leave rows out.
        self._vetoed: set[int] = set()
        #: The step in hand has many tables, or one.
        self._is_wide = self._is_alone = False
        #: A plan has owners whose code must not run: see `_guarded`.
        self._is_guarding = False

    def of_steps(self, steps: Sequence[Step], size_bytes: int) -> list[Command]:
        """Return the commands of a batch's steps, in order.

        Args:
            steps: of the batch.
            size_bytes: of all its changes; decides whether statements must be cut by size.

        Raises:
            ProtocolError: a change cannot be read.
            TargetRefused: an update or a delete came for a table that allows none.
        """
        commands: list[Command] = []
        for step in steps:
            if isinstance(step, TablesStep):
                self._tables(step, size_bytes, commands, is_late=False)
            elif isinstance(step, OrderedStep):
                commands += self.in_order(step.changes)
            else:
                commands += self._truncate(step)
        return self._guarded(commands) if self._is_guarding else commands

    def in_order(
        self, changes: Sequence[tuple[TablePlan, bytes] | TruncateStep], *, asks_first: bool = True
    ) -> list[Command]:
        """Return the commands of changes one by one, in source order.

        Args:
            changes: of whole transactions.
            asks_first: where a trigger may veto a change, the row is looked for in a statement before it (trap T-43).
                False: the change itself must find it, so that a veto is a wrong count, but for tables of `vetoed`.

        Raises:
            ProtocolError, TargetRefused: as `of_steps`.
        """
        commands: list[Command] = []
        for change in changes:
            if isinstance(change, TruncateStep):
                commands += self._truncate(change)
            else:
                self._row(*change, commands, asks_first=asks_first)
        return self._guarded(commands) if self._is_guarding else commands

    def vetoed(self, plan: TablePlan) -> None:
        """Note that a trigger may have vetoed a change of a table: from now on it is asked first."""
        self._vetoed.add(plan.facts.oid)

    def of_late_keys(self, steps: Sequence[Step], size_bytes: int) -> list[Command]:
        """Return the commands that `of_steps` left out, for keys that an earlier batch held.

        They are for the end of the target transaction, when all earlier ones have committed.
        """
        commands: list[Command] = []
        for step in steps:
            if isinstance(step, TablesStep):
                self._tables(step, size_bytes, commands, is_late=True)
        return self._guarded(commands) if self._is_guarding else commands

    def for_thread(self) -> CommandBuilder:
        """Return another builder, for a thread: no two may use one."""
        has_prepared = self.has_prepared()
        return CommandBuilder(lambda: has_prepared, may_lock_rows=self._may_lock_rows)

    def forget(self) -> None:
        """Drop the statements of plans that are no longer used."""
        self._statements.clear()
        self._checks.clear()

    def code_check(self, commands: Sequence[Command], role: str) -> list[Command]:
        """Do what the function does. Of few commands it is kept for batches of the same tables; `role` is one."""
        if len(commands) > _FEW_COMMANDS or any(command.others for command in commands):
            return code_check(commands, role)
        key = tuple([id(command.plan) for command in commands])
        kept = self._checks.get(key)
        if kept is None:
            if len(self._checks) >= _CHECKS:
                self._checks.clear()
            kept = self._checks[key] = [command.plan for command in commands], code_check(commands, role)
        return kept[1]

    def _guarded(self, commands: list[Command]) -> list[Command]:
        """Put the `guards` of their tables before commands."""
        return guards([plan for command in commands for plan in (command.plan, *command.others)]) + commands

    def _of(self, plan: TablePlan) -> Statements:
        found = self._statements.get(id(plan))
        if found is None:
            found = self._statements[id(plan)] = Statements(plan, BINARY_TYPES, may_lock_rows=self._may_lock_rows)
            self._is_guarding = self._is_guarding or plan.facts.foreign is not None
        return found

    def _tables(self, step: TablesStep, size_bytes: int, out: list[Command], *, is_late: bool) -> None:
        tables = list(step.tables.values())
        self._is_wide, self._is_alone = len(tables) >= _MANY_TABLES, len(tables) == 1
        if any(changes.plan.foreign_keys for changes in tables):
            tied = {id(changes) for pair in ties(tables) for changes in pair}
            self._family([changes for changes in tables if id(changes) in tied], size_bytes, out, is_late=is_late)
            tables = [changes for changes in tables if id(changes) not in tied]
        for changes in tables:
            for segment in changes.segments:
                if isinstance(segment, NetSegment):
                    if self._is_wide and not is_late and _are_few_new(changes, segment):
                        rows = [row for _, row in segment.net.values()]
                        out += self._new_rows(self._of(segment.plan), rows, size_bytes)
                    elif effects := _effects(changes, segment, is_late=is_late):
                        self._deletes(segment, effects, size_bytes, out)
                        self._writes(segment, effects, size_bytes, out)
                elif is_late:
                    continue
                elif isinstance(segment, RowSegment):
                    self._rows(segment, size_bytes, out)
                elif segment.rows:
                    self._inserts(segment, size_bytes, out)

    def _family(self, tables: list[TableChanges], size_bytes: int, out: list[Command], *, is_late: bool) -> None:
        """Add the commands of tables that foreign keys tie, in the order that `plan/foreign_keys.py` explains.

        Each has one segment, of net changes or of inserts; a batch of others is applied row by row.
        """
        ordered = parents_first(tables)
        last = deleted_last(tables)
        nets = {
            id(changes): (segment, effects)
            for changes in ordered
            for segment in changes.segments
            if isinstance(segment, NetSegment) and (effects := _effects(changes, segment, is_late=is_late))
        }
        for changes in reversed(ordered):
            if id(changes) in nets:
                segment, effects = nets[id(changes)]
                self._deletes(
                    segment, _without(effects, NET_DELETE) if id(changes) in last else effects, size_bytes, out
                )
        for changes in ordered:
            if id(changes) in nets:
                self._writes(*nets[id(changes)], size_bytes, out)
            elif not is_late:
                for each in changes.segments:
                    if isinstance(each, InsertSegment) and each.rows:
                        self._inserts(each, size_bytes, out)
        for changes in reversed(ordered):
            if id(changes) in nets and id(changes) in last:
                segment, effects = nets[id(changes)]
                self._deletes(segment, _without(effects, NET_REPLACE), size_bytes, out)

    def _rows(self, segment: RowSegment, size_bytes: int, out: list[Command]) -> None:
        """Add commands that apply changes in order: as sets of rows where the result is the same, else one by one."""
        if segment.moves and size_bytes <= SET_BYTES and can_move(segment.plan):
            self._moves(segment, out)
            return
        may_net = segment.plan.nets_whole_rows and size_bytes <= SET_BYTES and not self.has_prepared()
        net = net_rows(segment) if may_net else None
        if net is None:
            for frame in segment.frames:
                self._row(segment.plan, frame, out)
            return
        statements = self._of(segment.plan)
        for group in net.groups:
            build = partial(statements.whole_delete, group.nulls)
            if group.present:
                build = partial(statements.whole_update, group.present, group.nulls)
            out.append(_whole(statements, build, group))
        if net.inserts:
            out += self._new_rows(statements, net.inserts, size_bytes)

    def _moves(self, segment: RowSegment, out: list[Command]) -> None:
        """Add commands that give rows other keys, in runs where no move touches a key of another, in any order."""
        plan = segment.plan
        statements = self._of(plan)
        for start, end in runs_of_moves(segment):
            if end - start < _FEW_MOVES:
                for frame in segment.frames[start:end]:
                    self._row(plan, frame, out)
                continue
            for present, pairs in _by_present(segment.moves[start:end]).items():
                olds, news = [old for old, _ in pairs], [row for _, row in pairs]
                arrays = _both_columns(statements, partial(statements.set_move, present), news, olds)
                out.append(Command(*arrays, expected=len(pairs), operation="update", plan=plan))

    def _inserts(self, segment: InsertSegment, size_bytes: int, out: list[Command]) -> None:
        out += self._new_rows(self._of(segment.plan), segment.rows, size_bytes)

    def _new_rows(self, statements: Statements, rows: list[KeptRow], size_bytes: int) -> Iterator[Command]:
        """Yield commands that insert rows: by their values if there are few of them for each of many tables."""
        plan = statements.plan
        is_few = self._is_wide and len(rows) <= _FEW_ROWS and size_bytes <= SET_BYTES
        if not is_few or plan.replaced or plan.facts.rules:
            yield from _sets(statements, partial(statements.set_insert, _all(plan)), rows, size_bytes, "insert")
            return
        # Only a row of an update may lack values.
        prepared = statements.few_insert(len(rows))
        yield Command(prepared, texts_of(rows), expected=len(rows), operation="insert", plan=plan)

    def _deletes(self, segment: NetSegment, effects: Effects, size_bytes: int, out: list[Command]) -> None:
        """Come before `_writes`: a replaced row is in both."""
        if deleted := effects[NET_DELETE - 1] + effects[NET_REPLACE - 1]:
            plan = segment.plan
            statements = self._of(plan)
            if plan.checks_origin:
                self._foreign(plan, deleted, size_bytes, out)
            out += _sets(statements, statements.set_delete, deleted, size_bytes, "delete")

    def _foreign(self, plan: TablePlan, rows: list[KeptRow], size_bytes: int, out: list[Command]) -> None:
        """Add a check whether another writer wrote rows last; it fails by its count if it finds any."""
        statements = self._of(plan)
        for command in _sets(statements, statements.set_foreign, rows, size_bytes, "origin"):
            command.expected = 0
            out.append(command)

    def _writes(self, segment: NetSegment, by_effect: Effects, size_bytes: int, out: list[Command]) -> None:
        plan = segment.plan
        statements = self._of(plan)
        if absent := by_effect[NET_ABSENT - 1]:
            # Inserted and deleted inside the batch. A row found here means the insert would have failed: the wrong
            # count rolls all back.
            for command in _sets(statements, statements.set_delete, absent, size_bytes, "insert"):
                command.expected = 0
                out.append(command)
        for present, group in _by_columns(by_effect[NET_UPDATE - 1], segment).items():
            if plan.checks_origin:
                self._foreign(plan, group, size_bytes, out)
            is_lone = self._is_alone and len(segment.net) == 1
            build = partial(statements.set_update, present, is_lone=is_lone)
            out += _sets(statements, build, group, size_bytes, "update")
        if inserted := by_effect[NET_INSERT - 1] + by_effect[NET_REPLACE - 1]:
            out += self._new_rows(statements, inserted, size_bytes)

    def _row(self, plan: TablePlan, frame: bytes, out: list[Command], *, asks_first: bool = True) -> None:
        kind = frame[KIND_AT]
        statements = self._of(plan)
        # An insert that is vetoed is no conflict, and needs no row to be there.
        asks_first = asks_first or kind == INSERT or plan.facts.oid in self._vetoed
        # In source order a parent's delete may also have taken the row along on the target (trap T-25).
        may_miss = kind == DELETE and plan.may_go_with_parent
        expected = ANY_COUNT if may_miss or (plan.facts.triggers and asks_first) else 1
        if kind == INSERT:
            row = read_insert(frame, len(plan.columns))
            if has_unchanged(row):
                out.append(_incomplete(plan, row))
                return
            prepared = statements.row_insert(_all(plan))
            parameters = [_text(row[position], frame) for position in prepared.positions]
            out.append(Command(prepared, parameters, expected=expected, operation="insert", plan=plan))
            return
        if kind == DELETE:
            old: Row | None = read_delete(frame, len(plan.columns))
            new: Row = []
            present: tuple[int, ...] = ()
            prepared = statements.row_delete()
            is_moved = True
            operation: Operation = "delete"
        else:
            old, new = read_update(frame, len(plan.columns))
            present = tuple([position for position, value in enumerate(new) if value is not UNCHANGED])
            is_moved = old is not None and _is_moved(plan, old, new)
            prepared = statements.row_update(present, is_key_moved=is_moved)
            operation = "update"
        if plan.is_full and old is None:
            raise ProtocolError(chr(kind), 5, "the old row of a table with REPLICA IDENTITY FULL is missing")
        found = new if old is None else old
        if plan.checks_delete_origin if kind == DELETE else plan.checks_update_origin:
            foreign = statements.row_foreign(may_miss=may_miss)
            values = [_text(found[position], frame) for position in foreign.old_positions]
            # Twice where it cannot say that it waited for a row that was replaced: then the second finds the new one.
            out += [Command(foreign, values, expected=0, operation="origin", plan=plan)] * (2 if may_miss else 1)
        if plan.facts.triggers and asks_first and not may_miss:
            # A trigger may veto the change (trap T-43): a separate statement asks whether the row exists. An update of
            # nothing but ALWAYS identity columns also asks whether they have the new value already (trap T-50).
            identity = tuple([position for position in present if plan.columns[position].is_identity_always])
            exists = statements.row_update(identity) if identity else statements.row_exists(frees_key=is_moved)
            values = [_text(new[position], frame) for position in exists.positions]
            values += [_text(found[position], frame) for position in exists.old_positions]
            asked: Operation = "delete" if operation == "delete" else "exists"
            out.append(Command(exists, values, expected=1, operation=asked, plan=plan))
        parameters = [_text(new[position], frame) for position in prepared.positions]
        parameters += [_text(found[position], frame) for position in prepared.old_positions]
        out.append(Command(prepared, parameters, expected=expected, operation=operation, plan=plan))

    def _truncate(self, step: TruncateStep) -> list[Command]:
        self._is_guarding = self._is_guarding or any(plan.facts.foreign is not None for plan in step.plans)
        tables = [(plan.facts, plan.constants) for plan in step.plans]
        texts = prepared = emptying(tables, restart_identity=step.restart_identity, is_partial=step.is_partial)
        if any(foreign.is_enforced for plan in step.plans for foreign in plan.foreign_keys):
            # Earlier changes of the table may have left deferred checks, and PostgreSQL truncates no such table.
            texts = [CHECK_NOW, *prepared, CHECK_LATER]
        commands = [Command(text, (), expected=ANY_COUNT, operation="truncate", plan=step.plans[0]) for text in texts]
        if step.is_partial:
            # A DELETE would take along rows of a table that is left out, which may be the target's own.
            names = text_array([table_name(facts) for facts, _ in tables])
            looked = Command(NO_ACTING_KEYS, [names, names], expected=0, operation="cascade", plan=step.plans[0])
            commands.insert(0, looked)
        for command in commands:
            command.others = step.plans[1:]
        return commands


def oid_array(oids: Sequence[int]) -> bytes:
    """Return a binary oid[]."""
    return _array(_OID, [_oid(oid) for oid in oids])


def text_array(texts: Sequence[str]) -> bytes:
    """Return a binary text[]."""
    return _array(TEXT_OID, [text.encode("utf-8", "surrogateescape") for text in texts])


def _array(type_oid: int, elements: list[bytes]) -> bytes:
    """Return a binary array: dimensions, no NULLs, element type, length, lower bound, then the elements (arrayfuncs.c).

    Each of them follows its length.
    """
    head = _array_head(1, 0, type_oid, len(elements), 1)
    return head + b"".join([_length(len(element)) + element for element in elements])


def _numbers(each: list[int]) -> bytes:
    if each.count(each[0]) < len(each):
        return _array(_INT4, [_length(number) for number in each])
    return _array_head(1, 0, _INT4, len(each), 1) + (_length(4) + _length(each[0])) * len(each)  # mostly no twins


def _incomplete(plan: TablePlan, row: Row) -> Command:
    """Return a command that always fails, in place of an insert without all values; it has the missing positions."""
    missing = tuple([position for position, value in enumerate(row) if value is UNCHANGED])
    prepared = Sql(name=b"incomplete", text=b"SELECT WHERE false", n_parameters=0, is_set=False, positions=missing)
    return Command(prepared, (), expected=1, operation="incomplete", plan=plan)


def _effects(changes: TableChanges, segment: NetSegment, *, is_late: bool) -> Effects | None:
    """Return the rows by net effect, of late keys or of the others; None without any."""
    if is_late and not changes.late_keys:
        return None
    return segment.by_effect(changes.late_keys, is_late=is_late)


def _are_few_new(changes: TableChanges, segment: NetSegment) -> bool:
    """Return whether net changes are a few new rows, all to be written now; their order then does not matter.

    The last segment of a table may be empty.
    """
    return 0 < len(segment.net) <= _FEW_ROWS and not (segment.counts[1] or segment.counts[2] or changes.late_keys)


def _without(effects: Effects, effect: int) -> Effects:
    return [[] if number == effect else rows for number, rows in enumerate(effects, 1)]


def _all(plan: TablePlan) -> tuple[int, ...]:
    return tuple(range(len(plan.columns)))


def _sets(
    statements: Statements, build: Callable[[], Sql], rows: list[KeptRow], size_bytes: int, operation: Operation
) -> Iterator[Command]:
    """Yield the statement for runs of rows, each with one array for each position."""
    plan = statements.plan
    for run in _cut(rows, size_bytes, plan):
        prepared = build()
        parameters = columns_of(run, prepared.positions, prepared.type_oids, len(plan.columns))
        if None in parameters:
            # Never again for this plan: where one such value comes others do, and each statement text is planned again.
            pairs = zip(prepared.positions, parameters, strict=True)
            statements.send_as_text([position for position, array in pairs if array is None])
            prepared = build()
            parameters = columns_of(run, prepared.positions, prepared.type_oids, len(plan.columns))
        yield Command(prepared, parameters, expected=len(run), operation=operation, plan=plan)


def _whole(statements: Statements, build: Callable[[], Sql], group: Group) -> Command:
    """Return the statement that changes a group's rows, which are found by all their columns."""
    plan = statements.plan
    prepared, parameters = _both_columns(statements, build, group.news, group.olds)
    numbers = [_numbers(each) for each in (group.lows, group.highs)]
    operation: Operation = "update" if group.present else "delete"
    return Command(prepared, [*parameters, *numbers], expected=group.n_rows, operation=operation, plan=plan)


def _both_columns(
    statements: Statements, build: Callable[[], Sql], news: list[Row], olds: list[Row]
) -> tuple[Sql, list[bytes | None]]:
    """Return a statement that takes new and old rows, and its arrays of both."""
    prepared = build()
    parameters = _columns(prepared, news, olds, len(statements.plan.columns))
    if None in parameters:
        # As in `_sets`.
        pairs = zip((*prepared.positions, *prepared.old_positions), parameters, strict=True)
        statements.send_as_text([position for position, array in pairs if array is None])
        prepared = build()
        parameters = _columns(prepared, news, olds, len(statements.plan.columns))
    return prepared, parameters


def _columns(prepared: Sql, news: list[Row], olds: list[Row], n_columns: int) -> list[bytes | None]:
    n_new = len(prepared.positions)
    arrays = columns_of(news, prepared.positions, prepared.type_oids[:n_new], n_columns) if n_new else []
    return arrays + columns_of(olds, prepared.old_positions, prepared.type_oids[n_new:], n_columns)


def _by_present(moves: list[tuple[Row, Row]]) -> dict[tuple[int, ...], list[tuple[Row, Row]]]:
    """Group rows by the columns of the new one that have a value, as `_by_columns` does."""
    groups: dict[tuple[int, ...], list[tuple[Row, Row]]] = {}
    for move in moves:
        present = tuple([position for position, value in enumerate(move[1]) if value is not UNCHANGED])
        groups.setdefault(present, []).append(move)
    return groups


def _by_columns(rows: list[KeptRow], segment: NetSegment) -> dict[tuple[int, ...], list[KeptRow]]:
    """Group rows by the columns that have a value: unchanged TOAST is absent (trap T-41)."""
    if not rows:
        return {}
    if not segment.has_unchanged:
        return {_all(segment.plan): rows}
    return by_columns(rows, len(segment.plan.columns))


def _cut(rows: list[KeptRow], size_bytes: int, plan: TablePlan) -> Iterator[list[KeptRow]]:
    """Yield runs of rows of at most about SET_BYTES, of large ones about RUN_BYTES; nothing for no rows.

    Args:
        rows: of one set.
        size_bytes: of the whole batch, so at least theirs.
        plan: of their table.
    """
    if not rows:
        return
    if len(rows) == 1 or size_bytes < min(LARGE_ROW_BYTES * len(rows), SET_BYTES):
        yield rows
        return
    # A frame is its row and few bytes more. A call for each would cost more than all else here.
    sizes = map(len, rows) if {*map(type, rows)} == {bytes} else map(_row_bytes, rows)
    ends = list(accumulate(sizes))
    is_early = ends[-1] >= LARGE_ROW_BYTES * len(rows) and not plan.is_checked_by_statement
    most_bytes = min(RUN_BYTES, SET_BYTES) if is_early else SET_BYTES
    start = before = 0
    while start < len(rows):
        end = max(start + 1, bisect_right(ends, before + most_bytes, start))
        yield rows[start:end]
        start, before = end, ends[end - 1]


def _row_bytes(row: KeptRow) -> int:
    return len(row) if isinstance(row, bytes) else sum([len(value) for value in row if value is not UNCHANGED])


def _is_moved(plan: TablePlan, old: Row, new: Row) -> bool:
    return any(new[position] is not UNCHANGED and new[position] != old[position] for position in plan.key_positions)


def _text(value: bytes | None, frame: bytes) -> bytes | None:
    if value is UNCHANGED:
        # Only a key value can get here: without it the row cannot be found, and guessing would write another one.
        raise ProtocolError(chr(frame[KIND_AT]), FRAME_HEADER_BYTES, "a value that finds the row was not sent")
    return text_of(value)

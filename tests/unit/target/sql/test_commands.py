"""Batches as statements: which, in what order, with which arrays and expected counts."""

from __future__ import annotations

import struct
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from parapply.errors import ProtocolError
from parapply.plan.batch import Batch
from parapply.plan.scheduler import Scheduler
from parapply.plan.steps import ordered_changes
from parapply.plan.table import Plans, RowTrigger, table_name
from parapply.plan.table_changes import NET_REPLACE
from parapply.target.catalogue.match import match
from parapply.target.session.pipeline import ANY_COUNT
from parapply.target.sql import commands
from parapply.target.sql.commands import LARGE_ROW_BYTES, RUN_BYTES, Command, CommandBuilder
from parapply.wire.assembler import Assembler
from parapply.wire.rows import BINARY_TYPES, TEXT_OID
from tests import build
from tests.unit import plans as plans_of_tests
from tests.unit.changes_model import KEYLESS, NUMERIC, PAIR, PLAIN, SERIAL, Spec
from tests.unit.changes_stream import Op, Publisher, assembled, batches, ops

if TYPE_CHECKING:
    from collections.abc import Iterable

    from parapply.model import Transaction

NULL = object()


def transaction(plans: Plans, *payloads: bytes, specs: tuple[Spec, ...] = (PLAIN, KEYLESS, SERIAL)) -> Transaction:
    """Return one transaction of these messages; the tables are announced before."""
    for spec in specs:
        plan = spec.plan(0)
        plans.known[plan.relation] = plan
        plans.announce(plan.relation)
    frames = [build.xlog_data(payload) for payload in (build.begin(), *payloads, build.commit())]
    (done,) = Assembler(1 << 30).push(frames)
    return done


def of_batch(*payloads: bytes) -> list[Command]:
    """Return the commands of a batch with one transaction."""
    plans = Plans()
    batch = Batch(1)
    batch.add(transaction(plans, *payloads), plans)
    assert not batch.is_suspect
    return CommandBuilder().of_steps(batch.steps, batch.size_bytes)


def elements(array: bytes | None) -> list[object]:
    """Read a binary array as array_recv does; the compiled twin makes arrays of integers, whose texts come out here."""
    assert array is not None
    dimensions, has_null, element_oid, length, lower = struct.unpack_from("!iiIii", array)
    assert (dimensions, lower) == (1, 1)
    assert element_oid == TEXT_OID or element_oid in BINARY_TYPES
    assert has_null in (0, 1)
    at, values = 20, []
    for _ in range(length):
        (size,) = struct.unpack_from("!i", array, at)
        at += 4
        value = array[at : at + size]
        if element_oid != TEXT_OID:
            value = str(int.from_bytes(value, signed=True)).encode()
        values.append(NULL if size == -1 else value)
        at += max(size, 0)
    assert at == len(array)
    return values


def cells(*values: str | None) -> bytes:
    """Return a row of text values and NULLs."""
    return build.row(*[build.null() if value is None else build.text(value.encode()) for value in values])


def test_sets_come_as_deletes_updates_inserts_with_one_array_a_column() -> None:
    """Values go as slices into arrays, in the order of the statement's positions; a NULL has length -1."""
    oid = PLAIN.oid
    made = of_batch(
        build.insert(cells("2", "new", None), oid=oid),
        build.update(cells("3", "u", "w"), oid=oid),
        build.delete(key=cells("1", None, None), oid=oid),
    )
    assert [command.operation for command in made] == ["delete", "update", "insert"]
    assert [command.expected for command in made] == [1, 1, 1]
    assert all(command.is_binary for command in made)
    delete, update, insert = made
    assert [elements(array) for array in delete.parameters] == [[b"1"]]
    assert [elements(array) for array in insert.parameters] == [[b"2"], [b"new"], [NULL]]
    assert {tuple(elements(array)) for array in update.parameters} == {(b"3",), (b"u",), (b"w",)}


@pytest.mark.parametrize("n_tables", [255, 256])
def test_few_rows_for_each_of_many_tables_are_inserted_by_their_values(n_tables: int) -> None:
    """Of a table with more of them, and of fewer tables, they go as arrays, whose counts the server can check."""
    sent = [plans_of_tests.sent("a", "int4", is_key=True), plans_of_tests.sent("b", "text")]
    columns = [plans_of_tests.column("a"), plans_of_tests.column("b", "text")]
    plans, batch, changes = Plans(), Batch(1), []
    for number in range(n_tables):
        relation = plans_of_tests.relation(*sent, oid=1000 + number, name=f"t{number}")
        facts = plans_of_tests.table(columns, ["a"], oid=number + 1, name=f"t{number}")
        plans.known[relation] = match(relation, facts)
        plans.announce(relation)
        n_rows = {0: 32, 1: 33}.get(number, 1)
        changes += [build.insert(cells(str(row), None), oid=relation.oid) for row in range(n_rows)]
    batch.add(transaction(plans, *changes), plans)
    most, more, *others = CommandBuilder().of_steps(batch.steps, batch.size_bytes)
    are_values = n_tables >= 256
    assert [one.expected for one in (most, more)] == [32, 33]
    assert [one.prepared.is_set for one in (most, more, others[-1])] == [not are_values, True, not are_values]
    if are_values:
        assert most.prepared.name == b""
        assert not most.is_binary
        assert most.parameters == [value for row in range(32) for value in (b"%d" % row, None)]
        assert most.prepared.text.endswith(b"($63, $64)")


def test_code_is_looked_for_on_tables_of_which_none_is_known() -> None:
    """One statement names each table once and expects no row; tables where code runs are in order anyway."""
    row = cells("1", "a", "b")
    plain = of_batch(build.insert(row, oid=PLAIN.oid), build.insert(cells("a", "b"), oid=KEYLESS.oid))
    aware = of_batch(build.insert(row, oid=SERIAL.oid))
    assert commands.code_check([], "replica") == []
    assert commands.code_check(aware, "replica") == []
    (check,) = commands.code_check([*plain, *aware, *plain], "replica")
    assert (check.expected, check.is_binary) == (0, True)
    oids, names, known = check.parameters
    assert oids is not None
    assert elements(known) == []
    assert struct.unpack("!iiIiiiIiI", oids) == (1, 0, 26, 2, 1, 4, PLAIN.facts.oid, 4, KEYLESS.facts.oid)
    assert elements(names) == [table_name(PLAIN.facts).encode(), table_name(KEYLESS.facts).encode()]
    assert b"IN ('A', 'R')" in check.prepared.text
    assert b"IN ('A', 'O')" in commands.code_check(plain, "origin")[0].prepared.text


def test_the_check_of_a_few_tables_is_kept_for_their_next_batch() -> None:
    """The same plans have the same check, other plans another one; plans no longer used keep none."""
    builder = commands.CommandBuilder()
    row = cells("1", "a", "b")
    plain = of_batch(build.insert(row, oid=PLAIN.oid))
    both = [*plain, *of_batch(build.insert(cells("a", "b"), oid=KEYLESS.oid))]
    (kept,) = builder.code_check(plain, "replica")
    assert builder.code_check(plain, "replica") == [kept]
    assert kept.parameters == commands.code_check(plain, "replica")[0].parameters
    assert builder.code_check(both, "replica")[0].parameters == commands.code_check(both, "replica")[0].parameters
    builder.forget()
    assert builder.code_check(plain, "replica") != [kept]


def test_row_triggers_are_known_by_their_versions() -> None:
    """The check of a table with such triggers names the versions that its plan was made with."""
    trigger = RowTrigger(name="trigger r", version="1 2 3 4", reads=(), writes=(), is_function_of_new=True)
    (command,) = of_batch(build.insert(cells("1", "a", "b"), oid=PLAIN.oid))
    facts = msgspec.structs.replace(command.plan.facts, row_triggers=(trigger,))
    command.plan = msgspec.structs.replace(command.plan, facts=facts)
    (check,) = commands.code_check([command], "replica")
    assert elements(check.parameters[2]) == [b"1 2 3 4"]


def test_whole_rows_are_found_by_sets_unless_a_prepared_transaction_may_hold_one() -> None:
    """Deletes, updates and inserts of a table without a key are a statement each, in any order of the changes (T-24).

    While a transaction is prepared each change chooses a row by itself, in source order.
    """
    sent = plans_of_tests.relation(
        *[plans_of_tests.sent(name, "text", is_key=True) for name in ("a", "b")], identity="f", oid=77
    )
    facts = plans_of_tests.table([plans_of_tests.column(name, "text") for name in ("a", "b")], indexed_columns=("a",))
    plan, plans, batch = match(sent, facts), Plans(), Batch(1)
    plans.known[sent] = plan
    plans.announce(sent)
    changes = [
        build.insert(cells("1", None), oid=77),
        build.update(cells("2", "x"), old=cells("3", "x"), oid=77),
        build.insert(cells("4", "x"), oid=77),
        build.delete(old=cells("5", "x"), oid=77),
        build.update(cells("6", "x"), old=cells("4", "x"), oid=77),
        build.delete(old=cells("7", None), oid=77),
    ]
    batch.add(transaction(plans, *changes), plans)
    made = CommandBuilder().of_steps(batch.steps, batch.size_bytes)
    assert [(one.operation, one.expected) for one in made] == [
        ("insert", 1),
        ("delete", 1),
        ("delete", 1),
        ("update", 1),
        ("insert", 1),
    ]
    assert all(one.prepared.is_set for one in made)
    assert len(made[3].parameters) == 2 + 2 + 2
    prepared = CommandBuilder(lambda: True)
    for builder in (prepared, prepared.for_thread()):
        rows = builder.of_steps(batch.steps, batch.size_bytes)
        assert [one.operation for one in rows] == ["insert", "update", "insert", "delete", "update", "delete"]
        assert not any(one.prepared.is_set for one in rows[1:])


def test_a_row_inserted_and_deleted_in_a_batch_must_not_be_there() -> None:
    """Nothing is written, but a row of that key would have refused the insert: it is looked for with count 0 (T-39)."""
    oid = PLAIN.oid
    (command,) = of_batch(
        build.insert(cells("1", "a", "b"), oid=oid), build.delete(key=cells("1", None, None), oid=oid)
    )
    assert (command.operation, command.expected) == ("insert", 0)
    assert b"DELETE" in command.prepared.text


def test_a_replaced_row_is_deleted_and_inserted() -> None:
    """Columns that only the target has must get their defaults again, so delete then insert is not an update."""
    oid = PLAIN.oid
    made = of_batch(build.delete(key=cells("1", None, None), oid=oid), build.insert(cells("1", "n", "m"), oid=oid))
    assert [command.operation for command in made] == ["delete", "insert"]


def test_updates_are_grouped_by_the_columns_that_have_a_value() -> None:
    """An unchanged TOAST value is absent, not NULL (trap T-41)."""
    oid = PLAIN.oid
    without = build.row(build.text(b"1"), build.text(b"a"), build.unchanged())
    made = of_batch(build.update(without, oid=oid), build.update(cells("2", "a", "b"), oid=oid))
    assert [command.expected for command in made] == [1, 1]
    assert sorted(len(command.parameters) for command in made) == [2, 3]


def test_large_sets_are_cut_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """No parameter comes near the gigabyte that PostgreSQL allows; every row is in exactly one cut (trap T-45)."""
    monkeypatch.setattr(commands, "SET_BYTES", 5000)
    width = len(KEYLESS.plan(0).columns)
    rows = [build.insert(cells(*["x" * 900] * width), oid=KEYLESS.oid) for _ in range(20)]
    made = of_batch(*rows)
    assert len(made) > 1
    assert sum(command.expected for command in made) == 20
    assert all(len(parameter or b"") < 5000 for command in made for parameter in command.parameters)
    assert sum(len(elements(command.parameters[0])) for command in made) == 20


@pytest.mark.parametrize(("width", "is_cut"), [(LARGE_ROW_BYTES, True), (LARGE_ROW_BYTES // 4, False)])
def test_sets_of_large_rows_are_cut_early(width: int, *, is_cut: bool) -> None:
    """Above RUN_BYTES the target's memory comes and goes with each statement; for small rows statements cost more."""
    n_rows = 3 * RUN_BYTES // width
    rows = [build.insert(cells(str(number), "x" * width, None), oid=PLAIN.oid) for number in range(n_rows)]
    made = of_batch(*rows)
    assert (len(made) > 1) is is_cut
    assert sum(command.expected for command in made) == n_rows
    found = [value for command in made for value in elements(command.parameters[0])]
    assert len(found) == len(set(found)) == n_rows
    if is_cut:
        assert all(sum(len(array or b"") for array in command.parameters) <= RUN_BYTES for command in made)
        assert len(made) <= 4


def test_rows_that_are_right_only_together_stay_in_one_statement() -> None:
    """A row may refer to another of its table, or take over a deferrable value: both are looked at when it ends."""
    plan = PLAIN.plan(0)
    itself = plans_of_tests.foreign_key("itself", "a", parent_oid=plan.facts.root_oid)
    later = plans_of_tests.unique("later", "a", is_immediate=False)
    for facts in (
        msgspec.structs.replace(plan.facts, foreign_keys=(itself,)),
        msgspec.structs.replace(plan.facts, unique=(later,)),
    ):
        plans = Plans()
        n_rows = 2 * RUN_BYTES // LARGE_ROW_BYTES
        text = "x" * LARGE_ROW_BYTES
        rows = [build.insert(cells(str(number), text, None), oid=PLAIN.oid) for number in range(n_rows)]
        one = transaction(plans, *rows)
        plans.known[plan.relation] = msgspec.structs.replace(plan, facts=facts)
        plans.announce(plan.relation)
        batch = Batch(1)
        batch.add(one, plans)
        made = CommandBuilder().of_steps(batch.steps, batch.size_bytes)
        assert [command.expected for command in made] == [n_rows]


def test_in_order_every_change_is_a_statement_of_its_own() -> None:
    """At the head the target sees what the publisher did, row by row, in text format."""
    plans = Plans()
    oid = PLAIN.oid
    one = transaction(
        plans,
        build.insert(cells("1", "a", None), oid=oid),
        build.update(cells("2", "c", "d"), key=cells("1", None, None), oid=oid),
        build.delete(key=cells("2", None, None), oid=oid),
        build.truncate(oid, KEYLESS.oid),
    )
    made = CommandBuilder().in_order(ordered_changes(one, plans))
    assert [command.operation for command in made] == ["insert", "update", "delete", "truncate"]
    assert [command.expected for command in made] == [1, 1, 1, ANY_COUNT]
    assert not any(command.is_binary for command in made)
    assert list(made[0].parameters) == [b"1", b"a", None]
    assert list(made[1].parameters) == [b"2", b"c", b"d", b"1"]
    assert list(made[2].parameters) == [b"2"]


def test_where_triggers_act_the_row_is_looked_for_instead_of_counted() -> None:
    """A BEFORE trigger may veto a change, which is no conflict; a missing row is one (trap T-43)."""
    plans = Plans()
    oid = SERIAL.oid
    one = transaction(
        plans,
        build.insert(cells("1", "a", "b"), oid=oid),
        build.update(cells("1", "c", "d"), oid=oid),
        build.update(cells("2", "c", "d"), key=cells("1", None, None), oid=oid),
        build.delete(key=cells("2", None, None), oid=oid),
    )
    made = CommandBuilder().in_order(ordered_changes(one, plans))
    assert [command.operation for command in made] == [
        "insert", "exists", "update", "exists", "update", "delete", "delete"
    ]  # fmt: skip
    assert [command.expected for command in made] == [ANY_COUNT, 1, ANY_COUNT, 1, ANY_COUNT, 1, ANY_COUNT]
    locks = [command.prepared.text.rpartition(b" FOR ")[2] for command in made if command.expected == 1]
    assert locks == [b"NO KEY UPDATE OF t", b"UPDATE OF t", b"UPDATE OF t"]


def test_a_table_whose_trigger_has_vetoed_a_change_is_asked_first() -> None:
    """Counts decide until one was wrong; from then on a veto is none, and other tables are counted as before."""
    plans = Plans()
    other = SERIAL._replace(name="other", facts=msgspec.structs.replace(SERIAL.facts, oid=SERIAL.facts.oid + 1000))
    updates = [build.update(cells("1", "c", "d"), oid=spec.oid) for spec in (SERIAL, other)]
    one = transaction(plans, *updates, specs=(SERIAL, other))
    builder = CommandBuilder()
    made = builder.in_order(ordered_changes(one, plans), asks_first=False)
    assert [(command.operation, command.expected) for command in made] == [("update", 1)] * 2
    builder.vetoed(made[0].plan)
    made = builder.in_order(ordered_changes(one, plans), asks_first=False)
    assert [(command.operation, command.expected) for command in made] == [
        ("exists", 1), ("update", ANY_COUNT), ("update", 1),
    ]  # fmt: skip


def test_a_key_that_was_not_sent_is_never_guessed() -> None:
    """An update without old row whose key is 'unchanged' cannot find its row: ProtocolError, not NULL (trap T-41)."""
    plans = Plans()
    row = build.row(build.unchanged(), build.text(b"a"), build.text(b"b"))
    one = transaction(plans, build.update(row, oid=PLAIN.oid))
    with pytest.raises(ProtocolError, match="was not sent"):
        CommandBuilder().in_order(ordered_changes(one, plans))


def every_row(made: Iterable[Command]) -> Counter[tuple[object, ...]]:
    """Count the rows of commands: statement, operation, whether it must be found, and the row's values in order."""
    found: Counter[tuple[object, ...]] = Counter()
    for command in made:
        if command.is_binary:
            rows = list(zip(*[elements(array) for array in command.parameters], strict=True))
            assert command.expected in (0, len(rows))
        else:
            rows = [tuple(command.parameters)]
        for row in rows:
            found[command.prepared.name, command.operation, command.expected == 0, *row] += 1
    return found


def _put(key: int) -> Op:
    return Op("put", 0, key)


@example(wishes=[_put(0), Op("commit", 0), _put(0), _put(1)], sizes=[])  # one late row of two
@given(
    wishes=ops((PLAIN, PAIR, NUMERIC, KEYLESS), ("put", "update", "delete", "move", "commit", "commit", "announce")),
    sizes=st.lists(st.integers(1, 4), max_size=10),
)
def test_early_and_late_commands_are_all_commands(wishes: list[Op], sizes: list[int]) -> None:
    """Every row is in exactly one of both parts, in the statement it would be in undivided; late are the late keys."""
    publisher = Publisher((PLAIN, PAIR, NUMERIC, KEYLESS))
    builder, scheduler = CommandBuilder(), Scheduler()
    for batch in batches(assembled(publisher.run(wishes)), publisher.plans, sizes):
        undivided = every_row(builder.of_steps(batch.steps, batch.size_bytes))
        assert builder.of_late_keys(batch.steps, batch.size_bytes) == []
        scheduler.add(batch)
        early = every_row(builder.of_steps(batch.steps, batch.size_bytes))
        late = every_row(builder.of_late_keys(batch.steps, batch.size_bytes))
        assert early + late == undivided
        assert bool(late) is batch.has_late_keys
        entries = [changes.segments[0].net[key] for changes in batch.table_changes for key in changes.late_keys]  # type: ignore[union-attr]
        # A replaced row is in two statements.
        assert late.total() == len(entries) + sum(effect == NET_REPLACE for effect, _ in entries)


def test_late_keys_keep_the_order_and_the_counts_of_their_effects() -> None:
    """Late too, deletes come first and inserts last, and a row that must not be there has count 0 (trap T-39)."""
    oid, plans = PLAIN.oid, Plans()
    names = ["1", "2", "3", "4", "5", "6"]
    batch = Batch(2)
    delete, replaced, absent, update, insert, early = names
    payloads = [
        build.delete(key=cells(delete, None, None), oid=oid),
        build.delete(key=cells(replaced, None, None), oid=oid),
        build.insert(cells(replaced, "r", None), oid=oid),
        build.insert(cells(absent, "a", None), oid=oid),
        build.delete(key=cells(absent, None, None), oid=oid),
        build.update(build.row(build.text(update.encode()), build.text(b"u"), build.unchanged()), oid=oid),
        build.insert(cells(insert, "i", None), oid=oid),
        build.update(cells(early, "e", "f"), oid=oid),
    ]
    batch.add(transaction(plans, *payloads), plans)
    scheduler = Scheduler()
    holder = Batch(1)
    holder.add(transaction(plans, *[build.update(cells(name, "h", "h"), oid=oid) for name in names[:-1]]), plans)
    scheduler.add(holder)
    scheduler.add(batch)
    builder = CommandBuilder()
    assert [command.operation for command in builder.of_steps(batch.steps, batch.size_bytes)] == ["update"]
    late = builder.of_late_keys(batch.steps, batch.size_bytes)
    assert [(command.operation, command.expected) for command in late] == [
        ("delete", 2),
        ("insert", 0),
        ("update", 1),
        ("insert", 2),
    ]
    assert b"DELETE" in late[1].prepared.text
    # The unchanged value is absent, not NULL (trap T-41).
    assert {tuple(elements(array)) for array in late[2].parameters} == {(b"4",), (b"u",)}

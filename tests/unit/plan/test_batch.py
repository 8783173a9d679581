"""Batches against serial application: the same rows, whatever is merged, in pieces or not."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from parapply.errors import ProtocolError
from parapply.model import FRAME_HEADER_BYTES, Relation, Transaction
from parapply.plan.batch import Batch, Limits
from parapply.plan.steps import (
    OrderedStep,
    TablesStep,
    TruncateStep,
    is_serial,
    ordered_changes,
    without_tables,
)
from parapply.plan.table import Constant, ForeignKey, Lane, Plans
from parapply.plan.table_changes import NetSegment, RowSegment
from parapply.wire.rows import KIND_AT, TRUNCATE
from tests import build
from tests.unit import plans
from tests.unit.changes_model import BY_ROW, KEYLESS, NUMERIC, PAIR, PLAIN, SERIAL, SPECS, Side, Spec
from tests.unit.changes_stream import Op, Publisher, assembled, batches, ops

ONE = b"1"


def _published(*wishes: Op, specs: tuple[Spec, ...] = (PLAIN,)) -> tuple[Publisher, list[Transaction]]:
    publisher = Publisher(specs)
    return publisher, assembled(publisher.run(wishes))


@settings(max_examples=2 * settings().max_examples)
@given(wishes=ops(), sizes=st.lists(st.integers(1, 9), max_size=10))
def test_net_effects_leave_the_rows_of_serial_application(wishes: list[Op], sizes: list[int]) -> None:
    """Any transactions, merged in any way, lead to the rows that they lead to one change at a time."""
    publisher = Publisher()
    transactions = assembled(publisher.run(wishes))
    target = Side()
    for batch in batches(transactions, publisher.plans, sizes):
        target.apply_batch(batch)
    assert target == publisher.side


@settings(max_examples=2 * settings().max_examples)
@given(wishes=ops((PLAIN, NUMERIC)))
def test_net_effects_of_few_rows(wishes: list[Op]) -> None:
    """Many changes of the same few keys in one batch net to what they lead to one at a time."""
    publisher = Publisher((PLAIN, NUMERIC))
    target = Side((PLAIN, NUMERIC))
    for batch in batches(assembled(publisher.run(wishes)), publisher.plans, [99]):
        target.apply_batch(batch)
    assert target == publisher.side


@given(wishes=ops(), piece_bytes=st.integers(400, 3000))
def test_pieces_of_a_large_transaction_lead_to_the_same_rows(wishes: list[Op], piece_bytes: int) -> None:
    """A transaction may be cut anywhere, each piece planned by itself; nothing may run beside such a batch."""
    publisher = Publisher()
    target = Side()
    pieces = assembled(publisher.run(wishes), piece_bytes)
    for piece in pieces:
        batch = Batch(1)
        batch.add(piece, publisher.plans)
        assert batch.is_barrier or (piece.is_first and piece.is_last)
        target.apply_batch(batch)
    assert target == publisher.side


@settings(max_examples=2 * settings().max_examples)
@given(wishes=ops(), sizes=st.lists(st.integers(1, 9), max_size=10))
def test_changes_in_order_are_the_retry_of_a_batch(wishes: list[Op], sizes: list[int]) -> None:
    """From the plans in force before a batch its transactions can be read again, one by one, as often as needed."""
    publisher = Publisher()
    transactions = assembled(publisher.run(wishes))
    target = Side()
    left = iter(transactions)
    for size in [*sizes, len(transactions)]:
        before = dict(publisher.plans.current)
        batch = Batch(1)
        for transaction in itertools.islice(left, size):
            batch.add(transaction, publisher.plans)
        again = Plans()
        again.known, again.current = publisher.plans.known, before
        for transaction in batch.transactions:
            step = OrderedStep(ordered_changes(transaction, again))
            retry = Batch(1)
            retry.steps.append(step)
            target.apply_batch(retry)
        assert again.current == publisher.plans.current
    assert target == publisher.side


def test_a_relation_announced_in_the_middle_counts_from_there() -> None:
    """Changes of one batch on both sides of an announcement are read with the columns of their own."""
    wishes = (Op("put", 0, key=1), Op("announce", 0), Op("put", 0, key=1), Op("move", 0, key=1, other_key=2))
    publisher, transactions = _published(*wishes, Op("announce", 0), Op("move", 0, key=2, other_key=3))
    [batch] = batches(transactions, publisher.plans, [9])
    [changes] = batch.table_changes
    assert [type(segment) for segment in changes.segments[:4]] == [NetSegment, NetSegment, RowSegment, RowSegment]
    variants = [PLAIN.plan(0), PLAIN.plan(1), PLAIN.plan(1), PLAIN.plan(0)]
    assert all(segment.plan is plan for segment, plan in zip(changes.segments, variants, strict=False))
    target = Side((PLAIN,))
    target.apply_batch(batch)
    assert target == publisher.side


def test_nothing_moves_across_a_serial_transaction() -> None:
    """Changes after a transaction in source order are a step after it."""
    specs = (PLAIN, SERIAL)
    wishes = (Op("put", 0, key=1), Op("commit", 0), Op("put", 1), Op("commit", 0), Op("put", 0, key=1))
    publisher, transactions = _published(*wishes, specs=specs)
    [batch] = batches(transactions, publisher.plans, [9])
    assert [type(step) for step in batch.steps] == [TablesStep, OrderedStep, TablesStep]


def test_truncate_is_a_barrier_and_comes_once() -> None:
    """Changes before it are gone and count all the same; other tables come before it, and nothing runs beside."""
    specs = (PLAIN, BY_ROW, PAIR)
    wishes = (Op("put", 0, key=1), Op("truncate", 0, key=1), Op("put", 0, key=1), Op("put", 2, key=1))
    publisher, transactions = _published(*wishes, *wishes, specs=specs)
    [batch] = batches(transactions, publisher.plans, [9])
    assert batch.is_barrier
    assert batch.has_truncate
    others, truncate, rows = batch.steps
    assert isinstance(others, TablesStep)
    assert list(others.tables) == [PAIR.facts.oid]
    assert isinstance(truncate, TruncateStep)
    assert [plan.facts.oid for plan in truncate.plans] == [PLAIN.facts.oid, BY_ROW.facts.oid]
    assert isinstance(rows, TablesStep)
    assert [changes.counts for changes in rows.tables.values()] == [[1, 0, 0]]
    assert len(batch.truncates) == 2
    assert sum(sum(changes.counts) for changes in batch.table_changes) == 6


@pytest.mark.parametrize("tie", ["partition", "foreign key", "constants", "partial"])
def test_truncate_of_a_table_with_ties_keeps_its_place(tie: str) -> None:
    """Rows of other tables may depend on where it stands, so what came before is applied before it.

    Where it becomes a DELETE, keys of other tables may take their rows along.
    """
    wishes = (Op("put", 0, key=1), Op("truncate", 0, key=0), Op("put", 0, key=1), Op("put", 1, key=1))
    publisher, transactions = _published(*wishes, specs=(PLAIN, PAIR))
    relation, plan = next((one, plan) for one, plan in publisher.plans.known.items() if one.oid == PLAIN.oid)
    foreign = ForeignKey(
        name="f",
        positions=(),
        parent_oid=1,
        parent_columns=(),
        equalities=(),
        is_old_sent=False,
        is_enforced=True,
        is_cascading=False,
    )
    ties = {
        "partition": {"facts": replace(plan.facts, root_oid=plan.facts.oid + 1)},
        "foreign key": {"foreign_keys": (foreign,)},
        "constants": {"constants": (Constant(column=plans.column("x"), text="1"),)},
        "partial": {},
    }
    publisher.plans.known[relation] = replace(plan, **ties[tie])
    if tie == "partial":
        for transaction in transactions:
            transaction.changes = [
                without_tables(change, [PLAIN.oid])
                if isinstance(change, bytes) and change[KIND_AT] == TRUNCATE
                else change
                for change in transaction.changes
            ]
    [batch] = batches(transactions, publisher.plans, [9])
    assert [type(step) for step in batch.steps] == [TablesStep, TruncateStep, TablesStep]
    assert isinstance(batch.steps[2], TablesStep)
    assert list(batch.steps[2].tables) == [PLAIN.facts.oid, PAIR.facts.oid]


def test_a_truncate_of_nothing_or_of_the_unknown_is_malformed() -> None:
    """TRUNCATE names at least one relation, and only announced ones."""
    for payload in (build.truncate(), build.truncate(99)):
        transaction = Transaction(1, 1, 1)
        transaction.changes.append(build.xlog_data(payload))
        with pytest.raises(ProtocolError):
            Batch(1).add(transaction, Plans())


@pytest.mark.parametrize("kind", ["put", "truncate"])
def test_a_transaction_on_a_serial_table_keeps_its_order(kind: str) -> None:
    """Code on the target may see other tables: the whole transaction stays in source order, TRUNCATE included."""
    specs = (PLAIN, SERIAL)
    publisher, transactions = _published(
        Op("put", 0), Op("commit", 0), Op("put", 0), Op(kind, 1), Op("put", 0), specs=specs
    )
    plans = Plans()
    plans.known = publisher.plans.known
    harmless, serial = transactions
    assert not is_serial(harmless, plans)
    batch = Batch(1)
    batch.add(harmless, plans)
    assert not batch.is_barrier
    assert is_serial(serial, plans)
    batch.add(serial, plans)
    assert batch.is_barrier
    step = batch.steps[-1]
    assert isinstance(step, OrderedStep)
    assert len(step.changes) == 3
    assert len(batch.steps) == 2


def test_relations_that_share_a_target_table_keep_their_columns_and_order() -> None:
    """Two published relations with other column orders for one table: each change is read with its own (trap T-28)."""
    first, second = PLAIN.plan(0), PLAIN.plan(1)
    other = Relation(oid=77, schema="s", name="t_2", replica_identity="d", columns=second.relation.columns)
    plans = Plans()
    plans.current = {PLAIN.oid: first, 77: replace(second, relation=other)}
    row, swapped = build.row(*map(build.text, (b"5", b"a", b"b"))), build.row(*map(build.text, (b"z", b"5")))
    payloads = [
        build.insert(row, oid=PLAIN.oid),
        build.update(swapped, oid=77),
        build.update(row, oid=PLAIN.oid),
        build.delete(key=build.row(build.null(), build.text(b"5")), oid=77),
    ]
    transaction = Transaction(1, 1, 1)
    transaction.changes += [build.xlog_data(payload) for payload in payloads]
    batch = Batch(1)
    batch.add(transaction, plans)
    [changes] = batch.table_changes
    assert [segment.plan.relation.oid for segment in changes.segments] == [PLAIN.oid, 77, PLAIN.oid, 77]
    for segment in changes.segments:
        assert isinstance(segment, NetSegment)
        assert list(segment.net) == [b"\0\0\0\x015"]


def test_updates_and_deletes_take_places_for_the_locks_of_indexes() -> None:
    """A table takes one place, and once one for each index if rows are not only inserted; that fills a batch."""
    plans, batch = Plans(), Batch(1)
    facts = replace(PLAIN.facts, indexed_columns=("k0", "a"))
    plans.current = {PLAIN.oid: replace(PLAIN.plan(0), facts=facts), KEYLESS.oid: KEYLESS.plan(0)}
    row, moved = (build.row(*map(build.text, (key, b"a", b"b"))) for key in (b"5", b"6"))
    old, key = (build.row(build.text(text), build.null(), build.null()) for text in (b"5", b"6"))
    insert, update = build.insert(row, oid=PLAIN.oid), build.update(row, oid=PLAIN.oid)
    move, delete = build.update(moved, key=old, oid=PLAIN.oid), build.delete(key=key, oid=PLAIN.oid)
    other = build.insert(build.row(build.text(b"a"), build.text(b"b")), oid=KEYLESS.oid)
    limits = Limits(1_000, 1_000, 1 << 20, places=4)
    for payload, n_places in ((insert, 1), (update, 3), (move, 3), (delete, 3), (other, 4)):
        assert not batch.is_full(limits)
        transaction = Transaction(1, 1, 1)
        transaction.changes.append(build.xlog_data(payload))
        batch.add(transaction, plans)
        assert batch.n_places == n_places
    assert batch.is_full(limits)
    # As many may be for tables: another batch would have the same ones.
    limits.most_places = 9
    assert not batch.is_full(limits)
    batch.n_places = 5
    assert batch.is_full(limits), "more than half are for indexes"


def test_empty_transactions_move_the_end_and_nothing_else() -> None:
    """A transaction without changes makes the batch end later; there is nothing to apply."""
    publisher, transactions = _published(Op("commit", 0), Op("commit", 0))
    [batch] = batches(transactions, publisher.plans, [2])
    assert not batch.is_empty
    assert batch.steps == []
    assert batch.n_changes == 0
    assert (batch.first_lsn, batch.end_lsn) == (transactions[0].end_lsn, transactions[1].end_lsn)


def test_a_large_transaction_begins_and_ends_at_one_lsn() -> None:
    """Pieces have no end LSN until the last: the range is that one transaction; announcements are no changes."""
    publisher = Publisher((PLAIN,))
    pieces = assembled(publisher.run([Op("put", 0, key=key) for key in (1, 2, 3)]), 1)
    batch = Batch(1)
    for piece in pieces:
        batch.add(piece, publisher.plans)
    assert batch.first_lsn == batch.end_lsn == pieces[-1].end_lsn > 0
    assert batch.n_changes == 3
    assert batch.size_bytes == sum(piece.size_bytes for piece in pieces)


@given(wishes=ops((PLAIN, PAIR, KEYLESS, SERIAL), ("put", "update", "delete", "move")), data=st.data())
def test_a_cut_change_is_a_protocol_error(wishes: list[Op], data: st.DataObject) -> None:
    """A change message cut at any length raises ProtocolError, or is left for the worker to read row by row."""
    specs = (PLAIN, PAIR, KEYLESS, SERIAL)
    publisher, transactions = _published(*wishes, specs=specs)
    for transaction in transactions:
        at = data.draw(st.integers(0, len(transaction.changes) - 1), label="change")
        change = transaction.changes[at]
        if isinstance(change, bytes):
            size = data.draw(st.integers(FRAME_HEADER_BYTES + 1, len(change) - 1), label="bytes left")
            transaction.changes[at] = change[:size]
            batch = Batch(1)
            try:
                batch.add(transaction, publisher.plans)
            except ProtocolError:
                return
            by_itself = [segment for table in batch.table_changes for segment in table.segments]
            is_later = any(isinstance(segment, RowSegment) for segment in by_itself)
            assert is_later or any(isinstance(step, OrderedStep) for step in batch.steps)


def test_lanes_of_the_tables_in_these_tests() -> None:
    """The tables here cover every lane."""
    assert {spec.lane for spec in SPECS} == set(Lane)

"""Waits of batches for each other, and the order in which they start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from parapply.model import Transaction
from parapply.plan.batch import Batch
from parapply.plan.scheduler import Overlap, Scheduler, Wait, overlaps
from parapply.plan.table import Equality, ForeignKey, Plans, UniqueKey
from parapply.plan.table_changes import NetSegment
from parapply.vocabulary import WaitKind
from tests import build
from tests.unit.changes_model import KEYLESS, NUMERIC, PAIR, PLAIN, UNIQUE, Spec
from tests.unit.changes_stream import Op, Publisher, assembled, batches, ops
from tests.unit.dependency_model import batch_of, common, fill, put_off, touched, wire_key

if TYPE_CHECKING:
    from parapply.plan.keys import Key
    from parapply.plan.table import TablePlan
    from tests.unit.dependency_model import Late

CHANGES = ("put", "update", "delete", "move", "commit", "announce")


@given(wishes=ops(), sizes=st.lists(st.integers(1, 4), max_size=20))
def test_whatever_shares_a_key_or_a_wide_table_overlaps(wishes: list[Op], sizes: list[int]) -> None:
    """Batches are independent only if no key, no exclusive table is in both and neither is a barrier."""
    publisher = Publisher()
    done = batches(assembled(publisher.run(wishes)), publisher.plans, sizes)
    for number, later in enumerate(done):
        for earlier in done[:number]:
            found = overlaps(earlier, later)
            assert {overlap.wait.seq for overlap in found} <= {earlier.seq}
            if earlier.is_barrier or later.is_barrier:
                assert found == [Overlap(Wait(earlier.seq, "", WaitKind.BARRIER), None, frozenset())]
                continue
            assert all(overlap.changes in later.table_changes for overlap in found)
            tables = {overlap.changes.plan.relation: overlap for overlap in found if overlap.changes}
            assert len(tables) == len(found)
            met = {relation.oid: (overlap.wait.kind, set(overlap.keys)) for relation, overlap in tables.items()}
            assert met == common(earlier, later)
            assert all(overlap.wait.table == relation.qualified_name for relation, overlap in tables.items())


@given(wishes=ops((PLAIN, PAIR, NUMERIC, KEYLESS), CHANGES), sizes=st.lists(st.integers(1, 4), max_size=20))
def test_other_keys_of_tables_applied_as_sets_are_independent(wishes: list[Op], sizes: list[int]) -> None:
    """Without barriers and wide tables batches overlap in common keys only, and inserts without a key never do."""
    specs = (PLAIN, PAIR, NUMERIC, KEYLESS)
    publisher = Publisher(specs)
    done = batches(assembled(publisher.run(wishes)), publisher.plans, sizes)
    for number, later in enumerate(done):
        for earlier in done[:number]:
            found = overlaps(earlier, later)
            common = {(oid, key) for oid, key in touched(earlier) & touched(later) if key != "any"}
            assert sum(len(overlap.keys) for overlap in found) == len(common)
            assert {overlap.wait.kind for overlap in found} <= {"key"}


@given(
    wishes=ops((PLAIN, NUMERIC, UNIQUE, KEYLESS), (*CHANGES, "truncate")),
    sizes=st.lists(st.integers(1, 3), max_size=20),
)
def test_late_are_the_common_keys_of_what_can_be_split(wishes: list[Op], sizes: list[int]) -> None:
    """A batch waits for all it overlaps, but for keys of tables with one net change a key: those only are late.

    Nothing commits in the test, so every earlier batch counts.
    """
    publisher = Publisher((PLAIN, NUMERIC, UNIQUE, KEYLESS))
    scheduler = Scheduler()
    earlier: list[Batch] = []
    for batch in batches(assembled(publisher.run(wishes)), publisher.plans, sizes):
        can_start = scheduler.add(batch)
        waits, late = put_off(batch, earlier)
        assert {wait.seq for wait in scheduler.waits_of(batch)} == waits
        assert can_start is not bool(waits)
        _check_late(batch, late)
        assert [wait.seq for wait in scheduler.late_waits_of(batch)] == sorted(late)
        earlier.append(batch)


def _check_late(batch: Batch, late: Late) -> None:
    expected: dict[int, set[Key]] = {}
    for tables in late.values():
        for oid, keys in tables.items():
            expected.setdefault(oid, set()).update(keys)
    found = {changes.plan.relation.oid: changes.late_keys for changes in batch.table_changes if changes.late_keys}
    assert found == expected
    assert batch.has_late_keys is bool(late)
    for changes in batch.table_changes:
        if changes.late_keys:
            [segment] = changes.segments
            assert isinstance(segment, NetSegment)
            assert changes.late_keys <= segment.net.keys()


def test_the_columns_order_in_the_stream_does_not_matter() -> None:
    """A key met through another announcement of the relation is the same key."""
    [overlap] = overlaps(batch_of(1, PLAIN.plan(0), b"1"), batch_of(2, PLAIN.plan(1), b"1", b"2"))
    assert overlap.wait == Wait(1, "s.t1", WaitKind.KEY)
    assert overlap.keys == {wire_key(PLAIN, 0)}
    assert overlaps(batch_of(1, PLAIN.plan(0), b"1"), batch_of(2, PLAIN.plan(1), b"2")) == []


@pytest.mark.parametrize("is_first", [False, True])
def test_keys_of_another_form_take_the_table(*, is_first: bool) -> None:
    """When a key, its place or its comparison changed between two batches, none can be looked for in the other."""
    plan = NUMERIC.plan(0)
    as_bytes = replace(plan, columns=(replace(plan.columns[0], equality=Equality.BYTES), *plan.columns[1:]))
    other_key = replace(plan, facts=replace(plan.facts, key_columns=("a",)), key_positions=(1,))
    places = [replace(plan, unique_keys=(_unique_at(position),)) for position in (1, 2)]
    references = [replace(plan, foreign_keys=(_foreign_at(position),)) for position in (1, 2)]
    for one, other in ((plan, as_bytes), (plan, other_key), places, references):
        first, second = (other, one) if is_first else (one, other)
        _check_waits(batch_of(1, first, b"1"), batch_of(2, second, b"1"), "table")


def _unique_at(position: int) -> UniqueKey:
    """Return a unique index of one name, on any column."""
    return UniqueKey(
        name="u", positions=(position,), equalities=(Equality.BYTES,), is_nulls_distinct=True, is_old_sent=False
    )


def _foreign_at(*positions: int) -> ForeignKey:
    """Return a foreign key of one name to the key of PLAIN and more, on any columns."""
    return ForeignKey(
        name="f",
        positions=positions,
        parent_oid=PLAIN.facts.oid,
        parent_columns=("k0", "a")[: len(positions)],
        equalities=(Equality.BYTES,) * len(positions),
        is_old_sent=False,
        is_enforced=True,
        is_cascading=False,
    )


def test_parents_are_read_by_the_columns_they_were_announced_with() -> None:
    """A child waits for its parent also where the parent's columns have other places since, in the same batch."""
    child = replace(PAIR.plan(0), foreign_keys=(_foreign_at(0),))
    for first, second in ((0, 1), (1, 0)):
        parents = batch_of(1, PLAIN.plan(first), b"1")
        again = PLAIN.plan(second)
        fill(parents, replace(again, relation=replace(again.relation, oid=99)), b"2")
        for key, n_waits in ((b"1", 1), (b"2", 1), (b"3", 0), (b"v", 0)):
            found = overlaps(parents, batch_of(2, child, key))
            assert [overlap.wait.kind for overlap in found] == [WaitKind.FOREIGN_KEY] * n_waits


@pytest.mark.parametrize("is_relaxed", [False, True])
@pytest.mark.parametrize("is_moved", [False, True])
@pytest.mark.parametrize("kind", ["unique", "foreign"])
def test_a_value_sent_in_part_takes_the_table_where_any_order_goes(
    kind: str, *, is_moved: bool, is_relaxed: bool
) -> None:
    """Unchanged TOAST beside a new value may be the value of any other row, or parent, that is not committed (T-41).

    Of no interest is one of which nothing was sent, or all of it.
    """
    unique = replace(_unique_at(1), positions=(1, 2), equalities=(Equality.BYTES,) * 2)
    keys = {"unique_keys": (unique,)} if kind == "unique" else {"foreign_keys": (_foreign_at(1, 2),)}
    plan = replace(PLAIN.plan(0), keeps_written_over=is_relaxed, **keys)
    oid, old = plan.relation.oid, build.row(build.text(b"9"), build.null(), build.null())
    before: build.Before = {"key": old} if is_moved else {}
    value, other, unchanged = build.text(b"v"), build.text(b"w"), build.unchanged()
    for cells, is_whole in (((value, unchanged), True), ((value, other), False), ((unchanged, unchanged), False)):
        row = build.row(build.text(b"1"), *cells)
        batch = _batch(1, plan, build.update(row, oid=oid, **before))
        batch.close()
        (changes,) = batch.table_changes
        assert changes.is_whole_table is (is_whole and is_relaxed)
    # Also where the batch itself goes on to other values.
    updates = [build.update(build.row(build.text(b"1"), value, cell), oid=oid) for cell in (unchanged, other)]
    batch = _batch(1, plan, *updates)
    batch.close()
    assert batch.table_changes[0].is_whole_table is is_relaxed


@pytest.mark.parametrize("is_relaxed", [False, True])
@pytest.mark.parametrize("end", ["delete", "update"])
def test_a_value_that_a_batch_has_for_a_moment_is_held_where_any_order_goes(end: str, *, is_relaxed: bool) -> None:
    """A batch with a conflict is repeated row by row, so a later one that takes such a value must not be there then.

    With the order kept a later one is not committed then, and need not wait.
    """
    plan = replace(PLAIN.plan(0), unique_keys=(_unique_at(1),), keeps_written_over=is_relaxed)
    oid = plan.relation.oid
    ends = {
        "delete": build.delete(key=build.row(build.text(b"1"), build.null(), build.null()), oid=oid),
        "update": build.update(_row(b"1", b"other"), oid=oid),
    }
    earlier = _batch(1, plan, build.update(_row(b"1", b"taken"), oid=oid), ends[end])
    later = _batch(2, plan, build.insert(_row(b"2", b"taken"), oid=oid))
    found = [(overlap.wait.kind, overlap.wait.name) for overlap in overlaps(earlier, later)]
    assert found == ([(WaitKind.UNIQUE, "u")] if is_relaxed else [])


def _row(key: bytes, value: bytes) -> bytes:
    return build.row(build.text(key), build.text(value), build.text(b"v"))


def _batch(seq: int, plan: TablePlan, *messages: bytes) -> Batch:
    batch, plans, transaction = Batch(seq), Plans(), Transaction(seq, seq, seq)
    plans.current[plan.relation.oid] = plan
    transaction.end_lsn = seq
    transaction.changes += [build.xlog_data(message) for message in messages]
    batch.add(transaction, plans)
    return batch


@pytest.mark.parametrize("is_first", [False, True])
def test_one_wide_batch_makes_both_wait(*, is_first: bool) -> None:
    """A table that is exclusive for one of two batches is taken whole, whatever their keys."""
    wide = replace(PLAIN.plan(0), is_table_exclusive=True)
    plans = (wide, PLAIN.plan(0)) if is_first else (PLAIN.plan(0), wide)
    _check_waits(batch_of(1, plans[0], b"1"), batch_of(2, plans[1], b"2"), "table")
    _check_waits(batch_of(1, plans[0], b"1"), batch_of(2, plans[1], b"1"), "table")


def _check_waits(earlier: Batch, later: Batch, kind: str) -> None:
    """Fail unless the later batch waits as a whole, for this reason."""
    scheduler = Scheduler()
    assert scheduler.add(earlier)
    assert not scheduler.add(later)
    assert [(wait.seq, wait.kind) for wait in scheduler.waits_of(later)] == [(earlier.seq, kind)]
    assert scheduler.late_waits_of(later) == ()
    assert not any(changes.late_keys for changes in later.table_changes)


def test_a_published_relation_of_another_name_can_be_the_same_table() -> None:
    """The target's table counts, not the publisher's OID: what maps to it shares its keys (trap T-71)."""
    plan = PLAIN.plan(0)
    again = replace(plan, relation=replace(plan.relation, oid=99))
    assert len(overlaps(batch_of(1, plan, b"1"), batch_of(2, again, b"1"))) == 1
    elsewhere = replace(plan, facts=replace(plan.facts, oid=1234))
    assert overlaps(batch_of(1, plan, b"1"), batch_of(2, elsewhere, b"1")) == []


def test_two_relations_of_one_table_in_a_batch_are_not_split() -> None:
    """Their changes of one key follow each other in segments, so that the batch waits as a whole (trap T-28)."""
    plan = PLAIN.plan(0)
    again = replace(PLAIN.plan(1), relation=replace(PLAIN.plan(1).relation, oid=99))
    both = batch_of(2, plan, b"1")
    fill(both, again, b"2")
    _check_waits(batch_of(1, plan, b"1"), both, "key")


def test_a_suspect_batch_runs_beside_nothing() -> None:
    """Its keys are not all known."""
    for is_first in (False, True):
        first = batch_of(1, PLAIN.plan(0), *([b"1", b"1"] if is_first else [b"1"]))
        second = batch_of(2, PLAIN.plan(0), *([b"1"] if is_first else [b"1", b"1"]))
        assert (first.is_suspect, second.is_suspect) == (is_first, not is_first)
        _check_waits(first, second, "barrier")


def test_a_key_late_for_a_batch_that_waits_for_its_own_is_late_for_its_followers_too() -> None:
    """A late key stays held by the batch that puts it off: the next batch meets it there, whatever committed."""
    first, second, third = [batch_of(seq, PLAIN.plan(0), b"1", b"%d0" % seq) for seq in (1, 2, 3)]
    scheduler = Scheduler()
    assert scheduler.add(first)
    assert scheduler.add(second)
    scheduler.committed(first)
    assert scheduler.add(third)
    assert scheduler.late_waits_of(third)[-1] == Wait(2, "s.t1", WaitKind.KEY)
    assert third.table_changes[0].late_keys == {wire_key(PLAIN, 0)}


def test_a_batch_can_wait_for_one_and_have_keys_late_for_another() -> None:
    """It starts when the one it waits for has committed, and its late keys stay late."""
    first, second = batch_of(1, UNIQUE.plan(0), b"1"), batch_of(2, PLAIN.plan(0), b"1")
    third = batch_of(3, PLAIN.plan(0), b"1", b"2")
    fill(third, UNIQUE.plan(0), b"2")
    scheduler = Scheduler()
    scheduler.add(first)
    scheduler.add(second)
    assert not scheduler.add(third)
    assert scheduler.waits_of(third) == (Wait(1, "s.t5", WaitKind.TABLE),)
    assert scheduler.late_waits_of(third)[-1] == Wait(2, "s.t1", WaitKind.KEY)
    assert scheduler.committed(first).to_start == [third]
    assert [changes.late_keys for changes in third.table_changes] == [{wire_key(PLAIN, 0)}, set()]


SPLIT_SPECS = (PLAIN, UNIQUE)


@pytest.mark.parametrize("is_ordered", [False, True], ids=["any order", "commit order"])
@given(
    data=st.data(),
    wishes=ops(SPLIT_SPECS, (*CHANGES, "commit", "commit", "truncate")),
    sizes=st.lists(st.integers(1, 3), max_size=9),
)
def test_nothing_starts_before_what_it_depends_on_has_committed(
    *, data: st.DataObject, wishes: list[Op], sizes: list[int], is_ordered: bool
) -> None:
    """Batches come and commit in any order: who may start is what a naive model says.

    Keys are late for what is in flight when their batch comes, and stay so.
    """
    publisher = Publisher(SPLIT_SPECS)
    coming = batches(assembled(publisher.run(wishes)), publisher.plans, sizes)
    added: list[Batch] = []
    committed: set[int] = set()
    models: dict[int, tuple[set[int], Late]] = {}
    free: set[int] = set()
    scheduler = Scheduler()
    while coming or len(committed) < len(added):
        open_ = [batch for batch in added if batch.seq not in committed]
        assert scheduler.batches() == open_
        assert scheduler.head is (open_[0] if open_ else None)
        assert len(scheduler) == len(open_)
        ready = [batch for batch in open_ if batch.seq in free][: 1 if is_ordered else None]
        assert not open_ or open_[0].seq in free, "the head can always run"
        steps = [*(["add"] if coming else []), *(["commit", "commit"] if ready else [])]
        step = data.draw(st.sampled_from(steps), label="step")
        if step == "add":
            batch = coming.pop(0)
            added.append(batch)
            models[batch.seq] = put_off(batch, open_)
            if scheduler.add(batch):
                free.add(batch.seq)
        else:
            batch = data.draw(st.sampled_from(ready), label="committed")
            committed.add(batch.seq)
            freed = [other.seq for other in scheduler.committed(batch).to_start]
            assert freed == sorted(freed)
            assert not free & set(freed)
            free |= set(freed)
            assert scheduler.waits_of(batch) == ()
        for batch in added:
            waits, late = models[batch.seq]
            _check_late(batch, late)
            if batch.seq not in committed:
                assert {wait.seq for wait in scheduler.waits_of(batch)} == waits - committed
                assert (batch.seq in free) is not bool(waits - committed)


def test_batches_are_added_in_source_order() -> None:
    """A batch earlier than one in flight would find its dependents already started."""
    scheduler = Scheduler()
    scheduler.add(batch_of(2, PLAIN.plan(0), b"1"))
    with pytest.raises(AssertionError):
        scheduler.add(batch_of(1, PLAIN.plan(0), b"1"))


def test_why_a_batch_waits_is_told() -> None:
    """Each batch in the way is named with its table and whether a key, the table or a barrier is the reason."""
    scheduler = Scheduler()
    barrier = batch_of(3, PLAIN.plan(0))
    barrier.is_barrier = True
    spec: Spec = UNIQUE
    for batch in (batch_of(1, PLAIN.plan(0), b"1"), batch_of(2, spec.plan(0), b"1"), barrier):
        scheduler.add(batch)
    last = batch_of(4, spec.plan(0), b"2")
    assert not scheduler.add(last)
    assert [(wait.seq, wait.table, wait.kind) for wait in scheduler.waits_of(last)] == [
        (2, "s.t5", "table"),
        (3, "", "barrier"),
    ]

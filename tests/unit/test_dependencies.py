"""Which batch waits for which, and in what order batches start."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parapply.model import Transaction
from parapply.plan.batch import Batch, Plans
from parapply.plan.dependencies import Scheduler, conflict
from parapply.plan.table import Equality, Lane
from tests import build
from tests.unit.changes_model import KEYLESS, NUMERIC, PAIR, PLAIN, SPECS, UNIQUE, Spec
from tests.unit.changes_stream import Op, Publisher, assembled, batches, ops, touched

if TYPE_CHECKING:
    from collections.abc import Iterable

    from parapply.plan.table import TablePlan

WIDE = {spec.oid for spec in SPECS if spec.is_exclusive or spec.lane is not Lane.SET}
CHANGES = ("put", "update", "delete", "move", "commit", "announce")


def _must_wait(earlier: Batch, later: Batch) -> bool:
    """Tell by the messages alone whether two batches depend on each other."""
    first, second = touched(earlier), touched(later)
    tables = {oid for oid, _ in first} & {oid for oid, _ in second}
    keys = {(oid, key) for oid, key in first & second if key != "any"}
    return bool(keys) or bool(tables & WIDE)


@given(wishes=ops(), sizes=st.lists(st.integers(1, 4), max_size=20))
def test_whatever_shares_a_key_or_a_wide_table_waits(wishes: list[Op], sizes: list[int]) -> None:
    """Batches are independent only if no key, no exclusive table is in both and neither is a barrier."""
    publisher = Publisher()
    done = batches(assembled(publisher.run(wishes)), publisher.plans, sizes)
    for number, later in enumerate(done):
        for earlier in done[:number]:
            wait = conflict(earlier, later)
            is_barrier = earlier.is_barrier or later.is_barrier
            assert (wait is not None) is (is_barrier or _must_wait(earlier, later))
            if wait is not None:
                assert wait.seq == earlier.seq
                assert (wait.kind == "barrier") is is_barrier
                assert bool(wait.table) is not is_barrier


@given(wishes=ops((PLAIN, PAIR, NUMERIC, KEYLESS), CHANGES), sizes=st.lists(st.integers(1, 4), max_size=20))
def test_other_keys_of_tables_applied_as_sets_are_independent(wishes: list[Op], sizes: list[int]) -> None:
    """Without barriers and wide tables exactly a common key makes a batch wait, and inserts without a key never do."""
    specs = (PLAIN, PAIR, NUMERIC, KEYLESS)
    publisher = Publisher(specs)
    done = batches(assembled(publisher.run(wishes)), publisher.plans, sizes)
    for number, later in enumerate(done):
        for earlier in done[:number]:
            wait = conflict(earlier, later)
            common = {(oid, key) for oid, key in touched(earlier) & touched(later) if key != "any"}
            assert (wait is not None) is bool(common)
            assert wait is None or wait.kind == "key"


def _batch(seq: int, plan: TablePlan, *keys: bytes) -> Batch:
    plans = Plans()
    plans.current[plan.relation.oid] = plan
    transaction = Transaction(seq, seq, seq)
    transaction.end_lsn = seq
    names = [column.name for column in plan.relation.columns]
    for key in keys:
        cells = [build.text(key if name in plan.facts.key_columns else b"v") for name in names]
        transaction.changes.append(build.xlog_data(build.insert(build.row(*cells), oid=plan.relation.oid)))
    batch = Batch(seq)
    batch.add(transaction, plans)
    return batch


def test_the_columns_order_in_the_stream_does_not_matter() -> None:
    """A key met through another announcement of the relation is the same key."""
    wait = conflict(_batch(1, PLAIN.plan(0), b"1"), _batch(2, PLAIN.plan(1), b"1"))
    assert wait is not None
    assert (wait.seq, wait.table, wait.kind) == (1, "s.t1", "key")
    assert conflict(_batch(1, PLAIN.plan(0), b"1"), _batch(2, PLAIN.plan(1), b"2")) is None


@pytest.mark.parametrize("is_first", [False, True])
def test_keys_of_another_form_take_the_table(*, is_first: bool) -> None:
    """When the key or its comparison changed between two batches, their keys cannot be looked for in each other."""
    plan = NUMERIC.plan(0)
    as_bytes = replace(plan, columns=(replace(plan.columns[0], equality=Equality.BYTES), *plan.columns[1:]))
    other_key = replace(plan, facts=replace(plan.facts, key_columns=("a",)), key_positions=(1,))
    for other in (as_bytes, other_key):
        first, second = (other, plan) if is_first else (plan, other)
        wait = conflict(_batch(1, first, b"1"), _batch(2, second, b"1"))
        assert wait is not None
        assert wait.kind == "table"


@pytest.mark.parametrize("change", ["is_shared", "is_table_exclusive"])
@pytest.mark.parametrize("is_first", [False, True])
def test_one_wide_batch_makes_both_wait(*, change: str, is_first: bool) -> None:
    """A table that is shared or exclusive for one of two batches is taken whole, whatever their keys."""
    wide = replace(PLAIN.plan(0), **{change: True})  # type: ignore[arg-type]
    plans = (wide, PLAIN.plan(0)) if is_first else (PLAIN.plan(0), wide)
    wait = conflict(_batch(1, plans[0], b"1"), _batch(2, plans[1], b"2"))
    assert wait is not None
    assert wait.kind == "table"


def test_a_published_relation_of_another_name_can_be_the_same_table() -> None:
    """The target's table counts, not the publisher's OID: what maps to it shares its keys (trap T-71)."""
    plan = PLAIN.plan(0)
    again = replace(plan, relation=replace(plan.relation, oid=99))
    assert conflict(_batch(1, plan, b"1"), _batch(2, again, b"1")) is not None
    elsewhere = replace(plan, facts=replace(plan.facts, oid=1234))
    assert conflict(_batch(1, plan, b"1"), _batch(2, elsewhere, b"1")) is None


def test_a_suspect_batch_runs_beside_nothing() -> None:
    """Its keys are not all known."""
    suspect = _batch(1, PLAIN.plan(0), b"1", b"1")
    assert suspect.is_suspect
    other = _batch(2, UNIQUE.plan(0), b"1")
    for wait in (conflict(suspect, other), conflict(other, suspect)):
        assert wait is not None
        assert wait.kind == "barrier"


def _random_batches(data: st.DataObject) -> list[Batch]:
    drawn = data.draw(
        st.lists(st.tuples(st.sets(st.integers(0, 6), max_size=3), st.integers(0, 9)), max_size=10), label="keys"
    )
    done = []
    for seq, (keys, number) in enumerate(drawn, 1):
        batch = _batch(seq, PLAIN.plan(0), *[b"%d" % key for key in sorted(keys)])
        batch.is_barrier = number == 0
        done.append(batch)
    return done


def _waits_for(batch: Batch, committed: set[int], earlier: Iterable[Batch], to_head: set[int]) -> set[int]:
    left = [other for other in earlier if other.seq < batch.seq and other.seq not in committed]
    return {other.seq for other in left if batch.seq in to_head or conflict(other, batch) is not None}


@pytest.mark.parametrize("is_ordered", [False, True], ids=["any order", "commit order"])
@given(data=st.data())
def test_nothing_starts_before_what_it_depends_on_has_committed(*, data: st.DataObject, is_ordered: bool) -> None:
    """Batches come, are sent to the head and commit in any order: who may start is what a naive model says."""
    coming = _random_batches(data)
    added: list[Batch] = []
    committed: set[int] = set()
    to_head: set[int] = set()
    free: set[int] = set()
    scheduler = Scheduler()
    while coming or len(committed) < len(added):
        open_ = [batch for batch in added if batch.seq not in committed]
        assert scheduler.batches() == open_
        assert scheduler.head is (open_[0] if open_ else None)
        assert len(scheduler) == len(open_)
        ready = [batch for batch in open_ if batch.seq in free][: 1 if is_ordered else None]
        assert not open_ or open_[0].seq in free, "the head can always run"
        steps = [*(["add"] if coming else []), *(["commit", "commit", "retry"] if ready else [])]
        step = data.draw(st.sampled_from(steps), label="step")
        if step == "add":
            batch = coming.pop(0)
            added.append(batch)
            if scheduler.add(batch):
                free.add(batch.seq)
        elif step == "retry":
            batch = data.draw(st.sampled_from(ready), label="retried")
            to_head.add(batch.seq)
            if not scheduler.wait_for_all_earlier(batch):
                free.discard(batch.seq)
        else:
            batch = data.draw(st.sampled_from(ready), label="committed")
            committed.add(batch.seq)
            freed = [other.seq for other in scheduler.committed(batch)]
            assert freed == sorted(freed)
            assert not free & set(freed)
            free |= set(freed)
            assert scheduler.waits_of(batch) == ()
        for batch in added:
            if batch.seq not in committed:
                expected = _waits_for(batch, committed, added, to_head)
                assert {wait.seq for wait in scheduler.waits_of(batch)} == expected
                assert (batch.seq in free) is not bool(expected)


def test_batches_are_added_in_source_order() -> None:
    """A batch earlier than one in flight would find its dependents already started."""
    scheduler = Scheduler()
    scheduler.add(_batch(2, PLAIN.plan(0), b"1"))
    with pytest.raises(AssertionError):
        scheduler.add(_batch(1, PLAIN.plan(0), b"1"))


def test_why_a_batch_waits_is_told() -> None:
    """Each batch in the way is named with its table and whether a key, the table or a barrier is the reason."""
    scheduler = Scheduler()
    barrier = _batch(3, PLAIN.plan(0))
    barrier.is_barrier = True
    spec: Spec = UNIQUE
    for batch in (_batch(1, PLAIN.plan(0), b"1"), _batch(2, spec.plan(0), b"1"), barrier):
        scheduler.add(batch)
    last = _batch(4, spec.plan(0), b"2")
    assert not scheduler.add(last)
    assert [(wait.seq, wait.table, wait.kind) for wait in scheduler.waits_of(last)] == [
        (2, "s.t5", "table"),
        (3, "", "barrier"),
    ]

"""Unique values and foreign keys: what runs in parallel equals serial application, whatever commits first."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from parapply.plan.foreign_keys import parents_first
from tests.unit.changes_stream import batches, one_of_all
from tests.unit.foreign_key_model import CHILD, PARENT, Op, Source, Target

_KINDS = ("insert",) * 3 + ("delete", "update", "move") + ("commit",) * 3
_OP = one_of_all(_KINDS, [PARENT, CHILD], range(1, 6), [None, 1, 2, 3, 4, 5]).map(lambda parts: Op(*parts))
_OPS = st.integers(0, 60).flatmap(lambda n: st.lists(_OP, min_size=n, max_size=80))
_SIZES = st.lists(st.integers(1, 4), max_size=12)


@pytest.mark.parametrize("is_relaxed", [False, True], ids=["preserve", "relaxed"])
@pytest.mark.parametrize("is_full", [False, True], ids=["key", "full"])
@given(wishes=_OPS, sizes=_SIZES, seed=st.integers(0, 1 << 32), is_enforced=st.booleans())
@settings(max_examples=2 * settings().max_examples)
def test_parallel_equals_serial(
    *, wishes: list[Op], sizes: list[int], seed: int, is_enforced: bool, is_full: bool, is_relaxed: bool
) -> None:
    """All rows are equal, no reader meets an orphan, and nothing is refused where the wire carries old rows.

    Where it does not, what an update or delete frees cannot be seen (trap T-19): the batch is repeated at the head, and
    nothing is refused there.
    """
    source = Source(is_full=is_full, is_enforced=is_enforced)
    source.run(wishes)
    target = Target(Random(seed), is_relaxed=is_relaxed, is_exact=is_full, is_enforced=is_enforced)
    target.run(batches(source.transactions, source.plans, sizes))
    event(f"at a time: {min(target.n_parallel, 4)}")
    event(f"retries: {min(target.retries, 3)}")
    assert target.rows == source.rows


@pytest.mark.parametrize("is_enforced", [True, False])
def test_a_parent_comes_before_its_child(*, is_enforced: bool) -> None:
    """A child whose changes came first in a batch waits for the parent's if the target enforces their tie."""
    source = Source(is_full=True, is_enforced=is_enforced)
    source.run([Op("insert", CHILD, 1, None), Op("insert", PARENT, 1, 1), Op("update", CHILD, 1, 1)])
    (batch,) = batches(source.transactions, source.plans, [1])
    child, parent = batch.table_changes
    assert child.plan.foreign_keys
    assert not parent.plan.foreign_keys
    assert parents_first([child, parent]) == ([parent, child] if is_enforced else [child, parent])
    assert parents_first([parent, child]) == [parent, child]

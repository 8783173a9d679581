"""Unique values and foreign keys: what runs in parallel equals serial application, whatever commits first."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.unit.changes_stream import batches
from tests.unit.foreign_key_model import CHILD, PARENT, Op, Source, Target

_OP = st.builds(
    Op,
    kind=st.sampled_from(["insert", "insert", "insert", "delete", "update", "move", "commit", "commit", "commit"]),
    table=st.sampled_from([PARENT, CHILD]),
    key=st.integers(1, 5),
    value=st.sampled_from([None, 1, 2, 3, 4, 5]),
)
_OPS = st.integers(0, 60).flatmap(lambda n: st.lists(_OP, min_size=n, max_size=80))
_SIZES = st.lists(st.integers(1, 4), max_size=12)


@pytest.mark.parametrize("is_relaxed", [False, True], ids=["preserve", "relaxed"])
@pytest.mark.parametrize("is_full", [False, True], ids=["key", "full"])
@given(wishes=_OPS, sizes=_SIZES, seed=st.integers(0, 1 << 32), is_enforced=st.booleans())
@settings(max_examples=150, deadline=None)
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

"""Parts in which a failed batch is tried: all transactions are committed once, in order, with few attempts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parapply.plan.halving import BatchPart, Form, Halving


def _run(n_transactions: int, bad_for_sets: set[int], bad: set[int], *, are_known: bool = True) -> list[BatchPart]:
    """Apply a batch and return every attempt.

    Args:
        n_transactions: of the batch.
        bad_for_sets: transactions because of which sets fail.
        bad: those that fail row by row, too, if not alone.
        are_known: whether a failure row by row says whose it was.
    """
    halving = Halving(n_transactions)
    tried: list[BatchPart] = []
    committed: list[int] = []
    while not halving.is_done:
        part = halving.part
        tried.append(part)
        numbers = range(part.start, part.end)
        to_blame = [number for number in numbers if number in (bad | bad_for_sets if part.form is Form.SETS else bad)]
        if part.form is Form.ALONE or not to_blame:
            committed += numbers
            halving.committed()
        elif part.form is Form.ORDERED and are_known:
            halving.isolate(to_blame[0])
        else:
            halving.failed()
    assert committed == list(range(n_transactions))
    assert halving.n_done == n_transactions
    return tried


_NUMBERS = st.sets(st.integers(0, 999), max_size=20)


@given(st.integers(1, 1000), _NUMBERS, _NUMBERS, st.booleans())
def test_every_transaction_is_committed_once_and_in_order(
    n_transactions: int,
    bad_for_sets: set[int],
    bad: set[int],
    are_known: bool,  # noqa: FBT001  drawn
) -> None:
    """Whatever fails, parts follow one another without a gap, and only a single transaction is tried alone."""
    for part in _run(n_transactions, bad_for_sets, bad, are_known=are_known):
        assert part.start < part.end
        assert part.form is not Form.ALONE or part.end == part.start + 1


def test_a_batch_that_succeeds_is_tried_once() -> None:
    """At the head nearly every batch does."""
    assert _run(5000, set(), set()) == [BatchPart(0, 5000, Form.SETS)]


def test_only_the_smallest_part_that_fails_goes_row_by_row() -> None:
    """One transaction that no set can hold costs its 64 at most the sets, and no conflict is looked for."""
    tried = _run(5000, {3210}, set())
    in_order = [part for part in tried if part.form is not Form.SETS]
    assert [part.form for part in in_order] == [Form.ORDERED]
    assert in_order[0].start <= 3210 < in_order[0].end <= in_order[0].start + 64
    assert len(tried) == 16


def test_a_conflict_costs_attempts_by_the_logarithm_and_is_met_alone() -> None:
    """Transactions before it in the smallest part are committed first, and only it is tried alone."""
    tried = _run(5000, set(), {3210})
    assert [part for part in tried if part.form is Form.ALONE] == [BatchPart(3210, 3211, Form.ALONE)]
    assert len(tried) == 19


def test_where_the_failure_says_nothing_halves_end_at_single_transactions() -> None:
    """A deferred check that fails at COMMIT names no statement."""
    tried = _run(100, set(), {42}, are_known=False)
    assert [part for part in tried if part.form is Form.ALONE] == [BatchPart(42, 43, Form.ALONE)]


def test_one_transaction_is_isolated_as_asked() -> None:
    """A transaction that must be alone also splits sets: the ones before it stay together, as do the ones after it."""
    halving = Halving(10)
    halving.isolate(4)
    found = []
    while not halving.is_done:
        found.append(halving.part)
        halving.committed()
    assert found == [BatchPart(0, 4, Form.SETS), BatchPart(4, 5, Form.ALONE), BatchPart(5, 10, Form.SETS)]


def test_a_single_transaction_whose_sets_failed_is_alone() -> None:
    """Row by row as part of a run would be the same."""
    halving = Halving(1)
    halving.failed()
    assert halving.part == BatchPart(0, 1, Form.ALONE)


def test_joined_transactions_that_fail_are_tried_one_by_one() -> None:
    """Code that sees several transactions as one may fail because of that: each of the others commits separately."""
    halving = Halving(10, form=Form.JOINED)
    halving.passed(2)
    halving.failed()
    assert halving.part == BatchPart(2, 10, Form.EACH)
    halving.isolate(5)
    assert halving.part == BatchPart(2, 5, Form.EACH)

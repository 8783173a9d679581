"""What large transactions touch, by tables and ranges of keys: never less than they do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from parapply.plan.footprint import Footprint
from parapply.plan.overlap import overlaps
from tests.unit.changes_model import NUMERIC, PAIR, PLAIN, UNIQUE
from tests.unit.changes_stream import Op, Publisher, assembled, batches, ops
from tests.unit.dependency_model import batch_of
from tests.unit.foreign_key_model import CHILD, PARENT, Source
from tests.unit.foreign_key_model import Op as FamilyOp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.plan.batch import Batch
    from tests.unit.changes_model import Spec

_FAMILY_OPS = st.lists(
    st.builds(
        FamilyOp,
        kind=st.sampled_from(["insert", "insert", "delete", "update", "move", "commit"]),
        table=st.sampled_from([PARENT, CHILD]),
        key=st.integers(1, 9),
        value=st.sampled_from([None, 1, 2, 3, 4, 5]),
    ),
    max_size=40,
)


def _footprint(earlier: Sequence[Batch]) -> Footprint:
    footprint = Footprint()
    for batch in earlier:
        footprint.join(Footprint.of(batch))
    return footprint


def _check_covers(done: Sequence[Batch], n_earlier: int) -> None:
    """Fail if a batch overlaps one of the first, and not what is known of them all."""
    footprint = _footprint(done[:n_earlier])
    for later in done[n_earlier:]:
        does_overlap = any(overlaps(earlier, later) for earlier in done[:n_earlier])
        is_found = footprint.overlaps(Footprint.of(later))
        event(f"{does_overlap=} {is_found=}")
        assert is_found or not does_overlap


@given(wishes=ops(), sizes=st.lists(st.integers(1, 4), max_size=20), n_earlier=st.integers(0, 6))
def test_what_overlaps_by_keys_overlaps_by_ranges(wishes: list[Op], sizes: list[int], n_earlier: int) -> None:
    """Of every kind of table: batches that share a key, a unique value or a wide table, and barriers."""
    publisher = Publisher()
    done = batches(assembled(publisher.run(wishes)), publisher.plans, sizes)
    _check_covers(done, n_earlier)


@given(wishes=_FAMILY_OPS, sizes=st.lists(st.integers(1, 3), max_size=12), n_earlier=st.integers(0, 6))
def test_what_overlaps_by_foreign_keys_overlaps(wishes: list[FamilyOp], sizes: list[int], n_earlier: int) -> None:
    """A child and a parent are never apart, whichever of them comes first."""
    source = Source(is_full=True, is_enforced=True)
    source.run(wishes)
    _check_covers(batches(source.transactions, source.plans, sizes), n_earlier)


@pytest.mark.parametrize(
    ("plans", "earlier", "later", "does_overlap"),
    [
        ((PLAIN, PLAIN), (b"1", b"2"), (b"3", b"4"), False),
        ((PLAIN, PLAIN), (b"3", b"4"), (b"1", b"2"), False),
        ((PLAIN, PLAIN), (b"1", b"4"), (b"2", b"3"), True),
        ((PLAIN, PLAIN), (b"2", b"3"), (b"1", b"4"), True),
        ((PAIR, PAIR), (b"1", b"2"), (b"3", b"4"), False),
        ((PAIR, PAIR), (b"1", b"3"), (b"2", b"4"), True),
        ((PLAIN, PAIR), (b"1", b"2"), (b"1", b"2"), False),
        ((UNIQUE, UNIQUE), (b"1", b"2"), (b"3", b"4"), True),
    ],
    ids=["behind", "before", "inside", "around", "pair behind", "pair inside", "other table", "another unique index"],
)
def test_ranges(
    plans: tuple[Spec, Spec], earlier: Sequence[bytes], later: Sequence[bytes], *, does_overlap: bool
) -> None:
    """Two are apart in different tables, or where the keys of one all lie on one side of the other's."""
    footprint = Footprint()
    for seq, key in enumerate(earlier, 1):
        footprint.join(Footprint.of(batch_of(seq, plans[0].plan(0), key)))
    assert footprint.overlaps(Footprint.of(batch_of(9, plans[1].plan(0), *later))) is does_overlap


def test_keys_of_two_forms_may_be_any_key() -> None:
    """A table that is announced with another key on the way is touched as a whole: its keys have no common order."""
    other = NUMERIC._replace(
        name="again", facts=msgspec.structs.replace(NUMERIC.facts, oid=PLAIN.facts.oid, root_oid=PLAIN.facts.oid)
    )
    pieces = [Footprint.of(batch_of(1, PLAIN.plan(0), b"1")), Footprint.of(batch_of(2, other.plan(0), b"2"))]
    assert pieces[0].overlaps(pieces[1])
    footprint = Footprint()
    for piece in pieces:
        footprint.join(piece)
    for spec, key in ((PLAIN, b"0"), (PLAIN, b"9"), (other, b"0"), (other, b"9")):
        assert footprint.overlaps(Footprint.of(batch_of(9, spec.plan(0), key)))


def test_a_piece_that_was_not_read_as_sets_may_touch_anything() -> None:
    """On both sides."""
    piece, anything = Footprint.of(batch_of(1, PLAIN.plan(0), b"1")), Footprint.of(None)
    assert not Footprint().overlaps(piece)
    assert Footprint().overlaps(anything)
    footprint = Footprint()
    footprint.join(anything)
    assert footprint.overlaps(piece)


def test_what_was_announced_is_met_until_something_is_known_of_it() -> None:
    """A table that a transaction will change, with no change of it planned, is taken for touched as a whole."""
    footprint, announced = Footprint(), {PLAIN.oid}
    piece = Footprint.of(batch_of(2, PLAIN.plan(0), b"5"))
    assert footprint.overlaps(piece, announced)
    assert not footprint.overlaps(Footprint.of(batch_of(2, PAIR.plan(0), b"5")), announced)
    assert footprint.join(Footprint.of(batch_of(1, PLAIN.plan(0), b"1")))
    assert not footprint.overlaps(piece, announced)
    assert not footprint.join(Footprint.of(batch_of(1, PLAIN.plan(0), b"2")))

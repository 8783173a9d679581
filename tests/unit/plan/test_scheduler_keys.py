"""Keys in flight: a key that an earlier batch holds is always named, and a free one hardly ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from parapply.plan.scheduler import KeysInFlight
from parapply.plan.table_changes import TableChanges
from tests import build
from tests.unit.changes_model import PAIR, PLAIN, Spec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from parapply.plan.keys import Key

KEYS = st.sets(st.integers(0, 30), max_size=12)
#: Batches come and go in any order: a number commits the batch in flight at that place.
STEPS = st.lists(st.one_of(st.tuples(st.sampled_from([PLAIN, PAIR]), KEYS, KEYS), st.integers(0, 5)), max_size=25)


def table_changes(spec: Spec, inserted: Iterable[int], moved: Iterable[int]) -> TableChanges:
    """Return changes of a table that insert some keys and move others to a hundred more."""
    changes = TableChanges(spec.plan(0))
    for number in inserted:
        changes.add(build.xlog_data(build.insert(_row(spec, number))))
    for number in moved:
        changes.add(build.xlog_data(build.update(_row(spec, number + 100), key=_row(spec, number))))
    return changes


def _row(spec: Spec, number: int) -> bytes:
    n_keys = len(spec.facts.key_columns)
    return build.row(*[build.text(str(number).encode())] * n_keys, build.text(b"a"), build.text(b"b"))


def keys_of(changes: TableChanges) -> set[Key]:
    """Return every key that changes touch."""
    return set().union(*changes.key_sets())


@given(STEPS)
def test_no_key_in_flight_is_left_out(steps: list[tuple[Spec, set[int], set[int]] | int]) -> None:
    """A key that a batch in flight holds is named; when all have committed, the table of keys is as it was."""
    flight = KeysInFlight()
    in_flight: list[TableChanges] = []
    for step in steps:
        if isinstance(step, int):
            if step < len(in_flight):
                flight.remove(in_flight.pop(step))
            continue
        changes = table_changes(*step)
        held = [keys_of(other) for other in in_flight if other.tree_oid == changes.tree_oid]
        named = flight.add(changes)
        assert set().union(*held) & keys_of(changes) <= named <= keys_of(changes)
        in_flight.append(changes)
    for changes in in_flight:
        flight.remove(changes)
    again = table_changes(PLAIN, range(5), range(10, 15))
    assert flight.add(again) <= {key for key in keys_of(again) if _is_twice(again, key)}


def _is_twice(changes: TableChanges, key: Key) -> bool:
    return sum(key in keys for keys in changes.key_sets()) > 1


def test_few_keys_are_named_in_vain() -> None:
    """With fifty thousand keys of others in flight, nearly all of ten thousand new ones are known to be free."""
    flight = KeysInFlight()
    flight.add(table_changes(PLAIN, range(50_000), ()))
    assert len(flight.add(table_changes(PLAIN, range(50_000, 60_000), ()))) < 1_000


def test_a_slot_that_was_full_names_its_keys_for_ever() -> None:
    """Counts end at 255: beyond, keys are named in vain rather than ever left out."""
    flight = KeysInFlight()
    many = [table_changes(PLAIN, [7], ()) for _ in range(300)]
    for changes in many:
        flight.add(changes)
    for changes in many[:-1]:
        flight.remove(changes)
    assert flight.add(table_changes(PLAIN, [7], ())) == keys_of(many[0])

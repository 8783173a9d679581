"""Traps T-18 to T-28 and T-33: the dependency that each is about, with every chance to be missed (`gate.py`).

While a foreign lock holds the first transaction on the target, the later ones could come first. In any mode they must
not be seen before it, and the target must end as the source, without an error. Where the dependency is on the wire,
nothing may have to be repeated. `test_column_errors.py` has what is refused of T-23, T-24 and T-26.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.gate import Gate, Gates, for_each, gate, in_every_mode, schemas_of
from tests.fixtures.rotation import values_of
from tests.system import dependency_cases as rows
from tests.system import table_dependency_cases as tables
from tests.system import unique_dependency_cases as unique
from tests.system.family_cases import FAMILIES
from tests.system.key_cases import SETUP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.gated_case import GatedCase, Mode
    from tests.fixtures.servers import ServerPool

__all__ = ["gate"]

# The first test starts the daemon and waits for what the whole case takes.
pytestmark = [pytest.mark.timeout(300), pytest.mark.in_turn("mode", "pg_major")]

#: Of another version the catalogue is another one: of indexes, foreign keys and partitions. Rows come as ever.
of_both_versions = pytest.mark.pg_majors(15, 18)

_ICU = (
    "CREATE EXTENSION citext; CREATE COLLATION public.caseless"
    " (provider = icu, locale = 'und-u-ks-level2', deterministic = false);"
)


@pytest.fixture(scope="module")
def gates(server_pool: ServerPool, request: pytest.FixtureRequest) -> Iterator[Gates]:
    """The daemons of this module, by major version."""
    names = schemas_of(request)

    def make(major: int) -> Gate:
        # The embedded servers have neither ICU nor citext.
        setup = SETUP + (_ICU if major == 15 else "")
        source, target = server_pool.get("source", major), server_pool.get("target", major)
        return Gate(source, target, values_of(request, "mode", major), setup=setup, schemas=names)

    with ExitStack() as stack:
        yield Gates(stack, make)


@in_every_mode
@for_each(rows.SAME_ROW)
def test_t18_changes_of_one_row_keep_their_order(gate: Gate, case: GatedCase, mode: Mode) -> None:
    """A change of a row waits for the commit of the earlier change of that row (T-18)."""
    gate.check(case, mode)


@of_both_versions
@in_every_mode
@for_each(unique.FREED_VALUES)
def test_t19_a_freed_value_is_taken_after_it_is_free(gate: Gate, case: GatedCase, mode: Mode) -> None:
    """The freed value of a second unique index is not on the wire: tried again, never reported, never lost (T-19)."""
    gate.check(case, mode)


@in_every_mode
@for_each(rows.MOVED_KEYS)
def test_t20_a_moved_key_counts_where_it_was_and_where_it_is(gate: Gate, case: GatedCase, mode: Mode) -> None:
    """An update of a key conflicts with any change that touches the old key or the new one (T-20)."""
    gate.check(case, mode)


@in_every_mode
@for_each(rows.EQUAL_KEYS)
def test_t21_equal_keys_are_one_key_whatever_their_text(gate: Gate, case: GatedCase, mode: Mode) -> None:
    """Keys are equal when the target's index says so, also inside arrays, ranges, composites and domains (T-21)."""
    gate.check(case, mode)


@pytest.mark.pg_majors(15)  # the embedded servers have neither ICU nor citext
@in_every_mode
@for_each(rows.EQUAL_KEYS_ICU)
def test_t21_equal_keys_by_collation(gate: Gate, case: GatedCase, mode: Mode) -> None:
    """Keys that the target's collation or citext holds for equal are one key, though the source's does not (T-21)."""
    gate.check(case, mode)


@of_both_versions
@in_every_mode
@for_each(unique.FREED_BY_OTHER_RULES)
def test_t22_what_other_rules_free_is_taken_after_it_is_free(gate: Gate, case: GatedCase, mode: Mode) -> None:
    """NULLS NOT DISTINCT, expression, partial, exclusion and generated: no order but the source's is left (T-22)."""
    gate.check(case, mode)


@of_both_versions
@in_every_mode
@for_each(unique.TAKEN_BY_OTHER_RULES)
def test_t22_what_other_rules_let_nobody_take_is_taken_by_the_first(gate: Gate, case: GatedCase, mode: Mode) -> None:
    """A transaction that takes a value after it was taken and freed never commits before the first taker (T-22).

    That one could not be repeated at all, because the row in its way has committed.
    """
    gate.check(case, mode)


@pytest.mark.pg_majors(18)
@in_every_mode
@for_each(unique.WITHOUT_OVERLAPS)
def test_t22_a_key_without_overlaps(gate: Gate, case: GatedCase, mode: Mode) -> None:
    """Different keys whose ranges overlap exclude each other (T-22)."""
    gate.check(case, mode)


@of_both_versions
@in_every_mode
@for_each(unique.KEYS_OF_THE_TARGET)
def test_t23_the_keys_are_the_targets(gate: Gate, case: GatedCase, mode: Mode) -> None:
    """Unique indexes count that only the target has, on a leaf partition, or made while the daemon runs (T-23)."""
    gate.check(case, mode)


@in_every_mode
@for_each(rows.TWINS)
def test_t24_twins(gate: Gate, case: GatedCase, mode: Mode) -> None:
    """One change changes one of several equal rows, and NULL finds NULL, whichever comes first (T-24)."""
    gate.check(case, mode)


@of_both_versions
@in_every_mode
@for_each(FAMILIES)
def test_t25_families_under_the_replica_role(gate: Gate, case: GatedCase, mode: Mode) -> None:
    """Although no foreign key is checked, no reader sees a child without its parent, in any order of commits (T-25)."""
    gate.check(case, mode)


@in_every_mode
@for_each(tables.TRUNCATES)
def test_t26_truncate(gate: Gate, case: GatedCase, mode: Mode) -> None:
    """A TRUNCATE, of several tables at once, stays between what comes before and what comes after (T-26)."""
    gate.check(case, mode)


@in_every_mode
@for_each(tables.NEW_COLUMNS)
def test_t27_columns_that_change_in_the_middle(gate: Gate, case: GatedCase, mode: Mode) -> None:
    """Each change is read by the columns that were announced before it, whatever is in flight (T-27)."""
    gate.check(case, mode)


@of_both_versions
@in_every_mode
@for_each(tables.PARTITIONS)
def test_t28_partitions(gate: Gate, case: GatedCase, mode: Mode) -> None:
    """A row that moves between partitions of either side keeps the order of its changes (T-28)."""
    gate.check(case, mode)


@in_every_mode
@for_each(rows.SERIALISED_KEYS)
def test_t33_keys_of_several_parts(gate: Gate, case: GatedCase, mode: Mode) -> None:
    """('ab', 'c') waits for ('ab', 'c') only: ('a', 'bc') and other tables go on beside it (T-33)."""
    gate.check(case, mode)

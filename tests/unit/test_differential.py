"""The generator of the differential test, without a server: what a seed draws, and that it draws everything."""

from __future__ import annotations

import random

import pytest

from tests.differential.case import MAJORS, draw_case
from tests.differential.schema import SEEDS_OF_ALL_KINDS, drawn_alone, named_kinds, random_schema
from tests.differential.statements import operations_of
from tests.differential.types import TYPES, Feature, available
from tests.differential.ways import SEEDS_OF_ALL_WAYS, all_ways, random_ways

_EVERYTHING = frozenset(Feature)
_SEEDS = range(30)


def test_a_seed_draws_the_same_case_again() -> None:
    """Tables, settings and statements follow from the seed alone."""
    for seed in _SEEDS:
        first, again = (random_schema(seed, _EVERYTHING) for _ in range(2))
        assert (first.source_sql(), first.target_sql()) == (again.source_sql(), again.target_sql())
        assert str(draw_case(seed, MAJORS, has_crashes=True)) == str(draw_case(seed, MAJORS, has_crashes=True))
    texts = {random_schema(seed, _EVERYTHING).source_sql() for seed in _SEEDS}
    assert len(texts) == len(_SEEDS)


def test_killing_daemons_changes_nothing_else() -> None:
    """The long form and the short form of a seed are the same case but for the kills."""
    for seed in _SEEDS:
        quiet, killed = draw_case(seed, MAJORS), draw_case(seed, MAJORS, has_crashes=True)
        assert not any(quiet.crashes)
        assert (quiet.majors, quiet.ways, quiet.start_at, quiet.is_two_phase) == (
            killed.majors, killed.ways, killed.start_at, killed.is_two_phase,
        )  # fmt: skip


def test_seeds_in_a_row_draw_every_kind_and_every_way() -> None:
    """A few seeds, wherever they begin, leave out no kind of table and no way to apply."""
    names = _kinds_of(_SEEDS)
    for first in _SEEDS:
        # Partitions are published by their root with every other seed.
        assert _kinds_of(range(first, first + SEEDS_OF_ALL_KINDS)) == names
        ways = [way for seed in range(first, first + SEEDS_OF_ALL_WAYS) for way in random_ways(seed)]
        assert {(way.commit_order, way.workers, way.role) for way in ways} == all_ways()


def _kinds_of(seeds: range) -> set[str]:
    """Return the tables' names, where an odd one stands for its kind."""
    names = {table.name for seed in seeds for table in random_schema(seed, _EVERYTHING).tables}
    return {name for name in names if name.startswith("t_") and not name.startswith("t_key_")}


def test_long_runs_draw_each_large_kind_alone() -> None:
    """Few seeds have a kind alone, and its name draws it again."""
    names = [name for seed in range(100) for name in drawn_alone(seed)]
    assert set(names) == {"many_tables", "large_values"} <= named_kinds().keys()
    assert len(names) < 20


def test_every_type_is_drawn_as_key_and_as_value_somewhere() -> None:
    """No type of the list is left out by the rules for keys, comparisons and filters."""
    tables = [table for seed in range(150) for table in random_schema(seed, _EVERYTHING).tables]
    keys = {column.type_sql for table in tables for column in table.key}
    values = {column.type_sql for table in tables for column in table.columns}
    assert {one.name for one in available(_EVERYTHING) if one.is_key} <= keys
    assert TYPES.keys() <= values


def test_types_that_a_server_lacks_are_not_drawn() -> None:
    """Without an extension or ICU no column needs it."""
    lacking = {one.name for one in TYPES.values() if one.needs}
    used = {column.type_sql for seed in _SEEDS for table in random_schema(seed, frozenset()).tables
            for column in table.all_columns}  # fmt: skip
    assert lacking
    assert not used & lacking


@pytest.mark.parametrize("name", sorted(named_kinds()))
def test_every_operation_of_a_kind_gives_a_statement(name: str) -> None:
    """Each kind, drawn by name, gives text for every operation that transactions may choose."""
    chooser = random.Random(name)
    for seed in _SEEDS:
        schema = random_schema(seed, _EVERYTHING, [name])
        assert schema.tables[-1].name == "bulk"
        for table in schema.tables:
            assert all(operation(table, chooser) for operation in operations_of(table))


def test_spare_values_are_no_values() -> None:
    """A swap through a spare value meets no other row, because no type draws its spare value."""
    chooser = random.Random(1)
    for one in TYPES.values():
        assert one.spare not in {one.values(chooser) for _ in range(300)} or not one.spare, one.name


def test_versions_are_mixed() -> None:
    """Publisher and target are drawn from all versions, and differ most of the time."""
    pairs = [draw_case(seed, MAJORS).majors for seed in range(100)]
    assert {source for source, _ in pairs} == set(MAJORS) == {target for _, target in pairs}
    assert sum(source != target for source, target in pairs) > len(pairs) / 2

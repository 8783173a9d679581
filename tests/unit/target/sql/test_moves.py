"""Rows that get other keys: sets of those whose order does not matter, all others one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from parapply.plan.batch import Batch
from parapply.plan.table import Plans
from parapply.plan.table_changes import RowSegment
from parapply.target.sql import commands
from parapply.target.sql.commands import CommandBuilder
from parapply.target.sql.moves import can_move, runs_of_moves
from tests import build
from tests.unit.changes_model import PLAIN
from tests.unit.target.sql.test_commands import cells, elements, of_batch, transaction

if TYPE_CHECKING:
    from parapply.plan.table import TablePlan

_KEYS = 6


def _move(old: int, new: int, value: bytes = build.text(b"a")) -> bytes:
    row = build.row(build.text(b"%d" % new), value, build.text(b"b"))
    return build.update(row, key=cells(str(old), None, None), oid=PLAIN.oid)


@given(moves=st.lists(st.tuples(st.integers(1, _KEYS), st.integers(1, _KEYS)).filter(lambda one: one[0] != one[1])))
def test_a_run_touches_no_key_twice_and_ends_only_at_one_it_has_touched(moves: list[tuple[int, int]]) -> None:
    """In a run every order is right (T-20, T-38); runs follow each other, and none is shorter than it must be."""
    segment = RowSegment(PLAIN.plan(0))
    segment.moves = [([cells(str(old))], [cells(str(new))]) for old, new in moves]
    at = 0
    for start, end in runs_of_moves(segment):
        assert start == at
        at = end
        touched = [key for move in moves[start:end] for key in move]
        assert len(touched) == len(set(touched))
        assert end == len(moves) or not set(touched).isdisjoint(moves[end])
    assert at == len(moves)


def test_moves_that_do_not_touch_each_other_are_one_set() -> None:
    """One statement with the new rows and the old keys, in the order of the source."""
    (command,) = of_batch(*[_move(number, 100 + number) for number in range(1, 6)])
    assert (command.operation, command.expected, command.is_binary) == ("update", 5, True)
    keys, *others, old_keys = [elements(array) for array in command.parameters]
    assert keys == [b"101", b"102", b"103", b"104", b"105"]
    assert others == [[b"a"] * 5, [b"b"] * 5]
    assert old_keys == [b"1", b"2", b"3", b"4", b"5"]


def test_a_move_among_many_tables_leaves_no_insert_of_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a move a table has a segment for what comes next, which may be empty; VALUES of nothing is no SQL."""
    monkeypatch.setattr(commands, "_MANY_TABLES", 1)
    (command,) = of_batch(_move(1, 101))
    assert command.operation == "update"


def test_a_value_that_was_not_sent_is_not_set() -> None:
    """Moves with an unchanged TOAST value are a set of their own, without that column (T-41)."""
    moves = [_move(number, 100 + number, build.unchanged()) for number in range(1, 5)]
    whole, partial = of_batch(*[_move(number, 200 + number) for number in range(11, 15)], *moves)
    assert (whole.expected, len(whole.parameters)) == (4, 4)
    assert (partial.expected, len(partial.parameters)) == (4, 3)


def test_chains_go_one_by_one_in_order() -> None:
    """Each takes the key that the one before gave up: no set, whatever its order, is sure to succeed (T-38)."""
    chain = of_batch(*[_move(number, number + 1) for number in range(6, 0, -1)])
    assert [(command.expected, command.is_binary) for command in chain] == [(1, False)] * 6
    assert [command.parameters[-1] for command in chain] == [b"6", b"5", b"4", b"3", b"2", b"1"]


@pytest.mark.parametrize("change", ["trigger", "origin", "identity"])
def test_rows_that_must_be_asked_for_move_one_by_one(change: str) -> None:
    """A trigger may veto a row, another origin may have written it, an identity column cannot be set (T-43, T-50)."""
    plan = PLAIN.plan(0)
    assert can_move(plan)
    changed: dict[str, TablePlan] = {
        "trigger": replace(plan, facts=replace(plan.facts, triggers=("trigger veto",))),
        "origin": replace(plan, checks_update_origin=True),
        "identity": replace(plan, columns=(*plan.columns[:-1], replace(plan.columns[-1], is_identity_always=True))),
    }
    assert not can_move(changed[change])
    plans, batch = Plans(), Batch(1)
    moved = transaction(plans, *[_move(number, 100 + number) for number in range(1, 6)])
    plans.current[PLAIN.oid] = changed[change]
    batch.add(moved, plans)
    commands = CommandBuilder().of_steps(batch.steps, batch.size_bytes)
    assert not any(command.is_binary for command in commands)

"""The truth table of policies (docs/CONFLICTS.md), cell by cell, and which policy holds where."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from parapply.config import load_config
from parapply.conflict.kinds import Policy
from parapply.conflict.policies import Action, Facing, Rules, decide, outcome
from parapply.conflict.settle import may_be_conflict
from parapply.errors import ConfigError, StatementFailed
from parapply.vocabulary import ConflictOutcome, ConflictType
from tests.unit.runtime.apply.test_failure import command

if TYPE_CHECKING:
    from parapply.target.sql.commands import Operation

EXISTS = ("insert_exists", "update_exists", "multiple_unique_conflicts")
DIFFERS = ("update_origin_differs", "delete_origin_differs")
#: By type: the policies it takes.
TAKES = {
    **dict.fromkeys(EXISTS, frozenset({"error", "skip", "apply_remote", "keep_local", "last_update_wins"})),
    "update_missing": {"error", "skip", "apply_remote"},
    "delete_missing": {"error", "skip"},
    **dict.fromkeys(DIFFERS, frozenset({"off", "error", "skip", "apply_remote", "keep_local", "last_update_wins"})),
}
DOCS = Path(__file__).parents[3] / "docs" / "CONFLICTS.md"


@pytest.mark.parametrize("policy", list(Policy), ids=str)
@pytest.mark.parametrize("kind", list(TAKES))
def test_a_type_takes_the_policies_that_make_sense(kind: str, policy: Policy) -> None:
    """A row that is not there cannot win, and only what costs a look can be left off; everything else is an error."""
    if policy.value in TAKES[kind]:
        config = load_config(None, [f"conflict.{kind}={policy.value}"], {}, {}, required=())
        assert Rules(config.conflict).policy(ConflictType(kind), "public.t") is policy
    else:
        with pytest.raises(ConfigError, match=rf"^conflict\.{kind}: must be 'error'|must be 'off'"):
            load_config(None, [f"conflict.{kind}={policy.value}"], {}, {}, required=())


@pytest.mark.parametrize(
    ("policy", "facing", "action", "kept_as"),
    [
        *((Policy.ERROR, Facing(type=ConflictType(kind)), Action.STOP, ConflictOutcome.STOPPED) for kind in TAKES),
        *((Policy.SKIP, Facing(type=ConflictType(kind)), Action.DROP, ConflictOutcome.SKIPPED) for kind in TAKES),
        *(
            (Policy.KEEP_LOCAL, Facing(type=ConflictType(kind)), Action.DROP, ConflictOutcome.KEPT_LOCAL)
            for kind in (*EXISTS, *DIFFERS)
        ),
        *(
            (Policy.APPLY_REMOTE, Facing(type=ConflictType(kind)), Action.APPLY, ConflictOutcome.APPLIED_REMOTE)
            for kind in (*EXISTS, *DIFFERS, "update_missing")
        ),
    ],
)
def test_a_policy_that_looks_at_nothing(
    policy: Policy, facing: Facing, action: Action, kept_as: ConflictOutcome
) -> None:
    """Each policy does the same for every type that takes it."""
    assert decide(policy, facing) is action
    assert outcome(policy, action) is kept_as


def test_t41_an_incomplete_row_is_never_inserted() -> None:
    """Unchanged TOAST was not sent: apply_remote cannot make the row, and stops; an existing row it can write."""
    missing = Facing(type=ConflictType.UPDATE_MISSING, is_complete=False)
    assert decide(Policy.APPLY_REMOTE, missing) is Action.STOP
    there = Facing(type=ConflictType.UPDATE_ORIGIN_DIFFERS, is_complete=False)
    assert decide(Policy.APPLY_REMOTE, there) is Action.APPLY


@pytest.mark.parametrize(
    ("remote_us", "local_us", "is_greater", "action"),
    [
        (2, 1, False, Action.APPLY),
        (1, 2, True, Action.DROP),
        (1, 1, True, Action.APPLY),
        (1, 1, False, Action.DROP),
        (1, None, False, Action.APPLY),
    ],
)
def test_the_last_update(remote_us: int, local_us: int | None, is_greater: bool, action: Action) -> None:  # noqa: FBT001  a column of the table
    """The later commit wins; of equal ones the greater row, on both nodes; a row of unknown age is old.

    Without its large columns a row is compared on one of the nodes only, so that nothing is decided (T-41).
    """
    for kind in (*EXISTS, *DIFFERS):
        facing = Facing(
            type=ConflictType(kind), remote_time_us=remote_us, local_time_us=local_us, is_remote_greater=is_greater
        )
        assert decide(Policy.LAST_UPDATE_WINS, facing) is action
        cut = msgspec.structs.replace(facing, is_complete=False)
        assert decide(Policy.LAST_UPDATE_WINS, cut) is (Action.STOP if remote_us == local_us else action)


def test_a_table_overrides_what_holds_for_all() -> None:
    """A table's section names some types; the others are as for all tables."""
    rules = Rules(
        load_config(
            None,
            [
                "conflict.insert_exists=skip",
                "conflict.update_missing=skip",
                'conflict.tables."public.t".insert_exists=last_update_wins',
                'conflict.tables."public.t".delete_origin_differs=skip',
            ],
            {},
            {},
            required=(),
        ).conflict
    )
    assert rules.policy(ConflictType.INSERT_EXISTS, "public.t") is Policy.LAST_UPDATE_WINS
    assert rules.policy(ConflictType.UPDATE_MISSING, "public.t") is Policy.SKIP
    assert rules.policy(ConflictType.INSERT_EXISTS, "public.u") is Policy.SKIP
    assert rules.checks_origin("public.t") == (False, True)
    assert rules.checks_origin("public.u") == (False, False)
    assert rules.needs_commit_times
    assert rules.needing() == 'conflict.tables."public.t".insert_exists = "last_update_wins"'


def test_without_a_section_nothing_is_needed_and_everything_stops() -> None:
    """By default nothing is looked for on the way, and whatever is met stops."""
    rules = Rules(load_config(None, (), {}, {}, required=()).conflict)
    assert not rules.needs_commit_times
    assert rules.needing() == ""
    assert {rules.policy(ConflictType(kind), "a.b") for kind in TAKES if kind not in DIFFERS} == {Policy.ERROR}


def test_the_documented_table_is_this_one() -> None:
    """docs/CONFLICTS.md has a row for each type, and in it a dash exactly where the type does not take the policy."""
    order = ["error", "skip", "keep_local", "apply_remote", "last_update_wins"]
    rows = {}
    for line in DOCS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == len(order) + 1 and cells[0].strip("`") in TAKES:
            rows[cells[0].strip("`")] = cells[1:]
    assert rows.keys() == TAKES.keys()
    for kind, cells in rows.items():
        taken = {policy for policy, cell in zip(order, cells, strict=True) if cell != "-"}
        assert taken == TAKES[kind] - {"off"}, kind


@pytest.mark.parametrize(
    ("operation", "sqlstate", "statement", "expected"),
    [
        ("insert", "23505", 0, True),
        ("update", "23505", 0, True),
        ("update", "", 0, True),
        ("delete", "", 0, True),
        ("exists", "", 0, True),
        ("origin", "", 0, True),
        ("insert", "", 0, False),
        ("delete", "23505", 0, False),
        ("insert", "23P01", 0, False),
        ("insert", "23503", 0, False),
        ("insert", "23514", 0, False),
        ("update", "42501", 0, False),
        ("update", "40P01", 0, False),
        ("insert", "23505", -1, False),
        ("truncate", "42501", 0, False),
    ],
)
def test_t65_what_can_be_a_conflict(operation: Operation, sqlstate: str, statement: int, expected: bool) -> None:  # noqa: FBT001  a column of the table
    """Rows missing and rows in the way are conflicts; privileges, checks, locks and deferred checks are not (T-47)."""
    failure = StatementFailed("", sqlstate=sqlstate, statement=statement)
    assert may_be_conflict(failure, [command(operation)]) is expected

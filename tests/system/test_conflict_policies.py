"""Every policy in either commit order, in batches of any size: the same rows, and the same history everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fixtures.conflict_lab import ConflictCase, ConflictLab, ConflictOutcome, ConflictVariant
from tests.fixtures.rotation import values_of
from tests.system.conflict_cases import CASES, LAST_UPDATE_CASES

if TYPE_CHECKING:
    from tests.fixtures.servers import ServerPool

#: With one worker everything is merged, with four and the order kept nothing; what no table says holds for all. With
#: one worker there is one order only.
_COMMON = {"conflict.insert_exists": "skip"}
VARIANTS = (
    ConflictVariant(order="preserve", workers=1, settings=_COMMON),
    ConflictVariant(order="preserve", workers=4, settings={**_COMMON, "apply.max_batch_transactions": 1}),
    ConflictVariant(order="relaxed", workers=4, settings={**_COMMON, "apply.max_batch_transactions": 3}),
)
#: Of the last update, for which nothing is merged.
_LAST_VARIANTS = VARIANTS[1:]

pytestmark = pytest.mark.in_turn("variant")


@pytest.fixture(scope="module")
def lab(server_pool: ServerPool, pg_major: int, request: pytest.FixtureRequest) -> ConflictLab:
    """All cases except the ones of the last update; the first variant is what the histories are compared with."""
    source, target = server_pool.get("source", pg_major), server_pool.get("target", pg_major)
    chosen = values_of(request, "variant", pg_major)
    return ConflictLab(source, target, CASES, [one for one in VARIANTS if one is VARIANTS[0] or one in chosen])


@pytest.fixture(scope="module")
def last_update_lab(server_pool: ServerPool, pg_major: int, request: pytest.FixtureRequest) -> ConflictLab:
    """The cases of the last update, for which nothing is merged."""
    source, target = server_pool.get("source", pg_major), server_pool.get("target", pg_major)
    chosen = values_of(request, "variant", pg_major)
    return ConflictLab(source, target, LAST_UPDATE_CASES, [one for one in _LAST_VARIANTS if one in chosen])


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_policy_does_what_it_says(lab: ConflictLab, case: ConflictCase, variant: ConflictVariant) -> None:
    """Rows and history are as in the truth table, whatever the order, the workers and the batches."""
    check(lab, case, variant)


@pytest.mark.parametrize("variant", _LAST_VARIANTS, ids=str)
@pytest.mark.parametrize("case", LAST_UPDATE_CASES, ids=str)
def test_the_last_update_wins(last_update_lab: ConflictLab, case: ConflictCase, variant: ConflictVariant) -> None:
    """Whichever row was committed later stays."""
    check(last_update_lab, case, variant)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_history_is_the_same_everywhere(lab: ConflictLab, variant: ConflictVariant) -> None:
    """Every row of the history is the same in every setting: both rows, key, transaction, policy, outcome."""
    expected = outcome_of(lab, VARIANTS[0]).history
    assert outcome_of(lab, variant).history == expected
    assert len(expected) == sum(len(case.found) for case in CASES)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_conflict_is_never_an_error_of_its_own(lab: ConflictLab, variant: ConflictVariant) -> None:
    """A conflict that policies settle is logged as settled, without values, and nothing else is logged as an error."""
    outcome = outcome_of(lab, variant)
    assert not [event for event in outcome.events if event.get("level") == "error"]
    settled = [event["n_changes"] for event in outcome.events if event.get("event") == "conflicts_settled"]
    assert sum(settled) == len(outcome.history)
    assert not [event for event in outcome.events if "mine" in str(event)]


def outcome_of(lab: ConflictLab, variant: ConflictVariant) -> ConflictOutcome:
    """Return what a daemon left; fail if it did not end well."""
    outcome = lab.outcomes[str(variant)]
    assert not outcome.problem, outcome.problem
    return outcome


def check(lab: ConflictLab, case: ConflictCase, variant: ConflictVariant) -> None:
    """Fail unless rows and conflicts of a case are as they must be."""
    outcome = outcome_of(lab, variant)
    assert outcome.rows[case.name] == list(case.rows)
    history = [row for row in outcome.history if row[0] == case.name]
    assert [f"{row[1]} {row[3]} {row[14]}" for row in history] == list(case.found)
    if case.kept:
        assert [(row[8], row[5]) for row in history] == list(case.kept)

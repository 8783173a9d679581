"""Traps T-29 to T-32, T-34 to T-37: dependencies that are not in the rows, with each chance to miss them (`gate.py`).

Code on the target, unpredictable locks, commits that fail, values that never arrive, prepared transactions.
`test_code_on_target.py` and `test_stalls.py` have more of T-29 to T-31, with loads instead of a gate.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.gate import Gate, Gates, for_each, gate, in_every_mode, schemas_of
from tests.fixtures.rotation import values_of
from tests.system import code_dependency_cases as cases

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.gated_case import GatedCase, Mode
    from tests.fixtures.servers import ServerPool

__all__ = ["gate"]

# The first test starts the daemon and waits for what the whole case takes.
pytestmark = [pytest.mark.timeout(300), pytest.mark.pg_majors(15, 18), pytest.mark.in_turn("mode")]


@pytest.fixture(scope="module")
def gates(server_pool: ServerPool, request: pytest.FixtureRequest) -> Iterator[Gates]:
    """The daemons of this module, by major version."""
    names = schemas_of(request)

    def make(major: int) -> Gate:
        source, target = server_pool.get("source", major), server_pool.get("target", major)
        modes = values_of(request, "mode", major)
        return Gate(source, target, modes, settings=cases.TRUSTED, schemas=names)

    with ExitStack() as stack:
        yield Gates(stack, make)


@in_every_mode
@for_each(cases.CODE)
def test_t29_code_on_the_target_sees_the_order_of_the_source(gate: Gate, case: GatedCase, mode: Mode) -> None:
    """ALWAYS triggers, sequences in defaults and checks that query run in source order, relaxed or not (T-29)."""
    gate.check(case, mode)


@in_every_mode
@for_each(cases.LOCKS)
def test_t30_t31_locks_that_nobody_predicts(gate: Gate, case: GatedCase, mode: Mode) -> None:
    """A batch with a lock that an earlier one needs rolls back and is repeated: none hangs or is lost (T-30, T-31)."""
    gate.check(case, mode)


@in_every_mode
@for_each(cases.ANOMALIES)
def test_t32_only_relaxed_shows_the_invoice_before_the_order(gate: Gate, case: GatedCase, mode: Mode) -> None:
    """Transactions with no common key may be seen in another order if relaxed, as documented, and only then (T-32)."""
    gate.check(case, mode)


@in_every_mode
@for_each(cases.ISOLATION)
def test_t34_workers_read_what_is_committed(gate: Gate, case: GatedCase, mode: Mode) -> None:
    """A worker sees what its predecessor committed, whatever default_transaction_isolation is (T-34)."""
    assert gate.target(mode).rows("SHOW default_transaction_isolation") == [("serializable",)]
    gate.check(case, mode)


@in_every_mode
@for_each(cases.COMMIT_FAILS)
def test_t35_keys_are_free_when_the_commit_is_acknowledged(gate: Gate, case: GatedCase, mode: Mode) -> None:
    """A batch that depends on one whose COMMIT is refused the first time waits for the second COMMIT (T-35)."""
    gate.check(case, mode)


@in_every_mode
@for_each(cases.SEQUENCES)
def test_t36_sequences_do_not_arrive(gate: Gate, case: GatedCase, mode: Mode) -> None:
    """After a hundred rows the target's sequence is where it was: its values are copied at cut-over (T-36)."""
    gate.check(case, mode)


@in_every_mode
@for_each(cases.PREPARED)
def test_t37_prepared_transactions_take_their_place_when_they_commit(gate: Gate, case: GatedCase, mode: Mode) -> None:
    """A prepared transaction holds up no other while undecided, and keeps its keys' order by COMMIT PREPARED (T-37)."""
    gate.check(case, mode)

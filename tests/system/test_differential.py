"""The main property: parallel apply ends in the rows that serial apply by the built-in subscription ends in.

Each run takes fresh seeds; a failure names the command that repeats its tables and transactions. PARAPPLY_TEST_SEEDS
chooses the seeds here: `7,8` these, `1-50` a range. Daemons that are killed on the way belong to the long form (`make
faults`).
"""

from __future__ import annotations

import os
import random
import secrets
from typing import TYPE_CHECKING

import pytest

from tests.differential.case import MAJORS, Servers, draw_case, run_case
from tests.differential.conflicts import draw_conflicts, run_conflicts
from tests.differential.policies import run_policies
from tests.fixtures.selection import SELECTION

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.fixtures.servers import ServerOf

pytestmark = pytest.mark.each_session

_SEEDS_VARIABLE = "PARAPPLY_TEST_SEEDS"
#: Consecutive seeds draw every kind of table; the first one differs from run to run.
_N_CASES = 1
_N_CONFLICT_CASES = 1
_N_POLICY_CASES = 6
_HIGHEST_SEED = 1_000_000


def _seeds(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


@pytest.fixture(scope="module")
def first_seed() -> int:
    """The seed of the module's first case."""
    return secrets.randbelow(_HIGHEST_SEED)


@pytest.fixture(scope="module")
def majors(pytestconfig: pytest.Config, first_seed: int) -> Sequence[int]:
    """Two of the versions on this machine: more servers would take longer to start than their cases."""
    found = [major for major in MAJORS if major in pytestconfig.stash[SELECTION].binaries]
    return random.Random(first_seed).sample(found, min(2, len(found)))


_CHOSEN = list(_seeds(os.environ[_SEEDS_VARIABLE])) if os.environ.get(_SEEDS_VARIABLE) else []


@pytest.mark.parametrize("number", range(len(_CHOSEN) or _N_CASES))
def test_parallel_apply_equals_serial_apply(
    server_of: ServerOf, majors: Sequence[int], first_seed: int, number: int
) -> None:
    """Any tables, transactions, versions, workers, commit order and role: every table equals the built-in one's.

    The stream has no conflict, so none is reported on the way (T-69), whether the daemon follows it or finds a backlog.
    Rows that triggers write in the order of changes are also equal, in both commit orders (T-29). The publisher streams
    transactions above 64 kB, with subtransactions that are rolled back afterwards (T-51).
    """
    case = draw_case(_CHOSEN[number] if _CHOSEN else first_seed + number, majors)
    counts = run_case(case, _servers(server_of, case.majors))
    assert counts["committed"] > 0


@pytest.mark.parametrize("number", range(len(_CHOSEN) or _N_CONFLICT_CASES))
def test_policies_leave_what_they_say(server_of: ServerOf, majors: Sequence[int], first_seed: int, number: int) -> None:
    """Any tree of partitions with separate unique indexes, any policies: rows and history equal a model's."""
    seed = _CHOSEN[number] if _CHOSEN else first_seed + number
    counts = run_conflicts(draw_conflicts(seed), _servers(server_of, draw_case(seed, majors).majors))
    assert counts


def test_policies_are_the_same_whatever_the_batch(server_of: ServerOf, majors: Sequence[int], first_seed: int) -> None:
    """Any local changes under any policies: batches of every size leave the rows and records of one change at a time.

    A conflict that a later change of its batch takes back may stay unseen, as docs/CONFLICTS.md says, and no other.
    """
    seed = _CHOSEN[0] if _CHOSEN else first_seed
    counts = run_policies(seed, _servers(server_of, draw_case(seed, majors).majors), n_cases=_N_POLICY_CASES)
    assert counts


def _servers(server_of: ServerOf, pair: tuple[int, int]) -> Servers:
    source, target = pair
    return Servers(source=server_of("source", source), target=server_of("target", target))

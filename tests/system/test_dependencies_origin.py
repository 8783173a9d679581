"""Trap T-25 where foreign keys are enforced: session_replication_role = origin, in both orders (`gate.py`).

On the newest version: how the oldest one's catalogue shows foreign keys is what `test_dependencies.py` runs there.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.gate import Gate, Gates, schemas_of
from tests.fixtures.gated_case import GatedCase, Mode
from tests.fixtures.rotation import values_of
from tests.system.family_cases import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.servers import ServerPool

# The first test starts the daemon and waits for what the whole case takes.
pytestmark = [pytest.mark.timeout(300), pytest.mark.in_turn("mode")]

MODES = (
    Mode(order="preserve", workers=8, role="origin"),
    Mode(order="relaxed", workers=8, role="origin"),
)


@pytest.fixture(scope="module")
def gates(server_pool: ServerPool, request: pytest.FixtureRequest) -> Iterator[Gates]:
    """The daemons of this module, by major version."""
    names = schemas_of(request)

    def make(major: int) -> Gate:
        source, target = server_pool.get("source", major), server_pool.get("target", major)
        return Gate(source, target, values_of(request, "mode", major), schemas=names)

    with ExitStack() as stack:
        yield Gates(stack, make)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_t25_families_under_the_origin_role(gates: Gates, pg_major: int, case: GatedCase, mode: Mode) -> None:
    """Parents come before their children and go after them, by prediction: no batch fails on a foreign key (T-25).

    Cascades of the target find what the source's cascades send, without a false delete_missing.
    """
    gates.get(pg_major).check(case, mode)

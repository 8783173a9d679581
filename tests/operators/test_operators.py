"""Two minutes of operators with fresh seeds; hours of them: `make faults OPERATORS=1`.

With `PARAPPLY_OPERATORS_MINUTES` it runs for that long.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import pytest

from tests.operators.lab import lab
from tests.operators.search import n_steps, search

if TYPE_CHECKING:
    from tests.fixtures.servers import ServerOf, ServerPool

_MINUTES_VARIABLE: Final = "PARAPPLY_OPERATORS_MINUTES"
_MINUTES: Final = 2.0
#: Seconds at most in which a failing script is made shorter.
_SHRINK_S: Final = 120.0


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.timeout(900)
def test_operators_find_nothing(server_pool: ServerPool, server_of: ServerOf) -> None:
    """Whatever operators and applications do: both sides are equal, or a refusal's hint makes them equal.

    A failure's notes hold the script, and the command that repeats it.
    """
    with lab(pool=server_pool) as made:
        search(made, minutes=float(os.environ.get(_MINUTES_VARIABLE, _MINUTES)), seed=None, shrink_s=_SHRINK_S)
        assert n_steps(made.counts) > 0

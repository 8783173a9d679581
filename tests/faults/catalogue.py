"""The faults of the campaign by name, those that cannot be run here, and why.

A fault is a function of a `Round`: it injects, heals, and leaves a daemon behind that can catch up; what it finds by
itself it returns. A *last* fault ends a round: it leaves nothing that could go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.faults.lab import Round
    from tests.faults.oracles import Findings

    Inject = Callable[[Round], Findings | None]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way to break something.

    Attributes:
        name: number of the matrix in docs/TRAPS.md.
        title: for the table.
        inject: does it.
        needs_two_phase: only in rounds with prepared transactions.
        is_last: nothing can go on after it.
        why_not: why it cannot be run on this machine; empty if it can.
    """

    name: str
    title: str
    inject: Inject
    needs_two_phase: bool = False
    is_last: bool = False
    why_not: str = ""


#: Faults that the campaign does not inject, and the place where each is held instead.
NOT_RUN = {
    "F19": "two slots apply everything twice by definition: an operator's mistake without a fault to heal",
    "F25": "the load has it all the time: unique values that go from row to row, few accounts",
    "F32": "needs a standby at the primary's address; `tests/integration/test_settings.py` refuses a read-only target",
    "F37": "needs PgBouncer, which is absent; `tests/integration/test_settings.py` refuses what a pooler does",
}  # fmt: skip

FAULTS: list[Fault] = []


def fault(
    name: str, title: str, *, needs_two_phase: bool = False, is_last: bool = False, why_not: str = ""
) -> Callable[[Inject], Inject]:
    """Register a function as a fault; arguments as the fields of `Fault`."""

    def register(inject: Inject) -> Inject:
        FAULTS.append(
            Fault(
                name=name, title=title, inject=inject, needs_two_phase=needs_two_phase, is_last=is_last, why_not=why_not
            )
        )
        return inject

    return register

"""Runs examples until the time or the steps are over; a limit of Hypothesis' own would be one of examples."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.stateful import run_state_machine_as_test

from tests.operators.lab import fresh_seed
from tests.operators.machines import MACHINES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.operators.lab import Lab

#: Examples of one machine before the next one has its turn, and steps of an example.
_EXAMPLES = 6
_STEPS = 25


def settings(examples: int, steps: int, *, shrinks: bool = True) -> hypothesis.settings:
    """Return Hypothesis' settings: no database of examples, no limit of time for one."""
    return hypothesis.settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, database=None, derandomize=False,
        print_blob=True, report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if shrinks else [Phase.generate],
    )  # fmt: skip


def n_steps(lab: Lab) -> int:
    """Return how many steps were done."""
    return sum(count for name, count in lab.counts.items() if name.startswith("step "))


def search(
    lab: Lab, *, machines: Sequence[str] = (), minutes: float = 0.0, most_steps: int = 0, seed: int | None = None,
    steps: int = _STEPS, without: Sequence[str] = (), shrinks: bool = True, tell: Callable[[str], object] = lambda _: None,
) -> None:  # fmt: skip
    """Run examples of machines in turn, each turn with the next seed.

    Args:
        lab: servers and counters.
        machines: names; all when empty.
        minutes: for how long; with neither this nor `most_steps` one turn of each machine.
        most_steps: end after so many.
        seed: of the first turn; fresh when left out.
        steps: of an example.
        without: names of rules that are left out.
        shrinks: make a failing script as short as it gets.
        tell: called with a line for each turn.

    Raises:
        AssertionError: a machine found something; its notes hold the script, and the seed that repeats it.
    """
    number = fresh_seed() if seed is None else seed
    if minutes:
        lab.deadline_s = time.monotonic() + minutes * 60
    names = list(machines) or list(MACHINES)
    while True:
        for name in names:
            if lab.is_over or (most_steps and n_steps(lab) >= most_steps):
                return
            tell(f"{name}, seed {number}, {n_steps(lab)} steps")
            machine = hypothesis.seed(number)(type(MACHINES[name].__name__, (MACHINES[name],), dict.fromkeys(without)))
            try:
                run_state_machine_as_test(machine, settings=settings(_EXAMPLES, steps, shrinks=shrinks))  # type: ignore[arg-type]
            except BaseException as error:
                error.add_note(f"again: python -m tests.operators --machine {name} --seed {number}")
                raise
            number += 1
        if not minutes and not most_steps:
            return



"""Runs examples until the time or the steps are over; a limit of Hypothesis' own would be one of examples."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.internal.conjecture import engine
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.operators.lab import fresh_seed
from tests.operators.machines import MACHINES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.operators.lab import Lab

#: Examples of one machine before the next one has its turn, and steps of an example.
_EXAMPLES = 6
_STEPS = 25
_SHRINK_S = 120.0


def settings(examples: int, steps: int, *, shrinks: bool = True) -> hypothesis.settings:
    """Return Hypothesis' settings: no database of examples, no limit of time for one."""
    return hypothesis.settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, database=None, derandomize=False,
        print_blob=True, report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if shrinks else [Phase.generate],
    )  # fmt: skip


def _restricted(machine: type, without: Sequence[str], only: Sequence[str]) -> type[RuleBasedStateMachine]:
    """Return a machine without some of its rules."""
    rules = [name for name in dir(machine) if hasattr(getattr(machine, name), "hypothesis_stateful_rule")]
    left_out = [name for name in rules if name in without or (only and name not in only)]
    return type(machine.__name__, (machine,), dict.fromkeys(left_out))


def n_steps(counts: Mapping[str, int]) -> int:
    """Return how many steps were done."""
    return sum(count for name, count in counts.items() if name.startswith("step "))


def search(
    lab: Lab, *, machines: Sequence[str] = (), minutes: float = 0.0, most_steps: int = 0, seed: int | None = None,
    steps: int = _STEPS, without: Sequence[str] = (), only: Sequence[str] = (),
    shrink_s: float = _SHRINK_S, tell: Callable[[str], object] = lambda _: None,
) -> None:  # fmt: skip
    """Run examples of machines in turn, each turn with the next seed.

    Args:
        lab: servers and counters.
        machines: names; all when empty.
        minutes: for how long; with neither this nor `most_steps` one turn of each machine.
        most_steps: end after this number.
        seed: of the first turn; fresh when left out.
        steps: of an example.
        without: names of rules that are left out.
        only: names of the only rules that are done.
        shrink_s: seconds to make a failing script shorter; 0: leave it.
        tell: called with a line for each turn.

    Raises:
        AssertionError: a machine found something; its notes hold the script, and the seed that repeats it.
    """
    number = fresh_seed() if seed is None else seed
    # Hypothesis has no setting for it.
    engine.MAX_SHRINKING_SECONDS = int(shrink_s)
    if minutes:
        lab.deadline_s = time.monotonic() + minutes * 60
    names = list(machines) or list(MACHINES)
    while True:
        for name in names:
            if lab.is_over or (most_steps and n_steps(lab.counts) >= most_steps):
                return
            tell(f"{name}, seed {number}, {n_steps(lab.counts)} steps")
            machine = hypothesis.seed(number)(_restricted(MACHINES[name], without, only))
            try:
                run_state_machine_as_test(machine, settings=settings(_EXAMPLES, steps, shrinks=shrink_s > 0))
            except BaseException as error:
                error.add_note(f"again: python -m tests.operators --machine {name} --seed {number}")
                raise
            number += 1
        if not minutes and not most_steps:
            return

"""Turns of machines until the time or the steps are over, in one process; several processes share what is asked for."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Final

import click

from tests.operators.lab import lab
from tests.operators.search import n_steps, search

if TYPE_CHECKING:
    from pathlib import Path

#: Seconds for the servers of a turn to end.
_ENDS_S: Final = 10.0
#: Distance between the seeds of two processes.
_SEEDS: Final = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options, as `--help` describes them."""

    minutes: float
    most_steps: int
    seed: int | None
    versions: str
    machines: tuple[str, ...]
    length: int
    without: tuple[str, ...]
    without_tables: tuple[str, ...]
    only: tuple[str, ...]
    shrink_s: float
    go_on: bool
    found: Path | None

    def shared(self, jobs: int) -> list[Options]:
        """Return the part of each process: its steps, and seeds that no other one comes to."""
        steps = -(-self.most_steps // jobs)
        seeds = [None if self.seed is None else self.seed + job * _SEEDS for job in range(jobs)]
        return [replace(self, most_steps=steps, seed=seed) for seed in seeds]


@dataclass
class Done:
    """Work of one process, or of all of them.

    Attributes:
        majors: versions that were used.
        counts: steps by rule, and what happened.
        n_found: how often something was found.
    """

    majors: tuple[int, ...] = ()
    counts: Counter[str] = field(default_factory=Counter)
    n_found: int = 0

    def __add__(self, other: Done) -> Done:
        """Return both together."""
        return Done(other.majors or self.majors, self.counts + other.counts, self.n_found + other.n_found)


def run(options: Options) -> Done:
    """Run turns until the time or the steps are over, or something was found."""
    seed, n_found, began_s = options.seed, 0, time.monotonic()
    is_one_turn = not options.minutes or (seed is not None and not options.go_on and not options.most_steps)
    with lab([int(word) for word in options.versions.split(",") if word]) as made:
        made.left_out.update(options.without_tables)
        while True:
            try:
                search(
                    made, machines=options.machines, most_steps=options.most_steps, seed=seed, steps=options.length,
                    minutes=0.0 if is_one_turn else options.minutes - (time.monotonic() - began_s) / 60,
                    without=options.without, only=options.only, shrink_s=options.shrink_s, tell=click.echo,
                )  # fmt: skip
            except Exception as error:  # noqa: BLE001  whatever it is, it was found
                n_found += 1
                _tell(error, n_steps(made.counts), options.found)
            made.has_found, seed = False, None
            is_over = made.is_over or (options.most_steps and n_steps(made.counts) >= options.most_steps)
            if not options.go_on or is_over or (is_one_turn and not options.most_steps):
                return Done(made.majors, made.counts, n_found)


def _tell(error: Exception, steps: int, path: Path | None) -> None:
    text = "".join(traceback.format_exception(error, limit=-3))
    click.echo(text)
    if path:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"==== after {steps} steps\n{text}\n")


def end_with_parent() -> None:
    """Interrupt this process, so that its servers end, when the command that started it is gone."""
    parent, main = multiprocessing.parent_process(), threading.get_ident()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        while True:
            # The first interrupts the turn, the next one the wait for another turn.
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(_ENDS_S)

    # A shell has commands in its background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=watch, name="parent", daemon=True).start()

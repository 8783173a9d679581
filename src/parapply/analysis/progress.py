"""Progress on the terminal while the engine works: the step, a bar, the time. On standard error only.

In go steps as they begin; the engine says how far the step under way is. A thread polls it a few times a
second; it ends with the block.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from parapply.analysis.store import Engine

_LOOK_S: Final = 0.3
_JOIN_S: Final = 5.0


class Steps(Protocol):
    """A listener for steps."""

    def expect(self, steps: int) -> None:
        """Add a number of steps to come."""

    def begin(self, title: str) -> None:
        """End the step under way, if any, and begin another one."""


class Silent:
    """Shows nothing."""

    def expect(self, steps: int) -> None:
        """Do nothing."""

    def begin(self, title: str) -> None:
        """Do nothing."""


class _Bar:
    """A bar over all steps, moved on within a step as far as the engine can say."""

    def __init__(self, progress: Progress, engine: Engine) -> None:
        self._progress = progress
        self._engine = engine
        self._task = progress.add_task("Starting", total=0)
        self._begun = 0
        self._expected = 0
        self._best = 0.0  # a step has several stages, and each starts at 0

    def expect(self, steps: int) -> None:
        self._expected += steps
        self._progress.update(self._task, total=self._expected)

    def begin(self, title: str) -> None:
        self._begun += 1
        self._best = 0.0
        self._progress.update(self._task, description=title, completed=self._begun - 1)
        if not self._progress.console.is_terminal:
            self._progress.console.print(f"parapply: {self._begun}/{self._expected} {title}", highlight=False)

    def finish(self) -> None:
        self._progress.update(self._task, description="Done", completed=self._expected)

    def look(self, ended: threading.Event) -> None:
        while not ended.wait(_LOOK_S):
            done = self._engine.done()
            if done is not None and self._begun:
                self._best = max(self._best, done)
                self._progress.update(self._task, completed=self._begun - 1 + self._best * 0.95)


@contextmanager
def shown(engine: Engine) -> Iterator[Steps]:
    """Show steps until the end of the block; a line for each step where standard error is no terminal."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<36}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    ended = threading.Event()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = _Bar(progress, engine)
        thread = threading.Thread(target=bar.look, args=(ended,), name="report-progress", daemon=True)
        thread.start()
        try:
            yield bar
            bar.finish()
        finally:
            ended.set()
            thread.join(_JOIN_S)

"""Progress of a migration: a bar on a terminal, lines without one, or a JSON document a line.

Lines of progress go to standard error, as the copy's do; finished work is reported on standard output. With JSON the
documents alone are on standard output, and all lines on standard error.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any, TextIO

import click
import msgspec

from parapply import connect
from parapply.copy.bar import terminal_progress
from parapply.printable import printable
from parapply.source import slot
from parapply.target.state import migrations
from parapply.target.state.migrations import HowFar
from parapply.vocabulary import MigrationStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Progress, TaskID

    from parapply.config import Config
    from parapply.copy.bar import CopyProgress

#: Seconds between two lines where there is no terminal, and between two documents.
_LINE_S = 10.0
_DOCUMENT_S = 1.0
_MEGABYTE = 1e6


class Screen:
    """Display of all steps."""

    def __init__(self, *, as_json: bool, database: str | None = None) -> None:
        self._of = {} if database is None else {"database": database}
        #: The latest step and its state.
        self.latest = ("", "")
        self._json: TextIO | None = sys.stdout if as_json else None
        self._counter: Counter | None = None
        self._copied: HowFar | None = None

    def forget(self) -> None:
        """Know nothing of a step that has ended."""
        self._counter = self._copied = None

    def how_far(self) -> HowFar | None:
        """Return the progress of the step under way, None where nothing is counted."""
        if self._counter is not None:
            return self._counter.how_far()
        return self._copied

    def has_copied(self, n_rows: int) -> None:
        """Take the rows that the copy has brought in all; its bytes stay those since the step was begun."""
        size_bytes = 0 if self._copied is None else self._copied.size_bytes
        self._copied = HowFar(done=n_rows, total=n_rows, unit="rows", size_bytes=size_bytes)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Keep standard output for documents, if there are any, until the block ends."""
        if self._json is None:
            yield
            return
        with redirect_stdout(sys.stderr):
            yield

    def said(self, step: MigrationStep, state: str, text: str = "", **more: Any) -> None:  # noqa: ANN401  what JSON can hold
        """Report the outcome of a step."""
        self.latest = (step.value, state)
        if self._json is not None:
            document = {**self._of, "step": step.value, "state": state, **({"text": text} if text else {}), **more}
            self._json.write(json.dumps(document) + "\n")
            self._json.flush()
        else:
            click.echo(f"{step.value}: {state}{f': {printable(text)}' if text else ''}")

    def copying(self, step: MigrationStep, rows_before: int) -> Callable[[CopyProgress], None]:
        """Return a listener for a copy's progress that writes documents; without them the copy's own bar shows it.

        Rows of earlier commands also count; bytes are of this command alone, for the rate.
        """

        def tell(now: CopyProgress) -> None:
            self._copied = HowFar(
                done=rows_before + now.rows,
                total=rows_before + round(now.rows / now.share) if now.share else 0,
                unit="rows",
                size_bytes=now.size_bytes,
                left_s=None if now.left_s is None else round(now.left_s, 1),
            )
            if self._json is None:
                return
            self.said(
                step,
                "running",
                rows=now.rows,
                size_bytes=now.size_bytes,
                share=round(now.share, 4),
                bytes_per_s=round(now.bytes_per_s),
                left_s=None if now.left_s is None else round(now.left_s, 1),
            )

        return tell

    @contextmanager
    def counting(self, step: MigrationStep, total: int, unit: str, before: int = 0) -> Iterator[Counter]:
        """Count what a step does, until the block ends; `before` was done by an earlier command, and is not in it."""
        self._counter = Counter(self, step, total, unit, before, is_json=self._json is not None)
        try:
            yield self._counter
        finally:
            self._counter.end()


class Counter:
    """Progress of one step. Written by the tasks of one loop."""

    def __init__(  # noqa: PLR0913  one place makes it
        self, screen: Screen, step: MigrationStep, total: int, unit: str, before: int, *, is_json: bool
    ) -> None:
        self._before = before
        self._screen = screen
        self._step = step
        self._is_json = is_json
        self.total = total
        self.unit = unit
        self.done = 0
        self.size_bytes = 0
        self._names: dict[str, None] = {}
        self._began_s = self._said_s = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if total and not is_json and sys.stderr.isatty():
            self._bar = terminal_progress()
            self._task = self._bar.add_task(step.value, total=total, figures="")
            self._bar.start()

    def end(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def how_far(self) -> HowFar:
        """Return its progress, including earlier work."""
        left_s = self._left_s(time.monotonic())
        return HowFar(
            done=self._before + self.done,
            total=self._before + self.total if self.total else 0,
            unit=self.unit,
            size_bytes=self.size_bytes,
            left_s=None if left_s is None else round(left_s, 1),
        )

    def begin(self, name: str) -> None:
        """Name what is under way."""
        self._names[name] = None
        self._show()

    def add(self, name: str, size_bytes: int = 0) -> None:
        """Count something that is done."""
        self._names.pop(name, None)
        self.done += 1
        self.size_bytes += size_bytes
        self._show()

    def set(self, done: int, name: str) -> None:
        """Show the progress of work that has its own measure."""
        self.done = done
        self._names = {name: None} if name else {}
        self._show()

    def _show(self) -> None:
        now_s = time.monotonic()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.done, figures=self._figures(now_s))
            return
        if now_s - self._said_s < (_DOCUMENT_S if self._is_json else _LINE_S):
            return
        self._said_s = now_s
        left_s = self._left_s(now_s)
        if self._is_json:
            figures: dict[str, Any] = {
                "done": self.done,
                "total": self.total,
                "unit": self.unit,
                "size_bytes": self.size_bytes,
            }
            self._screen.said(
                self._step, "running", **figures, left_s=left_s and round(left_s, 1), now=list(self._names)
            )
            return
        left = "" if left_s is None else f", about {left_s:.0f} s left"
        share = f"{self.done / self.total:.0%}, " if self.total else ""
        click.echo(f"{self._step.value}: {share}{self._figures(now_s)}{left}", err=True)

    def _left_s(self, now_s: float) -> float | None:
        return (now_s - self._began_s) * (self.total - self.done) / self.done if self.done and self.total else None

    def _figures(self, now_s: float) -> str:
        seconds = max(1e-6, now_s - self._began_s)
        size = ""
        if self.size_bytes:
            megabytes = self.size_bytes / _MEGABYTE
            size = f"  {megabytes:,.0f} MB  {megabytes / seconds:,.0f} MB/s"
        names = "; ".join([printable(name) for name in list(self._names)[:2]])
        of = f" of {self.total:,}" if self.total else ""
        return f"{self.done:,}{of} {self.unit}{size}{f'  {names}' if names else ''}"


async def show_steps(config: Config, *, as_json: bool) -> int:
    """Print the steps and the progress of each; run none."""
    known = await steps(config)
    if as_json:
        click.echo(msgspec.json.encode([known[step] for step in MigrationStep if step in known]).decode())
        return 0
    for step in MigrationStep:
        row = known.get(step)
        if row is None:
            click.echo(f"{step.value}: not begun")
            continue
        took = f" in {row.seconds:.1f} s" if row.finished_at else f" since {row.started_at}"
        figures = f", {row.done:,} of {row.total:,} {row.unit}" if row.unit else ""
        click.echo(printable(f"{step.value}: {row.state}{took}{figures}{f': {row.detail}' if row.detail else ''}"))
    return 0


async def steps(config: Config) -> dict[str, migrations.StepRow]:
    """Return the steps that were begun, by name."""
    async with connect.open_both(config, "migrate") as ends:
        facts = await slot.inspect(ends.source, config.source.slot)
        return await migrations.load(ends.target, migration_of(config, facts))


def migration_of(config: Config, facts: slot.SourceFacts) -> migrations.Migration:
    """Return the names that identify the migration of a slot."""
    return migrations.Migration(
        schema=config.target.state_schema, slot_name=config.source.slot, system_identifier=facts.system_identifier
    )

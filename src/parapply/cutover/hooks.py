"""Commands of the operator's before and after the steps of a cut-over: DNS, Patroni, Kubernetes, alarms.

Each is noted before it begins and once it has ended with 0. A command that was interrupted runs again, and that is
said: each runs at least once, so it must bear to run twice. Any other end than 0 stops the cut-over, which is then
taken back as long as no client was let in, and the commands by their own ones, the last one first.

In: lists of a program and its arguments; no shell reads them. Its output is shown by line.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import click

from parapply import child, failpoints
from parapply.config_cutover import PLACES, UNDO
from parapply.cutover.pooler import without_secrets
from parapply.errors import ParapplyError
from parapply.logs import redact_text
from parapply.printable import printable
from parapply.target.state import cutovers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.cutover.look import Pair

#: Bytes of a line that are shown as one.
_LINE_BYTES: Final = 4096
#: Seconds that what a command has left behind may still hold its output.
_REST_S: Final = 1.0


class Hooks:
    """The commands of the configuration of the stream that runs."""

    def __init__(self, pair: Pair, row: cutovers.Cutover | None, *, is_back: bool) -> None:
        forward = pair.forward
        self._commands, self._limit_s = forward.cutover.commands, forward.cutover.command_timeout_s
        self._target, self._schema, self._slot_id = pair.ahead.target, forward.target.state_schema, pair.slot_id
        #: Commands that have run and were not taken back, in their order, and the one that runs or was interrupted.
        self._ran = list(row.commands) if row is not None else []
        self._running = row.command if row is not None else ""
        #: Commands that this call could not take back.
        self._failed: set[str] = set()
        self._environ = {
            "PARAPPLY_DIRECTION": "back" if is_back else "there",
            "PARAPPLY_OLD_DSN": without_secrets(forward.source.login.dsn),
            "PARAPPLY_NEW_DSN": without_secrets(forward.target.login.dsn),
        }

    def plan(self) -> list[str]:
        """Return the commands, each in words, in their order."""
        lines = []
        for place in PLACES:
            if place in self._commands:
                back = "taken back by a command" if UNDO + place in self._commands else "not taken back"
                lines.append(f"command {place}: {self._commands[place][0]}; {back}")
        return lines

    async def reach(self, place: str) -> None:
        """Run every command up to a place that has not run yet.

        Raises:
            ParapplyError: one ended otherwise than with 0, took too long, or cannot be run.
        """
        for name in PLACES[: PLACES.index(place) + 1]:
            if name not in self._commands or name in self._ran:
                continue
            if self._running == name:
                click.echo(f"command {name} was begun before, and its end is not known: it runs again")
            await self._note(self._ran, name)
            failpoints.probe("cutover_hook_begun")
            await self._run(name, name)
            failpoints.probe("cutover_hook_ended")
            await self._note([*self._ran, name], "")

    async def undo(self, first: str) -> list[ParapplyError]:
        """Take back the commands from a place on, the last one first, and return the errors of those that could not be.

        Those are noted still, and the next `--undo` tries them again.
        """
        found = []
        begun = [*self._ran, *([self._running] if self._running and self._running not in self._ran else [])]
        for name in reversed(begun):
            if PLACES.index(name) < PLACES.index(first) or name in self._failed:
                continue
            try:
                if UNDO + name in self._commands:
                    await self._run(UNDO + name, name)
                else:
                    click.echo(f"command {name} is not taken back: {UNDO}{name} is missing")
            except ParapplyError as error:
                found.append(error)
                self._failed.add(name)
                continue
            running = "" if self._running == name else self._running
            await self._note([one for one in self._ran if one != name], running)
        return found

    async def _note(self, ran: Sequence[str], running: str) -> None:
        await cutovers.note_commands(self._target, self._schema, self._slot_id, ran, running)
        self._ran, self._running = list(ran), running

    async def _run(self, name: str, place: str) -> None:
        when, _, step = place.partition("_")
        environ = {
            **os.environ,
            **self._environ,
            "PARAPPLY_WHEN": when,
            "PARAPPLY_STEP": step,
            "PARAPPLY_UNDO": str(int(name != place)),
        }
        began_s = time.monotonic()

        def say(line: str) -> None:
            click.echo(printable(f"{name}: {redact_text(line)}"))

        why = await _outcome(self._commands[name], environ, self._limit_s, say)
        if why:
            raise ParapplyError(f"command {name}: {why}", hint="its output is above; run it by hand, and correct it")
        click.echo(f"command {name} has run ({time.monotonic() - began_s:.3f} s)")


async def _outcome(words: Sequence[str], environ: dict[str, str], limit_s: float, say: Callable[[str], None]) -> str:
    """Run a command, hand on each line of its output, and return why it has failed; empty if it has not."""
    with ExitStack() as stack:
        output, its_output = await child.pipe(stack)
        try:
            # Not by asyncio, whose start of a process that is given up may never return.
            process = subprocess.Popen(  # noqa: ASYNC220, S603  it returns at once; the operator's command
                words, env=environ, stdin=subprocess.DEVNULL, stdout=its_output, stderr=its_output,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return f"{words[0]} cannot be run: {error.strerror}"
        its_output.close()
        reading = asyncio.gather(_hand_on(output, say))
        try:
            async with asyncio.timeout(limit_s):
                code = await asyncio.to_thread(process.wait)
            # A process that it has left behind may hold its output.
            await asyncio.wait([reading], timeout=_REST_S)
        except TimeoutError:
            return f"it has not ended after {limit_s:g} s"
        finally:
            reading.cancel()
            if process.poll() is None:
                child.end(process)
    return "" if not code else f"it ended with exit code {code}" if code > 0 else f"it ended by signal {-code}"


async def _hand_on(output: asyncio.StreamReader, say: Callable[[str], None]) -> None:
    rest = b""
    while part := await output.read(_LINE_BYTES):
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > _LINE_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            say(line.decode(errors="replace").rstrip("\r"))
    if rest:
        say(rest.decode(errors="replace"))

"""The notes of a cut-over on the target: the step that is under way, what it has made, and what is said of it.

The row of `target/state/cutovers.py` is read once by its own command, and written here alone, but for the poolers and
the operator's commands, which note themselves in columns of their own.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import click
import msgspec

from parapply import failpoints
from parapply.printable import printable
from parapply.target.state import cutovers
from parapply.vocabulary import CutoverStep

if TYPE_CHECKING:
    from parapply.cutover.look import Pair

#: Result of each step, for people.
_WORDS: Final = {
    CutoverStep.PREPARING: "the way back is prepared",
    CutoverStep.FENCING: "the source is fenced",
    CutoverStep.DRAINING: "the target has everything",
    CutoverStep.COMPARING: "both sides are compared",
    CutoverStep.SEQUENCES: "sequences are brought",
    CutoverStep.STOPPING: "the daemon is stopped",
    CutoverStep.TURNING: "the way back begins",
    CutoverStep.OPENING: "the target is opened",
    CutoverStep.ENDING: "the old stream is removed",
}


class CutoverNotes:
    """The row of one cut-over."""

    def __init__(self, pair: Pair, row: cutovers.Cutover | None) -> None:
        """Take the row as it was read, None if no cut-over was begun."""
        self._target, self._schema, self._slot_id = pair.ahead.target, pair.forward.target.state_schema, pair.slot_id
        self._found = row
        self._began_s = time.monotonic()

    @property
    def found(self) -> cutovers.Cutover | None:
        """Return the row, None if no cut-over was begun."""
        return self._found

    @property
    def row(self) -> cutovers.Cutover:
        """Return the row of a cut-over that was begun."""
        assert self._found is not None
        return self._found

    @property
    def step(self) -> CutoverStep:
        """Return the step that is under way, the first one if no cut-over was begun."""
        return self._found.step if self._found is not None else CutoverStep.PREPARING

    async def begin(self, new: cutovers.Cutover) -> None:
        """Write the first row; a failpoint follows."""
        await cutovers.begin(self._target, self._schema, self._slot_id, new)
        self._found = new
        failpoints.probe(f"cutover_{new.step}")

    async def enter(self, step: CutoverStep, *, fence_lsn: int | None = None, takeover_lsn: int | None = None) -> None:
        """Note a step before it begins; a failpoint follows, so that a test ends the command inside each."""
        await self._write(step, fence_lsn=fence_lsn, takeover_lsn=takeover_lsn)
        self._found = await cutovers.read(self._target, self._schema, self._slot_id)
        self._began_s = time.monotonic()
        failpoints.probe(f"cutover_{step}")

    async def back_to_draining(self) -> None:
        """Let a daemon apply the slot again."""
        await self._write(CutoverStep.DRAINING)
        self._found = await cutovers.read(self._target, self._schema, self._slot_id)

    async def undoing(self) -> None:
        """Note that everything is taken back from here on; the row still says how far it was."""
        await self._write(CutoverStep.UNDOING)

    async def _write(self, step: CutoverStep, *, fence_lsn: int | None = None, takeover_lsn: int | None = None) -> None:
        target, schema, slot_id = self._target, self._schema, self._slot_id
        await cutovers.enter(target, schema, slot_id, step, fence_lsn=fence_lsn, takeover_lsn=takeover_lsn)

    async def opened(self) -> None:
        """Note that nothing keeps writers from the target any longer."""
        await cutovers.note_opened(self._target, self._schema, self._slot_id)

    async def unfenced(self) -> None:
        """Note that writers were let in on the source again."""
        # Before that is certain: an error from here on must not say that they wait.
        self._found = msgspec.structs.replace(self.row, fenced_s=None)
        await cutovers.unfence(self._target, self._schema, self._slot_id)

    async def forget(self) -> None:
        """Remove the row."""
        await cutovers.forget(self._target, self._schema, self._slot_id)

    def say(self, step: CutoverStep, what: str) -> None:
        """Print the result of the step that has ended."""
        elapsed_s = time.monotonic() - self._began_s
        click.echo(printable(f"{step.number}/{len(_WORDS)} {step}: {what} ({elapsed_s:.3f} s)"))

    def say_where(self, held: str) -> None:
        """Print where a cut-over is that is not finished."""
        row = self.row
        fenced = f"; clients cannot write since {row.fenced_s:.1f} s" if row.fenced_s and row.gap_s is None else ""
        place = f"step {row.step.number} of {len(_WORDS)}, {row.step}: {_WORDS.get(row.step, '')}"
        paused = f"; clients wait at the poolers: {held}" if held else ""
        click.echo(printable(f"a cut-over is under way, at {place}{fenced}{paused}"))

"""The notes of a cut-over on the target: the step that is under way, what it has made, and what is said of it.

The row of `target/state/cutovers.py` is read once by its own command, and written here alone, but for the poolers and
the operator's commands, which note themselves in columns of their own.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

import click
import msgspec

from parapply import failpoints
from parapply.cutover import way_back
from parapply.errors import ParapplyError, TargetRefused
from parapply.logs import redact_text
from parapply.printable import printable
from parapply.source import slot
from parapply.target.state import cutovers
from parapply.target.state import slots as state
from parapply.vocabulary import CutoverStep

if TYPE_CHECKING:
    from parapply.cutover.client_sessions import ClientSessions
    from parapply.cutover.hooks import Hooks
    from parapply.cutover.look import CutoverOptions, Pair
    from parapply.cutover.meeting import Meeting
    from parapply.cutover.poolers import Poolers

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

    async def took_over(self) -> None:
        """Note the end of the time in which no client could write."""
        await cutovers.note_takeover(self._target, self._schema, self._slot_id)

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


class Held(NamedTuple):
    """Everything of a cut-over that clients and operators notice."""

    writers: ClientSessions
    poolers: Poolers
    hooks: Hooks


class Undoing:
    """Takes the cut-over of one database back.

    The fence is lifted first, because clients wait for that. All that the cut-over has made goes in the reverse order,
    and its note last, so that a command that was killed takes the rest back.
    """

    def __init__(self, pair: Pair, notes: CutoverNotes, meeting: Meeting, held: Held) -> None:
        self._forward, self._reverse, self._ahead, self._back, _ = pair
        self._notes = notes
        self._meeting = meeting
        self._writers, self._poolers, self._hooks = held

    async def asked(self, options: CutoverOptions) -> int:
        """Take everything back as `--undo` does, and return the exit code.

        Raises:
            TargetRefused: writers were let in, here or in another database of the command.
            ParapplyError: it could not all be taken back.
        """
        row = self._notes.found
        if row is None:
            click.echo(f"no cut-over of slot {self._forward.source.slot!r} is under way; nothing to undo")
            return 0
        if row.is_open:
            raise TargetRefused(
                "the target has taken over, and clients may have written there: it cannot be undone",
                hint=f"`{options.other_way}` goes back with all that was written since",
            )
        if self._meeting.open_database:
            raise TargetRefused(
                f"{self._meeting.open_database!r} was cut over already, and all of them are or none is",
                hint="the same command without --undo goes on; --exclude-databases leaves that one out",
            )
        await self._poolers.check_named(leaves=options.leaves_poolers)
        await self._take_back()
        click.echo("undone: the source takes writes as before; if the daemon was stopped, start it (`parapply run`)")
        return 0

    async def after_failure(self, *, has_stopped: bool) -> None:
        """Take everything back if the daemon was not stopped yet, or clients or other databases wait; else report."""
        row, step = self._notes.found, self._notes.step
        if row is None:
            return
        if self._meeting.open_database:
            click.echo(f"the same command goes on: {self._meeting.open_database!r} was cut over", err=True)
            return
        waits = self._forward.cutover.holds_clients or self._meeting.is_shared
        # A step after the stop went back to draining: the daemon is gone, and the operator decides.
        stays = step is CutoverStep.DRAINING and has_stopped
        if not (
            (waits and step.is_before(CutoverStep.OPENING)) or (step.is_before(CutoverStep.STOPPING) and not stays)
        ):
            click.echo("the same command goes on" + ("" if row.is_open else "; --undo takes it back"), err=True)
            return
        try:
            await self._take_back()
        except Exception as error:  # noqa: BLE001  clients wait, and must be told how they come in again
            now = self._notes.found
            fenced = "; until then no client can write" if now is not None and now.fenced_s else ""
            held = f"; clients wait at the poolers: {self._poolers.are_held}" if self._poolers.are_held else ""
            why = error.line() if isinstance(error, ParapplyError) else f"{type(error).__name__}: {error}"
            click.echo(
                f"parapply: taking it back also failed: {redact_text(why)}\n"
                f"the same command with --undo takes it back{fenced}{held}",
                err=True,
            )
        else:
            ended = "; start the daemon again (`parapply run`)" if has_stopped else ""
            click.echo(f"everything was taken back: the source takes writes as before{ended}")

    async def _take_back(self) -> None:
        row, reverse, back = self._notes.row, self._reverse, self._back
        await self._poolers.check_undoable()
        await self._notes.undoing()
        errors = await self._hooks.undo("after_fencing")
        if row.fenced_s is not None:
            # First, because clients wait for it. Changes from now on come through the slot that runs.
            await self._writers.let_in(row.fence, self._ahead.source)
            await self._notes.unfenced()
        async with self._meeting.at_poolers:
            errors += await self._poolers.give_back()
        errors += await self._hooks.undo("before_fencing")
        if row.takeover_lsn is not None:
            await way_back.drop_known_state(back, reverse)
        if row.made_slot and (await slot.read_slot(back.source, reverse.source.slot)) is not None:
            await slot.drop_slot(back.source, reverse.source.slot)
        if row.made_publication:
            await way_back.drop_publication(self._ahead.target, reverse)
        if await state.has_schema(back.target, reverse.target.state_schema):
            await state.drop_schema(back.target, reverse.target.state_schema)
        errors += await self._hooks.undo("before_preparing")
        for error in errors[1:]:
            click.echo(f"parapply: {redact_text(error.line())}", err=True)
        if errors:
            raise errors[0]
        await self._notes.forget()

"""A cut-over is taken back: by `--undo`, or after a failure as long as no client was let in on the target.

The fence is lifted first, because clients wait for that. Everything that the cut-over has made is removed, in the
reverse order, and the last act removes its note, so that a command that was killed takes the rest back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import click

from parapply.cutover import way_back
from parapply.errors import ParapplyError, TargetRefused
from parapply.logs import redact_text
from parapply.source import slot
from parapply.target.state import slots as state
from parapply.vocabulary import CutoverStep

if TYPE_CHECKING:
    from parapply.cutover.client_sessions import ClientSessions
    from parapply.cutover.hooks import Hooks
    from parapply.cutover.look import CutoverOptions, Pair
    from parapply.cutover.meeting import Meeting
    from parapply.cutover.notes import CutoverNotes
    from parapply.cutover.poolers import Poolers


class Held(NamedTuple):
    """Everything of a cut-over that clients and operators notice."""

    writers: ClientSessions
    poolers: Poolers
    hooks: Hooks


class Undoing:
    """Takes the cut-over of one database back."""

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
        except ParapplyError as error:
            now = self._notes.found
            fenced = "; until then no client can write" if now is not None and now.fenced_s else ""
            held = f"; clients wait at the poolers: {self._poolers.are_held}" if self._poolers.are_held else ""
            click.echo(
                f"parapply: taking it back also failed: {redact_text(error.line())}\n"
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

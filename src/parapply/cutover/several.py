"""`parapply cutover` of several databases by one command: all take over, or none.

In: the configurations of each database. Out: the end of each one. They are cut over side by side, each with its steps,
notes and lock, and wait for each other where a failure of one still takes all back (`meeting.py`).
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, NamedTuple

from parapply.cutover import command
from parapply.cutover.meeting import Meeting
from parapply.database_lines import DatabaseLines, about
from parapply.errors import ParapplyError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parapply.config import Config
    from parapply.cutover.look import CutoverOptions


class CutoverMember(NamedTuple):
    """One database."""

    forward: Config  # the stream that runs
    reverse: Config
    options: CutoverOptions


class CutoverEnd(NamedTuple):
    """The end of one database's cut-over."""

    exit_code: int
    error: ParapplyError | None = None


async def cutover(members: Mapping[str, CutoverMember], *, is_undo: bool) -> dict[str, CutoverEnd]:
    """Cut all over, or take that back, and return the end of each."""
    meeting, ended = Meeting(members), dict[str, CutoverEnd]()

    async def one(name: str, member: CutoverMember) -> None:
        with about(name):
            try:
                code = await command.one(*member, meeting, name, is_undo=is_undo)
            except ParapplyError as error:
                # Also before it had begun, because the others wait for it.
                meeting.fail(name)
                ended[name] = CutoverEnd(error.exit_code, error)
            else:
                ended[name] = CutoverEnd(code)

    with redirect_stdout(DatabaseLines(sys.stdout)), redirect_stderr(DatabaseLines(sys.stderr)):
        async with asyncio.TaskGroup() as group:
            for number, (name, member) in enumerate(members.items()):
                group.create_task(one(name, member), name=f"cutover-{number}")
    return {name: ended[name] for name in members}

"""The verdict on each command of the publisher: given once, where intake meets it, and obeyed by the worker. Pure."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from parapply.model import Relation
from parapply.wire.ddl_queue import names_queue, read_command

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from parapply.wire.ddl_queue import QueuedCommand


class CommandVerdict(enum.Enum):
    """Action of the worker when the command's turn has come."""

    RUN = enum.auto()  # inside its transaction
    LATER = enum.auto()  # after its transaction
    SKIP = enum.auto()  # noted as left out
    REFUSE = enum.auto()  # its transaction is not applied


class JudgedCommand(NamedTuple):
    """A command with its verdict."""

    command: QueuedCommand
    verdict: CommandVerdict
    reason: str = ""  # of SKIP and REFUSE


#: By frame: every change of the queue in a transaction. None for a change that brings no command.
JudgedFrames: TypeAlias = "dict[bytes, JudgedCommand | None]"


class CommandPolicy(NamedTuple):
    """Selection of the commands that run on the target, as configured."""

    apply: bool
    skip: Collection[int]  # numbers in the queue
    tags: Collection[str]

    def judged(self, command: QueuedCommand) -> JudgedCommand:
        """Return a command with its verdict."""
        if not self.apply:
            return JudgedCommand(command, CommandVerdict.SKIP, "ddl.apply is off")
        if command.number in self.skip:
            return JudgedCommand(command, CommandVerdict.SKIP, "ddl.skip names it")
        if command.tag not in self.tags:
            return JudgedCommand(command, CommandVerdict.REFUSE, f"ddl.tags does not allow {command.tag}")
        return JudgedCommand(command, CommandVerdict.LATER if command.is_later else CommandVerdict.RUN)

    def judged_frames(self, changes: Iterable[bytes | Relation], queue: Relation | None) -> JudgedFrames:
        """Return the changes of the queue among others.

        Raises:
            ProtocolError: a command cannot be read.
        """
        found: JudgedFrames = {}
        if queue is None:
            return found
        for change in changes:
            if not isinstance(change, Relation) and names_queue(change, queue):
                command = read_command(change, queue)
                found[change] = None if command is None else self.judged(command)
        return found

"""Rules for commands of the publisher on the target: the role that runs them, and the note that they have run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from parapply.config import SAME_ROLE
from parapply.target.sql.statements import Sql
from parapply.target.state.commands import command_sql

if TYPE_CHECKING:
    from parapply.config import Config, DdlConfig
    from parapply.wire.ddl_queue import QueuedCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRules:
    """How commands run, and where it is noted; made by the epoch.

    Attributes:
        config: names the role.
        note: the statement of `target/state/commands.py`.
        slot_id: of the state.
    """

    config: DdlConfig
    note: Sql
    slot_id: int


def role_of(config: DdlConfig, command: QueuedCommand) -> str:
    """Return the role that runs a command here; empty: the daemon's own."""
    return command.role_name if config.role == SAME_ROLE else config.role


def command_rules(config: Config, slot_id: int) -> CommandRules:
    """Return the rules of an epoch, as `CommandRules` has them."""
    text = command_sql(config.target.state_schema).encode()
    note = Sql(name=b"ddl", text=text, n_parameters=10, is_set=False, positions=())
    return CommandRules(config=config.ddl, note=note, slot_id=slot_id)

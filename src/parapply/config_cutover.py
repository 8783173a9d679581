"""The section of a cut-over: the poolers that the clients come through, and the operator's commands at its steps.

In: values as TOML, the environment or a flag gives them. Out: the section's fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from parapply.config_values import Secret, did_you_mean, dotted
from parapply.vocabulary import CutoverStep

#: Seconds until transactions in progress have ended at the poolers: new ones wait as long, and their clients notice.
PAUSE_TIMEOUT_S = 10.0
#: Seconds that a command may take: clients wait for most of them.
COMMAND_TIMEOUT_S = 60.0

#: Places at which a command can run, in their order.
PLACES: Final = tuple(
    f"{when}_{step}"
    for step in CutoverStep
    if step not in {CutoverStep.UNDOING, CutoverStep.DONE}
    for when in ("before", "after")
)
#: Begin of the name of a command that takes another one back.
UNDO: Final = "undo_"
_NAMES: Final = (*PLACES, *(UNDO + place for place in PLACES))

Limit = Annotated[float, Meta(ge=0.1, le=86_400)]


class CutoverConfig(msgspec.Struct, frozen=True):
    """How `parapply cutover` of the stream reaches the clients."""

    poolers: tuple[Secret, ...] = ()
    pooler_databases: tuple[str, ...] = ()
    pooler_files: tuple[str, ...] = ()
    pooler_target: Secret = Secret("")
    pause_timeout_s: Limit = PAUSE_TIMEOUT_S
    command_timeout_s: Limit = COMMAND_TIMEOUT_S
    commands: dict[str, tuple[str, ...]] = {}  # by place, or UNDO and place; no shell reads them

    def __post_init__(self) -> None:
        if len(self.pooler_files) not in {0, 1, len(self.poolers)}:
            raise ValueError("pooler_files must name one file for each of poolers, or one for all")
        if self.pooler_files and not self.poolers:
            raise ValueError("pooler_files is without poolers, whose files they are")
        if len(set(self.pooler_databases)) < len(self.pooler_databases) or "" in self.pooler_databases:
            raise ValueError("pooler_databases must be different names")

    @property
    def holds_clients(self) -> bool:
        """Return whether clients, or other things of the operator's, wait for the end of the cut-over."""
        return bool(self.poolers or self.commands)


def read_commands(path: list[str], given: Any, errors: list[str]) -> dict[str, tuple[str, ...]]:  # noqa: ANN401  TOML
    """Return the commands by name, and in `errors` a line for each that cannot be one."""
    if not isinstance(given, dict):
        errors.append(f"{dotted(path)}: must be a section")
        return {}
    for name, words in given.items():
        if name not in _NAMES:
            hint = did_you_mean(name, _NAMES) or "; before_ or after_ and a step of `parapply cutover`"
            errors.append(f"{dotted([*path, name])}: unknown key{hint}")
        elif (
            not isinstance(words, list)
            or not words
            or not all(isinstance(word, str) and "\0" not in word for word in words)
            or not words[0]
        ):
            errors.append(f"{dotted([*path, name])}: must be a list of a program and its arguments")
        elif name.startswith(UNDO) and name.removeprefix(UNDO) not in given:
            errors.append(f"{dotted([*path, name])}: {name.removeprefix(UNDO)}, which it takes back, is missing")
    return {name: tuple(words) for name, words in given.items() if isinstance(words, list)}

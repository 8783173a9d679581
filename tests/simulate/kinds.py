"""The kinds of schedules, and the rare states of each: a tame generator proves nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from parapply.engine.flight import CommitTurn
from tests.simulate import core, models, readers

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence


class Case(Protocol):
    """One schedule."""

    #: Events by their name.
    seen: Counter[str]
    #: Each step in words; None: not asked for.
    trace: list[str] | None

    @property
    def parts(self) -> list[list[int]]:
        """Return the choices so far, for `Kind.again`."""

    def run(self) -> None:
        """Play it to its end.

        Raises:
            Violation: a promise is broken.
        """


class Kind(NamedTuple):
    """One kind of schedules."""

    name: str
    of: Callable[[int], Case]  # by its seed
    again: Callable[[Sequence[Sequence[int]]], Case]  # by its choices
    #: States that so many schedules must have reached; a minute's run has as many.
    rare: tuple[str, ...]
    enough: int


#: Of both kinds.
_RARE: Final = (
    str(CommitTurn.YIELD), "late keys at the head", "parked", "parked head", "failed, then repeated", "in parts",
    "foreign lock wait", "lock wait", "large", "a large transaction is sent again", "a stream is followed",
    "a stream gives way", "a stream is applied at its commit", "prepared", "outcome", "takeover", "commit in doubt",
    "takeover while preparing", "lost answer", "kill", "crash", "crash that loses commits",
    "a blocked batch is skipped",
)  # fmt: skip
_CORE: Final = (
    str(CommitTurn.GIVE_BACK), "late keys", "a worker leaves", "a stream gives way to what is prepared",
    "rolled back early",
)  # fmt: skip
_MODELS: Final = ("a statement is refused", "a stream is rolled back in part")

_READERS: Final = (
    "ranges are read", "a stream begins", "a range ends before its turn", "a range is void", "a reader is lost",
    "a reader of a void range is lost", "a reader is refused", "a reader waits for room", "the slot is moved",
    "the stream takes over: caught", "the stream takes over: a", "the stream is left for ranges", "kill", "crash",
    "crash that loses commits", "takeover", "lost answer",
)  # fmt: skip

KINDS: Final = {
    "core": Kind("core", core.Schedule, core.Schedule.again, (*_RARE, *_CORE), 20_000),
    "models": Kind("models", models.RowSchedule, models.RowSchedule.again, (*_RARE, *_MODELS), 4_000),
    "readers": Kind("readers", readers.RangesSchedule, readers.RangesSchedule.again, _READERS, 10_000),
}

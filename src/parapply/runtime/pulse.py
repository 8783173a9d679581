"""Whether the leader gets on: what feeds systemd's watchdog, and what /healthz/live says.

A timer says only that the event loop turns. So each part that must get on shows a sign: something that changes whenever
it has done something, and what outside of the daemon it waits for, if it does. A part that stands still and waits for
nobody is stuck, and a restart would help; one that waits for a server, a foreign lock or a copy is not, and a restart
would change nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from parapply.runtime.crew import Crew
    from parapply.runtime.gauges import Parts
    from parapply.runtime.intake import Intake
    from parapply.runtime.worker import Worker

#: States in which a worker waits for an answer of the target, which may be held up by a foreign lock, or between two
#: attempts for a repair.
_AT_THE_TARGET = ("executing", "committing", "retrying")


class Sign(NamedTuple):
    """What a part shows."""

    part: str
    moved: object  # another value than at the last look: it has done something
    waits_for: str  # outside of this daemon or judged by a sign of its own; empty: it has to move


class Pulse:
    """Looked at in intervals by one task."""

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self._seen: dict[str, tuple[object, float]] = {}

    def look(self, signs: Iterable[Sign], now_s: float) -> None:
        """Take note of the signs at a time; parts that are not among them are forgotten."""
        seen = {}
        for sign in signs:
            moved, at_s = self._seen.get(sign.part, (None, now_s))
            seen[sign.part] = (sign.moved, now_s if sign.waits_for or sign.moved != moved else at_s)
        self._seen = seen

    def forget(self) -> None:
        """Begin anew: the process itself stood still."""
        self._seen = {}

    def stuck(self, patience_s: float, now_s: float) -> str:
        """Return the part that has stood still for longer, waiting for nobody; empty if none has."""
        return next((part for part, (_, at_s) in self._seen.items() if now_s - at_s > patience_s), "")


def signs_of(parts: Parts) -> list[Sign]:
    """Return what the parts of an epoch show."""
    progress = parts.progress
    return [
        Sign("progress", progress.turns, "the target" if progress.is_asking_target else ""),
        _intake(parts.intake, parts.crew),
        _crew(parts.crew, parts.workers, has_trouble=bool(parts.arbiter.troubles)),
    ]


def _intake(intake: Intake, crew: Crew) -> Sign:
    # In front of a full queue it waits for the workers, who show a sign of their own.
    waits_for = intake.waits_for or ("" if crew.is_idle else "the workers")
    return Sign("intake", (intake.heard_s, intake.taken_lsn), waits_for)


def _crew(crew: Crew, workers: Sequence[Worker], *, has_trouble: bool) -> Sign:
    moved = (crew.watermark.low_lsn, len(crew), crew.held_bytes, *(worker.since_s for worker in workers))
    if crew.is_idle:
        return Sign("workers", moved, "work")
    is_at_target = any(worker.state in _AT_THE_TARGET for worker in workers)
    return Sign("workers", moved, "the target" if is_at_target else "a repair" if has_trouble else "")

"""Watch over the leader's progress, on which systemd's watchdog and /healthz/live depend.

A timer says only that the event loop turns. So each part that must make progress shows a sign: a value that changes
whenever it has done something, and the thing outside of the daemon that it waits for, if any. A part that does not move
and waits for nothing outside is stuck, and a restart would help. A part that waits for a server, a foreign lock or a
copy is not stuck, and a restart would change nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from parapply.engine.stalls import AT_WORK

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from parapply.engine.state import EngineState
    from parapply.runtime.apply.worker import Worker
    from parapply.runtime.intake.batcher import Batcher
    from parapply.runtime.observe.gauges import Parts


class Heartbeat(NamedTuple):
    """Sign of one part."""

    part: str
    moved: object  # another value than at the last check: it has done something
    waits_for: str  # outside of this daemon or judged by a separate sign; empty: it has to move


class Watchdog:
    """Checked in intervals by one task."""

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self._seen: dict[str, tuple[object, float]] = {}

    def look(self, signs: Iterable[Heartbeat], now_s: float) -> None:
        """Record the signs at a time; parts that are not among them are forgotten."""
        seen = {}
        for sign in signs:
            moved, at_s = self._seen.get(sign.part, (None, now_s))
            seen[sign.part] = (sign.moved, now_s if sign.waits_for or sign.moved != moved else at_s)
        self._seen = seen

    def forget(self) -> None:
        """Begin again: the process itself was stopped."""
        self._seen = {}

    def stuck(self, patience_s: float, now_s: float) -> str:
        """Return a part that has not moved for longer and waits for nothing outside; empty without one."""
        return next((part for part, (_, at_s) in self._seen.items() if now_s - at_s > patience_s), "")


def signs_of(parts: Parts) -> list[Heartbeat]:
    """Return the signs of an epoch's parts."""
    progress = parts.progress
    waits_for = "the target" if progress.is_asking_target else "work" if progress.is_at_rest else ""
    return [
        Heartbeat("progress", progress.turns, waits_for),
        _intake(parts.batcher, parts.engine),
        _pool(parts.engine, parts.workers, has_trouble=bool(parts.worker_tasks.kit.conflict_handler.troubles)),
    ]


def _intake(batcher: Batcher, engine: EngineState) -> Heartbeat:
    # With the queue full, intake waits for the workers, which have a separate heartbeat.
    waits_for = batcher.reader.waits_for or ("the workers" if engine.jobs else "")
    return Heartbeat("intake", (batcher.reader.heard_s, batcher.taken_lsn), waits_for)


def _pool(engine: EngineState, workers: Sequence[Worker], *, has_trouble: bool) -> Heartbeat:
    moved = (engine.watermark.low_lsn, len(engine.jobs), engine.held_bytes, *(worker.since_s for worker in workers))
    if not engine.jobs:
        return Heartbeat("workers", moved, "work")
    is_at_target = any(worker.state in AT_WORK for worker in workers)
    return Heartbeat("workers", moved, "the target" if is_at_target else "a repair" if has_trouble else "")

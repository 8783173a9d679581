"""State of the daemon as a whole, its readiness and its liveness.

Live: the event loop turns and the leader makes progress (`Watchdog`); a restart helps if not. Ready: both ends are
open, the target's position was reported to the publisher, and changes are applied; a restart does not help if not.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from parapply.engine.stalls import AT_WORK
from parapply.logs import get_logger, redact_text
from parapply.vocabulary import DaemonState, WorkerState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from parapply.engine.state import EngineState
    from parapply.runtime.apply.worker import Worker
    from parapply.runtime.intake.batcher import Batcher
    from parapply.runtime.observe.gauges import Gauges, Parts
    from parapply.runtime.observe.systemd import Notifier

#: Seconds that the leader may make no progress, where no watchdog says otherwise.
_PATIENCE_S = 30.0
#: The least with a short watchdog interval, because the leader's own timers fire once a second.
_PATIENCE_MIN_S = 2.0
#: Seconds between two checks beyond which the process or the machine hung, and not the leader.
_PAUSE_S = 1.0


# A timer says only that the event loop turns. So each part that must make progress shows a sign: a value that changes
# whenever it has done something, and the thing outside of the daemon that it waits for, if any. A part that does not
# move and waits for nothing outside is stuck, and a restart would help. It would change nothing for one that waits.


class Heartbeat(NamedTuple):
    """Sign of one part."""

    part: str
    moved: object  # another value than at the last check: it has done something
    waits_for: str  # outside of this daemon or judged by a separate sign; empty: it has to move


class Watchdog:
    """Checked in intervals by one task."""

    def __init__(self) -> None:
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
        _pool(parts.engine, parts.workers, has_trouble=bool(parts.engine.troubles)),
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


class Health:
    """Written by the daemon and its epoch; `look` is called in intervals."""

    def __init__(self, slot: str, gauges: Gauges, notifier: Notifier) -> None:
        """Begin to start; the notifier gets every state, and says how patient systemd is."""
        self._slot = slot
        self._gauges = gauges
        self._notifier = notifier
        watchdog_s = notifier.watchdog_s
        self._patience_s = max(_PATIENCE_MIN_S, watchdog_s / 2) if watchdog_s else _PATIENCE_S
        self._clock = asyncio.get_running_loop().time
        self._watchdog = Watchdog()
        self._looked_s = self._clock()
        self._state = (DaemonState.STARTING, "connecting")
        self._log = get_logger()
        #: The part of the leader that makes no progress; empty: all do.
        self.stuck = ""

    @property
    def state(self) -> tuple[DaemonState, str]:
        """Return the state, and its reason if it is not plain."""
        if self._state[0] is DaemonState.RUNNING and self._gauges.parts is not None:
            shown, reason = self._gauges.parts.engine.shown
            # Still ready: a restart would wait for the same lock.
            return (shown, reason) if shown is DaemonState.RETRYING else (self._state[0], self._blocked_reason)
        return self._state

    @property
    def _blocked_reason(self) -> str:
        return "" if self._gauges.parts is None else self._gauges.parts.engine.blocked_reason(self._clock())

    @property
    def is_ready(self) -> bool:
        """Return whether changes are applied."""
        return self.state[0] is DaemonState.RUNNING

    def serving(self, parts: Parts) -> None:
        """Both ends are open, and the publisher knows how far the target is."""
        self._gauges.parts = parts
        self._watchdog.forget()
        self._state = (DaemonState.RUNNING, "")
        self._notifier.ready(self.line())

    def left(self, state: DaemonState, reason: str) -> None:
        """Nothing is applied now, or nothing new: it is reconnecting, retrying, healing or draining, for a reason."""
        self._state = (state, redact_text(reason))
        # No look may follow: a fleet lives on after a slot's leader.
        self.stuck = ""
        self._notifier.status(self.line())

    def detach(self) -> None:
        """The parts end. Their sessions may take long to close, and nothing is applied any more."""
        if self._state[0] is DaemonState.RUNNING:
            self._state = (DaemonState.RECONNECTING, "")
        self._gauges.detach()
        self._watchdog.forget()

    def look(self, interval_s: float) -> None:
        """Check whether the leader makes progress; called each `interval_s` seconds."""
        now_s = self._clock()
        if now_s - self._looked_s > interval_s + _PAUSE_S:
            self._watchdog.forget()
        self._looked_s = now_s
        self._watchdog.look([] if self._gauges.parts is None else signs_of(self._gauges.parts), now_s)
        stuck = self._watchdog.stuck(self._patience_s, now_s)
        if stuck and not self.stuck:
            self._log.error("leader_stuck", part=stuck, wait_s=self._patience_s)
        self.stuck = stuck
        if not stuck:
            self._notifier.alive(self.line())

    def line(self) -> str:
        """Return the text that systemctl status shows."""
        state, reason = self.state
        if self.stuck:
            return f"slot {self._slot}: {self.stuck} does not get on"
        parts, lag = self._gauges.parts, self._gauges.lag()
        if state is not DaemonState.RUNNING or parts is None:
            return f"slot {self._slot}: {state}" + (f", {reason}" if reason else "")
        behind = "" if lag is None else f", {lag.seconds(self._clock()):.1f} s behind"
        busy = sum([worker.state is not WorkerState.IDLE for worker in parts.workers])
        return f"slot {self._slot}: applying{behind}, {busy} of {len(parts.workers)} workers busy"

    def report(self) -> dict[str, Any]:
        """Return the answer of /healthz."""
        state, reason = self.state
        lag = self._gauges.lag()
        return {
            "slot": self._slot,
            "live": not self.stuck,
            "ready": self.is_ready,
            "state": state,
            "reason": f"{self.stuck} does not get on" if self.stuck else reason,
            "lag_s": None if lag is None else round(lag.seconds(self._clock()), 3),
        }

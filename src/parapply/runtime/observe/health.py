"""State of the daemon as a whole, its readiness and its liveness.

Live: the event loop turns and the leader makes progress (`watchdog.py`); a restart helps if not. Ready: both ends are
open, the target's position was reported to the publisher, and changes are applied; a restart does not help if not.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from parapply.logs import get_logger, redact_text
from parapply.runtime.observe.watchdog import Watchdog, signs_of
from parapply.vocabulary import DaemonState, WorkerState

if TYPE_CHECKING:
    from parapply.runtime.observe.gauges import Gauges, Parts
    from parapply.runtime.observe.systemd import Notifier

#: Seconds that the leader may make no progress, where no watchdog says otherwise.
_PATIENCE_S = 30.0
#: The least with a short watchdog interval, because the leader's own timers fire once a second.
_PATIENCE_MIN_S = 2.0
#: Seconds between two checks beyond which the process or the machine hung, and not the leader.
_PAUSE_S = 1.0


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
        """Nothing is applied now, or nothing new.

        Args:
            state: reconnecting, retrying, healing or draining.
            reason: why, in one line.
        """
        self._state = (state, redact_text(reason))
        self._notifier.status(self.line())

    def detach(self) -> None:
        """The parts end."""
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

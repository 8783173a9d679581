"""What people are shown of an epoch: how far both ends are, and how it goes."""

from __future__ import annotations

import asyncio

from parapply.limits import BLOCKED_S
from parapply.vocabulary import DaemonState


class Shown:
    """Written by the monitor, `state` also by progress when the epoch ends, `blocked` by the stall check.

    Read by progress, gauges and health.
    """

    __slots__ = (
        "_clock",
        "blocked",
        "lag_s",
        "looked_s",
        "passed_us",
        "session_blocked_s",
        "source_clock_us",
        "source_insert_lsn",
        "source_lsn",
        "state",
    )

    def __init__(self) -> None:
        """Start before the monitor's first check."""
        #: Where the publisher is; None: not checked yet.
        self.source_lsn: int | None = None
        #: Its clock at that moment, microseconds since 2000-01-01 UTC, and the end of all WAL that it had written then.
        self.source_clock_us: int | None = None
        self.source_insert_lsn = 0
        #: The time that its WAL had passed: its clock, or, of a standby, of the last commit replayed. None: not known.
        self.passed_us: int | None = None
        #: How far the target is behind; None: not checked yet.
        self.lag_s: float | None = None
        #: When the monitor last checked, by the event loop's clock.
        self._clock = asyncio.get_running_loop().time
        self.looked_s = self._clock()
        #: Since when, by the event loop's clock, a batch waits for foreign sessions, and for whom; None: none does.
        self.blocked: tuple[float, str] | None = None
        #: How long a session that is no worker's has waited on the target; 0.0: none does. By the stall check, too.
        self.session_blocked_s = 0.0
        #: State and reason.
        self.state = (DaemonState.RUNNING, "")

    def block(self, blocked: tuple[float, str] | None) -> None:
        """Take since when a batch waits for foreign sessions, and for whom."""
        self.blocked = blocked

    def block_session(self, wait_s: float) -> None:
        """Take how long a session that is no worker's has waited, the longest."""
        self.session_blocked_s = wait_s

    @property
    def blocked_s(self) -> float:
        """Return how long a batch has waited for foreign sessions; 0: none does."""
        return self._clock() - self.blocked[0] if self.blocked else 0.0

    @property
    def blocked_reason(self) -> str:
        """Return for whom a batch waits, once it has waited for long; else nothing."""
        if self.blocked is None or self.blocked_s < BLOCKED_S:
            return ""
        return f"blocked for {self.blocked_s:.0f} s by {self.blocked[1]}"

    def source_time_us(self) -> int | None:
        """Return the publisher's time, or a little less, in microseconds since 2000-01-01 UTC; None: not known yet."""
        if self.source_clock_us is None:
            return None
        return self.source_clock_us + int((self._clock() - self.looked_s) * 1e6)

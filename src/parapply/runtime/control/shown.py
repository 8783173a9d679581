"""What people are shown of an epoch: how far both ends are, and how it goes."""

from __future__ import annotations

import asyncio

from parapply.vocabulary import DaemonState


class Shown:
    """Written by the monitor, `state` also by progress when the epoch ends; read by progress, gauges and health."""

    __slots__ = ("lag_s", "looked_s", "source_lsn", "state")

    def __init__(self) -> None:
        """Start before the monitor's first check."""
        #: Where the publisher is; None: not checked yet.
        self.source_lsn: int | None = None
        #: How far the target is behind; None: not checked yet.
        self.lag_s: float | None = None
        #: When the monitor last checked, by the event loop's clock.
        self.looked_s = asyncio.get_running_loop().time()
        #: State and reason.
        self.state = (DaemonState.RUNNING, "")

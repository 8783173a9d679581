"""Reports to systemd: readiness, status and watchdog. Does nothing without systemd.

Source: sd_notify(3): datagrams of assignments to the socket named by NOTIFY_SOCKET, abstract ones written with '@';
sd_watchdog_enabled(3): WATCHDOG_USEC, meant for the process WATCHDOG_PID.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Notifier:
    """Sends datagrams; a lost one is not an error of ours."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Look for the socket and the watchdog's interval in the environment."""
        path = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        watchdog_us = environ.get("WATCHDOG_USEC", "")
        is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        #: Seconds between signs of life that systemd expects; 0: none.
        self.watchdog_s = int(watchdog_us) / 1e6 if watchdog_us.isdecimal() and is_ours else 0.0
        self._status = ""

    @property
    def is_heard(self) -> bool:
        """Return whether systemd listens."""
        return bool(self._address)

    def ready(self, status: str) -> None:
        """Say that changes are being applied."""
        self._status = status
        self._send(f"READY=1\nSTATUS={status}")

    def status(self, status: str) -> None:
        """Report the daemon's state, if it is new."""
        if status != self._status:
            self._status = status
            self._send(f"STATUS={status}")

    def alive(self, status: str) -> None:
        """Report that the daemon makes progress, and its state."""
        if self.watchdog_s:
            self._send("WATCHDOG=1")
        self.status(status)

    def stopping(self, status: str) -> None:
        """Say that the daemon ends."""
        self._status = status
        self._send(f"STOPPING=1\nSTATUS={status}")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(text.encode(), self._address)
        except OSError:
            # systemd does not listen, or does not read, which does not harm the daemon; and the daemon must not wait.
            return

"""Tell systemd how the daemon is: readiness, status and watchdog. Does nothing where there is no systemd.

Source: sd_notify(3): datagrams of assignments to the socket named by NOTIFY_SOCKET, abstract ones written with '@'.
"""

from __future__ import annotations

import os
import socket


class Notifier:
    """Sends datagrams; a lost one is not an error of ours."""

    def __init__(self) -> None:
        """Look for the socket and the watchdog's interval in the environment."""
        path = os.environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        watchdog_us = os.environ.get("WATCHDOG_USEC", "")
        #: Seconds between signs of life that systemd expects; 0: none.
        self.watchdog_s = int(watchdog_us) / 1e6 if watchdog_us.isdecimal() else 0.0

    def ready(self, status: str) -> None:
        """Say that changes are being applied."""
        self._send(f"READY=1\nSTATUS={status}")

    def status(self, status: str) -> None:
        """Say what the daemon does, and that it lives."""
        self._send(f"STATUS={status}\nWATCHDOG=1")

    def alive(self) -> None:
        """Say that the daemon lives."""
        self._send("WATCHDOG=1")

    def stopping(self, status: str) -> None:
        """Say that the daemon ends."""
        self._send(f"STOPPING=1\nSTATUS={status}")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.sendto(" ".join(text.split(" ")).encode(), self._address)
        except OSError:
            # Nobody listens: the daemon is not worse for it.
            return

"""The error of the demonstration: in goes a reason, out comes an exit code; nothing here touches a server.

Kept out of `parapply.errors` because the daemon never raises it and never imports this package.
"""

from __future__ import annotations

from parapply.errors import ParapplyError


class DemoError(ParapplyError):
    """A server or a program of the demonstration or of the tests failed, or was not ready in time; any function may."""

    exit_code = 2

    def __init__(self, message: str = "", *, hint: str = "", sqlstate: str = "") -> None:
        super().__init__(message, hint=hint)
        self.sqlstate = sqlstate

"""How often one source transaction was tried at the head, and when it is tried again."""

from __future__ import annotations

#: Seconds between attempts at the head when another session is in the way, doubled from the first to the last.
_AGAIN_MIN_S = 0.01
_AGAIN_MAX_S = 1.0
#: Seconds between attempts with on_error = "retry", doubled likewise.
_ERROR_MIN_S = 0.5
_ERROR_MAX_S = 30.0


class TryLater(Exception):
    """A transaction is to be tried again later; it is rolled back, and nothing of it is held on the target."""

    def __init__(self, delay_s: float) -> None:
        """Keep how long to wait."""
        super().__init__(delay_s)
        self.delay_s = delay_s


class Attempts:
    """How often one source transaction was tried at the head, and how long to wait before the next."""

    def __init__(self, *, stops_on_error: bool) -> None:
        """Begin with the shortest pauses."""
        self.stops_on_error = stops_on_error
        self.is_refreshed = False
        #: Whether each change is applied so that its conflicts can be settled.
        self.is_settling = False
        self._again_s = _AGAIN_MIN_S
        self._error_s = _ERROR_MIN_S

    def again_s(self) -> float:
        """Return the next pause when another session is in the way."""
        self._again_s, now = min(self._again_s * 2, _AGAIN_MAX_S), self._again_s
        return now

    def error_s(self) -> float:
        """Return the next pause for a repair."""
        self._error_s, now = min(self._error_s * 2, _ERROR_MAX_S), self._error_s
        return now

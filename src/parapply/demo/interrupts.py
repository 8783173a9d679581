"""Ctrl-C and its kin, so that whatever was started is known to the code that cleans up.

In go SIGINT, SIGTERM and SIGHUP; out comes an exception in the main thread, once, and never inside a `held` block:
an exception between the start of a process and the note of it would leave the process behind.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    Handler = Callable[[int, FrameType | None], object] | int | None

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The base of a shell's exit code for a program that a signal ended.
_SIGNAL_EXIT_BASE = 128


class Interrupts:
    """Turns the first signal into `KeyboardInterrupt` (SIGINT) or `SystemExit` and ignores later ones."""

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Handler] = {}
        self._held = 0
        self._waiting: signal.Signals | None = None
        self._is_over = False

    def __enter__(self) -> Self:
        # A hang-up that `nohup` made ignored stays so.
        is_immune = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        numbers = [number for number in _SIGNALS if not (is_immune and number == signal.SIGHUP)]
        self._previous = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # A handler that was not set from Python reads as None and cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep a signal until the end of the block; for blocks of seconds at most."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self._waiting and not self._held:
            self._raise(self._waiting)

    def ignore(self) -> None:
        """Raise nothing from now on: the end has begun, and it takes a few seconds only."""
        self._is_over = True

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._is_over:
            return
        if self._held:
            self._waiting = signal.Signals(number)
            return
        self._raise(signal.Signals(number))

    def _raise(self, number: signal.Signals) -> None:
        # At once: a second signal must not interrupt the cleaning up that begins now.
        self._is_over = True
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(_SIGNAL_EXIT_BASE + number)

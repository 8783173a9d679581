"""Signals to the daemon: to end, to end at once, to take another configuration, to say what it does.

The handlers only write down what is wanted; the daemon and its epoch check it where they wait.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any, Final

from parapply.tasks import log_tasks
from parapply.terminal import is_hung_up

if TYPE_CHECKING:
    from collections.abc import Callable

_STANDARD_FILES: Final = (0, 1, 2)


class Signals:
    """Written by the handlers; read by the daemon and its epoch.

    Attributes:
        end: the work under way is to be finished in order: everything, or this epoch for the sake of the next.
        abort: and not waited for.
        is_stop: the daemon ends; else another epoch follows.
    """

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.abort = asyncio.Event()
        self.is_stop = False
        self._before: dict[int, Any] = {}

    def listen(self, *, stopping: Callable[[], None], reload: Callable[[], bool]) -> None:
        """Handle signals from now on: SIGTERM and SIGINT drain, a second one aborts; SIGHUP, SIGUSR1.

        SIGHUP calls `reload`, which returns whether its settings need another epoch, or comes from a terminal that
        closes; then it is an end. `stopping` is called when the daemon shall end.
        """
        terminals = [number for number in _STANDARD_FILES if os.isatty(number)]

        def stop() -> None:
            self.stop()
            stopping()

        def hang_up() -> None:
            if self.is_stop:
                return
            if is_hung_up(terminals):
                stop()
            elif reload():
                self.end.set()

        loop = asyncio.get_running_loop()
        handlers = {
            signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: hang_up, signal.SIGUSR1: log_tasks
        }  # fmt: skip
        self._before = {number: signal.getsignal(number) for number in handlers}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)

    def leave(self) -> None:
        """Give signals back to those that handled them before."""
        for number, handler in self._before.items():
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, handler)

    def stop(self) -> None:
        """Ask for the end of the daemon, the second time at once."""
        if self.is_stop:
            self.abort.set()
        self.is_stop = True
        self.end.set()

    def renew(self) -> None:
        """Begin another epoch: the request that ended the last one is done, unless the daemon ends."""
        if not self.is_stop:
            self.end.clear()

    @property
    def why(self) -> str:
        """Return the reason for the end of an epoch, in words."""
        return "stopped by a signal" if self.is_stop else "the configuration was reloaded"

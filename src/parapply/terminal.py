"""Detection of a closed terminal, because not every shell passes SIGHUP on: `su -` and nohup do not."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def is_hung_up(terminals: Iterable[int]) -> bool:
    """Return whether one of these open terminals has gone, by its number as a file."""
    poll = select.poll()
    for number in terminals:
        # POLLHUP is reported without being asked for.
        poll.register(number, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))

"""The tasks of a process: ended for certain; logged for the operator of a daemon that hangs (``kill -USR1``)."""

from __future__ import annotations

import asyncio
import importlib
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parapply.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from types import FrameType

#: Seconds after which a task that still runs is cancelled again. A second cancellation interrupts what the first one
#: made it clean up (a statement of psycopg's is cancelled on its server), so not at once.
_AGAIN_S = 2.0
#: Seconds from which a wait may be up to a second longer, so that it ends with others: in a process with many slots
#: each wake of the event loop costs as much as most of what it wakes for.
_LONG_S = 5.0


async def load_modules(names: Sequence[str]) -> None:
    """Import modules of this package one after the other; the answers of servers come in between.

    Not in a thread: the two would take turns at the interpreter, which costs a tenth more.
    """
    for name in names:
        if f"parapply.{name}" not in sys.modules:
            await asyncio.sleep(0)
            importlib.import_module(f"parapply.{name}")


async def end_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and return when all have ended, however they ended.

    Once is not enough, because up to Python 3.11 ``asyncio.wait_for``, in which psycopg waits for its socket, loses a
    cancellation that comes in the same round of the event loop as the bytes it waits for. A task that works in a loop
    would then run for ever, and its waiter would wait for ever.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
    # Retrieve the exceptions, or asyncio reports them as never retrieved.
    await asyncio.gather(*tasks, return_exceptions=True)


def beat_s(seconds: float) -> float:
    """Return when a wait from now on ends, by the event loop's clock; a long one ends with the next whole second."""
    end_s = asyncio.get_running_loop().time() + seconds
    return math.ceil(end_s) if seconds >= _LONG_S else end_s


async def sleep_to_beat(seconds: float) -> None:
    """Sleep until `beat_s`."""
    await asyncio.sleep(beat_s(seconds) - asyncio.get_running_loop().time())


def log_tasks() -> None:
    """Log the calls that each task is inside, outermost first, as ``file:line function``.

    No values: nothing of a row or a secret is in it.
    """
    found: dict[str, list[str]] = {}
    for task in sorted(asyncio.all_tasks(), key=asyncio.Task.get_name):
        name, n_same = task.get_name(), 1
        while name in found:  # of several slots
            n_same += 1
            name = f"{task.get_name()} ({n_same})"
        found[name] = _calls(task.get_coro())
    get_logger().info("tasks", tasks=found)


def _calls(awaited: object) -> list[str]:
    """Return the chain of what awaits what, as far as Python shows it."""
    calls: list[str] = []
    while awaited is not None:
        frame: FrameType | None = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            code = frame.f_code
            calls.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return calls

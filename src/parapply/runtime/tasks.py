"""The tasks of a process: ended for certain; shown to whoever looks at a daemon that stands still (``kill -USR1``)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parapply.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import CodeType, FrameType

#: Seconds after which a task that still runs is cancelled again. A second cancellation interrupts what the first one
#: made it clean up (a statement of psycopg's is cancelled on its server), so not at once.
_AGAIN_S = 2.0


async def end_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and return when all have ended, however they ended.

    Once is not enough: up to Python 3.11 ``asyncio.wait_for``, in which psycopg waits for its socket, loses a
    cancellation that comes in the same round of the event loop as the bytes it waits for. A task that works in a loop
    would then go on for ever, and whoever waits for it, too.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
    # Looked at, so that nobody complains of an error that nobody has seen.
    await asyncio.gather(*tasks, return_exceptions=True)


def log_tasks() -> None:
    """Log the calls that each task is inside, outermost first, as ``file:line function``.

    No values: nothing of a row or a secret is in it.
    """
    tasks = sorted(asyncio.all_tasks(), key=asyncio.Task.get_name)
    get_logger().info("tasks", tasks={task.get_name(): _calls(task.get_coro()) for task in tasks})


def _calls(awaited: object) -> list[str]:
    """Return the chain of what awaits what, as far as Python shows it."""
    calls: list[str] = []
    while awaited is not None:
        frame: FrameType | None = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            calls.append(_call(frame.f_code, frame.f_lineno))
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return calls


def _call(code: CodeType, line: int) -> str:
    return f"{Path(code.co_filename).name}:{line} {code.co_name}"

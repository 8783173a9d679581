"""What every task of the process waits for, for whoever looks at a daemon that stands still: ``kill -USR1``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from parapply.logs import get_logger

if TYPE_CHECKING:
    from types import CodeType, FrameType


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

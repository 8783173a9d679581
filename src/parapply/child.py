"""A child process of ours: its output as a stream, and its end with all that it has started."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess
    from contextlib import ExitStack
    from typing import BinaryIO


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process of a separate session with all that it has started: a shell dies alone, and its children run on."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


async def pipe(stack: ExitStack) -> tuple[asyncio.StreamReader, BinaryIO]:
    """Return both ends of a pipe, which are closed with the stack."""
    reading, writing = os.pipe()
    its_end = stack.enter_context(os.fdopen(writing, "wb", buffering=0))
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reading, "rb", buffering=0)
    )
    stack.callback(transport.close)
    return stream, its_end

"""The replication stream: frames out of the socket, status updates into it.

psycopg has no replication API beyond COPY_BOTH, so this is libpq's copy protocol on the raw `pq` layer, never blocking:
`get_copy_data(0)` would hold the interpreter lock while it waits (DEPENDENCIES, trap 1).
(PostgreSQL manual, "Streaming Replication Protocol".)
"""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING

import psycopg
from psycopg import pq

from parapply.errors import SlotBusy, SourceLost, SourceRefused
from parapply.model import POSTGRES_EPOCH_US
from parapply.wire.frames import Keepalive, parse_keepalive, status_update

if TYPE_CHECKING:
    from collections.abc import Callable

#: Kernel buffer asked for, so that the walsender is not stopped while the leader computes. The kernel may give less.
RECEIVE_BUFFER_BYTES = 4 * 1024 * 1024

_XLOG_DATA = ord("w")
_KEEPALIVE = ord("k")


class ReplicationStream:
    """One running START_REPLICATION. Only the leader uses it."""

    def __init__(self, connection: psycopg.AsyncConnection[object]) -> None:
        """Take over a connection opened with ``replication=database``."""
        self._connection = connection
        self._pg = connection.pgconn
        self._loop = asyncio.get_running_loop()
        self._fd = self._pg.socket
        self._is_writing = False
        self._is_reading = False
        self._on_readable: Callable[[], None] = _nothing
        self._ended = False
        #: Latest keep-alive, valid once every frame drained before it has been handled; the leader takes it.
        self.keepalive: Keepalive | None = None
        #: What was last reported as flushed; it never goes back. The leader reads it.
        self.reported_flush_lsn = 0

    async def start(self, command: str) -> None:
        """Send START_REPLICATION.

        Raises:
            SlotBusy: another process reads the slot (55006); try again with back-off.
            SourceRefused: the publisher will never accept this command.
            SourceLost: the connection ended.
        """
        try:
            # psycopg must stay out of COPY_BOTH here: executed through a cursor, the result is a cursor left active.
            await self._connection.execute(command.encode())
        except psycopg.Error as error:
            raise _start_error(error) from error
        self._pg.nonblocking = 1
        with socket.socket(fileno=self._fd) as view:
            try:
                view.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            finally:
                view.detach()

    def resume_reading(self, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` whenever bytes have come, until `pause_reading`."""
        self._on_readable = on_readable
        if not self._is_reading and not self._ended:
            self._is_reading = True
            self._loop.add_reader(self._fd, on_readable)

    def pause_reading(self) -> None:
        """Stop reading: back-pressure. Status updates still go out, which keeps the walsender alive (trap T-10)."""
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._fd)

    def drain(self, limit_bytes: int) -> list[bytes]:
        """Return the data frames at hand, at most about `limit_bytes`, without waiting.

        Keep-alives are not among them: the latest is left in `keepalive`.

        Raises:
            SourceLost: the stream ended.
        """
        pg = self._pg
        frames: list[bytes] = []
        append, get_copy_data = frames.append, pg.get_copy_data
        size = 0
        try:
            while size < limit_bytes:
                pg.consume_input()
                before = len(frames)
                while True:
                    n_bytes, data = get_copy_data(1)
                    if n_bytes <= 0:
                        break
                    # One copy of the message: the view belongs to a libpq buffer that goes with it.
                    frame = bytes(data)
                    if frame[0] == _XLOG_DATA:
                        append(frame)
                        size += n_bytes
                    elif frame[0] == _KEEPALIVE:
                        self.keepalive = parse_keepalive(frame)
                if n_bytes < 0:
                    raise self._end()
                if len(frames) == before:
                    break
        except psycopg.Error as error:
            raise self._lost(error) from error
        return frames

    def send_status(
        self, written_lsn: int, flushed_lsn: int, applied_lsn: int, *, reply_requested: bool = False
    ) -> None:
        """Report progress; only `flushed_lsn` moves the slot, and it must be durable on the target (trap T-1).

        Raises:
            SourceLost: the stream ended.
        """
        if self._ended:
            return
        flushed_lsn = max(flushed_lsn, self.reported_flush_lsn)
        now_us = int(time.time() * 1_000_000) - POSTGRES_EPOCH_US
        message = status_update(written_lsn, flushed_lsn, max(applied_lsn, flushed_lsn), now_us, reply_requested)
        try:
            self._pg.put_copy_data(message)
        except psycopg.Error as error:
            raise self._lost(error) from error
        self.reported_flush_lsn = flushed_lsn
        self._flush()

    async def close(self) -> None:
        """End the stream politely if it still runs, and close the connection."""
        self.pause_reading()
        if not self._ended:
            self._ended = True
            try:
                self._pg.put_copy_end()
                self._pg.flush()
            except psycopg.Error:
                pass
        if self._is_writing:
            self._loop.remove_writer(self._fd)
            self._is_writing = False
        await self._connection.close()

    def _flush(self) -> None:
        try:
            blocked = self._pg.flush()
        except psycopg.Error:
            # The reader meets the same error and reports it.
            blocked = 0
        if blocked and not self._is_writing:
            self._is_writing = True
            self._loop.add_writer(self._fd, self._flush)
        elif not blocked and self._is_writing:
            self._is_writing = False
            self._loop.remove_writer(self._fd)

    def _end(self) -> SourceLost:
        """Read why the copy ended."""
        result = self._pg.get_result()
        message = ""
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            message = (result.error_message or b"").decode("utf-8", "replace").strip()
        return self._lost(RuntimeError(message or "the publisher ended the stream"))

    def _lost(self, error: Exception) -> SourceLost:
        self.pause_reading()
        self._ended = True
        return SourceLost(f"the stream from the publisher ended: {str(error).strip() or type(error).__name__}.")


def _nothing() -> None:
    """Stand in until a reader is set."""


def _start_error(error: psycopg.Error) -> Exception:
    text = str(error).strip()
    if error.sqlstate == "55006":
        return SlotBusy(
            f"the replication slot is in use: {text}.",
            hint="another reader holds it, or the publisher has not noticed yet that one went away; trying again",
        )
    if error.sqlstate is None or error.sqlstate[:2] in ("08", "53", "57"):
        return SourceLost(f"the publisher did not start the stream: {text}.")
    return SourceRefused(
        f"the publisher refused to start the stream: {text}.",
        hint="see docs/OPERATIONS.md for what each refusal means",
    )

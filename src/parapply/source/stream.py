"""The replication stream: frames out of the socket, status updates into it.

psycopg has no replication API beyond COPY_BOTH, so this is the copy protocol itself, never blocking; `transport.py`
moves the bytes. (PostgreSQL manual, "Streaming Replication Protocol".)
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
import time
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from parapply.errors import SlotBusy, SourceLost, SourceRefused
from parapply.model import POSTGRES_EPOCH_US
from parapply.source.transport import CopyFailed, transport_of
from parapply.wire.copy import Keepalive, parse_keepalive, status_update

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.source.slot import Connection
    from parapply.source.transport import Transport

#: Kernel buffer asked for, so that the walsender is not stopped while the leader computes. The kernel may give less.
RECEIVE_BUFFER_BYTES = 4 * 1024 * 1024
#: The same on one machine, where the network needs none: a walsender sends every message separately, and with the
#: receiver's buffer full the kernel joins them, which cost the publisher an eighth less. A quarter of it stopped the
#: sender.
LOCAL_RECEIVE_BUFFER_BYTES = 256 * 1024
#: After every other LSN.
_ANY_LSN: Final = 2**64 - 1
#: Undefined object. The slot existed a moment ago.
_NO_PUBLICATION: Final = "42704"


class ReplicationStream:
    """One running START_REPLICATION. Only the leader uses it."""

    def __init__(self, connection: Connection, *, past_libpq: bool = True) -> None:
        """Take over a connection opened with ``replication=database``.

        Args:
            connection: idle; closed by `close`.
            past_libpq: read an unencrypted socket directly, which is faster; else always by libpq.
        """
        self._connection = connection
        # As the server has it: it cuts a long one, and replaces what is not ASCII.
        self._standby_name = connection.info.parameter_status("application_name") or ""
        self._transport: Transport = transport_of(connection, past_libpq=past_libpq)
        self._loop = asyncio.get_running_loop()
        self._fd = self._transport.fd
        self._is_writing = False
        self._is_reading = False
        self._ended = False
        #: Latest keep-alive, valid once every frame drained before it has been handled; the leader takes it.
        self.keepalive: Keepalive | None = None
        #: True if the last `drain` took everything that had come.
        self.is_drained = True
        self._gap_lsn: int | None = None
        #: LSN last reported as flushed; it never decreases. The leader reads it.
        self.confirmed_flush_lsn = 0

    @property
    def waiting_bytes(self) -> int:
        """Return the number of bytes that the kernel holds for the next read."""
        (n_bytes,) = struct.unpack("i", fcntl.ioctl(self._fd, termios.FIONREAD, bytes(4)))
        return int(n_bytes)

    @property
    def transport(self) -> Transport:
        """Return the transport of the bytes; before `start` others may use it."""
        return self._transport

    @property
    def sender_pid(self) -> int:
        """Return the publisher's process that sends the stream."""
        return self._connection.info.backend_pid

    @property
    def standby_name(self) -> str:
        """Return the name that the publisher knows the stream by among its standbys."""
        return self._standby_name

    async def start(self, command: str) -> None:
        """Send START_REPLICATION.

        Raises:
            SlotBusy: another process reads the slot (55006); try again with back-off.
            SourceRefused: the publisher will never accept this command.
            SourceLost: the connection ended.
        """
        with socket.socket(fileno=self._fd) as view:
            try:
                view.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _receive_buffer_bytes(view))
            finally:
                view.detach()
        try:
            await self._transport.start(command)
        except CopyFailed as failure:
            raise _start_error(failure) from failure

    def resume_reading(self, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` whenever bytes have come, until `pause_reading`."""
        if not self._is_reading and not self._ended:
            self._is_reading = True
            self._loop.add_reader(self._fd, on_readable)
            if self._transport.has_early_data:
                self._loop.call_soon(on_readable)

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
            SourceRefused: it needs a publication of a time when there was none.
            ProtocolError: the bytes are not what a walsender sends.
        """
        transport = self._transport
        try:
            frames = transport.drain(limit_bytes)
        except CopyFailed as failure:
            raise self._lost(failure) from failure
        self.is_drained = transport.is_drained
        if transport.has_gap:
            transport.has_gap = False
            self.note_gap(_lsn_of(frames[-1]) if frames else _ANY_LSN)
        if transport.keepalive is not None:
            self.keepalive, transport.keepalive = parse_keepalive(transport.keepalive), None
        return frames

    def note_gap(self, lsn: int) -> None:
        """Note that a publication was missing while changes were decoded that lie before an LSN, and not far."""
        self._gap_lsn = max(lsn, self._gap_lsn or 0)

    @property
    def has_gap(self) -> bool:
        """Return whether `take_gap` would return one."""
        return self._gap_lsn is not None

    def take_gap(self) -> int | None:
        """Return that LSN, once; None: no publication was missing since the last call."""
        lsn, self._gap_lsn = self._gap_lsn, None
        return lsn

    def send_status(
        self, written_lsn: int, flushed_lsn: int, applied_lsn: int, *, reply_requested: bool = False
    ) -> None:
        """Report progress; only `flushed_lsn` moves the slot, and it must be durable on the target (trap T-1).

        Raises:
            SourceLost, SourceRefused: as `drain`.
        """
        if self._ended:
            return
        flushed_lsn = max(flushed_lsn, self.confirmed_flush_lsn)
        now_us = int(time.time() * 1_000_000) - POSTGRES_EPOCH_US
        message = status_update(written_lsn, flushed_lsn, max(applied_lsn, flushed_lsn), now_us, reply_requested)
        try:
            self._transport.write(message)
        except CopyFailed as failure:
            raise self._lost(failure) from failure
        self.confirmed_flush_lsn = flushed_lsn
        self._flush()

    async def close(self) -> None:
        """End the stream politely if it still runs, and close the connection."""
        self.pause_reading()
        if not self._ended:
            self._ended = True
            self._transport.end()
        if self._is_writing:
            self._loop.remove_writer(self._fd)
            self._is_writing = False
        self._transport.close()
        await self._connection.close()

    def _flush(self) -> None:
        blocked = self._transport.flush()
        if blocked and not self._is_writing:
            self._is_writing = True
            self._loop.add_writer(self._fd, self._flush)
        elif not blocked and self._is_writing:
            self._is_writing = False
            self._loop.remove_writer(self._fd)

    def _lost(self, failure: CopyFailed) -> SourceLost | SourceRefused:
        self.pause_reading()
        self._ended = True
        if failure.sqlstate == _NO_PUBLICATION:
            return _without_publication(failure)
        return SourceLost(f"the stream from the publisher ended: {str(failure) or 'connection lost'}.")


def _lsn_of(frame: bytes) -> int:
    (lsn,) = struct.unpack_from(">Q", frame, 1)
    return int(lsn)


def _receive_buffer_bytes(view: socket.socket) -> int:
    is_internet = view.family in (socket.AF_INET, socket.AF_INET6)
    is_local = is_internet and ip_address(view.getpeername()[0]).is_loopback
    return LOCAL_RECEIVE_BUFFER_BYTES if is_local else RECEIVE_BUFFER_BYTES


def _without_publication(failure: CopyFailed) -> SourceRefused:
    """Return what a stream means that needs a publication of a time when there was none: up to 17 it never goes on."""
    return SourceRefused(
        f"the publisher cannot decode changes of a time when a publication was missing: {failure}.",
        hint="the slot cannot give these changes: `parapply drop`, then `parapply init --copy --truncate`",
    )


def _start_error(failure: CopyFailed) -> SlotBusy | SourceLost | SourceRefused:
    if failure.sqlstate == "55006":
        return SlotBusy(
            f"the replication slot is in use: {failure}.",
            hint="another reader holds it, or the publisher has not noticed yet that one went away; trying again",
        )
    if failure.sqlstate == _NO_PUBLICATION:
        return _without_publication(failure)
    if failure.sqlstate is None or failure.sqlstate[:2] in ("08", "53", "57"):
        return SourceLost(f"the publisher did not start the stream: {failure}.")
    return SourceRefused(
        f"the publisher refused to start the stream: {failure}.",
        hint="the publisher's log has more; docs/TROUBLESHOOTING.md has the common causes",
    )

"""A longer way to a server: a TCP port that hands every byte on some time later, in each direction.

In go a server's address and seconds; out comes a port. Only bytes are late: how many come in a second is not limited,
and the handshake of TCP, which the kernel answers itself, is not late either. It is a process of its own, so that it
takes no time from the interpreter of whoever measures; it ends with its owner, however that one ends.

Its only timer is the timeout of select(2), because that of epoll is rounded up to whole milliseconds. Bytes come 0.1 to
0.3 ms later than they should on an idle machine, never earlier.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import subprocess
import sys
import time
from collections import deque
from typing import Final, Self

from parapply.demo.errors import DemoError

#: Bytes on their way in one direction of one connection; above, nothing more is read, and the sender has to wait.
#: At 100 ms this carries 600 MiB a second: no session comes near it.
HELD_BYTES: Final = 64 * 1024 * 1024
_READ_BYTES = 1024 * 1024
# Parts handed to the kernel at once; its own limit is 1024. Source: writev(2), IOV_MAX.
_SEND_PARTS = 256
# Two sockets each: select(2) cannot name more than 1024 files.
_CONNECTIONS = 400
_CONNECT_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 10.0
# How late the kernel may wake us on purpose, to save power; 50 us unless told. Source: PR_SET_TIMERSLACK(2const).
_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1


class Delay:
    """A detour to a server, there while the block runs.

    Attributes:
        port: TCP port on 127.0.0.1.
        pid: process that moves the bytes.
    """

    port: int
    pid: int

    def __init__(self, host: str, port: int, delay_s: float, *, held_bytes: int = HELD_BYTES) -> None:
        """Start nothing yet.

        Args:
            host: where the server is: a name, an address, or as in libpq the directory of its Unix socket.
            port: the server's; also part of the name of its Unix socket.
            delay_s: seconds in each direction; a round trip takes twice that longer.
            held_bytes: bytes on their way in one direction of one connection before the sender has to wait.
        """
        self._arguments = [host, str(port), repr(delay_s), str(held_bytes)]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start the process and return when it listens.

        Raises:
            DemoError: it ended at once.
        """
        # The pipe to its input is what tells it that we are gone: nobody else holds the other end.
        process = self._process = subprocess.Popen(  # noqa: S603 - our own program, no shell
            [sys.executable, "-m", "parapply.bench.delay", *self._arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            self.__exit__()
            raise DemoError(f"The process that delays bytes ended with {process.returncode} before it listened.")
        self.port, self.pid = int(line), process.pid
        return self

    def __exit__(self, *_: object) -> None:
        """End the process; its connections end, and bytes on their way are lost."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Way:
    """One direction of a connection.

    Attributes:
        source: what is read.
        sink: what is written.
        due_s: when the first part on its way arrives; `None` if nothing is on its way.
        is_blocked: whether the sink took less than it was given.
        is_over: whether the end has arrived, or the sink is gone.
    """

    __slots__ = ("_delay_s", "_held_bytes", "_is_ended", "_limit_bytes", "_parts", "is_blocked", "is_over", "sink",
                 "source")  # fmt: skip

    def __init__(self, source: socket.socket, sink: socket.socket, delay_s: float, limit_bytes: int) -> None:
        self.source = source
        self.sink = sink
        self.is_blocked = False
        self.is_over = False
        self._delay_s = delay_s
        self._limit_bytes = limit_bytes
        # When each part arrives, and the part; an empty one is the end.
        self._parts: deque[tuple[float, memoryview]] = deque()
        self._held_bytes = 0
        self._is_ended = False

    @property
    def due_s(self) -> float | None:
        return self._parts[0][0] if self._parts else None

    @property
    def wants_more(self) -> bool:
        """Whether the source is to be read; after the sink is gone too, or its own end would never be seen."""
        return not self._is_ended and self._held_bytes < self._limit_bytes

    def read(self, buffer: memoryview) -> bool:
        """Take what has come and return whether the source still lives."""
        try:
            n_bytes = self.source.recv_into(buffer)
        except BlockingIOError:
            return True
        except OSError:
            n_bytes = -1
        self._is_ended = n_bytes <= 0
        if not self.is_over:
            part = memoryview(bytes(buffer[: max(0, n_bytes)]))
            self._parts.append((time.monotonic() + self._delay_s, part))
            self._held_bytes += len(part)
        return n_bytes >= 0

    def write(self, now_s: float) -> None:
        """Hand on what is due."""
        parts = self._parts
        while parts and parts[0][0] <= now_s:
            if not parts[0][1]:
                self._end()
                return
            due: list[memoryview] = []
            for due_s, part in parts:
                if due_s > now_s or not part or len(due) == _SEND_PARTS:
                    break
                due.append(part)
            try:
                n_bytes = self.sink.sendmsg(due)
            except BlockingIOError:
                n_bytes = 0
            except OSError:
                self.give_up()
                return
            self.is_blocked = n_bytes < sum([len(part) for part in due])
            self._sent(n_bytes)
            if self.is_blocked:
                return

    def _sent(self, n_bytes: int) -> None:
        self._held_bytes -= n_bytes
        parts = self._parts
        while n_bytes:
            due_s, part = parts[0]
            if n_bytes < len(part):
                parts[0] = (due_s, part[n_bytes:])
                return
            n_bytes -= len(part)
            parts.popleft()

    def _end(self) -> None:
        # A sink that has gone meanwhile has ended, too.
        with contextlib.suppress(OSError):
            self.sink.shutdown(socket.SHUT_WR)
        self.give_up()

    def give_up(self) -> None:
        """Hand nothing on any more; what the source still says is read and dropped."""
        self._parts.clear()
        self._held_bytes = 0
        self.is_blocked = False
        self.is_over = True


class _Detour:
    """The process's side: one loop over all sockets."""

    def __init__(self, host: str, port: int, delay_s: float, limit_bytes: int) -> None:
        self._host = host
        self._server_port = port
        self._delay_s = delay_s
        self._limit_bytes = limit_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        # Both ways of each connection.
        self._links: list[tuple[_Way, _Way]] = []
        self._buffer = memoryview(bytearray(_READ_BYTES))

    def serve(self, owner_fd: int) -> None:
        """Move bytes until the owner's pipe ends."""
        listener_fd = self._listener.fileno()
        while True:
            ways = [way for link in self._links for way in link]
            readers = {way.source.fileno(): way for way in ways if way.wants_more}
            writers = [way.sink for way in ways if way.is_blocked]
            wanted = [owner_fd, *([listener_fd] if len(self._links) < _CONNECTIONS else []), *readers]
            readable, _, _ = select.select(wanted, writers, [], _timeout_s(ways))
            if owner_fd in readable:
                return
            for fd in readable:
                if fd == listener_fd:
                    self._accept()
                else:
                    self._read(readers[fd])
            now_s = time.monotonic()
            for way in ways:
                way.write(now_s)
            if any(one.is_over and other.is_over for one, other in self._links):
                self._close_what_is_over()

    def _read(self, way: _Way) -> None:
        if not way.read(self._buffer):
            # A reset: nobody is left to hand anything back to.
            for link in self._links:
                if way in link:
                    link[link[0] is way].give_up()

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return  # it has gone meanwhile
        try:
            server = _connect(self._host, self._server_port)
        except OSError:
            client.close()
            return
        for one in (client, server):
            one.setblocking(False)
            if one.family != socket.AF_UNIX:
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limits = (self._delay_s, self._limit_bytes)
        self._links.append((_Way(client, server, *limits), _Way(server, client, *limits)))

    def _close_what_is_over(self) -> None:
        for way, back in self._links:
            if way.is_over and back.is_over:
                way.source.close()
                way.sink.close()
        self._links = [link for link in self._links if not (link[0].is_over and link[1].is_over)]


def _timeout_s(ways: list[_Way]) -> float | None:
    """Return the seconds until something is due; a sink that takes nothing is waited for instead."""
    dues_s = [way.due_s for way in ways if way.due_s is not None and not way.is_blocked]
    return max(0.0, min(dues_s) - time.monotonic()) if dues_s else None


def _connect(host: str, port: int) -> socket.socket:
    """Connect as libpq does. Source: PostgreSQL manual, "Parameter Key Words", host."""
    if not host.startswith(("/", "@")):
        return socket.create_connection((host, port), _CONNECT_TIMEOUT_S)
    server = socket.socket(socket.AF_UNIX)
    server.settimeout(_CONNECT_TIMEOUT_S)
    # The abstract namespace of Linux is written with a zero byte. Source: unix(7).
    path = f"{host}/.s.PGSQL.{port}"
    try:
        server.connect("\0" + path[1:] if host.startswith("@") else path)
    except OSError:
        server.close()
        raise
    return server


def main() -> None:
    """Listen, say on which port, and move bytes until standard input ends: `HOST PORT DELAY_S HELD_BYTES`."""
    host, port, delay_s, limit_bytes = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)
    detour = _Detour(host, int(port), float(delay_s), int(limit_bytes))
    sys.stdout.write(f"{detour.port}\n")
    sys.stdout.flush()
    detour.serve(sys.stdin.fileno())


if __name__ == "__main__":
    main()

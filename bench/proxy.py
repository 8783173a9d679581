"""A TCP proxy: a port whose bytes go to a server and back, all of them, or as its owner wants.

In go a server's address, seconds and a function that sees the bytes; out comes a port. `Proxy` is run by the thread
that calls it. `delayed_port` runs one in a process of its own, so that it takes no time from the measuring interpreter
and is exact while that one is busy.

Only bytes are late: how many come in a second is not limited, and the handshake of TCP, which the kernel answers
itself, is not late either. All waiting is in select(2), because the timeout of epoll is rounded up to whole
milliseconds; it cannot name more than 1024 files, two for a connection. Bytes come 0.1 to 0.3 ms later than they
should on an idle machine, never earlier.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import selectors
import socket
import struct
import subprocess
import sys
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from parapply.demo.errors import DemoError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Bytes on their way in one direction of one connection; above, nothing more is read, and the sender has to wait.
#: At 100 ms this carries 600 MiB a second: no session comes near it.
HELD_BYTES: Final = 64 * 1024 * 1024
_CONNECT_TIMEOUT_S = 5.0
# A zero linger time makes close() send RST instead of FIN. Source: socket(7).
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
# How late the kernel may wake us on purpose, to save power; 50 us unless set. Source: PR_SET_TIMERSLACK(2const).
_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1


class Watch(Protocol):
    """A function that sees all bytes of all connections, in their order, when they are read."""

    def __call__(self, connection: ProxiedConnection, data: bytes, *, is_from_client: bool) -> bytes:
        """Return the bytes to pass on in the place of `data`; it may reset the connection or freeze the proxy."""


class Proxy:
    """Forwards the connections to a port, both directions and their ends, to one server.

    Other threads call `cut`, `freeze` and `thaw` through `loop.call_soon_threadsafe`.

    Attributes:
        port: TCP port on 127.0.0.1.
        loop: runs while `run` does; `loop.stop` ends it.
        connections: those that are open.
        is_refusing: whether new connections are reset.
        delay_s: as given.
        held_bytes: as given.
        watch: as given.
    """

    def __init__(
        self, host: str, port: int, *, delay_s: float = 0.0, held_bytes: int = HELD_BYTES, watch: Watch | None = None
    ) -> None:
        """Listen; connections wait until `run`.

        Args:
            host: where the server is.
            port: its TCP port.
            delay_s: seconds in each direction; a round trip takes twice that longer.
            held_bytes: bytes on their way in one direction of one connection before the sender has to wait.
            watch: sees the bytes of all connections and may change them.
        """
        self.loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        self.connections: set[ProxiedConnection] = set()
        self.is_refusing = False
        self.delay_s: Final = delay_s
        self.held_bytes: Final = held_bytes
        self.watch: Final = watch
        self._server = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._thawed = asyncio.Event()
        self._thawed.set()

    @property
    def is_frozen(self) -> bool:
        """Say whether nothing is forwarded."""
        return not self._thawed.is_set()

    def run(self) -> None:
        """Forward until the loop is stopped, then reset all connections.

        Raises:
            OSError: no connection can be accepted, such as for want of file descriptors.
        """
        accepting = self.loop.create_task(self._accept(), name="accept")
        accepting.add_done_callback(lambda _: self.loop.stop())
        with contextlib.closing(self.loop), self._listener, contextlib.suppress(asyncio.CancelledError):
            self.loop.run_forever()
            accepting.cancel()
            self.cut()
            self.loop.run_until_complete(accepting)

    def cut(self, *, then_refuse: bool = False) -> None:
        """Reset all connections, and from now on new ones, too, or not."""
        self.is_refusing = then_refuse
        for connection in list(self.connections):
            connection.reset()

    def freeze(self) -> None:
        """Forward nothing from now on, neither bytes nor ends: both sides see a silent network (half-open)."""
        self._thawed.clear()
        for connection in self.connections:
            connection.flow()

    def thaw(self) -> None:
        """Go on after `freeze`; nothing was lost."""
        self._thawed.set()
        for connection in list(self.connections):
            connection.flow()

    async def _accept(self) -> None:
        while True:
            client, _ = await self.loop.sock_accept(self._listener)
            await self._connect(client)

    async def _connect(self, client: socket.socket) -> None:
        connection = ProxiedConnection(self)
        await self.loop.connect_accepted_socket(lambda: connection.client, client)
        await self._thawed.wait()
        try:
            if self.is_refusing or connection.is_over:
                raise ConnectionRefusedError
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self.loop.create_connection(lambda: connection.server, *self._server)
        except OSError:
            connection.reset()


class ProxiedConnection:
    """A client's connection and ours to the server for it.

    Attributes:
        client: the client's end.
        server: the server's.
    """

    def __init__(self, proxy: Proxy) -> None:
        """Be one of the proxy's, before there are sockets."""
        self.client, self.server = _End(self, proxy), _End(self, proxy)
        self.client.other, self.server.other = self.server, self.client
        self._open = proxy.connections
        self._open.add(self)

    @property
    def is_over(self) -> bool:
        """Return whether nothing more is forwarded."""
        return self not in self._open

    def flow(self) -> None:
        """Forward what can be forwarded now, in both directions."""
        self.client.flow()
        self.server.flow()

    def close(self) -> None:
        """End it in order, after both directions have ended."""
        self._open.discard(self)
        for end in (self.client, self.server):
            if end.transport is not None:
                end.transport.close()

    def reset(self) -> None:
        """End it on both sides with RST; what is on its way is lost. The loop's next turn closes its sockets."""
        self._open.discard(self)
        for end in (self.client, self.server):
            if end.transport is not None:
                one = end.transport.get_extra_info("socket")
                with contextlib.suppress(OSError):  # closed already
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                end.transport.abort()


class _End(asyncio.Protocol):
    """One socket of a connection, and what came from it and is on its way to the other one.

    Attributes:
        other: the connection's other end.
        transport: to the socket, once it is connected.
        is_full: whether the socket takes no more for now.
        is_through: whether the end of what came from it has reached the other one.
    """

    other: _End

    def __init__(self, connection: ProxiedConnection, proxy: Proxy) -> None:
        self.transport: asyncio.Transport | None = None
        self.is_full = False
        self.is_through = False
        self._connection = connection
        self._proxy = proxy
        # It will say no more; it may still be answered.
        self._has_ended = False
        # On their way, in their order; an empty one is the end.
        self._parts: deque[bytes] = deque()
        self._held_bytes = 0
        # So many of them, from the first, have been on their way for long enough.
        self._n_due = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self._connection.is_over:
            self._connection.reset()
            return
        # It keeps what the kernel left of a part; all else waits here, where it is counted.
        transport.set_write_buffer_limits(0)
        self._connection.flow()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        # Not at once: the transport is in the middle of writing and must not be closed there.
        self._proxy.loop.call_soon(self.other.flow)

    def data_received(self, data: bytes) -> None:
        watch = self._proxy.watch
        if watch is not None:
            data = watch(self._connection, data, is_from_client=self is self._connection.client)
        if data:
            self._held_bytes += len(data)
            self._pass_on(data)

    def eof_received(self) -> bool:
        self._has_ended = True
        self._pass_on(b"")
        return True  # leave the socket open for the answer

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:  # else we have closed it
            self._after_delay(self._connection.reset)

    def _pass_on(self, part: bytes) -> None:
        self._parts.append(part)
        self._after_delay(self._arrive)
        self.flow()

    def _arrive(self) -> None:
        self._n_due += 1
        self.flow()

    def _after_delay(self, act: Callable[[], None]) -> None:
        if self._proxy.delay_s:
            self._proxy.loop.call_later(self._proxy.delay_s, act)
        else:
            act()

    def flow(self) -> None:
        """Hand on what is due and the other socket takes, and read if there is room for more."""
        sink, is_frozen = self.other, self._proxy.is_frozen
        while self._n_due and sink.transport is not None and not (sink.is_full or is_frozen):
            if sink.transport.is_closing():
                return
            part = self._parts.popleft()
            self._n_due -= 1
            self._held_bytes -= len(part)
            if part:
                sink.transport.write(part)
                continue
            with contextlib.suppress(OSError):  # it is gone, which is also an end
                sink.transport.write_eof()
            self.is_through = True
            if sink.is_through:
                self._connection.close()
        if self.transport is None or self._has_ended:
            return
        if is_frozen or self._held_bytes >= self._proxy.held_bytes:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()


@contextlib.contextmanager
def delayed_port(host: str, port: int, delay_s: float, *, held_bytes: int = HELD_BYTES) -> Iterator[int]:
    """Run a proxy that delays, in a process that ends with the block, or with this process, however that one ends.

    Args:
        host: where the server is.
        port: its TCP port.
        delay_s: see `Proxy`.
        held_bytes: see `Proxy`.

    Yields:
        its TCP port on 127.0.0.1.

    Raises:
        DemoError: it ended at once.
    """
    # The pipe to its input shows it that we are gone, because no other process holds the other end.
    with subprocess.Popen(  # noqa: S603 - our own program, no shell
        [sys.executable, "-P", __file__, host, str(port), repr(delay_s), str(held_bytes)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise DemoError(f"The process that delays bytes ended with {process.wait()} before it listened.")
        yield int(line)


def main() -> None:
    """Listen, say on which port, and forward until standard input ends: `HOST PORT DELAY_S HELD_BYTES`."""
    host, port, delay_s, held_bytes = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)
    proxy = Proxy(host, int(port), delay_s=float(delay_s), held_bytes=int(held_bytes))
    proxy.loop.add_reader(sys.stdin.fileno(), proxy.loop.stop)
    sys.stdout.write(f"{proxy.port}\n")
    sys.stdout.flush()
    proxy.run()


if __name__ == "__main__":
    main()

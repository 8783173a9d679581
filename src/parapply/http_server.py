"""A small HTTP server on the event loop of a process: one request a connection, GET and HEAD, nothing else.

In: a function that answers to a path. It runs on the loop that does the work on purpose, because a probe must see that
no answer comes if that hangs.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import re
from typing import TYPE_CHECKING, Final

from parapply.errors import ConfigError
from parapply.tasks import end_tasks

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.config_values import Address

#: Seconds for a request to come and for its answer to be taken.
_TIMEOUT_S: Final = 5.0
#: Remedies where an address cannot be listened on.
_HINTS: Final = {
    errno.EADDRINUSE: "another daemon or `parapply migrate` may have the port: each daemon on a machine needs its own",
    errno.EACCES: "a port below 1024 needs a privilege; take one above",
    errno.EADDRNOTAVAIL: 'name an address of this machine, or none (":port") for all of them',
}
#: Bytes of a request's head.
_HEAD_BYTES: Final = 8192
#: Connections at the same time; one more is closed unread. A scraper, two probes and a person are four.
_CONNECTIONS: Final = 16

_POLICY: Final = "default-src 'none'; frame-ancestors 'none'"
TEXT: Final = "text/plain; charset=utf-8"
_REASONS: Final = {
    200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 421: "Misdirected Request",
    503: "Not Ready",
}  # fmt: skip
#: Each Host of a head. Blanks are taken away later: a pattern with them on both sides takes quadratic time.
_HOST: Final = re.compile(rb"(?im)^host[ \t]*:([^\r\n]*)")
_PORT: Final = re.compile(rb":\d*$")


class HttpServer:
    """Every connection is a separate task that ends within seconds."""

    def __init__(self, answer: Callable[[str], tuple[int, str, bytes]], policy: str = _POLICY) -> None:
        """Start without listening.

        Args:
            answer: returns status, content type and body for a path.
            policy: rights of a browser with an answer, as in Content-Security-Policy.
        """
        self._more = f"Content-Security-Policy: {policy}\r\nX-Content-Type-Options: nosniff\r\n"
        self._resource = answer
        self._server: asyncio.Server | None = None
        self._is_local = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, address: Address) -> tuple[str, int]:
        """Begin to listen, and return host and port.

        Raises:
            ConfigError: the address is taken, or not one of this machine.
        """
        try:
            self._server = await asyncio.start_server(
                self._connected, address.host or None, address.port, limit=_HEAD_BYTES
            )
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError(
                f"metrics.listen: cannot listen on {address}: {why}", hint=_HINTS.get(error.errno or 0, "")
            ) from error
        host, port = self._server.sockets[0].getsockname()[:2]
        self._is_local = ipaddress.ip_address(host).is_loopback
        return str(host), int(port)

    async def close(self) -> None:
        """Stop listening; requests in progress are cut off."""
        if self._server is not None:
            self._server.close()
            self._server = None
        await end_tasks(self._tasks)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= _CONNECTIONS:
            writer.close()
            return
        task = asyncio.create_task(self._serve(reader, writer), name="metrics-request")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            return  # no client to answer
        finally:
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response(400, TEXT, b"not an HTTP/1 request\n")
        # A site of the web may have its name lead here, and then reads what this machine's browser may.
        if self._is_local and not all(map(_is_address, _HOST.findall(head))):
            return _response(421, TEXT, b"ask by an IP address or localhost, as this address is local\n")
        method, target = words[0], words[1].split(b"?", 1)[0]
        if method not in {b"GET", b"HEAD"}:
            return _response(405, TEXT, b"GET and HEAD only\n", "Allow: GET, HEAD\r\n")
        return _response(*self._resource(target.decode("latin-1")), self._more, has_body=method == b"GET")


def _is_address(host: bytes) -> bool:
    text = _PORT.sub(b"", host.strip()).decode("latin-1").lower()
    try:
        ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return text == "localhost"
    return True


def _response(status: int, content_type: str, body: bytes, more: str = "", *, has_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        f"Cache-Control: no-store\r\nConnection: close\r\n{more}\r\n"
    )
    return head.encode() + (body if has_body else b"")

"""One part from COPY TO STDOUT on the publisher to COPY FROM STDIN on the target; nothing is parsed on the way.

Past libpq on the publisher's side where nothing is encrypted: it gives out one row a call, which takes more time than
the server needs to send it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from typing import TYPE_CHECKING

from parapply import failpoints
from parapply.driver import values_hidden
from parapply.errors import SourceLost, SourceRefused
from parapply.source.slot import source_errors
from parapply.target.session.settings import target_errors
from parapply.wire.copy import RowReader, error_fields

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from psycopg import sql

    from parapply.copy.places import RateLimit
    from parapply.source import slot
    from parapply.target.session import settings

#: Bytes collected from libpq before they are handed on.
_CHUNK_BYTES = 64 * 1024
#: After a read of less than this the next one waits a moment: the publisher sends 8 kB at a time, and waking us for
#: each costs both more than handing it on. Nothing stops for it, because the target reads on from its socket.
_SMALL_READ_BYTES = 64 * 1024
_PAUSE_S = 0.002


async def pump(  # noqa: PLR0913  two ends
    source: slot.Connection,
    target: settings.Connection,
    out: sql.Composed,
    into: sql.Composed,
    *,
    relation: str,
    on_data: Callable[[int, int], None],
    limit: RateLimit | None = None,
    hides_values: bool = False,
) -> tuple[int, int]:
    """Copy a part, in a separate transaction on the target.

    Args:
        source: session on the publisher, idle.
        target: session on the target, idle.
        out: COPY ... TO STDOUT.
        into: COPY ... FROM STDIN for the same columns.
        relation: for messages.
        on_data: called with further rows and bytes, as they are handed on.
        limit: waited for; None: no limit.
        hides_values: the target's messages may have values that are to be kept from there.

    Returns:
        Rows, as the publisher counts them, and bytes.

    Raises:
        SourceRefused, SourceLost: the publisher failed, or does not let the table be read.
        TargetRefused, TargetLost: the target failed, or a row does not fit there.
    """
    is_plain = not source.pgconn.ssl_in_use and not source.pgconn.used_gssapi
    chunks = _past_libpq(source, out, relation) if is_plain else _by_libpq(source, out, relation)
    n_rows = size = told = 0
    async with target.cursor() as cursor:
        with target_errors(f"copying into {relation}"), values_hidden(when=hides_values):
            async with cursor.copy(into) as copy:
                async for rows, data in chunks:
                    n_rows = rows
                    if data:
                        await copy.write(data)
                        size += len(data)
                    on_data(rows - told, len(data))
                    told = rows
                    if limit is not None:
                        await limit.take(len(data))
                failpoints.probe(failpoints.COPY_PART)
    return n_rows, size


async def _by_libpq(conn: slot.Connection, out: sql.Composed, relation: str) -> AsyncIterator[tuple[int, bytes]]:
    """Yield the number of rows so far, this data included, and the data; at last the publisher's count with nothing."""
    pieces: list[bytes] = []
    n_rows = size = 0
    with source_errors(f"copying {relation}"):
        async with conn.cursor() as cursor:
            async with cursor.copy(out) as copy:
                async for piece in copy:
                    pieces.append(bytes(piece))
                    n_rows += 1
                    size += len(pieces[-1])
                    if size >= _CHUNK_BYTES:
                        yield n_rows, b"".join(pieces)
                        pieces, size = [], 0
            yield cursor.rowcount, b"".join(pieces)


async def _past_libpq(conn: slot.Connection, out: sql.Composed, relation: str) -> AsyncIterator[tuple[int, bytes]]:
    """Yield as `_by_libpq`; the session is idle again afterwards, and of no use after an error."""
    loop = asyncio.get_running_loop()
    reader = RowReader()
    query = out.as_bytes(conn) + b"\0"
    size = 0
    # Another descriptor of the same socket: libpq has nothing in its buffers between two commands.
    with socket.socket(fileno=os.dup(conn.pgconn.socket)) as plain:
        plain.setblocking(False)
        try:
            await loop.sock_sendall(plain, b"Q" + struct.pack(">I", len(query) + 4) + query)
            n_rows: int | None = None
            while n_rows is None:
                room = reader.room()
                n_bytes = await loop.sock_recv_into(plain, room)
                if not n_bytes:
                    raise SourceLost(f"source, copying {relation}: the server closed the connection unexpectedly")
                data = reader.received(n_bytes)
                n_rows = _look_at_others(reader, relation)
                size += len(data)
                if data or n_rows is not None:
                    yield reader.n_rows if n_rows is None else n_rows, data
                if n_rows is None and n_bytes < _SMALL_READ_BYTES < size:
                    await asyncio.sleep(_PAUSE_S)
        except OSError as error:
            raise SourceLost(f"source, copying {relation}: {error.strerror or error}") from error


def _look_at_others(reader: RowReader, relation: str) -> int | None:
    """Return how many rows the server has sent, once it is ready for the next command; before, None."""
    n_rows = 0
    is_ready = False
    for kind, contents in reader.others:
        if kind == ord("E"):
            raise _source_error(contents, relation)
        if kind == ord("C"):
            n_rows = int(contents.rstrip(b"\0").rpartition(b" ")[2])  # COPY 123
        is_ready = kind == ord("Z")
    if not is_ready:
        return None
    reader.others.clear()
    return n_rows


def _source_error(contents: bytes, relation: str) -> SourceRefused | SourceLost:
    fields = error_fields(contents)
    text = f"source, copying {relation}: {fields.get('M', '')}"
    if fields.get("C", "").startswith(("57", "08")):
        return SourceLost(text)
    hint = "GRANT SELECT on the published tables to the source's role" if fields.get("C") == "42501" else ""
    return SourceRefused(text, hint=hint)

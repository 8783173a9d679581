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

from parapply.errors import SourceLost, SourceRefused
from parapply.source.slot import source_errors
from parapply.target.settings import target_errors
from parapply.wire.copy import RowReader, error_fields

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from psycopg import sql

    from parapply.source import slot
    from parapply.target import settings

#: Bytes collected from libpq before they are handed on.
_CHUNK_BYTES = 64 * 1024


async def pump(  # noqa: PLR0913  two ends
    source: slot.Connection,
    target: settings.Connection,
    out: sql.Composed,
    into: sql.Composed,
    *,
    relation: str,
    on_data: Callable[[int, int], None],
) -> tuple[int, int]:
    """Copy, inside the transactions that both sessions are in.

    Args:
        source: session on the publisher, idle.
        target: session on the target, idle.
        out: COPY ... TO STDOUT.
        into: COPY ... FROM STDIN for the same columns.
        relation: for messages.
        on_data: called with further rows and bytes, as they are handed on.

    Returns:
        Rows and bytes.

    Raises:
        SourceRefused, SourceLost: the publisher failed, or does not let the table be read.
        TargetRefused, TargetLost: the target failed, or a row does not fit there.
    """
    is_plain = not source.pgconn.ssl_in_use and not source.pgconn.used_gssapi
    chunks = _past_libpq(source, out, relation) if is_plain else _by_libpq(source, out, relation)
    n_rows = size = 0
    async with target.cursor() as cursor:
        with target_errors(f"copying into {relation}"):
            async with cursor.copy(into) as copy:
                async for rows, data in chunks:
                    await copy.write(data)
                    n_rows += rows
                    size += len(data)
                    on_data(rows, len(data))
    return n_rows, size


async def _by_libpq(conn: slot.Connection, out: sql.Composed, relation: str) -> AsyncIterator[tuple[int, bytes]]:
    rows: list[bytes] = []
    size = 0
    with source_errors(f"copying {relation}"):
        async with conn.cursor() as cursor, cursor.copy(out) as copy:
            async for row in copy:
                rows.append(bytes(row))
                size += len(rows[-1])
                if size >= _CHUNK_BYTES:
                    yield len(rows), b"".join(rows)
                    rows, size = [], 0
    if rows:
        yield len(rows), b"".join(rows)


async def _past_libpq(conn: slot.Connection, out: sql.Composed, relation: str) -> AsyncIterator[tuple[int, bytes]]:
    """Yield rows and their data; the session is idle again afterwards, and of no use after an error."""
    loop = asyncio.get_running_loop()
    reader = RowReader()
    query = out.as_bytes(conn) + b"\0"
    # Another descriptor of the same socket: libpq has nothing in its buffers between two commands.
    with socket.socket(fileno=os.dup(conn.pgconn.socket)) as plain:
        plain.setblocking(False)
        try:
            await loop.sock_sendall(plain, b"Q" + struct.pack(">I", len(query) + 4) + query)
            is_ready = False
            while not is_ready:
                n_bytes = await loop.sock_recv_into(plain, reader.room())
                if not n_bytes:
                    raise SourceLost(f"source, copying {relation}: the server closed the connection unexpectedly")
                before = reader.n_rows
                data = reader.received(n_bytes)
                if data:
                    yield reader.n_rows - before, data
                is_ready = _look_at_others(reader, relation)
        except OSError as error:
            raise SourceLost(f"source, copying {relation}: {error.strerror or error}") from error


def _look_at_others(reader: RowReader, relation: str) -> bool:
    """Tell whether the server is ready for the next command.

    Raises:
        SourceRefused, SourceLost: it has reported an error.
    """
    is_ready = False
    for kind, contents in reader.others:
        if kind == ord("E"):
            fields = error_fields(contents)
            text = f"source, copying {relation}: {fields.get('M', '')}"
            if fields.get("C", "").startswith(("57", "08")):
                raise SourceLost(text)
            hint = "GRANT SELECT on the published tables to the source's role" if fields.get("C") == "42501" else ""
            raise SourceRefused(text, hint=hint)
        is_ready = is_ready or kind == ord("Z")
    reader.others.clear()
    return is_ready

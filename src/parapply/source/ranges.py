"""Ranges of a slot's WAL, read by query from a temporary copy of the slot.

Each session has one query under way: while a range is applied the next is decoded, because its bytes are taken into
memory as fast as they come. A walsender runs SQL, so a role with LOGIN and REPLICATION is enough, and the stream uses
the first session afterwards. A copy ends with its session, whatever happens.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import psycopg

from parapply import failpoints
from parapply.errors import SourceLost
from parapply.model import POSTGRES_EPOCH_US
from parapply.quoting import literal
from parapply.source import catch_up
from parapply.source.catch_up import RangePosition
from parapply.source.range_front import Asked
from parapply.source.slot import take_bytes
from parapply.source.stream import CopyFailed, QueryFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from parapply.source.catch_up import CatchUp
    from parapply.source.range_front import RangeFront
    from parapply.source.range_order import RangesEnd
    from parapply.source.slot import Connection
    from parapply.source.stream import Transport

#: Classes of SQLSTATE that say the connection, or the server behind it, is going; 57014 is a cancelled query.
_GOING = ("08", "57P")
#: Seconds for the cancellation of the query under way when the daemon ends.
_CANCEL_S = 1.0


class CopyRefused(Exception):
    """The publisher made no copy of the slot. Nothing was decoded, so the session may still stream."""


class RangeReader:
    """One session, which reads range after range. One call at a time; the sessions of a slot share the front."""

    def __init__(self, connection: Connection, transport: Transport, plan: CatchUp, front: RangeFront) -> None:
        """Take over an idle connection opened with ``replication=database``."""
        self._connection = connection
        self.transport = transport
        self._plan = plan
        self._front = front
        self._copy = f"parapply_catch_up_{connection.info.backend_pid}"
        self._has_copy = False
        #: Range that was asked for last.
        self.asked = Asked(0, 0)
        #: After the last range that was read.
        self._position: RangePosition | None = None
        #: Ranges read whole.
        self.n_read = 0
        #: True if a range was asked for that has not come to its end.
        self.is_unfinished = False
        #: Why the publisher refused a query, for people. The connection is of no use then: a walsender drops its
        #: temporary slots after every error, and in PostgreSQL up to 15.14, 16.10, 17.6 and 18.0 pgoutput's cache of
        #: relations outlives an error of the SQL function and points at freed memory, which the next decoding in the
        #: session would use.
        self.refusal = ""
        # Its texts repeat, and a walsender takes no prepared statement.
        connection.prepare_threshold = None

    async def ask(self, durable_lsn: int) -> RangesEnd | None:
        """Ask for the next range, and before that move the slot if there is much to move; the caller has the lock.

        Args:
            durable_lsn: everything that ends up to here is durable on the target.

        Returns:
            Where the ranges end if there is no further one; None: it is under way.

        Raises:
            CopyRefused: the publisher makes no copy of the slot.
            SourceLost: the connection ended, another query was refused, or another reader has moved the slot: the first
                copy begins where the slot is.
        """
        front = self._front
        try:
            position = await self._come_up()
            if (end := front.end_before(position)) is not None:
                return end
            if (move_lsn := front.move_lsn(durable_lsn)) is not None:
                await self._execute(catch_up.advance_sql(self._plan.slot, move_lsn))
                front.slot_lsn = move_lsn
                failpoints.probe(failpoints.SLOT_MOVED)
        except QueryFailed as failure:
            raise self.refused(failure) from failure
        self.asked = front.begin(position, self._copy)
        query = catch_up.range_sql(self._copy, self.asked.end_lsn, self._plan.options)
        try:
            self.is_unfinished = True
            await self.transport.ask(query, position.clock_us)
        except CopyFailed as failure:
            raise _lost(failure) from failure
        return None

    async def _come_up(self) -> RangePosition:
        """Bring the copy to the front.

        The copy that reads the range before is nearer than the own one, and may be copied while it is read: it
        is where that range begins, or already where it ends.
        """
        front = self._front
        if front.copy == self._copy and self._position is not None:
            return self._position
        await self._make_copy(front.copy)
        position = await self._look()
        if front.is_ahead_of(position):
            await self._execute(catch_up.advance_sql(self._copy, front.lsn))
            position = await self._look()
        return position

    async def _make_copy(self, of: str) -> None:
        copy, limits = literal(self._copy), self._plan.limits
        queries = [
            # A decoded range is kept in this memory before its first row is sent; the excess goes to a temporary file.
            f"SET work_mem = '{max(limits.range_bytes // 1024, 64)}kB'",
            f"SELECT pg_catalog.pg_copy_logical_replication_slot({literal(of)}, {copy}, true)",
        ]
        if self._has_copy:
            queries.insert(0, f"SELECT pg_catalog.pg_drop_replication_slot({copy})")
        # After an error there is none.
        self._has_copy = False
        await take_bytes(self._connection)
        try:
            await self._execute("; ".join(queries))
        except QueryFailed as failure:
            raise CopyRefused(f"the slot cannot be copied: {failure}") from failure
        self._has_copy = True

    async def read(self, take: Callable[[list[bytes], int], Awaitable[None]]) -> RangesEnd:
        """Read the range that was asked for.

        Args:
            take: gets frames, and their bytes on the wire.

        Returns:
            The LSN up to which every transaction was handed over whole, and why the stream must take over there;
            empty if there is more to read in ranges.

        Raises:
            SourceLost: the connection ended, the publisher refused the range, or another reader has moved the slot.
                The data handed over may end inside a transaction, and only another epoch forgets that.
        """
        last = b""
        n_messages = size_bytes = 0

        async def taken(frames: list[bytes], n_bytes: int) -> None:
            nonlocal last, n_messages, size_bytes
            last = frames[-1]
            n_messages += len(frames)
            size_bytes += n_bytes
            await take(frames, n_bytes)
            failpoints.probe(failpoints.RANGE_PART)

        try:
            has_stream = await self.transport.answer(taken)
            position = self._position = await self._look()
        except CopyFailed as failure:
            raise _lost(failure) from failure
        except QueryFailed as failure:
            if (failure.sqlstate or "").startswith(_GOING):
                raise _lost(failure) from failure
            raise self.refused(failure) from failure
        self.is_unfinished = False
        self._front.look(position)
        failpoints.probe(failpoints.RANGE_READ)
        if has_stream:
            return self._front.end_inside(self.asked, catch_up.end_lsn_of(last) if last else None)
        self.n_read += 1
        return self._front.end_of(self.asked, position, size_bytes // max(n_messages, 1))

    async def leave(self) -> None:
        """Drop the copy, after which the connection is ready for the stream.

        Raises:
            SourceLost: the connection ended, or the publisher refused.
        """
        try:
            if self._has_copy:
                await self._execute(f"SELECT pg_catalog.pg_drop_replication_slot({literal(self._copy)})")
            await self._execute("RESET work_mem")
        except QueryFailed as failure:
            raise self.refused(failure) from failure

    async def cancel(self) -> None:
        """Cancel the query under way, because the publisher would decode to its end."""
        if self.is_unfinished and not self._connection.closed:
            with contextlib.suppress(psycopg.Error, OSError):
                await self._connection.cancel_safe(timeout=_CANCEL_S)

    def refused(self, failure: Exception) -> SourceLost:
        """Return the error of a refused query, and note it."""
        self.refusal = f"the publisher refused a range: {failure}"
        return SourceLost(f"a range of the slot's WAL was refused: {failure}; the stream follows.")

    async def _look(self) -> RangePosition:
        rows = await self._execute(catch_up.position_sql(self._copy, self._plan.slot))
        if not rows:
            raise SourceLost("the temporary copy of the slot is gone.")
        ((copy_lsn, restart_lsn, slot_lsn, flush_lsn, unix_us),) = rows
        if copy_lsn is None or restart_lsn is None:
            raise SourceLost("the temporary copy of the slot was invalidated by the publisher.")
        position = RangePosition(
            copy_lsn=copy_lsn,
            restart_lsn=restart_lsn,
            slot_lsn=slot_lsn,
            flush_lsn=flush_lsn,
            clock_us=unix_us - POSTGRES_EPOCH_US,
        )
        if not self._front.slot_lsn and position.slot_lsn:
            self._front.slot_lsn = position.slot_lsn
        return position

    async def _execute(self, query: str) -> list[tuple[Any, ...]]:
        """Run SQL as one simple query, all that a walsender takes; raise QueryFailed if it is refused."""
        try:
            cursor = await self._connection.execute(query.encode())
            return await cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            text = error.diag.message_primary or str(error)
            if self._connection.closed or self._connection.broken or (error.sqlstate or "08").startswith(_GOING):
                raise SourceLost(f"the publisher ended the connection: {' '.join(text.split())}.") from error
            raise QueryFailed(text, error.sqlstate) from error


def _lost(failure: CopyFailed | QueryFailed) -> SourceLost:
    return SourceLost(f"a range of the slot's WAL was not read to its end: {str(failure) or 'connection lost'}.")

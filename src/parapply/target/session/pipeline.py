"""One target connection in libpq's pipeline mode, driven by the event loop.

Knows how to send many statements in one go and take their results; knows nothing of batches. The cursor API of psycopg
costs ten times the CPU of this path per statement (DEPENDENCIES: 18 us against 2 to 3), so the raw `pq` layer is used.
(libpq manual, "Pipeline Mode".)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from typing import TYPE_CHECKING, Final, Protocol

import psycopg
from psycopg import pq

from parapply.errors import StatementFailed, TargetLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Bounds of one flight: statements and bytes sent before their results are taken. Larger flights make libpq move its
#: buffers quadratically and let both sides block on full sockets. A statement of more bytes is a flight of its own, and
#: a thread sends it.
FLIGHT_STATEMENTS = 512
FLIGHT_BYTES = 8 * 1024 * 1024
#: Statements that stay prepared in one session. Each takes some 26 kB of the server's memory: two for each of ten
#: thousand tables would be half a gigabyte for each worker. Others are prepared for each execution: 38 us, and not 13.
NAMED_STATEMENTS = 4096

#: As the row count that a statement must report: it is not to be checked, code on the target may change it.
ANY_COUNT: Final = -1

_OK = (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK)


def _nothing() -> None:
    """Stand in where nobody listens."""


class Prepared(Protocol):
    """A statement that is prepared on first use, under a name that stands for its text; see `NAMED_STATEMENTS`."""

    @property
    def name(self) -> bytes: ...  # noqa: D102
    @property
    def text(self) -> bytes: ...  # noqa: D102


class Statement:
    """One execution: a prepared statement and its parameters, all text or all binary."""

    __slots__ = ("is_binary", "parameters", "prepared")

    def __init__(self, prepared: Prepared, parameters: Sequence[bytes | None], *, is_binary: bool = False) -> None:
        """Keep what to execute; parameters are not copied."""
        self.prepared = prepared
        self.parameters = parameters
        self.is_binary = is_binary


class StatementResult:
    """What one statement did."""

    __slots__ = ("rows", "tag")

    def __init__(self, rows: int, tag: bytes) -> None:
        """Keep the number of rows affected or returned, and the command tag."""
        self.rows = rows
        self.tag = tag


class Pipeline:
    """Sends statements and waits for their results; one user at a time."""

    def __init__(self, connection: psycopg.AsyncConnection[object]) -> None:
        """Take over a connection that is idle and set up; it must not be used otherwise afterwards."""
        self._connection = connection
        self._pg = connection.pgconn
        self._loop = asyncio.get_running_loop()
        self._fd = self._pg.socket
        self._names: set[bytes] = set()
        self._waiter: asyncio.Future[None] | None = None
        self._lost: TargetLost | None = None
        #: Done as soon as the connection is unusable, also while nothing runs on it; the result says why.
        self.lost: asyncio.Future[TargetLost] = self._loop.create_future()
        self._is_writing = False
        # Held by a thread while it uses the connection.
        self._in_thread = threading.Lock()
        self.backend_pid = self._pg.backend_pid
        self._pg.nonblocking = 1
        self._pg.enter_pipeline_mode()
        # The reader stays registered: a connection that dies while idle is noticed at once.
        self._loop.add_reader(self._fd, self._readable)

    @property
    def is_lost(self) -> bool:
        """Tell whether the connection is unusable."""
        return self._lost is not None

    async def run(
        self, statements: Sequence[Statement], *, on_sent: Callable[[], None] = _nothing
    ) -> list[StatementResult]:
        """Execute statements in order and return one outcome each.

        Args:
            statements: to execute.
            on_sent: called after each flight has left, before its results are read; a failpoint's place.

        Raises:
            StatementFailed: one failed; those after it were not executed. The transaction must be rolled back.
            TargetLost: the connection ended; what was sent may have been executed, or not.
        """
        outcomes: list[StatementResult] = []
        start = 0
        while start < len(statements):
            start = await self._flight(statements, start, outcomes, on_sent)
        return outcomes

    async def fetch(self, statement: Statement) -> list[tuple[bytes | None, ...]]:
        """Execute one statement and return its rows, values in text format.

        Raises:
            StatementFailed, TargetLost: as `run`.
        """
        results: list[pq.abc.PGresult] = []
        await self._flight([statement], 0, [], _nothing, results)
        result = results[-1]
        return [
            tuple([result.get_value(row, column) for column in range(result.nfields)]) for row in range(result.ntuples)
        ]

    async def _flight(
        self,
        statements: Sequence[Statement],
        start: int,
        outcomes: list[StatementResult],
        on_sent: Callable[[], None],
        results: list[pq.abc.PGresult] | None = None,
    ) -> int:
        if self._lost is not None:
            raise self._lost
        pg, names = self._pg, self._names
        expected: list[bytes | None] = []
        size = 0
        end = start
        try:
            while end < len(statements) and end - start < FLIGHT_STATEMENTS and size < FLIGHT_BYTES:
                statement = statements[end]
                size_bytes = sum([len(value) for value in statement.parameters if value is not None])
                if size_bytes > FLIGHT_BYTES and end > start:
                    break
                name = statement.prepared.name
                if name not in names:
                    if len(names) >= NAMED_STATEMENTS:
                        name = b""
                    pg.send_prepare(name, statement.prepared.text)
                    if name:  # the unnamed statement is another one each time
                        names.add(name)
                    expected.append(name)
                expected.append(None)
                end += 1
                size += size_bytes
                if size_bytes > FLIGHT_BYTES:
                    await self._send_large(name, statement)
                else:
                    _send(pg, name, statement)
            pg.pipeline_sync()
        except psycopg.Error as error:
            raise self._lose(error) from error
        self._flush()
        on_sent()
        await self._results(expected, start, outcomes, results)
        return end

    async def _send_large(self, name: bytes, statement: Statement) -> None:
        """Send a statement by a thread, which waits for the socket without the interpreter lock.

        libpq moves all that is left in its buffer each time the socket takes a part without blocking, so the time would
        grow with the square of the size, on the event loop's thread. Everything sent before has been answered: the
        server does nothing but read.

        Raises:
            psycopg.Error: the connection is of no use any more.
        """
        # The prepare is all there is to send, and switching to blocking wants it gone.
        while self._pg.flush():
            await self._writable()
        # The thread alone uses the connection now.
        self._loop.remove_writer(self._fd)
        self._is_writing = False
        self._loop.remove_reader(self._fd)
        sending = self._loop.run_in_executor(None, self._send_blocking, name, statement)
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            # The connection must not be closed under the thread, which ends at once when the socket does.
            if self._lost is None:
                self._shut_down()
            while not sending.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({sending})
            sending.exception()  # retrieved, or asyncio reports it
            self._lose(RuntimeError("given up while a statement was sent"))
            raise
        if self._lost is not None:
            raise self._lost
        self._loop.add_reader(self._fd, self._readable)

    def _send_blocking(self, name: bytes, statement: Statement) -> None:
        with self._in_thread:
            self._pg.nonblocking = 0
            _send(self._pg, name, statement)
            self._pg.nonblocking = 1

    async def _writable(self) -> None:
        writable = self._loop.create_future()
        self._loop.add_writer(self._fd, writable.set_result, None)
        try:
            await writable
        finally:
            self._loop.remove_writer(self._fd)

    def _shut_down(self) -> None:
        with socket.socket(fileno=os.dup(self._fd)) as view, contextlib.suppress(OSError):
            view.shutdown(socket.SHUT_RDWR)

    async def _results(
        self,
        expected: list[bytes | None],
        start: int,
        outcomes: list[StatementResult],
        results: list[pq.abc.PGresult] | None,
    ) -> None:
        """Take one result per expected entry and the sync; a failure is raised after the sync, when all is read."""
        failure: StatementFailed | None = None
        index = start
        for prepared_name in expected:
            result = await self._next_result()
            if result.status in _OK:
                if prepared_name is None:
                    outcomes.append(StatementResult(_rows(result), result.command_status or b""))
                    if results is not None:
                        results.append(result)
            elif failure is None:
                failure = _failure(result, index)
            if prepared_name is None:
                index += 1
            elif failure is not None:
                self._names.discard(prepared_name)
        await self._sync()
        if failure is not None:
            if _is_connection_error(failure.sqlstate):
                raise self._lose(failure) from failure
            raise failure

    async def _next_result(self) -> pq.abc.PGresult:
        result = await self._get()
        if result is None:
            # libpq tells once that the connection broke, in the result of whatever ran, and has nothing for the rest.
            raise self._lose(RuntimeError(self._pg.get_error_message()))
        # In pipeline mode a null pointer follows the results of each statement.
        while await self._get() is not None:
            pass
        return result

    async def _sync(self) -> None:
        result = await self._get()
        if result is None:
            raise self._lose(RuntimeError(self._pg.get_error_message()))
        if result.status != pq.ExecStatus.PIPELINE_SYNC:
            raise self._lose(RuntimeError("the pipeline lost its synchronisation"))

    async def _get(self) -> pq.abc.PGresult | None:
        while self._pg.is_busy():
            if self._lost is not None:
                raise self._lost
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        try:
            return self._pg.get_result()
        except psycopg.Error as error:
            raise self._lose(error) from error

    def _flush(self) -> None:
        try:
            blocked = self._pg.flush()
        except psycopg.Error as error:
            self._lose(error)
            return
        if blocked and not self._is_writing:
            self._is_writing = True
            self._loop.add_writer(self._fd, self._flush)
        elif not blocked and self._is_writing:
            self._is_writing = False
            self._loop.remove_writer(self._fd)

    def _readable(self) -> None:
        try:
            self._pg.consume_input()
        except psycopg.Error as error:
            self._lose(error)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _lose(self, error: Exception) -> TargetLost:
        if self._lost is None:
            self._lost = TargetLost(
                f"the connection to the target ended: {str(error).strip() or type(error).__name__}."
            )
            self.lost.set_result(self._lost)
            self._loop.remove_reader(self._fd)
            if self._is_writing:
                self._loop.remove_writer(self._fd)
                self._is_writing = False
            self._wake()
        return self._lost

    def forget_statements(self) -> None:
        """Prepare every statement anew from now on, under the same names, after the server forgot them too."""
        self._names.clear()

    def cancel(self) -> None:
        """Ask the server to stop the running statement; it then fails with SQLSTATE 57014."""
        if self._lost is None:
            self._connection.cancel()

    def close(self) -> None:
        """Close the connection; the server rolls back what was not committed."""
        if self._lost is None:
            self._lose(RuntimeError("closed"))
        if self._in_thread.locked():
            self._shut_down()
        with self._in_thread:
            self._pg.finish()


def _send(pg: pq.abc.PGconn, name: bytes, statement: Statement) -> None:
    parameters = statement.parameters
    formats = [1] * len(parameters) if statement.is_binary else None
    pg.send_query_prepared(name, parameters, formats)


def _rows(result: pq.abc.PGresult) -> int:
    if result.status == pq.ExecStatus.TUPLES_OK:
        return result.ntuples
    return result.command_tuples or 0


def _failure(result: pq.abc.PGresult, index: int) -> StatementFailed:
    field = result.error_field

    def text(code: pq.DiagnosticField) -> str:
        value = field(code)
        return value.decode("utf-8", "replace") if value else ""

    return StatementFailed(
        text(pq.DiagnosticField.MESSAGE_PRIMARY) or "the statement was not executed",
        sqlstate=text(pq.DiagnosticField.SQLSTATE),
        schema=text(pq.DiagnosticField.SCHEMA_NAME),
        table=text(pq.DiagnosticField.TABLE_NAME),
        constraint=text(pq.DiagnosticField.CONSTRAINT_NAME),
        statement=index,
    )


def _is_connection_error(sqlstate: str) -> bool:
    """Tell errors of the session or the machine from errors of the data (a connection error is never a conflict).

    08 connection, 57P shutdown and crash, 25P03/25P04 session timeouts, 53 out of disk, memory or connections, 58 I/O,
    25006 read only: the server was demoted under us.
    """
    return sqlstate[:2] in ("08", "53", "58") or sqlstate[:3] == "57P" or sqlstate in ("25P03", "25P04", "25006")

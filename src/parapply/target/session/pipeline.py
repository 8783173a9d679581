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
from typing import TYPE_CHECKING, Any, Final, Protocol

import psycopg
from psycopg import pq
from psycopg.adapt import Transformer

from parapply.errors import LocksExhausted, StatementFailed, TargetLost
from parapply.target.session.settings import LOCKS_HINT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

#: Bounds of one flight: statements and bytes sent before their results are taken. Larger flights make libpq move its
#: buffers quadratically and let both sides block on full sockets. A statement of more bytes is a separate flight, and a
#: thread sends it.
FLIGHT_STATEMENTS = 512
FLIGHT_BYTES = 8 * 1024 * 1024
#: Statements that stay prepared in one session. Each takes some 26 kB of the server's memory: two for each of ten
#: thousand tables would be half a gigabyte for each worker. Others are sent whole each time: 38 us, and not 13. So is
#: each at its first use: to prepare it costs 40 us more than that, which a statement used once would not bring back.
NAMED_STATEMENTS = 4096
#: Bytes of a text from which it is prepared at its first use, because to parse and plan it again costs more than all
#: that: 2.5 ms for 32 kB, an insert of 200 columns.
LONG_TEXT_BYTES: Final = 16 * 1024
#: Names that are remembered for that.
USED_ONCE: Final = 4 * NAMED_STATEMENTS

#: SQLSTATE and source file of a server's error that its table of locks is full; the message may be in any language.
_NO_LOCK: Final = ("53200", "lock.c")

#: Severities after which a server closes the connection.
_ENDING: Final = ("FATAL", "PANIC")
#: See `_is_of_session`.
_OF_SESSION: Final = frozenset({"25P03", "25P04", "53000", "53100", "53200", "53300", "58030", "25006"})

#: Row count of a statement whose count is not to be checked, because code on the target may change it.
ANY_COUNT: Final = -1

_OK = (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK)


def _is_near(fd: int) -> bool:
    with socket.socket(fileno=os.dup(fd)) as view:
        if view.family == socket.AF_UNIX:
            return True
        with contextlib.suppress(OSError):
            return bool(view.getpeername()[0] == view.getsockname()[0])
        return False


def do_nothing() -> None:
    """Do nothing, for callers that need no call."""


class Prepared(Protocol):
    """A statement that is prepared on its second use, under a name that stands for its text; see `NAMED_STATEMENTS`."""

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
    """The result of one statement."""

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
        #: Names of statements that were sent whole, once; see `NAMED_STATEMENTS`.
        self._used_once: set[bytes] = set()
        self._waiter: asyncio.Future[None] | None = None
        self._lost: TargetLost | None = None
        #: Done as soon as the connection is unusable, also while nothing runs on it; the result says why.
        self.lost: asyncio.Future[TargetLost] = self._loop.create_future()
        self._is_writing = False
        # Held by a thread while it uses the connection.
        self._in_thread = threading.Lock()
        self.backend_pid = self._pg.backend_pid
        #: True if the server is reached by this machine's own address. Read now, as libpq closes a socket that broke.
        self.is_near = _is_near(self._fd)
        #: When all results but the end had come, by the event loop's clock; of the last run that asked for it.
        self.before_end_s = 0.0
        self._pg.nonblocking = 1
        self._pg.enter_pipeline_mode()
        # The reader stays registered: a connection that dies while idle is noticed at once.
        self._loop.add_reader(self._fd, self._readable)

    @property
    def is_lost(self) -> bool:
        """Return whether the connection is unusable."""
        return self._lost is not None

    @property
    def is_outside_transaction(self) -> bool:
        """Return whether the server said after the last run that no transaction is open."""
        return self._pg.transaction_status == pq.TransactionStatus.IDLE

    async def run(
        self,
        statements: Sequence[Statement],
        *,
        on_sent: Callable[[], None] = do_nothing,
        is_end_timed: bool = False,
    ) -> list[StatementResult]:
        """Execute statements in order and return one outcome each.

        Outside of a transaction the statements of one flight are one, which commits at its end. (PostgreSQL manual,
        "Pipelining".)

        Args:
            statements: to execute.
            on_sent: called after each flight has left, before its results are read; a failpoint's place.
            is_end_timed: have the server send all results before the end, which costs both a system call;
                `before_end_s` says when they came.

        Raises:
            StatementFailed: one failed; those after it were not executed. The transaction must be rolled back. Its
                index is the number of statements where the end has failed.
            TargetLost: the connection ended; what was sent may have been executed, or not.
        """
        outcomes: list[StatementResult] = []
        start = 0
        while start < len(statements):
            start = await self._flight(statements, start, outcomes, on_sent, is_end_timed=is_end_timed)
        return outcomes

    async def run_ahead(
        self, flights: Iterable[Sequence[Statement]], *, on_sent: Callable[[], None] = do_nothing
    ) -> tuple[list[StatementResult], StatementFailed | None]:
        """Execute flights of statements in order, each sent before the results of the one before are taken.

        Nothing runs after a failure, in no later flight either: the server skips all up to the one synchronisation,
        which is sent at the end.

        Args:
            flights: within the bounds of one flight each; the next one is asked for when the server has work to do.
            on_sent: as of `run`.

        Returns:
            The results of what was executed, and the failure, if there was one; its index counts over all flights.
        """
        if self._lost is not None:
            raise self._lost
        outcomes: list[StatementResult] = []
        failure: StatementFailed | None = None
        index = 0
        ahead: list[bytes | None] = []
        is_empty = True
        try:
            for flight in flights:
                is_empty = False
                expected: list[bytes | None] = []
                for statement in flight:
                    _send(self._pg, self._prepare(statement, expected), statement)
                self._pg.send_flush_request()
                self._flush()
                on_sent()
                index, failure = await self._take(ahead, index, outcomes, failure)
                ahead = expected
                if failure is not None:
                    break
            if is_empty:
                return outcomes, None
            self._pg.pipeline_sync()
        except psycopg.Error as error:
            raise self._lose(error) from error
        self._flush()
        index, failure = await self._take(ahead, index, outcomes, failure)
        failure = await self._sync(index) or failure
        self._check_connection(failure)
        return outcomes, failure

    async def fetch(self, statement: Statement) -> list[tuple[bytes | None, ...]]:
        """Execute one statement and return its rows, values in text format.

        Raises:
            StatementFailed, TargetLost: as `run`.
        """
        result = await self._result(statement)
        return [
            tuple([result.get_value(row, column) for column in range(result.nfields)]) for row in range(result.ntuples)
        ]

    async def load(self, statement: Statement) -> list[tuple[Any, ...]]:
        """Execute one statement and return its rows as Python objects, as a cursor of psycopg would.

        Raises:
            StatementFailed, TargetLost: as `run`.
        """
        result = await self._result(statement)
        loader = Transformer(self._connection)
        loader.set_pgresult(result)
        return loader.load_rows(0, result.ntuples, tuple)

    async def _result(self, statement: Statement) -> pq.abc.PGresult:
        results: list[pq.abc.PGresult] = []
        await self._flight([statement], 0, [], do_nothing, results)
        return results[-1]

    async def _flight(  # noqa: PLR0913  one for each thing that differs
        self,
        statements: Sequence[Statement],
        start: int,
        outcomes: list[StatementResult],
        on_sent: Callable[[], None],
        results: list[pq.abc.PGresult] | None = None,
        *,
        is_end_timed: bool = False,
    ) -> int:
        if self._lost is not None:
            raise self._lost
        pg = self._pg
        expected: list[bytes | None] = []
        size = 0
        end = start
        try:
            while end < len(statements) and end - start < FLIGHT_STATEMENTS and size < FLIGHT_BYTES:
                statement = statements[end]
                size_bytes = _size_bytes(statement)
                if size_bytes > FLIGHT_BYTES and end > start:
                    break
                name = self._prepare(statement, expected)
                end += 1
                size += size_bytes
                if size_bytes > FLIGHT_BYTES:
                    await self._send_large(name, statement)
                else:
                    _send(pg, name, statement)
            if is_end_timed:
                pg.send_flush_request()
            pg.pipeline_sync()
        except psycopg.Error as error:
            raise self._lose(error) from error
        self._flush()
        on_sent()
        index, failure = await self._take(expected, start, outcomes, None, results)
        if is_end_timed:
            self.before_end_s = self._loop.time()
        # A failure is raised after the end, when all is read.
        failure = await self._sync(index) or failure
        self._check_connection(failure)
        if failure is not None:
            raise failure
        return end

    def _prepare(self, statement: Statement, expected: list[bytes | None]) -> bytes:
        """Return the name under which a statement is to be executed, b"" to send it whole; note what comes of it.

        Raises:
            psycopg.Error: the connection is no longer usable.
        """
        name, names = statement.prepared.name, self._names
        if name not in names:
            text = statement.prepared.text
            if self._is_worth_a_name(name, text):
                self._pg.send_prepare(name, text)
                names.add(name)
                expected.append(name)
            else:
                name = b""
        expected.append(None)
        return name

    def _is_worth_a_name(self, name: bytes, text: bytes) -> bool:
        """Return whether a statement that is not prepared should be: at its second use or long, while there is room."""
        if not name or len(self._names) >= NAMED_STATEMENTS:
            return False
        if len(text) >= LONG_TEXT_BYTES:
            return True
        if name in self._used_once:
            self._used_once.discard(name)
            return True
        if len(self._used_once) >= USED_ONCE:
            self._used_once.clear()
        self._used_once.add(name)
        return False

    async def _send_large(self, name: bytes, statement: Statement) -> None:
        """Send a statement by a thread, which waits for the socket without the interpreter lock.

        libpq moves all that is left in its buffer each time the socket takes a part without blocking, so the time would
        grow with the square of the size, on the event loop's thread. Everything sent before has been answered: the
        server does nothing but read.

        Raises:
            psycopg.Error: the connection is no longer usable.
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
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._fd)) as view:
            view.shutdown(socket.SHUT_RDWR)

    def _check_connection(self, failure: StatementFailed | None) -> None:
        """Raise TargetLost if a failure is one of the connection."""
        if failure is not None and (failure.ends_session or self._pg.status != pq.ConnStatus.OK):
            raise self._lose(failure) from failure

    async def _take(
        self,
        expected: Sequence[bytes | None],
        index: int,
        outcomes: list[StatementResult],
        failure: StatementFailed | None,
        results: list[pq.abc.PGresult] | None = None,
    ) -> tuple[int, StatementFailed | None]:
        """Take one result per expected entry; return the index of the next statement, and the first failure."""
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
        return index, failure

    async def _next_result(self) -> pq.abc.PGresult:
        # Most results have come with the one before: a coroutine for each would take longer than to take it.
        if self._pg.is_busy():
            await self._arrival()
        result = self._libpq_result()
        if result is None:
            # libpq reports a broken connection once, in the result of whatever ran, and has nothing for the rest.
            raise self._lose(RuntimeError(self._pg.get_error_message()))
        while True:
            if self._pg.is_busy():
                await self._arrival()
            # In pipeline mode a null pointer follows the results of each statement.
            if self._libpq_result() is None:
                return result

    async def _sync(self, index: int) -> StatementFailed | None:
        """Take the answer of the end; return its failure, which has the index, if a commit there has failed."""
        failure: StatementFailed | None = None
        has_none = False
        while True:
            if self._pg.is_busy():
                await self._arrival()
            result = self._libpq_result()
            if result is None and failure is not None and not has_none:
                # A null pointer follows the failure.
                has_none = True
            elif result is None:
                raise self._lose(RuntimeError(self._pg.get_error_message()))
            elif result.status == pq.ExecStatus.PIPELINE_SYNC:
                return failure
            elif result.status == pq.ExecStatus.FATAL_ERROR and failure is None:
                failure = _failure(result, index)
            else:
                raise self._lose(RuntimeError("the pipeline lost its synchronisation"))

    async def _arrival(self) -> None:
        """Wait until the next result has come whole, or is known never to come."""
        while self._pg.is_busy():
            if self._lost is not None:
                raise self._lost
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _libpq_result(self) -> pq.abc.PGresult | None:
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
            text = str(error).strip() or type(error).__name__
            if isinstance(error, StatementFailed) and error.is_for_locks:
                self._lost = LocksExhausted(f"the target has no room: {text}.", hint=LOCKS_HINT)
            else:
                self._lost = TargetLost(f"the connection to the target ended: {text}.")
            self.lost.set_result(self._lost)
            self._loop.remove_reader(self._fd)
            if self._is_writing:
                self._loop.remove_writer(self._fd)
                self._is_writing = False
            self._wake()
        return self._lost

    def forget_statements(self) -> None:
        """Prepare every statement again from now on, under the same names, after the server has also forgotten them."""
        self._names.clear()
        self._used_once.clear()

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


def is_one_flight(statements: Sequence[Statement]) -> bool:
    """Return whether `Pipeline.run` sends statements in one flight."""
    return len(statements) <= FLIGHT_STATEMENTS and sum(map(_size_bytes, statements)) < FLIGHT_BYTES


def _size_bytes(statement: Statement) -> int:
    return sum(map(len, filter(None, statement.parameters)))


def _send(pg: pq.abc.PGconn, name: bytes, statement: Statement) -> None:
    parameters = statement.parameters
    formats = [1] * len(parameters) if statement.is_binary else None
    if name:
        pg.send_query_prepared(name, parameters, formats)
    else:
        pg.send_query_params(statement.prepared.text, parameters, param_formats=formats)


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
        ends_session=text(pq.DiagnosticField.SEVERITY_NONLOCALIZED) in _ENDING
        or _is_of_session(text(pq.DiagnosticField.SQLSTATE)),
        is_for_locks=(text(pq.DiagnosticField.SQLSTATE), text(pq.DiagnosticField.SOURCE_FILE)) == _NO_LOCK,
    )


def _is_of_session(sqlstate: str) -> bool:
    """Return whether an error is of the session or the machine, not of the data (then it is never a conflict).

    57P shutdown and crash, 25P03/25P04 session timeouts, 53000/53100/53200/53300 out of file descriptors, disk, memory
    or connections, 58030 input and output, 25006 read only: the server was demoted under us. Others of the classes 08,
    53 and 58 come from code on the target while the session goes on: a trigger, a foreign table whose server is down,
    temp_file_limit.
    """
    return sqlstate[:3] == "57P" or sqlstate in _OF_SESSION

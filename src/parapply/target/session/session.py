"""A worker's session on the target: one target transaction after another, each with its record.

In: a pipeline and commands. Out: nothing, or why it failed. The record row is the first thing in every transaction and
its COMMIT is believed only by its tag (traps T-11, T-12, T-14). Must never decide when to commit: that is the worker
pool's.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psycopg
from psycopg import sql

from parapply import failpoints
from parapply.errors import StatementFailed, TargetLost
from parapply.model import format_lsn
from parapply.target.session import lease, origins, prepared, settings
from parapply.target.session.origins import OriginProblem
from parapply.target.session.pipeline import (
    ANY_COUNT,
    Pipeline,
    Statement,
    StatementResult,
    do_nothing,
    is_one_flight,
)
from parapply.target.sql.statements import Sql, counted
from parapply.target.state import slots as state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from parapply.login import Login
    from parapply.target.sql.commands import Command


class Record(NamedTuple):
    """The record of a target transaction in the state: end LSNs of the source transactions it holds."""

    first_lsn: int
    end_lsn: int
    commit_time_us: int  # of the last one, as on the wire
    n_transactions: int
    low_lsn: int  # everything up to here is committed, or is with it: the watermark for readers of the state
    members: tuple[int, ...] = ()  # the end LSNs one by one; (): all from first to end


class Proof(NamedTuple):
    """The row that a transaction to be prepared writes instead: visible, it proves that it was committed."""

    gid: str
    record: Record  # of the PREPARE


class SessionOptions(NamedTuple):
    """Options that all worker sessions of one leader share."""

    login: Login
    schema: str
    slot_id: int
    leader_pid: int  # server process that holds the lease
    role: str
    synchronous_commit: str
    application_name: str
    origin: str = ""  # replication origin to write under; "": none
    origin_pid: int = 0  # server process of the session that has it, and shares it; 0: none has it
    may_stamp: bool = False  # as of `TargetSettings`


def _plain(name: bytes, text: bytes) -> Statement:
    return Statement(Sql(name=name, text=text, n_parameters=0, is_set=False, positions=()), ())


_BEGIN: Final = _plain(b"begin", b"BEGIN")
_COMMIT: Final = _plain(b"to commit", b"COMMIT")
_ROLLBACK: Final = _plain(b"rollback", b"ROLLBACK")
_SAVEPOINT: Final = _plain(b"savepoint", b"SAVEPOINT piece")
_RELEASE: Final = _plain(b"release", b"RELEASE SAVEPOINT piece")
_ROLLBACK_TO: Final = _plain(b"rollback_to", b"ROLLBACK TO SAVEPOINT piece")
_FORGET: Final = _plain(b"", b"DEALLOCATE ALL")

_STAMP: Final = Sql(
    name=b"stamp",
    text=f"SELECT {state.stamp_sql('$1', '$2')}".encode(),
    n_parameters=2,
    is_set=False,
    positions=(),
)

#: The record's key existed already: another session applied this, or an answer was lost. Only the state shows which.
_ALREADY_RECORDED = "23505"
_DIVISION_BY_ZERO = "22012"
_NO_SCHEMA = "3F000"

#: In the error of a session that got no connection.
CONNECTING: Final = "connecting a worker"
_NO_ORIGIN: Final = OriginProblem("no replication origin was asked for", "")

#: Statements of a transaction before the first of its commands.
_BEFORE: Final = 2
#: A flight of whole transactions ends with the one that has this statement: large enough that the server is never out
#: of work, small enough that it never waits for the first.
EACH_STATEMENTS: Final = 64

_int8 = struct.Struct(">q").pack


class WorkerSession:
    """One target connection. Used by one worker, one call at a time."""

    def __init__(
        self,
        connection: psycopg.AsyncConnection[tuple[object, ...]],
        options: SessionOptions,
        origin_problem: OriginProblem | None = _NO_ORIGIN,
    ) -> None:
        """Take over a connection whose settings are pinned and whose fence lock is held; see `connect`."""
        #: Reason why rows written here look as if a session of this server wrote them; None if they do not.
        self.origin_problem = origin_problem
        self._stamps = options.may_stamp and not origin_problem
        version = connection.info.server_version
        self._pinning = settings.pinning("worker", version, options.role, options.synchronous_commit).encode()
        self.pipeline = Pipeline(connection)
        #: True if the open transaction has the savepoint of its last piece.
        self._has_savepoint = False
        self._connection = connection
        #: By the name of the form without a check.
        self._counted: dict[bytes, Sql] = {}
        self._slot_id = str(options.slot_id).encode()
        schema = options.schema
        self._record = _sql(b"record", state.record_sql(schema, stamps=self._stamps), 7)
        #: The same in a flight that commits at its end. Tests cut a connection where a name ends as the one of COMMIT.
        self._record_to_commit = self._record._replace(name=b"record to commit")
        self._proof = _sql(b"proof", prepared.proof_sql(schema, stamps=self._stamps), 4 if self._stamps else 2)
        self._is_proved = _sql(b"is_proved", prepared.is_proved_sql(schema), 2)
        self._note = _sql(b"note", prepared.note_sql(schema), 2)
        self._is_noted = _sql(b"is_noted", prepared.is_noted_sql(schema), 2)
        self._forget = _sql(b"forget", prepared.forget_sql(schema), 2)

    @classmethod
    async def connect(cls, options: SessionOptions) -> WorkerSession:
        """Open a session: settings pinned, the fence's lock taken while this leader holds the lease.

        Raises:
            TargetLost: no connection, or this leader no longer holds the lease.
        """
        with settings.target_errors(CONNECTING):
            connection = await settings.open_session(options.login, options.application_name, kind="worker")
        try:
            await settings.pin_session(
                connection, kind="worker", role=options.role, synchronous_commit=options.synchronous_commit
            )
            await settings.check_direct(connection)
            await _take_lock(connection, options)
            if not options.origin:
                return cls(connection, options)
            problem = await origins.carry_origin(connection, options.origin, options.origin_pid)
            return cls(connection, options, problem)
        except BaseException:
            await connection.close()
            raise

    async def execute(
        self, record: Record | Proof, commands: Sequence[Command], *, on_sent: Callable[[], None] = do_nothing
    ) -> None:
        """Begin a transaction, record it (or write its proof), execute the commands and check their counts.

        Does not commit.

        Args:
            record: of the transaction, or its proof.
            commands: of it.
            on_sent: called after each flight has left.

        Raises:
            StatementFailed: a command failed or reported another number of rows; `statement` is its index, -1 for the
                record. The caller rolls back.
            TargetLost: the connection ended, or the record existed already: the state must be read again.
        """
        failpoints.probe(failpoints.BEFORE_STATE)
        statements = [_BEGIN, self._first(record), *commands]
        await self._run_checked(statements, commands, before=2, on_sent=on_sent)
        failpoints.probe(failpoints.DML_SENT)

    async def execute_ahead(
        self, record: Record, commands: Iterable[Command], *, on_sent: Callable[[], None] = do_nothing
    ) -> None:
        """Do what `execute` does, with commands that are asked for while the server executes earlier ones.

        Raises:
            StatementFailed, TargetLost: as `execute`.
        """
        failpoints.probe(failpoints.BEFORE_STATE)
        sent: list[Command] = []
        outcomes, failure = await self.pipeline.run_ahead(self._run_of(record, commands, sent), on_sent=on_sent)
        if failure is not None:
            failure.statement -= _BEFORE
            _refuse_recorded(failure)
            raise failure
        _check_counts(sent, outcomes[_BEFORE:])
        failpoints.probe(failpoints.DML_SENT)

    def _run_of(self, record: Record, commands: Iterable[Command], sent: list[Command]) -> Iterator[list[Statement]]:
        flight: list[Statement] = [_BEGIN, self._first(record)]
        for command in commands:
            sent.append(command)
            flight.append(command)
            if len(flight) >= EACH_STATEMENTS:
                yield flight
                flight = []
        if flight:
            yield flight

    async def execute_and_commit(
        self, record: Record, commands: Sequence[Command], *, is_commit_timed: bool = False
    ) -> float:
        """Do what `execute` and `commit` do in one flight; the server checks the counts before it commits.

        Spares a round trip, and the leader a look, for each transaction; only for sets whose counts are known, and when
        nothing needs to be waited for before the commit. Neither BEGIN nor COMMIT is sent, which each cost as much as a
        quarter of one row: the flight is the transaction, and commits at its end.

        Returns:
            When the server began to commit, by the event loop's clock; 0.0: not known, or not asked for.

        Raises:
            StatementFailed: as both. Nothing is open then.
            TargetLost: as both: whether it committed is in doubt.
        """
        if failpoints.armed:
            failpoints.probe(failpoints.BEFORE_STATE)
        statements = [self._first(record, commits=True), *[self._checked(command) for command in commands]]
        # A lock or a setting of the transaction needs one that is begun, and so do several flights.
        if any(command.expected == ANY_COUNT for command in commands) or not is_one_flight(statements):
            await self._commit_with([_BEGIN, self._first(record)], commands)
            return 0.0
        if not self.pipeline.is_outside_transaction:
            raise TargetLost("target: a transaction is open that should have ended; the state is read again")
        try:
            on_sent = _commit_sent if failpoints.armed else do_nothing
            await self._run(statements, before=1, on_sent=on_sent, is_end_timed=is_commit_timed)
        except StatementFailed as failure:
            raise _named(failure, commands) from failure
        if failpoints.armed:
            failpoints.probe(failpoints.COMMITTED)
        if not self.pipeline.is_outside_transaction:
            raise TargetLost("target: the server did not commit; the state is read again")
        return self.pipeline.before_end_s if is_commit_timed else 0.0

    async def execute_late_and_commit(self, commands: Sequence[Command]) -> None:
        """Do what `execute_late` and `commit` do in one flight, as `execute_and_commit` does.

        All that come later wait for this commit, so its round trips are what hot rows cost on a long network.

        Raises:
            StatementFailed, TargetLost: as `execute_and_commit`.
        """
        await self._commit_with([], commands)

    async def execute_each(
        self, transactions: Iterable[tuple[Record, Sequence[Command]]], *, on_sent: Callable[[], None] = do_nothing
    ) -> tuple[int, StatementFailed | None]:
        """Do what `execute_and_commit` does for one transaction after the other, without waiting between them.

        A transaction begins when the one before has committed, and not at all if that fails: the server executes
        nothing more then. The caller rolls back.

        Args:
            transactions: each with its record; asked for while the server executes earlier ones. The server must be
                able to check the row counts of their commands, and a flight must hold each of them.
            on_sent: called after each flight has left.

        Returns:
            Number of transactions that have committed, and the failure of the next one; its `statement` is the index
            in the commands of that transaction, -1 for its record or COMMIT.
        """
        failpoints.probe(failpoints.BEFORE_STATE)
        ends: list[int] = []  # of each transaction sent, the index of its COMMIT

        def sent() -> None:
            on_sent()
            _commit_sent()

        outcomes, failure = await self.pipeline.run_ahead(self._flights(transactions, ends), on_sent=sent)
        n_committed = bisect_left(ends, len(outcomes))
        failpoints.probe(failpoints.COMMITTED)
        if any(outcomes[at].tag != b"COMMIT" for at in ends[:n_committed]):
            raise TargetLost("target: the server rolled back instead of committing; the state is read again")
        if failure is None:
            return n_committed, None
        first = ends[n_committed - 1] + 1 if n_committed else 0
        at = failure.statement - first - _BEFORE
        if at == -1 and failure.sqlstate == _ALREADY_RECORDED:
            raise _recorded_already() from failure
        if failure.sqlstate == _DIVISION_BY_ZERO:
            # As in `_commit_with`.
            failure = StatementFailed("another number of rows than expected")
        failure.statement = at if at >= 0 and first + _BEFORE + at < ends[n_committed] else -1
        return n_committed, failure

    def _flights(
        self, transactions: Iterable[tuple[Record, Sequence[Command]]], ends: list[int]
    ) -> Iterator[list[Statement]]:
        flight: list[Statement] = []
        n_sent = 0
        for record, commands in transactions:
            flight += [_BEGIN, self._first(record), *map(self._checked, commands), _COMMIT]
            ends.append(n_sent + len(flight) - 1)
            if len(flight) >= EACH_STATEMENTS:
                n_sent += len(flight)
                yield flight
                flight = []
        if flight:
            yield flight

    async def _commit_with(self, first: Sequence[Statement], commands: Sequence[Command]) -> None:
        statements = [*first, *[self._checked(command) for command in commands], _COMMIT]
        try:
            on_sent = _commit_sent if failpoints.armed else do_nothing
            outcomes = await self._run(statements, before=len(first), on_sent=on_sent)
        except StatementFailed as failure:
            raise _named(failure, commands) from failure
        if failpoints.armed:
            failpoints.probe(failpoints.COMMITTED)
        if outcomes[-1].tag != b"COMMIT":
            raise StatementFailed("the server rolled back instead of committing")

    def _checked(self, command: Command) -> Statement:
        """Return a statement that fails unless it finds as many rows as its command must."""
        if command.expected == ANY_COUNT:
            return command
        prepared = self._counted.get(command.prepared.name)
        if prepared is None:
            prepared = self._counted[command.prepared.name] = counted(command.prepared)
        expected = _int8(command.expected) if command.is_binary else b"%d" % command.expected
        return Statement(prepared, [*command.parameters, expected], is_binary=command.is_binary)

    async def execute_late(self, commands: Sequence[Command]) -> None:
        """Execute more commands of the open transaction, and check their counts.

        Raises:
            StatementFailed, TargetLost: as `execute`.
        """
        await self._run_checked(commands, commands, before=0)

    async def begin(self) -> None:
        """Begin the transaction of a large source transaction, whose record comes last, once its end is known."""
        self._has_savepoint = False
        await self._run_surely([_BEGIN])

    async def piece(self, commands: Sequence[Command], *, counts_on_server: bool = False) -> None:
        """Execute one piece of a large transaction behind a savepoint, which the next piece releases.

        Args:
            commands: of the piece.
            counts_on_server: have the server check the counts, so that the first command that fails in any way is the
                one reported. A wrong count is then 22012, division by zero, which may also be the user's.

        Raises:
            StatementFailed: as `execute`; the caller goes back with `undo_piece`.
            TargetLost: the connection ended, or there is no place to go back to.
        """
        before = self._marked()
        try:
            if counts_on_server:
                await self._run_counted(before, commands)
            else:
                await self._run_checked([*before, *commands], commands, before=len(before))
        except StatementFailed as failure:
            if failure.statement < 0:
                # The latest savepoint, if any, is the one of the piece before, which would be lost silently.
                reason = f"target: a savepoint failed ({failure.sqlstate}); all of it is sent again"
                raise TargetLost(reason) from failure
            raise

    def _marked(self) -> list[Statement]:
        """Return the statements that mark the place where a piece begins."""
        before = [_RELEASE, _SAVEPOINT] if self._has_savepoint else [_SAVEPOINT]
        self._has_savepoint = True
        return before

    async def _run_counted(self, before: Sequence[Statement], commands: Sequence[Command]) -> None:
        for first, end in _up_to_rules(commands):
            part = commands[first:end]
            checked = [one if _is_ruled(one) else self._checked(one) for one in part]
            try:
                outcomes = await self._run([*before, *checked], before=len(before))
            except StatementFailed as failure:
                failure.statement += first if failure.statement >= 0 else 0
                raise
            if part and _is_ruled(part[-1]):
                _check_counts(part[-1:], outcomes[-1:], end - 1)
            before = []

    async def undo_piece(self) -> None:
        """Go back to before the last piece, after it failed."""
        await self._run_surely([_ROLLBACK_TO, _RELEASE])
        self._has_savepoint = False

    async def savepoint(self, depth: int) -> None:
        """Mark the place where a subtransaction begins, inside `depth` others.

        Raises:
            StatementFailed, TargetLost: as `execute`.
        """
        before = [_RELEASE] if self._has_savepoint else []
        self._has_savepoint = False
        await self.pipeline.run([*before, _plain(b"sub%d" % depth, b"SAVEPOINT sub%d" % depth)])

    async def rollback_to(self, depth: int) -> None:
        """Undo everything since the savepoint of that depth, and forget it.

        Raises:
            StatementFailed, TargetLost: as `execute`.
        """
        self._has_savepoint = False
        texts = (b"ROLLBACK TO SAVEPOINT sub%d", b"RELEASE SAVEPOINT sub%d")
        await self.pipeline.run([_plain(b"", text % depth) for text in texts])

    async def begin_recorded(self, record: Record | Proof) -> None:
        """Begin a transaction with its record, whose changes come in pieces.

        Raises:
            StatementFailed, TargetLost: as `execute`.
        """
        self._has_savepoint = False
        failpoints.probe(failpoints.BEFORE_STATE)
        await self._run_checked([_BEGIN, self._first(record)], (), before=2)

    async def fetch(self, statement: Statement) -> list[tuple[bytes | None, ...]]:
        """Execute one statement of the open transaction and return its rows, values in text format.

        Raises:
            StatementFailed, TargetLost: as `execute`; its index is -1.
        """
        try:
            return await self.pipeline.fetch(statement)
        except StatementFailed as failure:
            failure.statement = -1
            raise

    async def ask(self, text: str, parameters: Sequence[bytes]) -> list[tuple[Any, ...]]:
        """Execute a query in the open transaction and return its rows as Python objects.

        Raises:
            StatementFailed, TargetLost: as `execute`; its index is -1.
        """
        query = Sql(name=b"", text=text.encode(), n_parameters=len(parameters), is_set=False, positions=())
        try:
            return await self.pipeline.load(Statement(query, parameters))
        except StatementFailed as failure:
            failure.statement = -1
            raise

    async def run_command(self, values: Mapping[str, str], role: str, schema: str, command: str) -> bytes:
        """Run one command in the open transaction behind a savepoint, under settings and a role; return its tag.

        A server takes one command only in this form. Whatever it has left of settings and role is taken back, so
        its COMMIT is as durable as others, unless a deferred trigger of rows that its functions wrote sets them again.

        Args:
            values: of settings, for the command.
            role: that runs it; empty: the session's own.
            schema: that names without one must go to; empty: any.
            command: one.

        Raises:
            StatementFailed: `statement` is 0 where it was the command that failed; the caller goes back with
                `undo_piece`.
        """
        await self.piece([])
        calls = ", ".join([f"pg_catalog.set_config(${2 * n + 1}, ${2 * n + 2}, true)" for n in range(len(values))])
        texts = [text.encode() for pair in values.items() for text in pair]
        setting = Sql(name=b"", text=f"SELECT {calls}".encode(), n_parameters=len(texts), is_set=False, positions=())
        before = [Statement(setting, texts)]
        if role:
            before.append(_plain(b"", sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(role)).as_bytes(None)))
        await self.run(before)
        ((found,),) = await self.ask("SELECT pg_catalog.current_schema()", [])
        if schema and found != schema:
            raise StatementFailed(f"schema {schema} is not there, or may not be used", sqlstate=_NO_SCHEMA)
        after = [_plain(b"", b"RESET ROLE"), _plain(b"", self._pinning)]
        return (await self._run([_plain(b"", command.encode()), *after], before=0))[0].tag

    async def run(self, statements: Sequence[Statement], *, is_piece: bool = False) -> None:
        """Execute statements of the open transaction that belong to none of its changes.

        Args:
            statements: to execute.
            is_piece: they are one, and can be undone as such.

        Raises:
            StatementFailed, TargetLost: as `execute`; its index is -1.
        """
        try:
            await self.pipeline.run([*self._marked(), *statements] if is_piece else statements)
        except StatementFailed as failure:
            failure.statement = -1
            raise

    async def record(self, record: Record | Proof) -> None:
        """Record a large transaction at its end.

        Raises:
            StatementFailed, TargetLost: as `execute`.
        """
        failpoints.probe(failpoints.BEFORE_STATE)
        await self._run_checked([self._first(record)], (), before=1)

    async def record_prepared(self, record: Record, gid: str) -> None:
        """Record, in a separate transaction, that a transaction is prepared.

        Raises:
            TargetLost: the connection ended, or it is not recorded, or was already: the state must be read again.
        """
        await self._record_alone(record, Statement(self._note, [self._slot_id, gid.encode()]))

    async def record_outcome(self, record: Record, start: str) -> None:
        """Record, in a separate transaction, that the prepared transaction whose name starts so is ended.

        Raises:
            TargetLost: as `record_prepared`.
        """
        await self._record_alone(record, Statement(self._forget, [self._slot_id, start.encode()]))

    async def _record_alone(self, record: Record, more: Statement) -> None:
        try:
            outcomes = await self._run([_BEGIN, self._first(record), more, _COMMIT], before=2)
        except StatementFailed as failure:
            # Not for the caller to repeat: what it records is done.
            raise TargetLost(
                f"target: what is prepared or decided could not be recorded ({failure.sqlstate}); the state is read "
                "again"
            ) from failure
        if outcomes[-1].tag != b"COMMIT":
            raise TargetLost(
                "target: the server rolled a record back instead of committing it; the state is read again"
            )

    async def prepare(self, gid: str) -> None:
        """Prepare the open transaction under a name of `target.prepared`.

        Raises:
            StatementFailed: the server has rolled it back instead.
            TargetLost: the connection ended, or the server has no room for one more prepared transaction.
        """
        failpoints.probe(failpoints.BEFORE_COMMIT)
        try:
            text = b"PREPARE TRANSACTION '%s'" % gid.encode()
            (outcome,) = await self.pipeline.run([_plain(b"", text)], on_sent=_prepare_sent)
        except StatementFailed as failure:
            failure.statement = -1
            raise
        failpoints.probe(failpoints.PREPARED)
        if outcome.tag != b"PREPARE TRANSACTION":
            raise StatementFailed("the server rolled back instead of preparing")

    async def decide(self, gid: str, record: Record, *, is_commit: bool) -> None:
        """Commit a prepared transaction, or roll it back.

        Args:
            gid: of the prepared transaction.
            record: of the outcome: rows get its commit time, where the server keeps one.
            is_commit: commit it.

        Raises:
            StatementFailed: none has that name, or another role prepared it.
        """
        if self._stamps:
            # The session still has the commit time of what it recorded last.
            await self.pipeline.run([Statement(_STAMP, _stamp_values(record))])
        text = (b"COMMIT PREPARED '%s'" if is_commit else b"ROLLBACK PREPARED '%s'") % gid.encode()
        await self.pipeline.run([_plain(b"", text)], on_sent=_decision_sent)

    async def is_proved(self, start: str) -> bool:
        """Return whether the prepared transaction whose name starts so was committed.

        Raises:
            StatementFailed, TargetLost: as `execute`.
        """
        (outcome,) = await self.pipeline.run([Statement(self._is_proved, [self._slot_id, start.encode()])])
        return outcome.rows > 0

    async def is_noted(self, start: str) -> bool:
        """Return whether a transaction whose name starts so was prepared here, and its outcome is not recorded.

        Raises:
            StatementFailed, TargetLost: as `execute`.
        """
        (outcome,) = await self.pipeline.run([Statement(self._is_noted, [self._slot_id, start.encode()])])
        return outcome.rows > 0

    async def commit(self) -> None:
        """Commit.

        Raises:
            StatementFailed: a deferred check failed, or the server rolled back instead (trap T-12).
            TargetLost: the connection ended; whether it committed is in doubt and only the state shows it (trap T-14).
        """
        failpoints.probe(failpoints.BEFORE_COMMIT)
        try:
            (outcome,) = await self.pipeline.run([_COMMIT], on_sent=_commit_sent)
        except StatementFailed as failure:
            failure.statement = -1  # no command's: a deferred check does not say whose row it was
            raise
        failpoints.probe(failpoints.COMMITTED)
        if outcome.tag != b"COMMIT":
            raise StatementFailed("the server rolled back instead of committing")

    async def rollback(self) -> None:
        """End the transaction without effect, whatever state it is in; do nothing where none is open."""
        if self.pipeline.is_outside_transaction:
            return
        await self._run_surely([_ROLLBACK])

    async def _run_surely(self, statements: Sequence[Statement]) -> None:
        """Run statements that fail only if a request to cancel what ran before has come late, and hit them."""
        try:
            await self.pipeline.run(statements)
        except StatementFailed:
            await self.pipeline.run(statements)

    async def forget_statements(self) -> None:
        """Have every statement planned again, because tables changed under them (trap T-48)."""
        self.pipeline.forget_statements()
        # The unnamed statement: the named ones are what goes.
        await self.pipeline.run([_FORGET])
        self.pipeline.forget_statements()

    async def cancel(self) -> None:
        """Ask the server to stop what runs; it fails with 57014."""
        if not self.pipeline.is_lost:
            with settings.target_errors("cancelling"):
                await self._connection.cancel_safe(timeout=5)

    async def close(self) -> None:
        """Close the connection; what was not committed is rolled back by the server."""
        self.pipeline.close()
        await self._connection.close()

    def _first(self, record: Record | Proof, *, commits: bool = False) -> Statement:
        if isinstance(record, Proof):
            stamp = _stamp_values(record.record) if self._stamps else []
            return Statement(self._proof, [self._slot_id, record.gid.encode(), *stamp])
        return Statement(self._record_to_commit if commits else self._record, self._values(record))

    def _values(self, record: Record) -> list[bytes | None]:
        members = "{" + ",".join([format_lsn(lsn) for lsn in record.members]) + "}" if record.members else None
        return [
            self._slot_id,
            format_lsn(record.end_lsn).encode(),
            format_lsn(record.first_lsn).encode(),
            members.encode() if members else None,
            format_lsn(record.low_lsn).encode(),
            str(record.commit_time_us).encode(),
            str(record.n_transactions).encode(),
        ]

    async def _run_checked(
        self,
        statements: Sequence[Statement],
        commands: Sequence[Command],
        before: int,
        on_sent: Callable[[], None] = do_nothing,
    ) -> None:
        """Run statements of which the last are `commands`, and check the counts of those."""
        outcomes = await self._run(statements, before, on_sent=on_sent)
        _check_counts(commands, outcomes[before:])

    async def _run(
        self,
        statements: Sequence[Statement],
        before: int,
        *,
        on_sent: Callable[[], None] = do_nothing,
        is_end_timed: bool = False,
    ) -> list[StatementResult]:
        """Run statements; a failure counts from the one at `before`, and what stands just before that is the record."""
        try:
            return await self.pipeline.run(statements, on_sent=on_sent, is_end_timed=is_end_timed)
        except StatementFailed as failure:
            failure.statement -= before
            _refuse_recorded(failure)
            raise


def _stamp_values(record: Record) -> list[bytes]:
    return [format_lsn(record.end_lsn).encode(), str(record.commit_time_us).encode()]


def _refuse_recorded(failure: StatementFailed) -> None:
    if failure.statement == -1 and failure.sqlstate == _ALREADY_RECORDED:
        raise _recorded_already() from failure


def _named(failure: StatementFailed, commands: Sequence[Command]) -> StatementFailed:
    """Return the failure of a transaction that was sent with its commit: -1 is also the commit's."""
    if failure.statement == len(commands):
        failure.statement = -1
    elif failure.sqlstate == _DIVISION_BY_ZERO and failure.statement >= 0:
        # It may be a division of the user's: then the same comes again when the batch is repeated in order.
        expected = commands[failure.statement].expected
        return StatementFailed(f"another number of rows than {expected}", statement=failure.statement)
    return failure


def _is_ruled(command: Command) -> bool:
    """Return whether the server cannot check a command's count, because a rule refuses the form that counts (0A000)."""
    return bool(command.plan.facts.rules) and command.expected != ANY_COUNT


def _up_to_rules(commands: Sequence[Command]) -> Iterator[tuple[int, int]]:
    """Yield where runs of commands begin and end, each behind a command whose count is looked at here."""
    first = 0
    for end, command in enumerate(commands, 1):
        if _is_ruled(command) and end < len(commands):
            yield first, end
            first = end
    yield first, len(commands)


def _check_counts(commands: Sequence[Command], outcomes: Sequence[StatementResult], first: int = 0) -> None:
    for index, (command, outcome) in enumerate(zip(commands, outcomes, strict=True), first):
        if command.expected not in (outcome.rows, ANY_COUNT):
            raise StatementFailed(f"{outcome.rows} rows where {command.expected} are expected", statement=index)


def _recorded_already() -> TargetLost:
    return TargetLost("target: this transaction is recorded as applied already; the state is read again")


def _commit_sent() -> None:
    failpoints.probe(failpoints.COMMIT_SENT)


def _prepare_sent() -> None:
    failpoints.probe(failpoints.PREPARE_SENT)


def _decision_sent() -> None:
    failpoints.probe(failpoints.DECISION_SENT)


def _sql(name: bytes, text: str, n_parameters: int) -> Sql:
    return Sql(name=name, text=text.encode(), n_parameters=n_parameters, is_set=False, positions=())


async def _take_lock(connection: psycopg.AsyncConnection[tuple[object, ...]], options: SessionOptions) -> None:
    with settings.target_errors("taking the worker's lock"):
        try:
            await connection.execute(lease.worker_lock_sql(options.slot_id, options.leader_pid).encode())
        except psycopg.errors.ObjectInUse as error:
            # The control session broke or another daemon took over; taking the lease again shows which.
            raise TargetLost("target: this daemon no longer holds the lease of its slot") from error

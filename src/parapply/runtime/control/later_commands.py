"""Commands of the publisher that cannot run in a transaction, run on the target after the one in which they came.

They are noted with that transaction (`parapply.ddl`, pending), and run one after the other in a separate session while
the stream goes on. Only transactions that hold commands wait for them. Each command is noted as begun when no index of
its name exists. So the index shows the outcome after a kill: a valid one is the command's, an INVALID one is dropped
and made again. A lock keeps the session of an earlier start, which may still be at work, and this one apart.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from parapply import failpoints
from parapply.errors import ParapplyError, StatementFailed
from parapply.logs import get_logger
from parapply.model import format_lsn
from parapply.runtime.apply.ddl import reason_of, settings_of
from parapply.runtime.apply.failure import FailureClass, classify
from parapply.runtime.apply.transaction import role_of
from parapply.target.session import lease, settings
from parapply.target.state import commands
from parapply.vocabulary import CommandOutcome
from parapply.wire.ddl_queue import is_create_index, later_index

if TYPE_CHECKING:
    from parapply.config import Config
    from parapply.metrics.figures import Figures
    from parapply.runtime.tables.control_pool import ControlPool
    from parapply.runtime.tables.plans import TablePlans
    from parapply.target.session.settings import Connection
    from parapply.target.state.commands import PendingCommand
    from parapply.wire.ddl_queue import QueuedCommand

#: Seconds to wait for it, and seconds until the next try where another object or session was in the way.
_LOCK_S: Final = 5.0
_AGAIN_S: Final = 10.0
_DUPLICATE: Final = "42P07"
_HINT: Final = (
    "correct what is in the way, and start the daemon again, which tries again; or run it by hand, and set "
    "ddl.skip = [{}]"
)

#: The session has the command's search_path and role, so no operator or type may be one of its schemas.
_CREATED: Final = """
SELECT pg_catalog.format('%I.%I', n.nspname, c.relname), x.indisvalid AND x.indisready
  FROM pg_catalog.pg_class AS t
  JOIN pg_catalog.pg_class AS c ON c.relnamespace OPERATOR(pg_catalog.=) t.relnamespace
   AND c.relname OPERATOR(pg_catalog.=) (pg_catalog.parse_ident($1))[1]::pg_catalog.name
  JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
  JOIN pg_catalog.pg_index AS x ON x.indexrelid OPERATOR(pg_catalog.=) c.oid
 WHERE t.oid OPERATOR(pg_catalog.=) pg_catalog.to_regclass($2)::pg_catalog.oid"""
_DROPPED: Final = """
SELECT pg_catalog.format('%I.%I', n.nspname, c.relname), x.indisvalid AND x.indisready
  FROM pg_catalog.pg_class AS c
  JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
  JOIN pg_catalog.pg_index AS x ON x.indexrelid OPERATOR(pg_catalog.=) c.oid
 WHERE c.oid OPERATOR(pg_catalog.=) pg_catalog.to_regclass($1)::pg_catalog.oid"""


class LaterCommands:
    """Its task writes; intake calls and waits."""

    def __init__(
        self, config: Config, slot_id: int, control_pool: ControlPool, *, tables: TablePlans, figures: Figures
    ) -> None:
        self._config = config
        self._slot_id = slot_id
        self._control_pool = control_pool
        self._figures = figures
        self._tables = tables
        self._called = asyncio.Event()
        self._settled = asyncio.Event()
        self._log = get_logger()

    def call(self) -> None:
        """Note that a transaction with such a command has committed."""
        self._settled.clear()
        self._called.set()

    async def settled(self) -> None:
        """Return when none is under way; one that has failed may be left."""
        await self._settled.wait()

    async def run(self) -> None:
        """Run pending commands, and new ones, until cancelled."""
        while True:
            self._called.clear()
            is_again = await self._run_all()
            if not self._called.is_set():
                self._settled.set()
            try:
                async with asyncio.timeout(_AGAIN_S if is_again else None):
                    await self._called.wait()
            except TimeoutError:
                pass

    async def _run_all(self) -> bool:
        """Run pending commands; return whether to try again, because one failed for a passing reason."""
        schema = self._config.target.state_schema
        async with self._control_pool.session() as conn:
            found = await commands.pending(conn, schema, self._slot_id)
        is_again = False
        for one in found:
            reason = ""
            if one.command.number in self._config.ddl.skip:
                await self._note(one, CommandOutcome.LEFT_OUT, "ddl.skip names it")
                continue
            if not self._config.ddl.apply:
                await self._note(one, CommandOutcome.PENDING, "ddl.apply is off")
                continue
            try:
                await self._run(one)
            except StatementFailed as failure:
                is_again = is_again or classify(failure) is FailureClass.AGAIN
                reason = reason_of(failure)
            except psycopg.Error as error:
                is_again, reason = True, type(error).__name__
            except ParapplyError as error:
                is_again, reason = True, error.line()
            if reason:
                await self._note(one, CommandOutcome.PENDING, reason)
        return is_again

    async def _run(self, one: PendingCommand) -> None:
        """Run a command, unless it turns out to have run; StatementFailed leaves nothing, others are in doubt."""
        config, command = self._config, one.command
        conn = await settings.connect_control(
            config.target.login,
            role=config.target.session_replication_role,
            application_name=f"parapply ddl {config.source.slot}",
        )
        async with conn:
            await lease.take_lease(conn, self._slot_id, _LOCK_S, lock_class=lease.LATER_LOCK_CLASS)
            async with self._control_pool.session() as asking:
                now = await commands.pending(asking, config.target.state_schema, self._slot_id)
            if all(each.key != one.key for each in now):
                return
            await self._prepare(conn, command)
            found = await _index(conn, command)
            if one.is_begun and is_create_index(command.command) and found is not None and not found[1]:
                await _drop(conn, found[0])
                found = None
            is_done = one.is_begun and (found is not None) == is_create_index(command.command)
            if not is_done:
                if not one.is_begun and (found is None) == is_create_index(command.command):
                    async with self._control_pool.session() as asking:
                        await commands.begin(asking, self._config.target.state_schema, one.key)
                failpoints.probe(failpoints.LATER_BEGUN)
                await self._execute(conn, command)
            failpoints.probe(failpoints.LATER_DONE)
        await self._note(one, CommandOutcome.APPLIED, "")

    async def _prepare(self, conn: Connection, command: QueuedCommand) -> None:
        """Have a session mean the same as the one on the publisher."""
        for name, value in settings_of(command).items():
            await settings.rows(conn, sql.SQL("SELECT pg_catalog.set_config($1, $2, false)"), [name, value])
        if role := role_of(self._config.ddl, command):
            try:
                await conn.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(role)))
            except psycopg.Error as error:
                raise _failed(error) from error

    async def _execute(self, conn: Connection, command: QueuedCommand) -> None:
        try:
            # In this form a server takes one command only.
            async with conn.cursor(binary=True) as cursor:
                await cursor.execute(command.command.encode())
        except psycopg.Error as error:
            failure = _failed(error)
            if not failure.sqlstate or conn.closed:
                raise
            found = await _index(conn, command)
            if is_create_index(command.command) and failure.sqlstate != _DUPLICATE and found and not found[1]:
                await _drop(conn, found[0])
            raise failure from error
        found = await _index(conn, command)
        if is_create_index(command.command) and not (found and found[1]):
            raise StatementFailed("the existing index is INVALID", sqlstate="")

    async def _note(self, one: PendingCommand, outcome: CommandOutcome, reason: str) -> None:
        async with self._control_pool.session() as conn:
            await commands.finish(conn, self._config.target.state_schema, one.key, outcome, reason)
        told: dict[str, Any] = {
            "tag": one.command.tag, "number": one.command.number, "commit_lsn": format_lsn(one.key.commit_lsn),
        }  # fmt: skip
        if outcome is CommandOutcome.PENDING:
            self._log.warning("ddl_failed", **told, reason=reason, hint=_HINT.format(one.command.number))
            return
        self._figures.commands[outcome] += 1
        if outcome is CommandOutcome.LEFT_OUT:
            self._log.warning("ddl_left_out", **told, reason=reason)
        else:
            self._log.info("ddl_applied", **told)
            self._tables.is_in_doubt.set()


async def _index(conn: Connection, command: QueuedCommand) -> tuple[str, bool] | None:
    """Return the index of a command as it is now, with whether it is valid; None if it does not exist."""
    index, table = later_index(command.command)
    query, values = (_CREATED, [index, table]) if table else (_DROPPED, [index])
    found = await settings.rows(conn, sql.SQL(query), values)
    return (str(found[0][0]), bool(found[0][1])) if found else None


async def _drop(conn: Connection, index: str) -> None:
    await conn.execute(f"DROP INDEX CONCURRENTLY {index}".encode())


def _failed(error: psycopg.Error) -> StatementFailed:
    constraint = error.diag.constraint_name or ""
    return StatementFailed(settings.first_line(error), sqlstate=error.sqlstate or "", constraint=constraint)

"""One database at one PgBouncer, by its admin console: its clients wait while it is paused, and are led on after that.

The console speaks the simple query protocol and takes one command at a time. PAUSE answers once the last server session
has ended, that is, after its transaction; a console that is closed before does not take it back.

In: connection string of the console, name of the database. Rows are data. Source: PgBouncer's manual, "Admin console";
its admin.c.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from parapply.driver import Session, lost_hint
from parapply.errors import ParapplyError
from parapply.logs import SECRETS
from parapply.quoting import identifier, plain_literal

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Seconds that the console may take for all but PAUSE: it answers at once, or hangs.
_ANSWER_S: Final = 10.0
_CONSOLE: Final = "pgbouncer"
#: Bytes of a name, with its quotes, that the console takes.
_LONGEST_BYTES: Final = 63


class Place(NamedTuple):
    """Where a database of a pooler leads."""

    host: str  # empty: the socket in PgBouncer's default directory
    port: int
    dbname: str

    def __str__(self) -> str:
        return f"{self.dbname} at {self.host or 'its socket'}, port {self.port}"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A database as the console shows it."""

    place: Place
    is_paused: bool
    is_disabled: bool
    is_by_session: bool  # a client keeps its server session until it leaves
    wait_limit_s: float  # a client that waits longer gets an error; 0: none does
    login_retry: str  # pause after a login at the server that failed, as the console writes it


def without_secrets(dsn: str) -> str:
    """Return a connection string without what must not be shown or noted."""
    parts: dict[str, Any] = conninfo_to_dict(dsn)
    return make_conninfo(**{key: value for key, value in parts.items() if key not in SECRETS})


class Pooler:
    """A database of a pooler."""

    def __init__(self, dsn: str, database: str) -> None:
        self.dsn = without_secrets(dsn)
        self.database = database
        self._way_in = dsn
        self._session: Session | None = None

    def __str__(self) -> str:
        return f"{self.database!r} of the pooler at {self.dsn}"

    async def close(self) -> None:
        """Leave the console."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(psycopg.Error):
                await session.close()

    async def look(self) -> Entry:
        """Return the database as it is now.

        Raises:
            ParapplyError: the console does not answer, or knows no such database.
        """
        found = [one for one in await self._ask("SHOW DATABASES") if one.get("name") == self.database]
        if not found:
            raise ParapplyError(
                f"no database {self}", hint="name it as its clients do: pooler_databases (--pooler-database)"
            )
        settings = {one["key"]: one["value"] or "" for one in await self._ask("SHOW CONFIG")}
        entry = found[0]
        return Entry(
            place=Place(entry["host"] or "", int(entry["port"] or 0), entry["database"] or ""),
            is_paused=entry.get("paused") not in {"0", None},
            is_disabled=entry.get("disabled") not in {"0", None},
            is_by_session=(entry.get("pool_mode") or settings.get("pool_mode")) == "session",
            wait_limit_s=float(settings.get("query_wait_timeout") or 0),
            login_retry=settings.get("server_login_retry") or "0",
        )

    async def check_rights(self) -> None:
        """Refuse a role that may only look; ENABLE of a database that is enabled changes nothing.

        Raises:
            ParapplyError: its role is not among admin_users, or the name is too long for the console.
        """
        if len(identifier(self.database).encode()) > _LONGEST_BYTES:
            raise ParapplyError(f"the console takes no name as long as {self.database!r}", hint="give it a shorter one")
        await self._ask(f"ENABLE {identifier(self.database)}")

    async def pause(self, limit_s: float) -> None:
        """Let the transactions in progress end, and their clients' next ones wait; again where it is paused already.

        Raises:
            ParapplyError: one has not ended in time, and all others wait for it now; or the console does not answer.
        """
        try:
            await self._ask(f"PAUSE {identifier(self.database)}", limit_s)
        except TimeoutError as error:
            raise ParapplyError(
                f"the sessions of {self} have not all ended their transactions within {limit_s:g} s",
                hint="end the long ones (see SHOW SERVERS there), or raise pause_timeout_s (--pause-timeout)",
            ) from error

    async def reload(self) -> None:
        """Have it read its file again; raise ParapplyError if it does not, or the file is wrong."""
        await self._ask("RELOAD")

    async def resume(self) -> bool:
        """Let the clients go on, and return whether they waited; raise ParapplyError if the console does not answer."""
        entry = await self.look()
        if not entry.is_paused:
            return False
        # PAUSE breaks off a login at the server that is under way, and so does a client that connects between RELOAD
        # and RESUME. PgBouncer counts it as failed: all would wait for server_login_retry, 15 s by default. A kill
        # before the end leaves 0, until the next RELOAD.
        await self._ask("SET server_login_retry = 0")
        await self._ask(f"RESUME {identifier(self.database)}")
        # In quotes, because the console takes no fraction without them.
        await self._ask(f"SET server_login_retry = {plain_literal(entry.login_retry)}")
        return True

    async def _ask(self, command: str, limit_s: float | None = None) -> list[dict[str, str | None]]:
        """Run a command of the console and return its rows by column; raise TimeoutError after the limit."""
        try:
            async with asyncio.timeout(limit_s or _ANSWER_S):
                if self._session is None:
                    self._session = await self._connect()
                results = await _answer(self._session.pgconn, command)
        except TimeoutError as error:
            # Its console waits on, and would not hear of another command.
            await self.close()
            if limit_s:
                raise
            raise ParapplyError(f"the pooler at {self.dsn} does not answer", hint="see its log") from error
        except psycopg.Error as error:
            await self.close()
            text = str(error).strip()
            raise ParapplyError(
                f"the pooler at {self.dsn} is not reached: {text}",
                hint=lost_hint(error, text) or "correct the connection string of its console, or start it",
            ) from error
        return _rows(self, command, results)

    async def _connect(self) -> Session:
        parts: dict[str, Any] = {
            "dbname": _CONSOLE,
            "connect_timeout": int(_ANSWER_S),
            **conninfo_to_dict(self._way_in),
        }
        return await Session.connect(make_conninfo(**parts), autocommit=True)


async def _answer(conn: pq.abc.PGconn, command: str) -> list[pq.abc.PGresult]:
    """Send a command and return its results. psycopg's own way waits for the end of a command that was given up."""
    loop, has_come = asyncio.get_running_loop(), asyncio.Event()
    conn.send_query(command.encode())
    conn.flush()
    loop.add_reader(conn.socket, has_come.set)
    results: list[pq.abc.PGresult] = []
    try:
        while True:
            while conn.is_busy():
                await has_come.wait()
                has_come.clear()
                conn.consume_input()
            if (result := conn.get_result()) is None:
                return results
            results.append(result)
    finally:
        loop.remove_reader(conn.socket)


def _rows(pooler: Pooler, command: str, results: Sequence[pq.abc.PGresult]) -> list[dict[str, str | None]]:
    for result in results:
        if result.status not in {pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK}:
            text = result.error_message.decode(errors="replace").strip()
            raise ParapplyError(
                f"the pooler at {pooler.dsn} refuses {command}: {text}",
                hint="its log says more; the role of the console must be one of its admin_users",
            )
    return [
        {
            (result.fname(column) or b"").decode(): None if value is None else value.decode(errors="replace")
            for column in range(result.nfields)
            for value in [result.get_value(row, column)]
        }
        for result in results
        for row in range(result.ntuples)
    ]

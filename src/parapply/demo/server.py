"""One PostgreSQL server of our own, shared by the demonstration and the tests.

In goes a directory to work under and settings; out come connection strings and rows. The server listens on 127.0.0.1
only and asks for no password, so every user of this machine can connect as the superuser: for throw-away data only.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psycopg
from psycopg import sql as pgsql
from psycopg.conninfo import make_conninfo

from parapply.demo.binaries import find_program
from parapply.demo.cluster import DEFAULT_SETTINGS, SUPERUSER, Cluster, Setting, StopMode, clean_environment, free_port
from parapply.demo.errors import DemoError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["DEFAULT_SETTINGS", "SUPERUSER", "PgServer", "Setting", "StopMode", "execute"]

_START_TIMEOUT_S = 60.0
_PROGRAM_TIMEOUT_S = 120.0
_POLL_S = 0.03
_PORT_ATTEMPTS = 5


class PgServer(Cluster):
    """A PostgreSQL server in its own directory; as a context manager it is started, and removed at the end.

    Arguments and what stops, crashes and kills it: see `Cluster`.
    """

    # True once it has answered: from then on others know its port.
    _has_started = False
    # Why the server does not answer yet, as a client sees it.
    _last_refusal = ""

    def __enter__(self) -> Self:
        self.init()
        try:
            self.start()
        except BaseException:
            self.cleanup()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the server, unless `keep` was called."""
        self.cleanup()

    def start(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Start the server and return when it answers; crash recovery is over then.

        The port stays the same over restarts. Only the very first start takes another one if it was lost since.

        Raises:
            DemoError: it ended or did not answer within `timeout_s` seconds; the message holds the end of its log.
        """
        if self.is_running():
            return
        for attempt in range(_PORT_ATTEMPTS):
            self._launch()
            if self._wait_until_it_answers(timeout_s):
                self._has_started = True
                self._shared_memory.forget()
                return
            port_was_taken = "Address already in use" in self.log_tail()
            if self._has_started or not port_was_taken or attempt == _PORT_ATTEMPTS - 1:
                break
            self.port = free_port()
        if self.is_running():
            self._end_quickly()
        raise DemoError(f"The server {self.name} did not start: {self._last_refusal} Its log: {self.log_tail()}")

    def restart(self, mode: StopMode = "fast", timeout_s: float = _START_TIMEOUT_S) -> None:
        """Stop and start the server, on the same port."""
        self.stop(mode)
        self.start(timeout_s)

    def dsn(
        self, dbname: str = "postgres", user: str = SUPERUSER, *, unix_socket: bool = False, **extra: str | int
    ) -> str:
        """Return a connection string; raise DemoError if a Unix socket was asked for and the server has none."""
        host = self.socket_dir if unix_socket else "127.0.0.1"
        if host is None:
            raise DemoError(f"The server {self.name} has no Unix socket.", hint="make it with unix_socket=True")
        return make_conninfo("", host=str(host), port=self.port, dbname=dbname, user=user, **extra)

    def execute(
        self,
        sql: str | pgsql.Composable,
        params: Sequence[Any] | Mapping[str, Any] | None = None,
        *,
        dbname: str = "postgres",
        user: str = SUPERUSER,
    ) -> list[tuple[Any, ...]]:
        """Run SQL on a new connection in autocommit mode and return the rows of its last statement.

        Raises:
            DemoError: the server refused or went away; `sqlstate` says what it was.
        """
        return execute(self.dsn(dbname, user), sql, params)

    def run(
        self,
        program: str,
        *args: str,
        dbname: str = "postgres",
        env: Mapping[str, str] | None = None,
        timeout_s: float = _PROGRAM_TIMEOUT_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run psql, pgbench or another client against this server and return its output as text.

        Raises:
            DemoError: it failed (the message holds what it wrote), or ran longer than `timeout_s` seconds.
        """
        command = [str(self.program(program)), *args]
        try:
            done = subprocess.run(  # noqa: S603 - programs of the installation, no shell
                command, env={**self.client_env(dbname), **(env or {})},
                capture_output=True, text=True, check=False, timeout=timeout_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise DemoError(f"{program} on {self.name} did not end within {timeout_s:g} s.") from error
        if done.returncode != 0:
            raise DemoError(f"{program} on {self.name} failed with {done.returncode}: {done.stderr or done.stdout}")
        return done

    def program(self, name: str) -> Path:
        """Return the path of a client program, from another version if this one lacks it."""
        return find_program(name, self.binaries)

    def client_env(self, dbname: str = "postgres") -> dict[str, str]:
        """Return the environment that points libpq programs at this server, without the caller's own PG variables."""
        address = {"PGHOST": "127.0.0.1", "PGPORT": str(self.port), "PGUSER": SUPERUSER, "PGDATABASE": dbname}
        return {**clean_environment(), **address}

    def _wait_until_it_answers(self, timeout_s: float) -> bool:
        """Return whether the server answered before it ended and before the time was over."""
        deadline_s = time.monotonic() + timeout_s
        while self.is_running() and time.monotonic() < deadline_s:
            if self._answers():
                return True
            time.sleep(_POLL_S)
        return False

    def _answers(self) -> bool:
        """Return whether our own server answers: on a lost port, another server would."""
        try:
            rows = execute(self.dsn(connect_timeout=2), "SHOW data_directory")
        except DemoError as error:
            self._last_refusal = str(error)
            return False
        return Path(rows[0][0]).resolve() == self.data_dir.resolve()


def execute(
    dsn: str, sql: str | pgsql.Composable, params: Sequence[Any] | Mapping[str, Any] | None = None
) -> list[tuple[Any, ...]]:
    """Run SQL on a new connection in autocommit mode and return the rows of its last statement.

    Without `params` the text is sent as it is (`%` means itself) and may hold several statements.

    Raises:
        DemoError: the server refused or went away; `sqlstate` says what it was.
    """
    try:
        with psycopg.connect(dsn, autocommit=True) as connection:
            return execute_in(connection, sql, params)
    except psycopg.Error as error:
        raise DemoError(f"PostgreSQL said: {error}", sqlstate=error.sqlstate or "") from error


def execute_in(
    connection: psycopg.Connection, sql: str | pgsql.Composable, params: Sequence[Any] | Mapping[str, Any] | None = None
) -> list[tuple[Any, ...]]:
    """Run SQL as `execute` does, on an open connection; raise psycopg.Error if the server refused or went away."""
    query = sql.encode() if isinstance(sql, str) else sql.as_bytes()
    cursor = connection.execute(query, params)
    while True:
        rows = cursor.fetchall() if cursor.description else []
        if not cursor.nextset():
            return rows

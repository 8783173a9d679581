"""Pinned session settings, and the checks of a target."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from parapply.errors import TargetLost, TargetRefused
from parapply.login import Login
from parapply.target.session import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.databases import Database
    from tests.fixtures.servers import OwnServers

#: Settings that an administrator may have made for the role; each breaks an applier that does not pin it (F26).
HOSTILE = {
    "default_transaction_isolation": "serializable",
    "default_transaction_read_only": "on",
    "default_transaction_deferrable": "on",
    "statement_timeout": "25ms",
    "idle_in_transaction_session_timeout": "1ms",
    "lock_timeout": "25ms",
    "row_security": "on",
    "search_path": "public",
    "DateStyle": "SQL, DMY",
    "IntervalStyle": "iso_8601",
    "TimeZone": "Asia/Tokyo",
    "extra_float_digits": "-10",
    "bytea_output": "escape",
    "xmloption": "document",
    "array_nulls": "off",
    "synchronous_commit": "local",
}


@pytest.fixture
def plain_role(target_db: Database) -> Iterator[str]:
    """Make a role without any privilege."""
    name = f"plain_{secrets.token_hex(4)}"
    role = sql.Identifier(name)
    target_db.execute(sql.SQL("CREATE ROLE {} LOGIN").format(role))
    yield name
    target_db.execute(sql.SQL("DROP OWNED BY {}").format(role))
    target_db.execute(sql.SQL("DROP ROLE {}").format(role))


@pytest.fixture
def hostile_db(target_db: Database) -> Iterator[Database]:
    """Make the database's defaults as bad as an administrator could."""
    database = sql.Identifier(target_db.dbname)
    for name, value in HOSTILE.items():
        values = sql.SQL(", ").join(sql.Literal(part) for part in value.split(", "))
        query = sql.SQL("ALTER DATABASE {} SET {} = {}").format(database, sql.Identifier(name), values)
        target_db.server.execute(query)
    yield target_db
    # The database is dropped over a session in it.
    target_db.server.execute(sql.SQL("ALTER DATABASE {} RESET ALL").format(database))


@pytest.mark.pg_majors(15, 16, 18)
@pytest.mark.parametrize("kind", ["worker", "control"])
async def test_every_setting_is_pinned(hostile_db: Database, kind: settings.Kind) -> None:
    """Whatever the database's own settings say, a session of ours has the values of the table."""
    conn = await psycopg.AsyncConnection.connect(hostile_db.dsn, autocommit=True)
    async with conn:
        await settings.pin_session(conn, kind=kind, role="replica", synchronous_commit="off")
        await settings.check_direct(conn)
        found = dict(await settings.rows(conn, sql.SQL("SELECT lower(name), setting FROM pg_catalog.pg_settings")))
    milliseconds = {"client_connection_check_interval": "1000", "tcp_user_timeout": "30000"}
    for setting in settings.SETTINGS:
        if setting.name.lower() in found and (kind == "worker" or not setting.workers_only):
            wanted = milliseconds.get(setting.name, setting.value)
            assert found[setting.name.lower()] == wanted, setting.name
    assert found["session_replication_role"] == "replica"
    # The watermark is only told when it is durable, so its session commits synchronously.
    assert found["synchronous_commit"] == ("off" if kind == "worker" else "on")


@pytest.mark.pg_majors(15, 18)
def test_missing_privilege_for_the_role_names_the_grant(target_db: Database, plain_role: str) -> None:
    """A role that may not set session_replication_role sees the GRANT that helps, and it does help (T-62)."""
    dsn = target_db.dsn_with(user=plain_role)

    async def connect() -> None:
        conn = await settings.connect_control(Login(dsn), role="replica", application_name="test")
        await conn.close()

    with pytest.raises(TargetRefused) as caught:
        asyncio.run(connect())
    assert "GRANT SET ON PARAMETER session_replication_role" in caught.value.hint
    grant = sql.SQL("GRANT SET ON PARAMETER session_replication_role TO {}").format(sql.Identifier(plain_role))
    target_db.execute(grant)
    asyncio.run(connect())


class LyingRelay(threading.Thread):
    """Forward one connection, but announce another process id, as PgBouncer does: it makes its own cancel keys."""

    def __init__(self, host: str, port: int) -> None:
        """Listen on a free port."""
        super().__init__()
        self._to = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def run(self) -> None:
        """Forward until either side closes."""
        with self._listener, self._listener.accept()[0] as client, socket.create_connection(self._to) as server:
            upwards = threading.Thread(target=self._pass_on, args=(client, server))
            upwards.start()
            with server.makefile("rb") as replies, suppress(ConnectionError):
                while head := replies.read(5):
                    body = replies.read(struct.unpack("!I", head[1:])[0] - 4)
                    if head[:1] == b"K":
                        body = struct.pack("!I", struct.unpack("!I", body[:4])[0] + 1) + body[4:]
                    client.sendall(head + body)
            upwards.join()

    @staticmethod
    def _pass_on(client: socket.socket, server: socket.socket) -> None:
        with suppress(ConnectionError):
            while data := client.recv(65536):
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)


def test_pooler_is_refused(target_db: Database) -> None:
    """A session whose process is not the announced one belongs to a pooler: its locks would belong to none (F37)."""
    parameters = conninfo_to_dict(target_db.dsn)
    relay = LyingRelay(str(parameters["host"]), int(str(parameters["port"])))
    relay.start()
    dsn = make_conninfo(target_db.dsn, host="127.0.0.1", port=relay.port, sslmode="disable", gssencmode="disable")
    with pytest.raises(TargetRefused, match="pooler"):
        asyncio.run(settings.connect_control(Login(dsn), role="replica", application_name="test"))
    relay.join()


@pytest.mark.crash
def test_standby_and_dead_server(own_servers: OwnServers) -> None:
    """A standby is refused with what to do (F32); a server that is down is lost, which is retried."""
    server = own_servers()
    dsn = server.dsn()

    async def connect() -> None:
        conn = await settings.connect_control(Login(dsn), role="replica", application_name="test")
        await conn.close()

    server.stop()
    (server.data_dir / "standby.signal").touch()
    server.start()
    with pytest.raises(TargetRefused, match="standby") as caught:
        asyncio.run(connect())
    assert "target_session_attrs" in caught.value.hint
    server.stop()
    with pytest.raises(TargetLost):
        asyncio.run(connect())


@pytest.mark.parametrize(("kind", "timeout_ms"), [("control", 30_000), ("worker", 0)])
def test_f23_a_worker_may_wait_for_a_lock_with_much_sent(
    target_db: Database, kind: settings.Kind, timeout_ms: int
) -> None:
    """Only sessions with short questions have the kernel's user timeout: it also counts a living server's full buffer.

    Observed: with more sent than the server's buffer takes, and its statement waiting for a table lock, a worker's
    session ended after 30 s, and so did every next one until the lock was released.
    """
    with (
        psycopg.connect(settings.client_conninfo(target_db.dsn, "timeouts", kind=kind)) as connection,
        socket.socket(fileno=os.dup(connection.pgconn.socket)) as view,
    ):
        assert view.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == timeout_ms
        assert view.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

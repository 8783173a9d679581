"""The proxy of the benchmark and of the tests delivers everything, late, in order, and breaks where it is asked to."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from bench.proxy import HELD_BYTES, delayed_port
from tests.fixtures.proxy import CutProxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from threading import Event

    from tests.fixtures.databases import Database

    #: Takes a server's address and gives the port that leads to it.
    Way: TypeAlias = Callable[[str, int], AbstractContextManager[int]]

DELAY_S = 0.03
TIMEOUT_S = 60.0
STAMP = struct.Struct("d")
STAMPS = 200

# Starts a proxy, says where it is, and waits for its end.
OWNER = """
import sys
from bench.proxy import delayed_port
with delayed_port("127.0.0.1", int(sys.argv[1]), 0.0) as port:
    print(port, flush=True)
    sys.stdin.read()
"""


@contextmanager
def in_thread(host: str, port: int) -> Iterator[int]:
    """A port from which a thread of the test's process forwards."""
    with CutProxy(host, port) as proxy:
        yield proxy.port


def in_process(delay_s: float = DELAY_S, held_bytes: int = HELD_BYTES) -> Way:
    """A port from which a process forwards, late."""
    return lambda host, port: delayed_port(host, port, delay_s, held_bytes=held_bytes)


either_way = pytest.mark.parametrize("way", [in_thread, in_process()], ids=["thread", "process"])
either_side = pytest.mark.parametrize("is_from_client", [True, False], ids=["from client", "from server"])


@contextmanager
def both_ends(way: Way) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A client and the server's end of its connection, the proxy between them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        with (
            way(*listener.getsockname()) as port,
            socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as client,
        ):
            server, _ = listener.accept()
            server.settimeout(TIMEOUT_S)
            with server:
                yield client, server


def read_all(end: socket.socket) -> bytes:
    """Return what comes until the other side has ended."""
    parts = []
    while part := end.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


def send_all(end: socket.socket, payload: bytes) -> None:
    """Send everything, then say that there is no more."""
    end.sendall(payload)
    end.shutdown(socket.SHUT_WR)


@pytest.fixture
def proxy(source_db: Database) -> Iterator[CutProxy]:
    """A proxy before the session's publisher."""
    info = psycopg.conninfo.conninfo_to_dict(source_db.dsn)
    with CutProxy(str(info["host"]), int(info["port"] or 5432)) as made:
        yield made


@pytest.mark.parametrize(
    "way", [in_thread, in_process(0.001, 1 << 16), in_process(0.001)], ids=["thread", "little room", "much room"]
)
def test_bytes_arrive_whole_and_in_order(way: Way) -> None:
    """All bytes arrive in their order, both directions at once, also where the sender has to wait for room."""
    sizes = (16 << 20, 12 << 20)
    payloads = [random.Random(size).randbytes(size) for size in sizes]
    with both_ends(way) as ends, ThreadPoolExecutor(4) as pool:
        sending = [pool.submit(send_all, end, payload) for end, payload in zip(ends, payloads, strict=True)]
        reading = [pool.submit(read_all, end) for end in reversed(ends)]
        assert [one.result(TIMEOUT_S) == payload for one, payload in zip(reading, payloads, strict=True)] == [True] * 2
        for one in sending:
            one.result(TIMEOUT_S)


@either_side
def test_nothing_arrives_before_it_is_due(is_from_client: bool) -> None:  # noqa: FBT001  a parameter of the test
    """Every byte, and the end, comes at least the delay later, in either direction."""
    with both_ends(in_process()) as (client, server), ThreadPoolExecutor(1) as pool:
        sender, receiver = (client, server) if is_from_client else (server, client)

        def send() -> float:
            for _ in range(STAMPS):
                sender.sendall(STAMP.pack(time.monotonic()))
            ended_s = time.monotonic()
            sender.shutdown(socket.SHUT_WR)
            return ended_s

        sending = pool.submit(send)
        # Read before the clock is, so that a late clock hides nothing.
        for _ in range(STAMPS):
            (sent_s,) = STAMP.unpack(receiver.recv(STAMP.size, socket.MSG_WAITALL))
            assert time.monotonic() - sent_s >= DELAY_S
        assert receiver.recv(1) == b""
        assert time.monotonic() - sending.result(TIMEOUT_S) >= DELAY_S


@either_way
def test_the_end_of_one_direction_is_passed_on(way: Way) -> None:
    """A side that has said its last can still be answered, and the answer's end also arrives."""
    with both_ends(way) as (client, server):
        send_all(client, b"question")
        assert read_all(server) == b"question"
        send_all(server, b"answer")
        assert read_all(client) == b"answer"


@either_way
@either_side
def test_a_reset_is_passed_on(way: Way, is_from_client: bool) -> None:  # noqa: FBT001  a parameter of the test
    """When one side is gone without a word, the other side learns of it as it would without the proxy."""
    with both_ends(way) as (client, server):
        gone, left = (client, server) if is_from_client else (server, client)
        gone.sendall(b"x")
        assert left.recv(1) == b"x"
        # A zero linger time makes close() send RST. Source: socket(7).
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()
        with pytest.raises(ConnectionResetError):
            left.recv(1)


@either_way
def test_a_server_that_is_not_there_ends_the_connection(way: Way) -> None:
    """Without a server after the proxy a connection ends instead of hanging."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with (
        way(*address) as port,
        # The reset may come before the connection is used.
        pytest.raises(ConnectionResetError),
        socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as client,
    ):
        client.recv(1)


def test_it_ends_with_an_owner_that_is_killed() -> None:
    """The process ends when its owner is killed: a connection through it ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        command = [sys.executable, "-c", OWNER, str(listener.getsockname()[1])]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
            assert owner.stdout is not None
            port = int(owner.stdout.readline())
            with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as client:
                server, _ = listener.accept()
                with server:
                    os.kill(owner.pid, signal.SIGKILL)
                    with pytest.raises(ConnectionResetError):
                        client.recv(1)


def test_a_session_works_through_a_delay(target_db: Database) -> None:
    """A session with the server works and has its round trips later by twice the delay."""
    with psycopg.connect(target_db.dsn) as direct:
        host, port = direct.info.host, direct.info.port
    with (
        delayed_port(host, port, DELAY_S) as late_port,
        psycopg.connect(make_conninfo(target_db.dsn, host="127.0.0.1", port=late_port)) as connection,
    ):
        before_s = time.monotonic()
        row = connection.execute("SELECT sum(length(repeat('x', 1000))) FROM generate_series(1, 1000)").fetchone()
        assert time.monotonic() - before_s >= 2 * DELAY_S
        assert row == (1_000_000,)


def test_a_pattern_that_comes_in_two_reads_is_found() -> None:
    """The first part of a pattern is forwarded; the second one is not, and the connection is cut."""
    dropped: list[Event] = []

    @contextmanager
    def way(host: str, port: int) -> Iterator[int]:
        with CutProxy(host, port) as proxy:
            dropped.append(proxy.drop_before(b"COMMIT"))
            yield proxy.port

    with both_ends(way) as (client, server):
        client.sendall(b"COM")
        assert server.recv(3) == b"COM"
        client.sendall(b"MIT")
        assert dropped[0].wait(TIMEOUT_S)
        for end in (client, server):
            with pytest.raises(ConnectionResetError):
                end.recv(1)


def test_a_cut_breaks_and_refuses(source_db: Database, proxy: CutProxy) -> None:
    """A cut breaks open connections, a refusing proxy takes no new ones, a restored one does."""
    dsn = proxy.dsn(source_db.dsn)
    with psycopg.connect(dsn) as connection:
        proxy.cut(then_refuse=True)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(dsn)
    proxy.restore()
    psycopg.connect(dsn).close()


def test_a_freeze_is_silent_and_loses_nothing(source_db: Database, proxy: CutProxy) -> None:
    """A frozen network delivers nothing and breaks nothing; thawed, it delivers all."""
    with psycopg.connect(proxy.dsn(source_db.dsn), autocommit=True) as connection:
        proxy.freeze()
        connection.pgconn.send_query(b"SELECT 'late'")
        assert select.select([connection.fileno()], [], [], 0.2)[0] == []
        proxy.thaw()
        assert _first_value(connection) == b"late"


def test_drop_before_loses_the_commit(source_db: Database, proxy: CutProxy) -> None:
    """A commit that is cut before the server gets it has not happened."""
    source_db.execute("CREATE TABLE t (i int)")
    dropped = proxy.drop_before(b"COMMIT")
    with psycopg.connect(proxy.dsn(source_db.dsn)) as connection:
        connection.execute("INSERT INTO t VALUES (1)")
        with pytest.raises(psycopg.OperationalError):
            connection.commit()
    assert dropped.wait(10.0)
    assert source_db.rows("SELECT count(*) FROM t") == [(0,)]


def test_drop_reply_hides_the_commit(source_db: Database, proxy: CutProxy) -> None:
    """A commit whose answer is lost has happened, though the client cannot know; in a pipeline too."""
    source_db.execute("CREATE TABLE t (i int)")
    for expected in (1, 2):
        dropped = proxy.drop_reply_after(b"COMMIT")
        with psycopg.connect(proxy.dsn(source_db.dsn), autocommit=True) as connection:
            with pytest.raises(psycopg.OperationalError):
                _insert_in_pipeline(connection)
            assert dropped.wait(10.0)
        assert source_db.rows("SELECT count(*) FROM t") == [(expected,)]


def test_freeze_before_holds_the_commit(source_db: Database, proxy: CutProxy) -> None:
    """A held commit has not happened until the network thaws."""
    source_db.execute("CREATE TABLE t (i int)")
    frozen = proxy.freeze_before(b"COMMIT")
    with psycopg.connect(proxy.dsn(source_db.dsn), autocommit=True) as connection:
        connection.execute("BEGIN; INSERT INTO t VALUES (1)")
        connection.pgconn.send_query(b"COMMIT")
        assert frozen.wait(10.0)
        assert source_db.rows("SELECT count(*) FROM t") == [(0,)]
        proxy.thaw()
        _first_value(connection)
        assert source_db.rows("SELECT count(*) FROM t") == [(1,)]


def _first_value(connection: psycopg.Connection) -> bytes | None:
    """Wait for the answer without libpq's blocking calls: they keep the interpreter's lock, which the proxy needs."""
    value: bytes | None = None
    while True:
        while connection.pgconn.is_busy():
            assert select.select([connection.fileno()], [], [], 10.0)[0], "no answer"
            connection.pgconn.consume_input()
        result = connection.pgconn.get_result()
        if result is None:
            return value
        value = result.get_value(0, 0) if result.ntuples else None


def _insert_in_pipeline(connection: psycopg.Connection) -> None:
    """Send a transaction whose first answers come long before the answer to its commit."""
    with connection.pipeline():
        connection.execute("BEGIN")
        connection.execute("SELECT pg_sleep(0.1)")
        connection.execute("INSERT INTO t VALUES (1)")
        connection.execute("COMMIT")

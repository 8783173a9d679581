"""The longer way to a server delivers everything, late, in order, and ends with its owner."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from parapply.bench.delay import HELD_BYTES, Delay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.databases import Database
    from tests.fixtures.servers import OwnServers

DELAY_S = 0.03
TIMEOUT_S = 60.0
STAMP = struct.Struct("d")
STAMPS = 200

# Starts a delay, says where it is, and waits for its end.
OWNER = """
import sys
from parapply.bench.delay import Delay
with Delay("127.0.0.1", int(sys.argv[1]), 0.0) as delay:
    print(delay.port, flush=True)
    sys.stdin.read()
"""


@contextmanager
def both_ends(held_bytes: int = HELD_BYTES, delay_s: float = DELAY_S) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A client and the server's end of its connection, the delay between them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        host, port = listener.getsockname()
        with (
            Delay(host, port, delay_s, held_bytes=held_bytes) as delay,
            socket.create_connection(("127.0.0.1", delay.port), TIMEOUT_S) as client,
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


@pytest.mark.parametrize("held_bytes", [1 << 16, HELD_BYTES])
def test_bytes_arrive_whole_and_in_order(held_bytes: int) -> None:
    """All bytes arrive in their order, both directions at once, also where the sender has to wait for room."""
    sizes = (16 << 20, 12 << 20)
    payloads = [random.Random(size).randbytes(size) for size in sizes]
    with both_ends(held_bytes, delay_s=0.001) as ends, ThreadPoolExecutor(4) as pool:
        sending = [pool.submit(send_all, end, payload) for end, payload in zip(ends, payloads, strict=True)]
        reading = [pool.submit(read_all, end) for end in reversed(ends)]
        assert [one.result(TIMEOUT_S) == payload for one, payload in zip(reading, payloads, strict=True)] == [True] * 2
        for one in sending:
            one.result(TIMEOUT_S)


@pytest.mark.parametrize("is_from_client", [True, False])
def test_nothing_arrives_before_it_is_due(is_from_client: bool) -> None:  # noqa: FBT001  a parameter of the test
    """Every byte, and the end, comes at least the delay later, in either direction."""
    with both_ends() as (client, server), ThreadPoolExecutor(1) as pool:
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


def test_the_end_of_one_direction_is_passed_on() -> None:
    """A side that has said its last can still be answered, and the answer's end arrives, too."""
    with both_ends() as (client, server):
        send_all(client, b"question")
        assert read_all(server) == b"question"
        send_all(server, b"answer")
        assert read_all(client) == b"answer"


def test_a_reset_ends_both_directions() -> None:
    """When one side is gone without a word, the other side learns of it."""
    with both_ends() as (client, server):
        client.sendall(b"x")
        assert server.recv(1) == b"x"
        # A zero linger time makes close() send RST. Source: socket(7).
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        assert server.recv(1) == b""


def test_a_server_that_is_not_there_ends_the_connection() -> None:
    """Without a server behind it a connection ends instead of hanging."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (
        Delay("127.0.0.1", port, DELAY_S) as delay,
        socket.create_connection(("127.0.0.1", delay.port), TIMEOUT_S) as client,
    ):
        assert client.recv(1) == b""


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
                    assert client.recv(1) == b""


def test_a_session_works_through_it(target_db: Database) -> None:
    """A session with the server works and has its round trips later by twice the delay."""
    with psycopg.connect(target_db.dsn) as direct:
        host, port = direct.info.host, direct.info.port
    with (
        Delay(host, port, DELAY_S) as delay,
        psycopg.connect(make_conninfo(target_db.dsn, host="127.0.0.1", port=delay.port)) as connection,
    ):
        before_s = time.monotonic()
        row = connection.execute("SELECT sum(length(repeat('x', 1000))) FROM generate_series(1, 1000)").fetchone()
        assert time.monotonic() - before_s >= 2 * DELAY_S
        assert row == (1_000_000,)


def test_a_unix_socket_is_found_as_libpq_finds_it(own_servers: OwnServers) -> None:
    """A directory as the host means the server's Unix socket in it."""
    server = own_servers(unix_socket=True)
    with (
        Delay(str(server.socket_dir), server.port, DELAY_S) as delay,
        psycopg.connect(make_conninfo(server.dsn(), port=delay.port)) as connection,
    ):
        assert connection.execute("SELECT inet_client_addr() IS NULL").fetchone() == (True,)

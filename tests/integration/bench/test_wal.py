"""The benchmark's figures of WAL on a real server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg

from bench import wal

if TYPE_CHECKING:
    from parapply.demo.server import PgServer
    from tests.fixtures.servers import OwnServers

_ROWS = 1000
_MAKE = f"""
CREATE TABLE old AS SELECT i AS id, repeat('x', 50) AS note FROM generate_series(1, {_ROWS}) AS i;
CREATE TABLE new (LIKE old);
"""


def written(server: PgServer, *statements: str) -> wal.Wal:
    """Return the WAL of some statements, each a transaction."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        begin = wal.position(connection)
        for statement in statements:
            connection.execute(statement)
        return wal.written_since(server, connection, begin)


def test_records_and_images_are_told_apart(own_servers: OwnServers) -> None:
    """Inserts write a record a row, in several files; changes of old pages after a checkpoint also write the pages."""
    server = own_servers(settings={"autovacuum": False, "full_page_writes": True})
    server.execute(_MAKE)
    # The first to read rows writes hints, and with checksums an image of each page.
    server.execute("SELECT count(*) FROM old")
    server.execute("CHECKPOINT")
    inserted = written(server, "SELECT pg_switch_wal()", "INSERT INTO new SELECT * FROM old")
    server.execute("CHECKPOINT")
    updated = written(server, "UPDATE old SET note = note WHERE id = 1", "UPDATE old SET note = note WHERE id = 2")
    assert written(server).written_bytes < inserted.written_bytes // 10
    assert inserted.written_bytes > _ROWS * 50
    if not (server.binaries.bin_dir / "pg_waldump").exists():
        assert (inserted.records, inserted.image_bytes, inserted.own_bytes) == (None, None, None)
        return
    assert inserted.records is not None
    assert updated.records is not None
    assert _ROWS < inserted.records < _ROWS * 1.1
    assert inserted.image_bytes is not None
    # Of the catalogue's pages at most.
    assert inserted.image_bytes < 4 * 8192
    assert updated.records < 50
    assert updated.image_bytes is not None
    assert updated.image_bytes > 4000
    assert updated.own_bytes is not None
    assert updated.own_bytes < updated.image_bytes


def test_without_the_begin_only_bytes_are_known(own_servers: OwnServers) -> None:
    """Where a checkpoint has removed the begin, bytes remain exact, and nothing else is guessed."""
    server = own_servers(settings={"autovacuum": False, "min_wal_size": "32MB", "wal_keep_size": 0})
    server.execute(_MAKE)
    found = written(
        server,
        *["INSERT INTO new SELECT * FROM old", "SELECT pg_switch_wal()", "CHECKPOINT"] * 4,
    )
    assert found.written_bytes > 3 * 16 * 1024 * 1024
    assert (found.records, found.image_bytes, found.own_bytes) == (None, None, None)

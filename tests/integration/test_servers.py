"""The test bed itself: servers that start, stop, crash and die on every version."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql

from parapply.demo.binaries import (
    PGBIN_VARIABLE,
    Account,
    available,
    find_binaries,
    find_program,
    readable_copy,
    server_account,
)
from parapply.demo.cluster import processes_in
from parapply.demo.errors import DemoError
from parapply.demo.server import PgServer
from tests.fixtures.databases import create_database, drop_database

if TYPE_CHECKING:
    from collections.abc import Iterator

    from parapply.demo.cluster import Setting
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import NewDatabase, OwnServers, ServerOf, ServerPool

every_major = pytest.mark.pg_majors(15, 18)  # the oldest and the newest; those between: test_versions
_NAME = r"it's a \ % {} name"


@pytest.fixture(scope="module")
def server(server_pool: ServerPool, pg_major: int) -> Iterator[PgServer]:
    """A server that tests of this module change and start again, and leave running."""
    settings: dict[str, Setting] = {"cluster_name": _NAME, "track_commit_timestamp": True}
    made = server_pool.new("own", pg_major, settings, unix_socket=True)
    yield made
    made.cleanup()


@every_major
def test_session_servers_have_the_version_and_replicate(
    source_db: Database, target_db: Database, pg_major: int
) -> None:
    """A test gets two empty databases on two servers of its version, ready for logical replication."""
    assert int(source_db.rows("SHOW server_version_num")[0][0]) // 10000 == pg_major
    for database in (source_db, target_db):
        assert database.rows("SHOW wal_level") == [("logical",)]
        assert database.rows("SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace") == [(0,)]
    assert source_db.rows("SELECT system_identifier FROM pg_control_system()") != target_db.rows(
        "SELECT system_identifier FROM pg_control_system()"
    )


@every_major
@pytest.mark.crash
def test_committed_rows_survive_crash_and_kill(own_servers: OwnServers) -> None:
    """Committed rows are present after an immediate stop and after SIGKILL, on the same port; others are not."""
    server = own_servers()
    port = server.port
    server.execute("CREATE TABLE t (i int)")
    for expected, end in enumerate((server.stop, server.crash, server.kill), start=1):
        server.execute("INSERT INTO t VALUES (%s)", [expected])
        with psycopg.connect(server.dsn()) as open_transaction:
            open_transaction.execute("INSERT INTO t VALUES (0)")
            end()
            assert not server.is_running()
            assert processes_in(server.data_dir) == []
            open_transaction.close()
        server.start()
        assert server.port == port
        assert server.execute("SELECT count(*), min(i) FROM t") == [(expected, 1)]


@pytest.mark.crash
def test_removed_server_leaves_nothing(own_servers: OwnServers) -> None:
    """A killed and removed server leaves no file, no process and no shared memory."""
    server = own_servers()
    directory, data_dir = server.directory, server.data_dir
    segments = {path for path in Path("/dev/shm").glob("PostgreSQL.*") if _is_mapped(path, processes_in(data_dir))}
    assert segments
    server.kill()
    server.cleanup()
    assert not directory.exists()
    assert not any(path.exists() for path in segments)
    server.cleanup()


@pytest.mark.crash
def test_server_dies_with_its_owner(pg_major: int) -> None:
    """When the process that started a server is killed, the server ends and its directory is removed."""
    script = (
        "import json, sys; from parapply.demo.binaries import find_binaries; from parapply.demo.server import PgServer;"
        f"s = PgServer(binaries=find_binaries({pg_major}), name='orphan').__enter__();"
        "print(json.dumps([str(s.directory), s.pid, s._guardian._process.pid]), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout
        directory, postmaster_pid, guardian_pid = json.loads(owner.stdout.readline())
        watched = [os.pidfd_open(postmaster_pid), os.pidfd_open(guardian_pid)]
        assert Path(directory).exists()
        owner.kill()
    try:
        for descriptor in watched:
            assert select.select([descriptor], [], [], 20.0)[0], "did not end with its owner"
    finally:
        for descriptor in watched:
            os.close(descriptor)
    assert not Path(directory).exists()


@pytest.mark.crash
def test_kept_server_outlives_its_context(own_servers: OwnServers) -> None:
    """After `keep` a server runs on when its context ends; stopping it is then the user's business."""
    server = own_servers("kept")
    directory = server.directory
    server.keep()
    server.cleanup()
    assert server.is_running()
    assert server._guardian is None
    server.stop()
    shutil.rmtree(directory)


@pytest.mark.crash
def test_failed_start_shows_the_log(server: PgServer) -> None:
    """A server that cannot start says so at once, with what it wrote to its log; it starts when that is mended."""
    server.stop()
    server.configure({"max_connections": "many"})
    with pytest.raises(DemoError, match=r"max_connections") as failure:
        server.start()
    assert failure.value.exit_code == 2
    assert not server.is_running()
    server.configure({"max_connections": 50})
    server.start()
    assert server.execute("SHOW max_connections") == [("50",)]


@pytest.mark.crash
def test_settings_are_quoted_and_applied(server: PgServer) -> None:
    """A setting reaches the server as given, whatever is in it; the Unix socket works when asked for."""
    assert server.execute("SHOW cluster_name") == [(_NAME,)]
    with psycopg.connect(server.dsn(unix_socket=True)) as connection:
        assert connection.execute("SHOW track_commit_timestamp").fetchone() == ("on",)
    server.configure({"max_prepared_transactions": 0})
    server.restart()
    assert server.execute("SHOW max_prepared_transactions") == [("0",)]


@pytest.mark.crash
def test_clients_of_the_installation_run(server: PgServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients reach the server whatever PG variables the caller has; a failing one is an error with its text."""
    monkeypatch.setenv("PGOPTIONS", "-c no_such_setting=1")
    server.run("pgbench", "-i", "-q")
    assert server.run("psql", "-Atc", "SELECT count(*) FROM pgbench_branches").stdout == "1\n"
    with pytest.raises(DemoError, match="does not exist"):
        server.run("psql", "-c", "SELECT * FROM missing")
    with pytest.raises(DemoError, match="no_such_program was not found"):
        find_program("no_such_program", server.binaries)


def test_statement_errors_are_ours_with_their_sqlstate(source_db: Database) -> None:
    """An SQL error comes as DemoError with the SQLSTATE; a percent sign without parameters means itself."""
    assert source_db.rows("SELECT 5 % 3; SELECT '%s'") == [("%s",)]
    with pytest.raises(DemoError) as failure:
        source_db.execute("SELECT 1 / 0")
    assert failure.value.sqlstate == "22012"


def test_dropped_database_lets_go_of_everything(source_db: Database) -> None:
    """A database with an active slot, a prepared transaction, sessions and an odd name is removed after its test."""
    database = create_database(source_db.server, 'odd "%s" {}')
    database.execute("SELECT pg_create_logical_replication_slot('held_by_test', 'pgoutput')")
    database.execute("CREATE TABLE t (i int); CREATE PUBLICATION p FOR ALL TABLES")
    # Not as context managers: these would commit on sessions that are ended by then.
    with closing(database.connect()) as writer, closing(database.connect(replication="database")) as reader:
        writer.execute("BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'left behind'")
        reader.pgconn.send_query(
            b"START_REPLICATION SLOT held_by_test LOGICAL 0/0 (proto_version '1', publication_names 'p')"
        )
        assert reader.pgconn.get_result()
        drop_database(database)
    assert source_db.rows("SELECT 1 FROM pg_replication_slots WHERE slot_name = 'held_by_test'") == []
    assert source_db.execute("SELECT 1 FROM pg_database WHERE datname = %s", [database.dbname]) == []


@pytest.mark.needs_majors(15, 18)
def test_built_in_replication_from_15_to_18(server_of: ServerOf, new_database: NewDatabase) -> None:
    """A built-in subscription carries rows from 15 to 18: the settings suit logical replication."""
    source = new_database(server_of("source", 15), "source")
    target = new_database(server_of("target", 18), "target")
    for database in (source, target):
        database.execute("CREATE TABLE t (i int PRIMARY KEY, v text)")
    source.execute("INSERT INTO t VALUES (1, 'copied'); CREATE PUBLICATION p FOR TABLE t")
    target.execute(
        sql.SQL("CREATE SUBSCRIPTION {} CONNECTION {} PUBLICATION p").format(
            sql.Identifier(target.dbname), sql.Literal(source.dsn)
        )
    )
    source.execute("INSERT INTO t VALUES (2, 'streamed')")
    target.wait_until("SELECT count(*) = 2 FROM t")
    assert target.rows("SELECT * FROM t ORDER BY i") == [(1, "copied"), (2, "streamed")]


def test_explicit_directory_without_a_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PARAPPLY_PGBIN without a server is an error that names it; a missing version is one that says what to do."""
    monkeypatch.setenv(PGBIN_VARIABLE, str(tmp_path))
    with pytest.raises(DemoError, match=str(tmp_path)):
        find_binaries()
    monkeypatch.delenv(PGBIN_VARIABLE)
    with pytest.raises(DemoError, match="PostgreSQL 9 was not found") as failure:
        find_binaries(9)
    assert PGBIN_VARIABLE in failure.value.hint


@pytest.mark.crash
def test_explicit_directory_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """PARAPPLY_PGBIN is taken before anything else, also before a newer version."""
    oldest = available()[-1]
    monkeypatch.setenv(PGBIN_VARIABLE, os.pathsep.join([str(oldest.bin_dir), str(oldest.bin_dir)]))
    assert find_binaries() == oldest


def test_readable_copy_keeps_its_shape_and_a_foreign_one_is_refused() -> None:
    """Programs in a private directory are copied once to where others can read them; a planted copy is not used."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        tree = place / "private" / "package" / "tree"
        for part in (tree / "bin", tree / "lib", tree / "share", place / "private" / "package.libs"):
            part.mkdir(parents=True)
            (part / "program").write_bytes(b"program")
            (part / "program").chmod(0o700)
        (place / "private").chmod(0o700)
        copied = readable_copy(tree, version_text="1.0", parent=place)
        copy = copied.parent.parent
        assert (copied / "bin" / "program").stat().st_mode & 0o777 == 0o755
        assert (copy / "package.libs" / "program").read_bytes() == b"program"
        assert copy.stat().st_mode & 0o777 == 0o755
        assert (place / "private").stat().st_mode & 0o777 == 0o700
        assert readable_copy(tree, version_text="1.0", parent=place) == copied
        copy.chmod(0o777)
        with pytest.raises(DemoError, match="only this user can write"):
            readable_copy(tree, version_text="1.0", parent=place)
        shutil.rmtree(copy)
        copy.symlink_to(place / "private")
        with pytest.raises(DemoError, match="only this user can write"):
            readable_copy(tree, version_text="1.0", parent=place)


@pytest.mark.crash
def test_parent_that_cannot_be_entered_is_named(tmp_path: Path, pg_major: int) -> None:
    """A directory that the server's account cannot enter is an error that says so, and nothing stays behind."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700 if server_account() else 0o500)
    server = PgServer(parent=closed, binaries=find_binaries(pg_major))
    with pytest.raises((DemoError, PermissionError)) as failure:
        server.init()
    assert str(closed) in f"{failure.value} {getattr(failure.value, 'hint', '')}"
    assert list(closed.iterdir()) == []


@pytest.mark.crash
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a program as a user who is not there")
def test_a_user_without_an_entry_is_named(pg_major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of initdb as a user whom /etc/passwd does not have, as in many a container, ends with a hint that helps."""
    without_entry = Account(name="none", uid=54_321, gid=54_321)
    monkeypatch.setattr("parapply.demo.cluster.server_account", lambda: without_entry)
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        with pytest.raises(DemoError, match="effective user ID 54321") as failure:
            PgServer(parent=Path(place), binaries=find_binaries(pg_major)).init()
    assert "/etc/passwd" in failure.value.hint


@pytest.mark.crash
def test_reload_applies_a_setting(server: PgServer, new_database: NewDatabase) -> None:
    """A changed setting that needs no restart comes with a reload."""
    server.configure({"log_min_duration_statement": 4321})
    server.reload()
    new_database(server).wait_until("SELECT current_setting('log_min_duration_statement') = '4321ms'")


@pytest.mark.docker
def test_container_answers() -> None:
    """Where docker runs, a container serves as a server too."""
    from testcontainers.community.postgres import PostgresContainer  # noqa: PLC0415 - only where docker is

    with (
        PostgresContainer("postgres:18", driver=None) as container,
        psycopg.connect(container.get_connection_url()) as connection,
    ):
        assert connection.info.server_version // 10000 == 18


def _is_mapped(path: Path, pids: list[int]) -> bool:
    """Return whether one of the processes has a file in its memory; one that has just ended has not."""
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            if str(path) in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8"):
                return True
    return False

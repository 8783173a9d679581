"""`parapply check` on real servers: all that is wrong is found at once, and what is right is not complained of."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from parapply.check import look as check_look
from parapply.check.kinds import Code
from parapply.check.look import look
from parapply.check.source import CheckOptions
from parapply.config import Config, load_config
from parapply.target.session import origins
from tests.fixtures.plain import foreign_transaction, plain_route
from tests.fixtures.route import Route
from tests.system.check_cases import FOUND, SOURCE, TARGET

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import OwnServers


def report_of(route: Route, run_command: RunCommand, *options: str) -> dict[str, Any]:
    """Return the JSON of a check, whose exit code is the one of the process."""
    done = run_command(route, "check", "--json", *options)
    assert not done.stderr, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["exit_code"] == done.returncode
    return report


@pytest.mark.pg_majors(15, 18)
def test_everything_wrong_is_found_at_once(source_db: Database, target_db: Database, run_command: RunCommand) -> None:
    """One report has every finding, with the quoted object and the SQL that mends it; and no other finding."""
    source_db.execute(SOURCE)
    target_db.execute(TARGET.format(role=target_db.target_role))
    wrong = ('conflict.tables."public.type".insert_exists=skip', 'apply.tables."nosuch.table".parallel=always')
    settings = [word for one in ("ddl.apply=true", *wrong) for word in ("--set", one)]
    report = report_of(Route(source=source_db, target=target_db), run_command, "--copy", *settings)
    found = [(one["code"], one["object"], f"{one['found']} {one['fix']}") for one in report["findings"]]
    for one in FOUND:
        key = (one.code.text, one.object)
        assert [text for code, name, text in found if (code, name) == key and one.words in text], one
    expected = {(one.code.text, one.object) for one in FOUND}
    assert [one for one in found if one[:2] not in expected] == []
    assert report["exit_code"] == 4


@pytest.mark.pg_majors(15, 18)
@pytest.mark.bare_target
def test_a_clean_pair_is_fine(source_db: Database, target_db: Database, run_command: RunCommand) -> None:
    """With the roles of config/roles only notes are reported, exit 0, and nothing was made; after init likewise."""
    tables = "CREATE TABLE t (i int PRIMARY KEY, v text NOT NULL); CREATE TABLE u (i int PRIMARY KEY REFERENCES t)"
    source_db.execute(f"{tables}; INSERT INTO t VALUES (1, ''); CREATE PUBLICATION pub FOR ALL TABLES")
    target_db.execute(tables)
    route = Route(source=source_db, target=target_db)
    report = report_of(route, run_command, "--copy")
    assert {one["severity"] for one in report["findings"]} == {"note"}
    assert report["exit_code"] == 0
    assert [(one["table_name"], one["lane"]) for one in report["tables"]] == [("t", "set-based"), ("u", "set-based")]
    assert _made(route) == []
    done = run_command(route, "init", "--copy")
    assert (done.returncode, "warning" in done.stdout) == (0, False), done
    # The rows that the copy brought, and the slot, are what is to be there.
    report = report_of(route, run_command, "--copy")
    assert (report["exit_code"], report["is_known"]) == (0, True)
    assert "0 refused, 0 warning" in run_command(route, "check").stdout


async def test_a_daemon_that_runs_does_not_look_as_if_the_publisher_was_put_back(
    source_db: Database,
    target_db: Database,
    new_slot: Callable[[Route], None],
    start_daemon: StartDaemon,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check reads both ends one after the other, and the daemon applies more in between."""
    route = plain_route(source_db, target_db, new_slot)
    daemon = start_daemon(route)
    daemon.wait_for_event("source_connected")
    read_target = check_look._known

    async def later(*arguments: Any) -> Any:  # noqa: ANN401  its own
        source_db.execute("INSERT INTO evt SELECT generate_series(1, 100)")
        daemon.wait_caught_up()
        return await read_target(*arguments)

    monkeypatch.setattr(check_look, "_known", later)
    report = await look(config_of(source_db, target_db, **{"source.slot": route.slot}), CheckOptions())
    assert report.is_known
    assert Code.SLOT_REFUSED not in {one.code for one in report.findings}


def _made(route: Route) -> list[object]:
    """Return what `init` would have made."""
    slots = route.source.rows("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()")
    return [*slots, *route.target.rows("SELECT nspname FROM pg_namespace WHERE nspname = 'parapply'")]


@pytest.mark.bare_target
def test_init_looks_first(source_db: Database, target_db: Database, run_command: RunCommand) -> None:
    """Init reports every refusal in a line and makes nothing; it goes on with an arguable one, and prints warnings."""
    source_db.execute("CREATE TABLE gone (i int PRIMARY KEY); CREATE TABLE keyless (i int); CREATE TABLE other (i int)")
    source_db.execute("CREATE PUBLICATION pub FOR TABLE gone, keyless")
    target_db.execute("CREATE TABLE keyless (i int)")
    route = Route(source=source_db, target=target_db)
    done = run_command(route, "init", "--publication", "nowhere")
    first, last = done.stderr.splitlines()
    assert first.startswith('parapply: target, table_missing: "public"."gone" is published but missing here. Hint: ')
    assert first.endswith("or go on all the same with --despite table_missing")
    assert last.startswith('parapply: source, publication_missing: no publication "nowhere"')
    # The publisher's refusal decides, and is not arguable.
    assert (done.returncode, "despite" in last, _made(route)) == (3, False, []), done
    # `check` ends as `init` does.
    run_command(route, "check", "--publication", "nowhere", code=3)
    run_command(route, "check", code=4)
    done = run_command(route, "init")
    assert (done.returncode, len(done.stderr.splitlines()), _made(route)) == (4, 1, []), done
    done = run_command(route, "init", "--despite", "slot_refused")
    assert (done.returncode, "--despite slot_refused: init cannot go on with that" in done.stderr) == (2, True), done
    done = run_command(route, "init", "--despite", "table_missing", code=0)
    for words in (
        "warning: source, replica_identity: replica identity DEFAULT without a primary key",
        'ALTER TABLE "public"."keyless" REPLICA IDENTITY FULL;',
        'refused: target, table_missing: "public"."gone"',
    ):
        assert words in done.stdout, done.stdout
    assert "other" not in done.stdout, "notes are for `parapply check`"
    # Objects that exist are not checked again.
    done = run_command(route, "init")
    assert (done.returncode, "nothing to do" in done.stdout, "replica_identity" in done.stdout) == (0, True, False), (
        done
    )


@pytest.mark.pg_majors(15, 18)
@pytest.mark.bare_target
def test_locked_tables_are_not_waited_for(source_db: Database, target_db: Database, run_command: RunCommand) -> None:
    """A table that a transaction keeps locked, on either end, is named with its process; then check and init end."""
    for database in (source_db, target_db):
        database.execute("CREATE TABLE t (i int PRIMARY KEY); CREATE TABLE u (i int PRIMARY KEY)")
    source_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    route = Route(source=source_db, target=target_db)
    with foreign_transaction(source_db, "TRUNCATE t") as holder:
        for command in (["check"], ["init"]):
            done = run_command(route, *command)
            (line,) = done.stderr.splitlines()
            assert done.returncode == 3, done
            assert f"tables are locked: public.t (process {holder.info.backend_pid})" in line
    with foreign_transaction(target_db, "LOCK TABLE u IN ACCESS EXCLUSIVE MODE") as holder:
        for command in (["check", "--copy"], ["init", "--copy"]):
            done = run_command(route, *command)
            (line,) = done.stderr.splitlines()
            assert done.returncode == 4, done
            assert f"tables are locked: public.u (process {holder.info.backend_pid})" in line
    assert _made(route) == []


def test_a_role_needs_what_is_published(source_db: Database, target_db: Database, run_command: RunCommand) -> None:
    """Of a publication of inserts neither UPDATE nor DELETE is asked for; a copy also reads single columns."""
    for database in (source_db, target_db):
        database.execute("CREATE TABLE t (i int PRIMARY KEY, secret int)")
    source_db.execute("CREATE PUBLICATION pub FOR TABLE t (i) WITH (publish = 'insert')")
    role = source_db.source_role
    source_db.execute(f"REVOKE ALL ON t FROM {role}; GRANT SELECT (i) ON t TO {role}")
    target_db.execute(f"REVOKE UPDATE, DELETE ON t FROM {target_db.target_role}")
    report = report_of(Route(source=source_db, target=target_db), run_command, "--copy")
    assert [one for one in report["findings"] if one["severity"] != "note"] == []


def test_a_page_for_people(source_db: Database, target_db: Database, run_command: RunCommand) -> None:
    """The worst comes first, and SQL stays on one line however narrow the terminal is."""
    name = "t" * 60
    source_db.execute(f"CREATE TABLE {name} (i int); CREATE PUBLICATION pub FOR ALL TABLES")
    done = run_command(Route(source=source_db, target=target_db), "check", environ={"COLUMNS": "40"}, code=4)
    at = [done.stdout.index(words) for words in ("REFUSED (1)", "WARNING (1)", "NOTE (", "1 refused, 1 warning")]
    assert at == sorted(at)
    assert f'ALTER TABLE "public"."{name}" REPLICA IDENTITY FULL;' in done.stdout


@pytest.mark.parametrize("count", [2, 90])
async def test_queries_do_not_grow_with_the_tables(
    source_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Ten thousand tables are asked about as one is: by the same number of statements."""
    tables = "; ".join(f"CREATE TABLE t{number} (i int PRIMARY KEY)" for number in range(count))
    source_db.execute(f"{tables}; CREATE PUBLICATION pub FOR ALL TABLES")
    target_db.execute(tables)
    n_statements = 0
    execute = psycopg.AsyncCursor.execute

    async def counted(cursor: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401  psycopg's
        nonlocal n_statements
        n_statements += 1
        return await execute(cursor, *arguments, **options)

    monkeypatch.setattr(psycopg.AsyncCursor, "execute", counted)
    report = await look(config_of(source_db, target_db), CheckOptions())
    assert len(report.plans) == count
    assert 0 < n_statements < 45


def config_of(source: Database, target: Database, **flags: object) -> Config:
    """Return a configuration between two databases, as the roles of config/roles."""
    given = {
        "source.dsn": source.source_role_dsn, "target.dsn": target.target_role_dsn, "source.slot": "checked",
        "source.publications": ("pub",), **flags,
    }  # fmt: skip
    return load_config(flags=given, environ={})


#: Things that a publisher and a target can lack as servers, and the words that must be reported of each.
_SERVER_CODES = {
    Code.WAL_LEVEL: "wal_level = 'logical'", Code.SOURCE_REPLICATION: 'ALTER ROLE "poor" REPLICATION;',
    Code.SOURCE_CONNECTIONS: "", Code.SLOTS_EXHAUSTED: "max_replication_slots", Code.SOURCE_SELECT: "GRANT USAGE",
    Code.WAL_SENDERS_EXHAUSTED: "max_wal_senders", Code.OPEN_TRANSACTION: "ROLLBACK PREPARED",
    Code.WAL_SENDER_TIMEOUT: "5 s", Code.PUBLICATION_MISSING: '"other"',
    Code.REPLICATION_ROLE: "GRANT SET ON PARAMETER session_replication_role", Code.STATE_SCHEMA: "GRANT CREATE",
    Code.TWO_PHASE: "max_prepared_transactions", Code.TARGET_CONNECTIONS: "needs 24 connections",
    Code.ORIGINS_NEEDED: "max_replication_slots", Code.COMMIT_TIMESTAMPS: "track_commit_timestamp",
    Code.ENCODING: "LATIN1",
    Code.EXTENSION_MISSING: 'CREATE EXTENSION "citext";', Code.SPILL_SPACE: "spill_limit_bytes",
}  # fmt: skip


@pytest.mark.pg_majors(15)
async def test_servers_that_lack_everything(own_servers: OwnServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each missing limit, setting and privilege of the servers is reported with its remedy, all in one report."""
    source = own_servers("poor_source", settings={
        "wal_level": "replica", "max_replication_slots": 0, "max_wal_senders": 0, "wal_sender_timeout": "5s",
    })  # fmt: skip
    target = own_servers("poor_target", settings={
        "max_connections": 20, "max_prepared_transactions": 0, "track_commit_timestamp": "off",
        "max_replication_slots": 2,
    })  # fmt: skip
    source.execute("CREATE DATABASE poor")
    source.execute("CREATE ROLE poor LOGIN CONNECTION LIMIT 3")
    source.execute("CREATE EXTENSION citext; CREATE TABLE t (c citext PRIMARY KEY)", dbname="poor")
    source.execute("CREATE PUBLICATION pub FOR TABLE t", dbname="poor")
    source.execute("BEGIN; INSERT INTO t VALUES (''); PREPARE TRANSACTION 'it''s open'", dbname="poor")
    target.execute("CREATE DATABASE poor ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    target.execute("CREATE ROLE poor LOGIN")
    monkeypatch.setattr("parapply.check.source._OLD_TRANSACTION_S", 0)
    config = load_config(environ={}, flags={
        "source.dsn": source.dsn("poor", user="poor"), "target.dsn": target.dsn("poor", user="poor"),
        "source.slot": "checked", "source.publications": ("pub", "other"), "source.two_phase": True,
        "apply.workers": 20, "conflict.update_origin_differs": "error", "apply.spill_limit_bytes": 1 << 60,
    })  # fmt: skip
    report = await look(config, CheckOptions(is_copy=True))
    for code, words in _SERVER_CODES.items():
        told = [f"{one.found} {one.fix}" for one in report.findings if one.code is code]
        assert [text for text in told if words in text], (code, told)
    assert {one.code for one in report.findings} - set(_SERVER_CODES) <= {
        Code.TABLE_MISSING, Code.LOCALE, Code.WAL_RETENTION,
    }  # fmt: skip


@pytest.mark.pg_majors(18)
def test_what_the_daemon_would_refuse_is_refused(
    source_db: Database, target_db: Database, run_command: RunCommand
) -> None:
    """Missing rights that end a daemon or a copy later, and the state of a slot that no daemon goes on with."""
    for database in (source_db, target_db):
        database.execute("CREATE TABLE hidden (i int PRIMARY KEY); CREATE TABLE part (i int PRIMARY KEY, v int)")
    role = source_db.source_role
    source_db.execute("CREATE PUBLICATION pub FOR ALL TABLES; ALTER TABLE hidden ENABLE ROW LEVEL SECURITY;"
                      f"REVOKE SELECT ON part FROM {role}; GRANT SELECT (i) ON part TO {role}")  # fmt: skip
    functions = ", ".join(origins.FUNCTIONS)
    target_db.execute(f"REVOKE EXECUTE ON FUNCTION {functions} FROM {target_db.target_role}")
    settings = {"source.origin": "none", "ddl.apply": "true", "ddl.role": "nosuch"}
    route = Route(source=source_db, target=target_db, settings=settings)
    found = [(one["code"], one["object"]) for one in report_of(route, run_command, "--copy")["findings"]
             if one["severity"] == "refused"]  # fmt: skip
    wanted = {"source_select": ('"public"."hidden"', '"public"."part"'), "ddl_role": ('"nosuch"',),
              "origins_needed": (f'"{target_db.target_role}"',)}  # fmt: skip
    assert sorted(found) == sorted((code, name) for code, names in wanted.items() for name in names)
    route = Route(source=source_db, target=target_db)
    run_command(route, "init", code=0)
    columns = "slot_id, step, reverse_slot, made_slot, made_publication, fence, opens"
    values = "slot_id, 'turning', 'back', true, true, 'database', true"
    target_db.execute(f"INSERT INTO parapply.cutovers ({columns}) SELECT {values} FROM parapply.slots")
    ((slot_id,),) = target_db.rows("SELECT slot_id FROM parapply.slots")
    gid = f"parapply_{slot_id}_700_0/1"
    target_db.execute(f"BEGIN; INSERT INTO part VALUES (1); PREPARE TRANSACTION '{gid}'")
    try:
        codes = [one["code"] for one in report_of(route, run_command)["findings"] if one["severity"] == "refused"]
    finally:
        target_db.execute(f"ROLLBACK PREPARED '{gid}'")
    assert codes == ["cut_over", "prepared_pending"]


def test_one_database_is_not_followed_into_itself(source_db: Database, run_command: RunCommand) -> None:
    """Two ways to one database are refused by `check`, `init` and `run` (exit 4): each change would come again."""
    source_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR ALL TABLES")
    route = Route(source=source_db, target=source_db, source_dsn=f"{source_db.dsn} application_name=other")
    for command in ("check", "init", "run"):
        done = run_command(route, command)
        assert (done.returncode, "lead to one database" in done.stderr) == (4, True), done
    assert source_db.rows("SELECT count(*) FROM pg_namespace WHERE nspname = 'parapply'") == [(0,)]

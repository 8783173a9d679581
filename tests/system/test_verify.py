"""`verify`: equal tables are equal while both sides are in use, and every kind of difference is found and named."""

from __future__ import annotations

import asyncio
import json
import uuid
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any, cast

import psycopg
import pytest

from parapply.config import load_config
from parapply.cutover.comparison import CutoverComparison
from parapply.errors import SourceRefused
from parapply.verify import command, postgres
from parapply.verify.command import VerifyAgain, VerifyOptions, comparison
from parapply.verify.postgres import VerifyEnd
from tests.fixtures.plain import FAST
from tests.fixtures.route import Route
from tests.fixtures.workloads import BankLoad, create_bank
from tests.system.verify_cases import DAMAGE, PUBLICATION, ROWS, TABLES, damaged

if TYPE_CHECKING:
    from parapply.config import Config
    from parapply.verify.postgres import Compared
    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database


#: A key whose values may be equal and print apart.
_EQUAL_KEYS = "CREATE TABLE equal_keys (n numeric PRIMARY KEY, v text);"
#: A column that no UPDATE may set, and one whose text depends on the session.
_SPECIAL = (
    "CREATE TABLE numbered (id int PRIMARY KEY, n bigint GENERATED ALWAYS AS IDENTITY, v text);"
    "CREATE TABLE named (r regclass);"
)
#: Besides, keys that have several rows there.
_MORE_DAMAGE = """
UPDATE keyed SET own = a; ALTER TABLE keyed DROP CONSTRAINT keyed_pkey;
UPDATE keyed SET v = 'w' WHERE a = 20; INSERT INTO keyed SELECT * FROM keyed WHERE a IN (20, 21);
UPDATE equal_keys SET n = 1.00; UPDATE numbered SET v = 'w', own = 1; INSERT INTO named VALUES ('keyed');
CREATE TABLE child (id int REFERENCES numbered ON DELETE CASCADE); INSERT INTO child VALUES (1);
"""
#: A trigger that needs its own search_path.
_REFUSING = """
CREATE FUNCTION refusing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM FROM keyed; RETURN OLD; END';
CREATE TRIGGER refusing BEFORE DELETE ON loose FOR EACH ROW EXECUTE FUNCTION refusing();
"""


@pytest.mark.pg_majors(15)  # the newest: test_compared_tables_are_unlocked
def test_differences_are_found_and_named(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """Rows missing, extra and different, NULL against an empty text, one of several equal rows, one in a partition.

    The statements it prints make the target equal again; the target's tables are partitioned in another way.
    """
    source_db.execute(TABLES + _EQUAL_KEYS + _SPECIAL + ROWS + "INSERT INTO equal_keys VALUES (1.0, 'v');"
                      "INSERT INTO numbered (id) VALUES (1); INSERT INTO named VALUES ('named')")  # fmt: skip
    source_db.execute(f"{PUBLICATION}; ALTER PUBLICATION pub ADD TABLE equal_keys, numbered, named")
    target_db.execute(TABLES + _EQUAL_KEYS + _SPECIAL +
                      "ALTER TABLE part_root DETACH PARTITION part_2; DROP TABLE part_2;"
                      "CREATE TABLE part_rest PARTITION OF part_root DEFAULT;"
                      "ALTER TABLE keyed ADD own int; ALTER TABLE numbered ADD own int")  # fmt: skip
    route = Route(source=source_db, target=target_db, settings=FAST)
    run_command(route, "init", "--copy", code=0)
    start_daemon(route).wait_for_event("source_connected")
    equal = run_command(route, "verify")
    assert (equal.returncode, equal.stderr) == (0, "")
    assert "public.keyed: equal, 500 rows" in equal.stdout
    target_db.execute(DAMAGE + _MORE_DAMAGE)
    done = run_command(route, "verify", "--json", "--statements", code=1)
    report = json.loads(done.stdout)
    found = {
        table["table_name"]: [(one["kind"], one["key"][0], one["count"]) for one in table["differences"]]
        for table in report["tables"]
    }
    assert found == {
        "equal_keys": [("missing", "1.0", 1), ("extra", "1.00", 1)],
        "keyed": [
            ("missing", "7", 1),
            ("different", "11", 1),
            ("different", "12", 1),
            ("different", "20", 1),
            ("extra", "20", 1),
            ("extra", "21", 1),
            ("extra", "9001", 1),
        ],
        "loose": [("missing", "0", 1), ("extra", "1", 1)],
        "named": [("extra", "public.keyed", 1)],
        "numbered": [("different", "1", 1)],
        "part_root": [("different", "700", 1)],
    }
    shown = run_command(route, "verify", "--table", "public.keyed", "--max-keys", "2", code=1)
    assert "missing   a=7, b c=k7" in shown.stdout
    assert "more than 2 keys differ" in shown.stdout
    texts = [text for table in report["tables"] for text in table["statements"]]
    assert "-- not set, since no UPDATE can: n" in texts
    before = target_db.rows("SELECT count(*) FROM loose")
    with target_db.connect() as conn:
        conn.execute("SET TimeZone = 'Asia/Tokyo';" + _REFUSING)
        # As psql does, which goes on after an error.
        for text in texts:
            with suppress(psycopg.Error):
                conn.execute(text)
        assert target_db.rows("SELECT count(*) FROM loose") == before
        conn.execute("DROP TRIGGER refusing ON loose")
        conn.execute("".join(next(table["statements"] for table in report["tables"] if table["table_name"] == "loose")))
    run_command(route, "verify", code=0)
    assert target_db.rows("SELECT own, (SELECT count(*) FROM child) FROM numbered") == [(1, 1)]
    # All but the rows with several of one key are updated, and keep what is not published.
    assert target_db.rows("SELECT a FROM keyed WHERE own IS NULL ORDER BY a") == [(7,), (20,), (21,)]


_RANGES = {
    "numbers": "CREATE TABLE numbers (a {int}, b int, v text, PRIMARY KEY (a, b))",
    "times": "CREATE TABLE times (at timestamptz PRIMARY KEY, v text)",
    "uuids": "CREATE TABLE uuids (id uuid PRIMARY KEY, v text)",
    "texts": "CREATE TABLE texts (id text PRIMARY KEY, v text)",
    "few": "CREATE TABLE few (a int, b int, PRIMARY KEY (a, b))",
}
_MANY_ROWS = """
INSERT INTO numbers SELECT i - 10500, i % 7, 'v' FROM generate_series(1, 21000) AS i;
INSERT INTO times SELECT timestamptz '2026-01-01' + i * interval '1 min', 'v' FROM generate_series(1, 21000) AS i;
INSERT INTO uuids SELECT md5(i::text)::uuid, 'v' FROM generate_series(1, 21000) AS i;
INSERT INTO texts SELECT md5(i::text), 'v' FROM generate_series(1, 21000) AS i;
INSERT INTO few SELECT i % 2, i FROM generate_series(1, 21000) AS i;
"""
_DAMAGE_MANY = """
DELETE FROM numbers WHERE a = -10499; UPDATE numbers SET v = 'w' WHERE a = 7;
INSERT INTO numbers VALUES (900000, 1, 'x');
UPDATE times SET v = 'w' WHERE at = '2026-01-02 00:00:00Z'; DELETE FROM times WHERE at > '2026-01-15 13:59Z';
UPDATE uuids SET v = 'w' WHERE id = md5('4711')::uuid; UPDATE texts SET v = 'w' WHERE id = md5('4711');
DELETE FROM few WHERE b = 77;
ALTER TABLE numbers DROP CONSTRAINT numbers_pkey, ALTER a DROP NOT NULL; INSERT INTO numbers VALUES (NULL, 1, 'x');
"""


@pytest.mark.pg_majors(15)  # the oldest: what it has to offer, the others have
def test_one_row_is_found_in_any_kind_of_range(
    source_db: Database,
    target_db: Database,
    run_command: RunCommand,
    start_daemon: StartDaemon,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Tables of several ranges, by the key's order or by hash; also below and above all bounds, on either end."""
    source_db.execute(";".join(_RANGES.values()).format(int="int"))
    source_db.execute(_MANY_ROWS + "ANALYZE; CREATE PUBLICATION pub FOR ALL TABLES")
    target_db.execute(";".join(_RANGES.values()).format(int="bigint"))
    route = Route(source=source_db, target=target_db, settings=FAST)
    run_command(route, "init", "--copy", code=0)
    start_daemon(route).wait_for_event("source_connected")
    # As a cut-over makes its state on the publisher, before the stream has sent anything of it.
    source_db.execute(
        "CREATE SCHEMA state; CREATE TABLE state.schema_version (version int NOT NULL);"
        "CREATE UNIQUE INDEX schema_version_one_row ON state.schema_version ((true));"
        "CREATE TABLE state.slots (id int);"
        # Rewritten, as an upgrade does it: of such a table of others the stream may not have all rows.
        "ALTER TABLE state.slots ADD COLUMN at timestamptz NOT NULL DEFAULT clock_timestamp()"
    )
    equal = run_command(route, "verify")
    assert (equal.returncode, equal.stderr) == (0, ""), equal.stdout
    assert target_db.rows("SELECT count(*) FROM parapply.copies WHERE schema_name = 'state'") == [(0,)]
    source_db.execute("CREATE PUBLICATION hollow")
    _check_nothing(_config(replace(route, publication="hollow")))
    sampled = run_command(route, "verify", "--sampled", "1")
    assert (sampled.returncode, "equal (of 4 only a sample)" in sampled.stdout) == (0, True), sampled.stdout
    target_db.execute("UPDATE numbers SET v = 'w'")
    run_command(route, "verify", "--sampled", "1", "--table", "public.numbers", code=1)
    target_db.execute("UPDATE numbers SET v = 'v'")
    _check_again(route, capsys)
    target_db.execute(_DAMAGE_MANY)
    done = run_command(route, "verify", "--json", code=1)
    found = {
        table["table_name"]: [(one["kind"], one["key"][0]) for one in table["differences"]]
        for table in json.loads(done.stdout)["tables"]
    }
    hashed = "b52340b4de4566b804c9880aa0b4af5f"
    assert found == {
        "few": [("missing", "1")],
        "numbers": [("missing", "-10499"), ("different", "7"), ("extra", "900000"), ("extra", None)],
        "texts": [("different", hashed)],
        "times": [("different", "2026-01-02 00:00:00+00"), ("missing", "2026-01-15 14:00:00+00")],
        "uuids": [("different", str(uuid.UUID(hashed)))],
    }


def _check_nothing(hollow: Config) -> None:
    """No table at all is an error, also of one database of several; a cut-over says so and goes on."""
    with pytest.raises(SourceRefused, match="hollow have no table to compare"):
        asyncio.run(comparison(hollow, VerifyOptions()))
    cutover = CutoverComparison(hollow, "whole", 60.0, pytest.fail)
    assert asyncio.run(cutover.after(0)) == "nothing, for no table is published"


def _config(route: Route) -> Config:
    flags = {"source.dsn": route.source.dsn, "target.dsn": route.target.dsn, "source.slot": route.slot,
             "source.publications": (route.publication,)}  # fmt: skip
    return load_config(None, (), flags, {})


def _check_again(route: Route, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranges equal a moment ago are compared again as time allows, also the newest keys; omissions are named."""
    config = _config(route)
    options = VerifyOptions(sampled_ranges=1)
    earlier = asyncio.run(comparison(config, options))
    route.target.execute("INSERT INTO numbers VALUES (800000, 1, 'x')")
    no_time = asyncio.run(comparison(config, options, VerifyAgain(earlier, 0.0)))
    assert [one.equal_at for one in no_time.verdicts] == [earlier.at_lsn] * len(_RANGES)
    assert capsys.readouterr().out.count("not compared again; ") == len(_RANGES)
    again = asyncio.run(comparison(config, options, VerifyAgain(earlier, 60.0)))
    assert [one.table.name for one in again.verdicts if not one.is_equal] == ["numbers"]
    route.target.execute("DELETE FROM numbers WHERE a = 800000")


def test_compared_tables_are_unlocked(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Compared tables are unlocked before the end, in the same snapshot, as a server has few locks for its tables."""
    route = damaged(source_db, target_db, run_command, start_daemon)
    locked: list[int] = []
    unlock = VerifyEnd.unlock

    async def unlock_and_count(end: VerifyEnd, table: Compared) -> None:
        await unlock(end, table)
        for session in end._sessions:
            cursor = await session.execute(
                "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND relation >= 16384"
            )
            locked.extend(n for (n,) in await cursor.fetchall())

    monkeypatch.setattr(VerifyEnd, "unlock", unlock_and_count)
    found = []
    for most, longest_s in ((1, inf), (1000, 0.0), (1000, inf)):
        monkeypatch.setattr(postgres, "_MOST_LOCKED", most)
        monkeypatch.setattr(postgres, "_LONGEST_LOCKED_S", longest_s)
        result = asyncio.run(comparison(_config(route), VerifyOptions()))
        found.append([(one.table.name, one.found) for one in result.verdicts])
        assert (max(locked) == 0) == (most == 1 or not longest_s)
        locked.clear()
    assert found[0] == found[1] == found[2]
    assert sum(len(one) for _, one in found[0]) == 7
    _check_late_partition(route, monkeypatch)
    _check_rewritten(route, monkeypatch)


def _check_late_partition(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition that is made and filled while the snapshot is waited for is compared on both sides."""
    read, n_read = command._tables, 0

    async def made_then(*arguments: Any) -> Any:  # noqa: ANN401
        nonlocal n_read
        found, n_read = await read(*arguments), n_read + 1
        if n_read == 1:
            for database in (route.target, route.source):
                database.execute("CREATE TABLE part_3 PARTITION OF part_root FOR VALUES FROM (1000) TO (2000)")
            route.source.execute("INSERT INTO part_root VALUES (1500, 'v')")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(command, "_tables", made_then)
        (verdict,) = asyncio.run(comparison(_config(route), VerifyOptions(tables=("public.part_root",)))).verdicts
    assert [(one.kind, one.key) for one in verdict.found] == [("different", ("700",))]
    assert verdict.source_rows == 1000


def _check_rewritten(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is emptied after the snapshot and before it is read is empty there, and no result; others are."""
    summary = VerifyEnd.summary

    def first(database: Database, command: str, *, is_source: bool) -> object:
        async def emptied(end: VerifyEnd, table: Compared, *others: Any) -> Any:  # noqa: ANN401
            if end._is_source is is_source and table.published.name == "keyed":
                database.execute(f"{command} keyed")
            return await summary(end, table, *others)

        return emptied

    why = ""
    options = VerifyOptions(tables=("public.keyed", "public.part_root"), prints_statements=True)
    for is_source, database, end in ((False, route.target, "target"), (True, route.source, "source")):
        monkeypatch.setattr(VerifyEnd, "summary", first(database, "TRUNCATE", is_source=is_source))
        found = asyncio.run(comparison(_config(route), options))
        why = f"{end}: public.keyed was rewritten, emptied or replaced after the snapshot of this comparison"
        assert [(one.why_not, len(one.found), len(one.statements)) for one in found.verdicts] == [
            (why, 0, 0),
            # Between BEGIN and COMMIT.
            ("", 1, 3),
        ]
        assert command.said(found).startswith("1 of 2 tables differ, 1 not compared at ")
    # A cut-over compares all of it again behind the fence.
    route.source.execute("TRUNCATE loose")
    route.target.execute("UPDATE part_root SET v = 'v'")
    monkeypatch.setattr(VerifyEnd, "summary", first(route.source, "VACUUM FULL", is_source=True))
    warned: list[str] = []
    asyncio.run(CutoverComparison(_config(route), "sampled", 60.0, warned.append).before())
    assert warned == [f"not compared before the fence: {why}"]
    found = asyncio.run(comparison(_config(route), VerifyOptions(as_json=True)))
    assert [one["is_equal"] for one in cast("Any", command.document(found)["tables"])] == [False, True, True]
    assert not found.is_equal


def test_both_sides_stay_in_use(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """Under load, with independent transactions in any order, nothing is ever reported that is not so."""
    create_bank(source_db, target_db)
    target_db.execute("TRUNCATE acct")
    route = Route(source=source_db, target=target_db, settings={**FAST, "apply.commit_order": "relaxed"})
    run_command(route, "init", "--copy", code=0)
    start_daemon(route).wait_for_event("source_connected")
    with BankLoad(source_db, seed=5, pace_s=0.01) as load:
        for _ in range(2):
            load.wait_for_more(20)
            done = run_command(route, "verify", code=0)
            assert "all 3 tables are equal" in done.stdout


def test_an_old_transaction_does_not_hold_up_the_daemon(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """The publisher's snapshot waits for transactions that run there: after --max-pause it is given up."""
    create_bank(source_db, target_db)
    route = Route(source=source_db, target=target_db, settings=FAST)
    run_command(route, "init", code=0)
    daemon = start_daemon(route)
    daemon.wait_for_event("source_connected")
    with source_db.connect() as old:
        old.execute("BEGIN; INSERT INTO evt VALUES (1, 1)")
        done = run_command(route, "verify", "--max-pause", "0.5", code=1)
        assert "gave no snapshot in 0.5 s" in done.stderr
        source_db.execute("INSERT INTO evt VALUES (2, 2)")
        daemon.wait_caught_up()
        old.execute("COMMIT")

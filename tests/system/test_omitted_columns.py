"""Columns that the target's rows do not get: everything else of a row is right, and nothing asks for them.

The oracle is SQL on the source. On the target the columns have the target's own values, which stay.
"""

from __future__ import annotations

import random
import secrets
import signal
from functools import partial
from typing import TYPE_CHECKING

import pytest

from parapply import failpoints
from tests.differential.compare import check_equal
from tests.differential.ways import random_ways
from tests.fixtures.fan import make_slot
from tests.fixtures.plain import FAST
from tests.fixtures.random_changes import write_random
from tests.fixtures.route import Route
from tests.fixtures.streams import FOLLOW

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.fixtures.daemon import Daemon, RunCommand, StartDaemon
    from tests.fixtures.databases import Database

#: `big` is out of line; rows of `whole`, found by all of their columns, may be equal on the target.
_SOURCE = """
CREATE TABLE item (id int PRIMARY KEY, secret text, v text, big text, kept text);
ALTER TABLE item ALTER big SET STORAGE EXTERNAL, ALTER kept SET STORAGE EXTERNAL;
CREATE TABLE account (secret text UNIQUE, id int PRIMARY KEY, email text UNIQUE);
ALTER TABLE account REPLICA IDENTITY FULL;
CREATE TABLE whole (secret int, a int, b text);
ALTER TABLE whole REPLICA IDENTITY FULL;
INSERT INTO item SELECT n, 's' || n, 'v', repeat(n::text, 3000), repeat(n::text, 3000) FROM generate_series(1, 20) AS n;
INSERT INTO account SELECT 's' || n, n, 'e' || n FROM generate_series(1, 20) AS n;
INSERT INTO whole SELECT n, n % 5, 'x' FROM generate_series(1, 20) AS n;
CREATE PUBLICATION pub FOR ALL TABLES;
"""
#: One has the columns with its own values, one with none, and one lacks them.
_TARGET = """
CREATE TABLE item (kept text, id int PRIMARY KEY, secret text NOT NULL DEFAULT 'own', v text, big text);
CREATE TABLE account (id int PRIMARY KEY, email text UNIQUE, secret text);
CREATE TABLE whole (a int, b text);
"""
_OMITS: Mapping[str, str | float] = {
    'mapping.tables."public.item".omit': "secret,big",
    'mapping.tables."public.account".omit': "secret",
    'mapping.tables."public.whole".omit': "secret",
}
_COLUMNS = {"item": "id, v, kept", "account": "id, email", "whole": "a, b"}
#: Streamed while it is in progress.
_UPSERT = (
    "INSERT INTO item SELECT n, 's', 'v', repeat('b', 300), 'k' FROM generate_series(1000, 1400) AS n"
    " ON CONFLICT (id) DO UPDATE SET secret = 'again', v = item.v || '{a}'"
)
_TRANSACTIONS = 120
#: Amid the transactions a column gets another place.
_MOVES = """
ALTER TABLE whole DROP secret, ADD secret int DEFAULT 3; UPDATE whole SET a = a + 1;
INSERT INTO whole (secret, a) VALUES (1, 1)
"""


@pytest.fixture
def source(source_db: Database) -> Database:
    """A publisher whose rows have more columns."""
    source_db.execute(_SOURCE)
    return source_db


@pytest.fixture
def new_target(target_with: Callable[[str], Database]) -> Callable[[], Database]:
    """Make targets with empty tables."""
    return partial(target_with, _TARGET)


def _check(source: Database, target: Database) -> None:
    for table, columns in _COLUMNS.items():
        query = f"SELECT {columns} FROM {table}"
        check_equal(source.rows(query), target.rows(query), table)
    assert target.rows("SELECT DISTINCT secret, big FROM item") == [("own", None)]
    assert target.rows("SELECT DISTINCT secret FROM account") == [(None,)]


def _statement(chooser: random.Random) -> str:
    one, other = chooser.randint(1, 30), chooser.randint(1, 30)
    text = chooser.choice([
        "INSERT INTO item VALUES ({a}, 'new', 'new', repeat('{b}', 3000), repeat('{b}', 3000)) ON CONFLICT DO NOTHING",
        "UPDATE item SET v = 'w{b}' WHERE id BETWEEN {a} AND {b}",
        "UPDATE item SET secret = secret || '{b}', big = big || 'x' WHERE id > {a}",
        "UPDATE item SET kept = repeat('{b}', 3000) WHERE id = {a}",
        "UPDATE item SET id = -id WHERE id IN ({a}, {b}, -{a})",
        "DELETE FROM item WHERE id = {a}",
        "INSERT INTO account VALUES ('s{b}', {a}, 'e{b}')",
        "UPDATE account SET email = 'e{b}' WHERE id = {a}",
        "UPDATE account SET secret = NULL WHERE id < {a}",
        "DELETE FROM account WHERE id = {a}",
        "INSERT INTO whole (secret, a, b) SELECT {b}, {a} % 5, 'x' FROM generate_series(1, 3)",
        "UPDATE whole SET secret = {b} WHERE a = {a} % 5",
        "UPDATE whole SET b = 'y{b}' WHERE a = {a} % 5",
        "DELETE FROM whole WHERE ctid = (SELECT min(ctid) FROM whole WHERE a = {a} % 5)",
        _UPSERT,
    ])  # fmt: skip
    return text.format(a=one, b=other)


def test_random_changes(
    source: Database,
    new_target: Callable[[], Database],
    run_command: RunCommand,
    start_daemon: StartDaemon,
) -> None:
    """Copy, stream and verify agree with SQL on the source, in any order, with any number of workers, after a kill."""
    seed = secrets.randbelow(1_000_000)
    print(f"seed {seed}")  # noqa: T201  shown where the test fails
    point = random.Random(seed).choice((failpoints.DML_SENT, failpoints.COMMIT_SENT, failpoints.COMMITTED))
    routes = []
    for way in random_ways(seed):
        settings = {**FAST, "source.decoding_memory_bytes": 65536, **_OMITS, **way.settings}
        route = Route(source=source, target=new_target(), settings=settings)
        done = run_command(route, "init", "--copy", "--connections", "2")
        assert done.returncode == 0, done.stderr
        _check(source, route.target)
        routes.append(route)
    killed = start_daemon(routes[0], environ={"PARAPPLY_FAILPOINT": f"{point}:kill:5"})
    running = [start_daemon(routes[1])]
    write_random(source, seed, _statement, _TRANSACTIONS, amid=_MOVES)
    assert killed.exit_code() == -signal.SIGKILL, killed.log_tail()
    running += [start_daemon(routes[0]), start_daemon(routes[2])]
    for route, daemon in zip((routes[1], routes[0], routes[2]), running, strict=True):
        daemon.wait_caught_up()
        _check(source, route.target)
        assert route.target.rows("SELECT conflict_type, table_name FROM parapply.conflicts") == []
    verified = run_command(routes[0], "verify")
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_conflicts_replay_and_heal(
    source: Database, new_target: Callable[[], Database], run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """Records of conflicts, replays, overwrites, and what heal brings are without the columns."""
    policies = {"conflict.insert_exists": "apply_remote", "conflict.update_missing": "skip"}
    route = Route(source=source, target=new_target(), settings={**FAST, **_OMITS, **policies})
    assert run_command(route, "init", "--copy").returncode == 0
    daemon = start_daemon(route)
    route.target.execute("INSERT INTO item (id, v, secret) VALUES (50, 'local', 'mine'); DELETE FROM item WHERE id = 1")
    source.execute("INSERT INTO item VALUES (50, 'x', 'remote'); UPDATE item SET v = 'lost', kept = 'k' WHERE id = 1")
    daemon.wait_caught_up()
    route.target.wait_until("SELECT count(*) = 2 FROM parapply.conflicts")
    assert route.target.rows("SELECT v, secret FROM item WHERE id = 50") == [("remote", "mine")]
    records = route.target.rows("SELECT conflict_id, remote_row::text FROM parapply.conflicts ORDER BY table_name")
    assert not [text for _, text in records if "secret" in (text or "") or "big" in (text or "")]
    missing = "SELECT conflict_id FROM parapply.conflicts WHERE conflict_type = 'update_missing'"
    ((number,),) = route.target.rows(missing)
    # As it was noted before the column was to be left out.
    hush = f'UPDATE parapply.conflicts SET {{0}} = {{0}} || \'{{{{"secret":"hush"}}}}\' WHERE conflict_id = {number}'
    route.target.execute(hush.format("remote_row"))
    run_command(route, "conflicts replay", str(number), "--yes", code=0)
    route.target.execute(hush.format("key"))
    replayed = run_command(route, "conflicts replay", str(number), "--yes")
    assert replayed.returncode == 4, replayed.stderr
    assert '`omit` leaves out column "secret"' in replayed.stderr
    assert route.target.rows("SELECT v, kept, secret FROM item WHERE id = 1") == [("lost", "k", "own")]
    daemon.stop()
    source.execute(f"SELECT pg_drop_replication_slot('{route.slot}')")
    source.execute("UPDATE item SET v = 'healed', secret = 'new' WHERE id IN (2, 50); DELETE FROM item WHERE id = 3;"
                   "INSERT INTO item VALUES (77, 's', 'healed'); DELETE FROM whole WHERE a = 0")  # fmt: skip
    healed = run_command(route, "heal")
    assert healed.returncode == 0, healed.stdout + healed.stderr
    assert route.target.rows("SELECT v, secret FROM item WHERE id = 50") == [("healed", "mine")]
    route.target.execute("UPDATE item SET secret = 'own'")
    _check(source, route.target)


@pytest.mark.parametrize(
    ("ddl", "omit", "words"),
    [
        ("", "id", 'column "id", and public.item has it in its key'),
        ("", "nosuch", 'column "nosuch", and public.item publishes no such column'),
        ("ALTER TABLE item ALTER secret DROP DEFAULT", "secret", '"secret" of the target table is NOT NULL'),
        ("CREATE UNIQUE INDEX more ON item (v, secret)", "secret", '"secret" is part of unique index "more"'),
        (
            "ALTER TABLE item DROP CONSTRAINT item_pkey, ADD PRIMARY KEY (id, secret)",
            "secret",
            '"secret" is part of the key of the target table',
        ),
    ],
)
def test_what_cannot_be_left_out_is_refused(  # noqa: PLR0917  the case
    source: Database,
    new_target: Callable[[], Database],
    run_command: RunCommand,
    start_daemon: StartDaemon,
    ddl: str,
    omit: str,
    words: str,
) -> None:
    """`check` and `init` say why, and a daemon that meets such a table applies nothing to it."""
    settings: Mapping[str, str | float] = {**FAST, 'mapping.tables."public.item".omit': omit}
    source.execute("CREATE PUBLICATION few FOR TABLE item")
    route = Route(source=source, target=new_target(), publication="few", settings=settings)
    route.target.execute(ddl or "SELECT")
    for command in (("check",), ("init", "--copy")):
        refused = run_command(route, *command)
        assert refused.returncode != 0
        assert words in (refused.stdout + refused.stderr).replace("\n", " ")
    if ddl:
        make_slot(route)
        daemon = start_daemon(route)
        source.execute("INSERT INTO item VALUES (1000, 's', 'v')")
        assert daemon.exit_code() != 0
        assert words.replace('"', '\\"') in daemon.log_tail()
        assert route.target.rows("SELECT count(*) FROM item") == [(0,)]


def test_no_value_comes_by_another_name(
    source: Database,
    new_target: Callable[[], Database],
    run_command: RunCommand,
    start_daemon: StartDaemon,
    tmp_path: Path,
) -> None:
    """A name of no table ends a daemon that would begin the slot; a name of no column, and a new one, one that runs.

    So it is with a file from the start, and with SIGHUP; with the right name the next daemon goes on. A heal without
    the slot knows the names that the rows came by.
    """
    path = tmp_path / "app.toml"
    target = new_target()
    target.execute("ALTER TABLE item ADD hidden text; CREATE TABLE thing (LIKE item INCLUDING ALL)")
    source.execute("CREATE PUBLICATION few FOR TABLE item")
    route = Route(source=source, target=target, publication="few", settings=FAST)
    source.execute(f"SELECT pg_create_logical_replication_slot('{route.slot}', 'pgoutput')")

    def omit(column: str, table: str = "item") -> None:
        path.write_text(f'[mapping.tables]\n"public.{table}".omit = ["{column}"]\n', encoding="utf-8")

    def refused(daemon: Daemon, words: str) -> None:
        assert daemon.exit_code() == 4, daemon.log_tail()
        assert words in daemon.failure

    omit("secret", "itme")
    refused(start_daemon(route, "--config", str(path)), "public.itme is no published table; did you mean public.item?")
    omit("secret")
    daemon = start_daemon(route, "--config", str(path))
    daemon.wait_for_event("source_connected")
    omit("secert")
    daemon.send(signal.SIGHUP)
    daemon.wait_for_event("source_connected", count=2)
    source.execute("INSERT INTO item VALUES (100, 'hush', 'v')")
    refused(daemon, 'column "secert" is not published')
    omit("secret")
    daemon = start_daemon(route, "--config", str(path))
    daemon.wait_caught_up()
    source.execute("ALTER TABLE item RENAME secret TO hidden; INSERT INTO item VALUES (101, 'hush', 'v')")
    refused(daemon, 'column "secret" is not published')
    omit("hidden")
    daemon = start_daemon(route, "--config", str(path))
    daemon.wait_caught_up()
    source.execute("ALTER TABLE item RENAME TO thing; INSERT INTO thing VALUES (102, 'hush', 'v')")
    refused(daemon, "became public.thing, which has another `replace` or `omit` in [mapping]")
    source.execute(f"SELECT pg_drop_replication_slot('{route.slot}')")
    healed = run_command(route, "heal", "--config", str(path))
    assert healed.returncode == 4, healed.stdout + healed.stderr
    assert "public.item became public.thing, which has another" in healed.stderr
    query = "SELECT id, secret, hidden FROM item UNION ALL SELECT id, secret, hidden FROM thing ORDER BY id"
    assert target.rows(query) == [(100, "own", None), (101, "own", None)]


#: Changes of a table (id, secret, v) after which another column has the name.
_OTHER_NAMES = {
    "swapped": "RENAME secret TO t; ALTER TABLE one RENAME v TO secret; ALTER TABLE one RENAME t TO v",
    "made_again": "RENAME secret TO hidden; ALTER TABLE one ADD secret text",
    "dropped": "DROP v; ALTER TABLE one RENAME secret TO v; ALTER TABLE one ADD secret text",
}


@pytest.mark.parametrize(
    ("kind", "change"), [("omit", "swapped"), ("replace.secret", "made_again"), ("omit", "dropped")]
)
def test_a_name_that_went_to_another_column_while_none_is_missing(  # noqa: PLR0917  the case
    source: Database,
    new_target: Callable[[], Database],
    run_command: RunCommand,
    start_daemon: StartDaemon,
    kind: str,
    change: str,
) -> None:
    """The column whose values are kept from the target is known by its number, whether or not a daemon runs.

    So it is after a new start. With both names in the configuration the stream goes on.
    """
    target = new_target()
    source.execute("CREATE TABLE one (id int PRIMARY KEY, secret text, v text);"
                   "CREATE PUBLICATION few FOR TABLE one, account")  # fmt: skip
    target.execute("CREATE TABLE one (id int PRIMARY KEY, v text, secret text, hidden text)")
    value = "secret" if kind == "omit" else "left(secret, 0)"
    column = "hidden" if change == "made_again" else "v"
    fast: Mapping[str, str | float] = {**FAST, "source.decoding_memory_bytes": 65536}
    if change == "dropped":
        fast = {**fast, **FOLLOW}
    settings: Mapping[str, str | float] = {**fast, f'mapping.tables."public.one".{kind}': value}
    route = Route(source=source, target=target, publication="few", settings=settings)
    other = Route(source=source, target=target, publication="few", settings=settings, slot=f"{route.slot}_other")
    copied = ("--copy",) if change == "dropped" else ()
    assert run_command(route, "init", *copied).returncode == 0
    daemon = start_daemon(route)
    source.execute("INSERT INTO one VALUES (1, 'hush', 'v')")
    daemon.wait_caught_up()
    if change != "dropped":
        assert run_command(other, "init").returncode == 0
    source.execute(f"ALTER TABLE one {_OTHER_NAMES[change]}")
    # Streamed in progress, beside which a small one shows that it has come.
    with source.connect() as session, session.transaction():
        session.execute(
            f"INSERT INTO one (id, {column}) SELECT n, repeat('hush', 100) FROM generate_series(1000, 3000) AS n"
        )
        source.execute("INSERT INTO account VALUES ('s', 100, 'e')")
        target.wait_until("SELECT EXISTS (SELECT FROM account WHERE id = 100)")
    assert daemon.exit_code() == 4, daemon.log_tail()
    for one in (route, other)[: 1 if change == "dropped" else 2]:
        target.execute("DELETE FROM account")
        daemon = start_daemon(one)
        assert daemon.exit_code() == 4, daemon.log_tail()
        assert 'column "secret" of public.one became' in daemon.failure
    assert target.rows("SELECT id, v FROM one WHERE v LIKE '%hush%' OR hidden IS NOT NULL") == []
    both: Mapping[str, str | float] = {'mapping.tables."public.one".omit': f"secret,{column}"}
    if kind != "omit":
        both = {**settings, 'mapping.tables."public.one".omit': column}
    start_daemon(Route(source=source, target=target, publication="few", settings={**fast, **both}, slot=route.slot))
    source.execute("INSERT INTO one (id, v) VALUES (2, 'hush')")
    target.wait_until("SELECT EXISTS (SELECT FROM one WHERE id = 2)")
    assert target.rows(f"SELECT count(*) FROM one WHERE {column} LIKE '%hush%'") == [(0,)]


def test_columns_that_come_and_go(
    source: Database, new_target: Callable[[], Database], start_daemon: StartDaemon
) -> None:
    """A column may be left out that older changes lack, because it was added since.

    One that was renamed, dropped or left out by the publication ends the daemon, and so does each name that may have
    belonged to another column.
    """
    target = new_target()
    one = "CREATE TABLE one (id int PRIMARY KEY, v text, secret text)"
    target.execute(f"ALTER TABLE item ADD late text, ADD hidden text; {one}; ALTER TABLE one ADD old text")
    source.execute(f"{one}; CREATE PUBLICATION few FOR TABLE item (id, secret, v), one")

    def omitting(slot: str, columns: str, table: str = "item") -> Route:
        settings: Mapping[str, str | float] = {**FAST, f'mapping.tables."public.{table}".omit': columns}
        return Route(source=source, target=target, publication="few", settings=settings, slot=slot)

    def refused(daemon: Daemon, name: str) -> None:
        assert daemon.exit_code() == 4, daemon.log_tail()
        assert f'column "{name}" is not published' in daemon.failure

    route = omitting("added", "secret,late")
    make_slot(route)
    source.execute("INSERT INTO item VALUES (100, 'hush', 'v'); ALTER TABLE item ADD late text")
    source.execute("ALTER PUBLICATION few SET TABLE item (id, secret, v, late), one")
    source.execute("INSERT INTO item (id, secret, late) VALUES (101, 'hush', 'hush')")
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    source.execute("ALTER PUBLICATION few SET TABLE item (id, secret, v), one")
    source.execute("ALTER TABLE item DROP late; INSERT INTO item (id, secret) VALUES (102, 'hush')")
    refused(daemon, "late")
    daemon = start_daemon(omitting("added", "secret"))
    daemon.wait_caught_up()
    daemon.stop()
    query = "SELECT id, secret, late, hidden FROM item ORDER BY id"
    assert target.rows(query) == [(number, "own", None, None) for number in range(100, 103)]
    names = ("hidden", "secret", "hidden,secret")
    for number, columns in enumerate(names):
        make_slot(omitting(f"renamed_{number}", columns))
    source.execute("INSERT INTO item (id, secret) VALUES (104, 'hush'); ALTER TABLE item RENAME secret TO hidden;"
                   "INSERT INTO item (id, hidden) VALUES (105, 'hush')")  # fmt: skip
    for number, columns in enumerate(names):
        refused(start_daemon(omitting(f"renamed_{number}", columns)), columns.rpartition(",")[2])
    assert target.rows(f"SELECT * FROM ({query}) AS all_of WHERE id > 102") == []
    make_slot(omitting("reused", "old", "one"))
    source.execute("INSERT INTO one VALUES (1, 'v', 'hush')")
    source.execute("ALTER TABLE one RENAME secret TO old; ALTER TABLE one ADD secret text")
    refused(start_daemon(omitting("reused", "old", "one")), "old")
    make_slot(omitting("moved", "hidden,secret", "one"))
    source.execute("ALTER TABLE one DROP secret, DROP old; ALTER TABLE one ADD secret text")
    source.execute("INSERT INTO one VALUES (2, 'v', 'hush')")
    source.execute("ALTER TABLE one RENAME v TO hidden; ALTER TABLE one RENAME secret TO v")
    refused(start_daemon(omitting("moved", "hidden,secret", "one")), "hidden")
    make_slot(omitting("again", "hidden", "one"))
    source.execute("ALTER TABLE one DROP v; ALTER TABLE one RENAME hidden TO v; INSERT INTO one VALUES (3, 'hush')")
    source.execute("ALTER TABLE one ADD hidden text")
    refused(start_daemon(omitting("again", "hidden", "one")), "hidden")
    assert target.rows("SELECT * FROM one") == []


def test_a_name_that_went_to_another_column(
    source: Database, new_target: Callable[[], Database], start_daemon: StartDaemon
) -> None:
    """An announcement that lacks a column is compared each time, also if it is like one that was right."""
    target = new_target()
    one = "CREATE TABLE one (id int PRIMARY KEY, v text)"
    target.execute(f"{one}; ALTER TABLE one ADD late text")
    source.execute(f"{one}; CREATE PUBLICATION few FOR TABLE one, account")
    settings: Mapping[str, str | float] = {**FAST, **FOLLOW, 'mapping.tables."public.one".omit': "late"}
    settings = {**settings, "source.decoding_memory_bytes": 65536, 'mapping.tables."public.account".omit': "secret"}
    route = Route(source=source, target=target, publication="few", settings=settings)
    make_slot(route)
    source.execute("INSERT INTO one VALUES (1, 'v')")
    source.execute("ALTER TABLE one ADD late text")
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    source.execute("INSERT INTO one VALUES (2, 'v', 'hush')")
    daemon.wait_caught_up()
    source.execute("ALTER TABLE one DROP v; ALTER TABLE one RENAME late TO v")
    # Streamed in progress, beside which a small one shows that it has come.
    with source.connect() as session, session.transaction():
        session.execute("INSERT INTO one SELECT n, repeat('hush', 100) FROM generate_series(1000, 3000) AS n")
        source.execute("INSERT INTO account VALUES ('s', 100, 'e')")
        target.wait_until("SELECT EXISTS (SELECT FROM account WHERE id = 100)")
    assert daemon.exit_code() == 4, daemon.log_tail()
    assert 'column "late" is not published' in daemon.failure
    assert target.rows("SELECT id, v, late FROM one ORDER BY id") == [(1, "v", None), (2, "v", None)]

"""Several sources with their rows in one table of the target, each with its own constants; and rows of yet another.

The oracle is SQL on the sources. Rows that belong to no source stand for tenants that other daemons apply: whatever
happens, they stay.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.differential.compare import check_equal
from tests.differential.ways import random_ways
from tests.fixtures.fan import make_slot
from tests.fixtures.plain import FAST
from tests.fixtures.random_changes import write_random
from tests.fixtures.route import Route

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database

#: Of one tenant on the publisher. `big` is out of line, `whole` is found by all of its columns.
_SOURCE = """
CREATE SCHEMA {tenant};
CREATE TABLE {tenant}.item (id int PRIMARY KEY, v text, big text);
ALTER TABLE {tenant}.item ALTER big SET STORAGE EXTERNAL;
CREATE TABLE {tenant}.account (id int PRIMARY KEY, email text UNIQUE);
ALTER TABLE {tenant}.account REPLICA IDENTITY FULL;
CREATE TABLE {tenant}.whole (a int, b text);
ALTER TABLE {tenant}.whole REPLICA IDENTITY FULL;
CREATE TABLE {tenant}.head (id int PRIMARY KEY, v int);
CREATE TABLE {tenant}.line (head int REFERENCES {tenant}.head ON DELETE CASCADE, n int, v text, PRIMARY KEY (head, n));
"""
_TARGET = """
CREATE TABLE item (id int, v text, tenant int, big text, PRIMARY KEY (tenant, id)) PARTITION BY LIST (tenant);
CREATE TABLE item_1 PARTITION OF item FOR VALUES IN (1);
CREATE TABLE item_others PARTITION OF item DEFAULT;
CREATE TABLE account (tenant int, id int, email text, PRIMARY KEY (id, tenant), UNIQUE (email, tenant));
CREATE TABLE whole (a int, tenant int, b text);
CREATE TABLE head (tenant int, id int, v int, note text DEFAULT 'own', PRIMARY KEY (id, tenant));
CREATE TABLE line (tenant int, head int, n int, v text, PRIMARY KEY (tenant, head, n),
  FOREIGN KEY (tenant, head) REFERENCES head (tenant, id) ON DELETE CASCADE);
"""
_COLUMNS = {"item": "id, v, big", "account": "id, email", "whole": "a, b", "head": "id, v", "line": "head, n, v"}
#: Rows that no source has.
_STRANGERS = """
INSERT INTO item SELECT n, 'x', 99, 'x' FROM generate_series(1, 40) AS n;
INSERT INTO account (tenant, id, email) SELECT 99, n, 'e' || n FROM generate_series(1, 40) AS n;
INSERT INTO whole SELECT n % 5, 99, 'x' FROM generate_series(1, 40) AS n;
INSERT INTO head SELECT 99, n, 0 FROM generate_series(1, 20) AS n;
INSERT INTO line SELECT 99, n, 1, 'x' FROM generate_series(1, 20) AS n;
"""
_FILL = """
INSERT INTO {tenant}.item SELECT n, 'v' || n, repeat(n::text, 3000) FROM generate_series(1, 20) AS n;
INSERT INTO {tenant}.account SELECT n, 'e' || n FROM generate_series(1, 20) AS n;
INSERT INTO {tenant}.whole SELECT n % 5, CASE WHEN n % 2 = 0 THEN 'x' END FROM generate_series(1, 20) AS n;
INSERT INTO {tenant}.head SELECT n, n FROM generate_series(1, 10) AS n;
INSERT INTO {tenant}.line SELECT n, 1, 'v' FROM generate_series(1, 10) AS n;
"""
_TENANTS = {"t1": 1, "t2": 2, "t3": -3}
_MAPPING = {
    f'mapping.schemas."{tenant}".{key}': value
    for tenant, number in _TENANTS.items()
    for key, value in {"schema": "public", "set.tenant": str(number)}.items()
}
_TRANSACTIONS = 150
_TARGET_REFUSED = 4


@pytest.fixture
def new_target(target_with: Callable[[str], Database]) -> Callable[[], Database]:
    """Make targets with tables for all tenants, and a stranger's rows in each."""
    return partial(target_with, _TARGET + _STRANGERS)


@pytest.fixture
def source(source_db: Database) -> Database:
    """A publisher with a schema for each tenant, with the same keys in each."""
    source_db.execute("".join((_SOURCE + _FILL).format(tenant=tenant) for tenant in _TENANTS))
    source_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    return source_db


def _check(source: Database, target: Database, tenants: Mapping[str, int] = _TENANTS) -> None:
    """Compare every table with its sources, and the strangers' rows with what they were."""
    for table, columns in _COLUMNS.items():
        parts = [f"SELECT {number}, {columns} FROM {tenant}.{table}" for tenant, number in tenants.items()]
        found = target.rows(f"SELECT tenant, {columns} FROM {table} WHERE tenant <> 99")
        check_equal(source.rows(" UNION ALL ".join(parts)), found, table)
    counts = [target.rows(f"SELECT count(*) FROM {table} WHERE tenant = 99")[0][0] for table in _COLUMNS]
    assert counts == [40, 40, 40, 20, 20]


def _statement(chooser: random.Random) -> str:
    tenant, one, other = chooser.choice(list(_TENANTS)), chooser.randint(1, 30), chooser.randint(1, 30)
    text = chooser.choice([
        "INSERT INTO {t}.item VALUES ({a}, 'new', repeat('{b}', 3000)) ON CONFLICT DO NOTHING",
        "UPDATE {t}.item SET v = 'w{b}' WHERE id BETWEEN {a} AND {b}",
        "UPDATE {t}.item SET id = -id WHERE id IN ({a}, {b}, -{a})",
        "DELETE FROM {t}.item WHERE id = {a}",
        "INSERT INTO {t}.account VALUES ({a}, 'e{b}')",
        "UPDATE {t}.account SET email = 'e{b}' WHERE id = {a}",
        "UPDATE {t}.account SET email = NULL WHERE id < {a}",
        "DELETE FROM {t}.account WHERE id = {a}",
        "INSERT INTO {t}.whole SELECT {a} % 5, 'x' FROM generate_series(1, 3)",
        "UPDATE {t}.whole SET b = 'y{b}' WHERE a = {a} % 5",
        "DELETE FROM {t}.whole WHERE ctid = (SELECT min(ctid) FROM {t}.whole WHERE a = {a} % 5)",
        "INSERT INTO {t}.head VALUES ({a}, 0); INSERT INTO {t}.line VALUES ({a}, 1, 'v')",
        "INSERT INTO {t}.line VALUES ({a}, {b}, 'v')",
        "UPDATE {t}.line SET n = n + 100 WHERE head = {a}",
        "DELETE FROM {t}.head WHERE id = {a}",
        "UPDATE {t}.head SET v = v + 1",
    ])  # fmt: skip
    if chooser.random() < 0.03:
        text = chooser.choice(["TRUNCATE {t}.item", "TRUNCATE {t}.head, {t}.line", "TRUNCATE {t}.whole, {t}.account"])
    return text.format(t=tenant, a=one, b=other)


def test_random_changes_of_several_sources(
    source: Database,
    new_target: Callable[[], Database],
    run_command: RunCommand,
    start_daemon: StartDaemon,
) -> None:
    """Copy and stream, in any commit order, with any number of workers, roles and batches: each keeps to its rows."""
    seed = secrets.randbelow(1_000_000)
    print(f"seed {seed}")  # noqa: T201  shown where the test fails
    daemons = []
    for way in random_ways(seed):
        route = Route(source=source, target=new_target(), settings={**FAST, **_MAPPING, **way.settings})
        # Rows come in no order that enforced foreign keys would take.
        run_command(route, "init", "--copy", "--set", "target.session_replication_role=replica", code=0)
        _check(source, route.target)
        daemons.append((route, way))
    running = [(route, start_daemon(route)) for route, _ in daemons[:2]]
    write_random(source, seed, _statement, _TRANSACTIONS)
    running += [(route, start_daemon(route)) for route, _ in daemons[2:]]
    for route, daemon in running:
        daemon.wait_caught_up()
        _check(source, route.target)
        assert route.target.rows("SELECT conflict_type, table_name FROM parapply.conflicts") == []
    verified = run_command(running[0][0], "verify", code=0)
    assert "all 15 tables are equal" in verified.stdout


def test_a_second_publisher_copies_into_a_table_that_others_fill(
    source: Database, new_target: Callable[[], Database], run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """Copies empty no rows but their own, with TRUNCATE nowhere; verify, refresh and heal look at their own alone."""
    first = Route(source=source, target=new_target(), settings={**FAST, **_MAPPING})
    run_command(first, "init", "--copy", code=0)
    second = Route(
        source=source, target=first.target, publication="second",
        settings={**FAST, 'mapping.schemas."t1".schema': "public", 'mapping.schemas."t1".set.tenant': "1"},
    )  # fmt: skip
    source.execute("CREATE PUBLICATION second FOR TABLES IN SCHEMA t1")
    refused = run_command(second, "init", "--copy")
    assert """DELETE FROM "public"."whole" WHERE "tenant" = '1';""" in refused.stderr, refused.stderr
    moved = {**second.settings, 'mapping.schemas."t1".set.tenant': "4"}
    third = Route(source=source, target=first.target, publication="second", settings=moved)
    tenants = {**_TENANTS, "t1": 4}
    run_command(third, "init", "--copy", "--connections", "3", code=0)
    daemon = start_daemon(third)
    source.execute("UPDATE t1.item SET v = 'later'; TRUNCATE t1.whole")
    daemon.wait_caught_up()
    for table in ("item", "whole"):
        run_command(third, "refresh", "--table", f"t1.{table}", "--truncate", code=0)
    run_command(third, "verify", code=0)
    daemon.stop()
    third.target.execute("UPDATE head SET note = 'kept'")
    third.source.execute(f"SELECT pg_drop_replication_slot('{third.slot}')")
    source.execute("UPDATE t1.item SET v = 'lost' WHERE id < 5; DELETE FROM t1.item WHERE id = 7;"
                   "INSERT INTO t1.item VALUES (77, 'lost', 'lost'); INSERT INTO t1.whole VALUES (7, 'lost');"
                   "UPDATE t1.head SET v = 77 WHERE id = 1; TRUNCATE t1.line")  # fmt: skip
    healed = run_command(third, "heal", code=0)
    assert "t1.whole (public.whole on the target): emptied" in healed.stdout
    assert first.target.rows("SELECT count(*) FROM head WHERE note = 'kept'") == [(60,)]
    assert first.target.rows("SELECT count(*) FROM whole WHERE tenant = 1") == [(20,)]
    first.target.execute("DELETE FROM item WHERE tenant = 1; DELETE FROM account WHERE tenant = 1;"
                         "DELETE FROM whole WHERE tenant = 1; DELETE FROM head WHERE tenant = 1")  # fmt: skip
    _check(source, first.target, tenants)


def test_a_truncate_that_deletes_keeps_its_place(
    source_db: Database, target_with: Callable[[str], Database], run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """Its cascade on the target takes rows of before along, and none that came behind it (T-26)."""
    source_db.execute("CREATE SCHEMA t1; CREATE TABLE t1.head (id int PRIMARY KEY);"
                      "CREATE TABLE t1.line (id int PRIMARY KEY, head int); CREATE PUBLICATION pub FOR ALL TABLES;"
                      "INSERT INTO t1.head VALUES (1); INSERT INTO t1.line VALUES (10, 1)")  # fmt: skip
    target = target_with("CREATE TABLE head (tenant int, id int, PRIMARY KEY (tenant, id)); CREATE TABLE line (tenant"
                         " int, id int, head int, PRIMARY KEY (tenant, id),"
                         " FOREIGN KEY (tenant, head) REFERENCES head ON DELETE CASCADE)")  # fmt: skip
    settings = {"mapping.schemas.t1.schema": "public", "mapping.schemas.t1.set.tenant": "1"}
    settings["target.session_replication_role"] = "origin"
    route = Route(source=source_db, target=target, settings={**FAST, **settings})
    run_command(route, "init", "--copy", "--set", "target.session_replication_role=replica", code=0)
    daemon = start_daemon(route)
    source_db.execute("TRUNCATE t1.head; INSERT INTO t1.line VALUES (20, 1); INSERT INTO t1.head VALUES (1)")
    daemon.wait_caught_up()
    assert target.rows("SELECT id FROM line") == [(20,)]


def test_conflicts_are_about_own_rows(
    source: Database, new_target: Callable[[], Database], run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """Policies and replays find, overwrite and insert rows with the constants, and no row of another source."""
    policies = {"conflict.insert_exists": "apply_remote", "conflict.update_missing": "skip"}
    policies["conflict.multiple_unique_conflicts"] = "apply_remote"
    route = Route(source=source, target=new_target(), settings={**FAST, **_MAPPING, **policies})
    run_command(route, "init", "--copy", code=0)
    daemon = start_daemon(route)
    route.target.execute("INSERT INTO item VALUES (50, 'local', 2, 'local');"
                         "INSERT INTO account (tenant, id, email) VALUES (2, 50, 'other'), (2, 51, 'e50');"
                         "DELETE FROM head WHERE tenant = 2 AND id = 1")  # fmt: skip
    source.execute("INSERT INTO t2.item VALUES (50, 'remote', 'remote'); INSERT INTO t2.account VALUES (50, 'e50');"
                   "UPDATE t2.head SET v = 100 WHERE id = 1")  # fmt: skip
    daemon.wait_caught_up()
    found = "SELECT v FROM item WHERE id = 50", "SELECT tenant, email FROM account WHERE id IN (50, 51) AND tenant = 2"
    assert [route.target.rows(one) for one in found] == [[("remote",)], [(2, "e50")]]
    route.target.wait_until("SELECT count(*) = 3 FROM parapply.conflicts")
    ((number,),) = route.target.rows("SELECT conflict_id FROM parapply.conflicts WHERE table_name = 'head'")
    run_command(route, "conflicts replay", str(number), "--yes", code=0)
    assert route.target.rows("SELECT tenant, v FROM head WHERE id = 1 ORDER BY 1") == [
        (-3, 1), (1, 1), (2, 100), (99, 0),
    ]  # fmt: skip
    # The second source finds the column that the target has got for the first one.
    route.target.execute("ALTER TABLE head ADD extra int")
    for number, tenant in enumerate(_TENANTS):
        source.execute(f"ALTER TABLE {tenant}.head ADD extra int; INSERT INTO {tenant}.head VALUES (60, 0, {number})")
        daemon.wait_caught_up()
    assert route.target.rows("SELECT tenant, extra FROM head WHERE id = 60 ORDER BY 1") == [(-3, 2), (1, 0), (2, 1)]


@pytest.mark.parametrize(
    ("ddl", "settings", "words"),
    [
        ("", {'mapping.schemas."t2".set.tenant': "1"}, "no constants distinguish their rows"),
        ("CREATE UNIQUE INDEX more ON head (id)", {}, 'unique index "more" does not hold "tenant"'),
        ("ALTER TABLE t1.head ADD tenant int", {}, 'column "tenant" is also published'),
        ("", {'mapping.schemas."t1".set.tenant': "one"}, 'column "tenant" takes an integer'),
        ("", {'mapping.schemas."t1".set.tenant': "3000000000"}, "takes no integer as large"),
        ("", {'mapping.schemas."t1".set.tenants': "1"}, 'column "tenants" does not exist'),
    ],
)  # fmt: skip
def test_what_could_meet_rows_of_others_is_refused(  # noqa: PLR0917  the case
    source: Database,
    new_target: Callable[[], Database],
    run_command: RunCommand,
    ddl: str,
    settings: Mapping[str, str],
    words: str,
) -> None:
    """`check` names what would let a source reach another one's rows, or what no row can have."""
    target = new_target()
    (source if "t1" in ddl else target).execute(ddl or "SELECT")
    few = {f'mapping.schemas."{one}".{key}': value for one, key, value in (
        ("t1", "schema", "public"), ("t2", "schema", "public"), ("t1", "set.tenant", "1"), ("t2", "set.tenant", "2"),
    )}  # fmt: skip
    if 'mapping.schemas."t1".set.tenants' in settings:
        few = {key: value for key, value in few.items() if "t2" not in key and not key.endswith("tenant")}
    source.execute("CREATE PUBLICATION few FOR TABLES IN SCHEMA t1")
    checked = run_command(Route(source=source, target=target, publication="few", settings={**few, **settings}), "check")
    assert checked.returncode != 0
    assert words in checked.stdout + checked.stderr


def test_a_slot_without_constants_keeps_out(
    source: Database, new_target: Callable[[], Database], run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """Its TRUNCATE would empty the table: `check`, `init` and a daemon name the slot that writes there with `set`.

    Neither may another slot have the same constants.
    """
    own = {'mapping.schemas."t1".schema': "public", 'mapping.schemas."t1".set.tenant': "1"}
    source.execute("CREATE PUBLICATION one FOR TABLE t1.item; CREATE PUBLICATION two FOR TABLE t2.item")
    first = Route(source=source, target=new_target(), publication="one", settings={**FAST, **own})
    run_command(first, "init", "--copy", code=0)
    second = Route(
        source=source, target=first.target, publication="two",
        settings={**FAST, 'mapping.schemas."t2".schema': "public"},
    )  # fmt: skip
    words = f"target table public.item has rows of slot '{first.slot}' with constants, and rows of t2.item would"
    same = replace(second, settings={**second.settings, 'mapping.schemas."t2".set.tenant': "1"})
    for route, end in ((second, " have none"), (same, " not be apart from them by tenant = 1")):
        for command in (("check",), ("init",)):
            refused = run_command(route, *command)
            assert words + end in " ".join((refused.stdout + refused.stderr).split())
            assert refused.returncode == _TARGET_REFUSED
    leaf = replace(second, settings={**FAST, 'mapping.tables."t2.item"': "public.item_1"})
    assert words.replace("item has", "item_1 has", 1) in run_command(leaf, "init").stderr
    daemon = start_daemon(first)
    make_slot(second)
    source.execute("TRUNCATE t2.item")
    stopped = start_daemon(second)
    assert stopped.exit_code() == _TARGET_REFUSED
    assert words in stopped.log_tail()
    daemon.wait_caught_up()
    assert first.target.rows("SELECT count(*) FROM item WHERE tenant = 1") == [(20,)]


@pytest.mark.parametrize("copies", [True, False], ids=["copied", "not_copied"])
def test_a_table_that_gets_other_constants(
    source: Database, new_target: Callable[[], Database], run_command: RunCommand, start_daemon: StartDaemon, *,
    copies: bool,
) -> None:  # fmt: skip
    """A table that moves to another tenant has its rows under the first: the daemon stops, until it is copied again."""
    moved = {'mapping.schemas."t4".schema': "public", 'mapping.schemas."t4".set.tenant': "4"}
    route = Route(source=source, target=new_target(), settings={**FAST, **_MAPPING, **moved})
    if copies:
        run_command(route, "init", "--copy", code=0)
    else:
        make_slot(route)
    daemon = start_daemon(route)
    source.execute("INSERT INTO t1.item VALUES (50, 'x', 'x')")
    daemon.wait_caught_up()
    source.execute("CREATE SCHEMA t4; ALTER TABLE t1.item SET SCHEMA t4; INSERT INTO t4.item VALUES (51, 'x', 'x')")
    assert daemon.exit_code() == _TARGET_REFUSED
    assert "t1.item became t4.item, which has other constants in [mapping]: its rows in target table" in daemon.failure
    route.target.execute("DELETE FROM item WHERE tenant = 1")
    run_command(route, "refresh", "--table", "t4.item", "--truncate", code=0)
    daemon = start_daemon(route)
    source.execute("UPDATE t4.item SET v = 'later'")
    daemon.wait_caught_up()
    rows = route.target.rows("SELECT id, v FROM item WHERE tenant IN (1, 4)")
    check_equal(source.rows("SELECT id, v FROM t4.item"), rows, "item")


@pytest.mark.parametrize("comes", ["table", "slot"])
def test_a_table_becomes_shared(
    source: Database, new_target: Callable[[], Database], run_command: RunCommand, start_daemon: StartDaemon, comes: str
) -> None:
    """A table is published later, or a slot with `set` begins later: a daemon without it stops before its TRUNCATE."""
    own = {'mapping.schemas."t1".schema': "public", 'mapping.schemas."t1".set.tenant': "1"}
    source.execute("CREATE PUBLICATION one FOR TABLE t1.item; CREATE PUBLICATION two FOR TABLE t2.head")
    first = Route(source=source, target=new_target(), publication="one", settings={**FAST, **own})
    second = Route(
        source=source, target=first.target, publication="two",
        settings={**FAST, 'mapping.schemas."t2".schema': "public"},
    )  # fmt: skip
    make_slot(second)
    if comes == "slot":
        source.execute("ALTER PUBLICATION two ADD TABLE t2.item")
    else:
        run_command(first, "init", "--copy", code=0)
    daemon = start_daemon(second)
    daemon.wait_caught_up()
    if comes == "slot":
        run_command(first, "init", "--copy", code=0)
    else:
        source.execute("ALTER PUBLICATION two ADD TABLE t2.item; TRUNCATE t2.item")
    assert daemon.exit_code() == _TARGET_REFUSED
    words = f"target table public.item has rows of slot '{first.slot}' with constants, and rows of t2.item would have"
    assert words in daemon.failure
    for command in (("refresh", "--table", "t2.item", "--truncate"), ("heal",)):
        refused = run_command(second, *command)
        assert words in " ".join(refused.stderr.split())
    assert first.target.rows("SELECT count(*) FROM item WHERE tenant = 1") == [(20,)]


def test_a_command_with_another_file_forgets_no_constants(
    source: Database, new_target: Callable[[], Database], run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """Constants stay noted until the slot's daemon begins with others: no other slot comes in between."""
    own = {'mapping.schemas."t1".schema': "public", 'mapping.schemas."t1".set.tenant': "1"}
    source.execute("CREATE PUBLICATION one FOR TABLE t1.item")
    route = Route(source=source, target=new_target(), publication="one", settings={**FAST, **own})
    run_command(route, "init", "--copy", code=0)
    note = "SELECT constants_in FROM parapply.slots"
    before = route.target.rows(note)
    for settings in ({}, {**own, 'mapping.schemas."t1".set.tenant': "2"}):
        refused = run_command(replace(route, settings={**FAST, **settings}), "refresh", code=_TARGET_REFUSED)
        assert "public.item has rows of this slot with tenant = 1" in " ".join(refused.stderr.split())
        assert route.target.rows(note) == before
    run_command(route, "refresh", code=0)
    other = replace(route, settings={**FAST, 'mapping.schemas."t1".schema': "public",
                                     'mapping.schemas."t1".set.tenant': "2"})  # fmt: skip
    start_daemon(other).wait_caught_up()
    assert route.target.rows(note) == [({"public.item": [{"tenant": "2"}]},)]


def test_a_daemon_stops_before_rows_of_others(
    source: Database, new_target: Callable[[], Database], start_daemon: StartDaemon
) -> None:
    """A unique index that came later, and that rows of several sources could meet in, stops the daemon by name."""
    route = Route(source=source, target=new_target(), settings={**FAST, **_MAPPING})
    make_slot(route)
    route.target.execute("CREATE UNIQUE INDEX more ON head (id) WHERE tenant <> 99")
    daemon = start_daemon(route)
    source.execute("INSERT INTO t1.head VALUES (1000, 1)")
    assert daemon.exit_code() != 0
    assert 'unique index \\"more\\" does not hold' in daemon.log_tail()
    assert route.target.rows("SELECT count(*) FROM head WHERE tenant <> 99") == [(0,)]

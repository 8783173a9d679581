"""Columns that get the value of an SQL expression: everything of a row is right, and what cannot be kept is refused.

The oracle is SQL on the source.
"""

from __future__ import annotations

import json
import random
import secrets
import signal
from dataclasses import replace
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

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database

_FUNCTION = """
CREATE FUNCTION masked(text) RETURNS text LANGUAGE sql IMMUTABLE STRICT AS $$ SELECT left($1, 1) || '***' $$;
"""
#: `big` is out of line, so that updates leave it unsent.
_SOURCE = (
    _FUNCTION
    + """
CREATE TABLE item (id int PRIMARY KEY, email text, n int, big text, name text, m int, born date, kept text);
ALTER TABLE item ALTER big SET STORAGE EXTERNAL, ALTER kept SET STORAGE EXTERNAL;
CREATE TABLE account (secret text, id int PRIMARY KEY, phone text, code text UNIQUE);
ALTER TABLE account REPLICA IDENTITY FULL;
INSERT INTO item SELECT n, 'e' || n, n, repeat(n::text, 3000), 'v' || n, -n, date '2000-02-02' + n, repeat('k', 3000)
  FROM generate_series(1, 20) AS n;
INSERT INTO account SELECT 's' || n, n, '0' || n, 'c' || n FROM generate_series(1, 20) AS n;
CREATE PUBLICATION pub FOR ALL TABLES;
"""
)
#: Others in another order, with other types, and own columns.
_TARGET = (
    _FUNCTION
    + """
CREATE TABLE item (kept text, id int PRIMARY KEY, email varchar(40), own text DEFAULT 'own', n bigint, big text,
  name text, m smallint, born date);
CREATE TABLE account (id int PRIMARY KEY, code text UNIQUE, phone text, secret text);
"""
)
_OF_ITEM = {
    "email": "md5(email)",
    "n": "n * 10 + m",
    "big": "left(big, 3) || pg_catalog.length(big)",
    "name": "'long {}%s\\: ' || (length(big) > 9000) -- of another column",
    "born": "date_trunc('year', born::timestamp)::date",
}
_OF_ACCOUNT = {"secret": "NULL::text", "phone": "public.masked(phone)"}
_REPLACES: Mapping[str, str | float] = {
    **{f'mapping.tables."public.item".replace.{name}': text for name, text in _OF_ITEM.items()},
    **{f'mapping.tables."public.account".replace.{name}': text for name, text in _OF_ACCOUNT.items()},
}
#: On the source, and on the target.
_QUERIES = {
    "item": (
        (
            "SELECT id, md5(email), n * 10 + m, left(big, 3) || length(big), 'long {}%s\\: ' || (length(big) > 9000), "
            " m, date_trunc('year', born::timestamp)::date, kept FROM item"
        ),
        "SELECT id, email, n, big, name, m, born, kept FROM item",
    ),
    "account": (
        "SELECT id, NULL, masked(phone), code FROM account",
        "SELECT id, secret, phone, code FROM account",
    ),
}
_TRANSACTIONS = 120
#: Amid the transactions a column that an expression reads gets another type.
_RETYPED = "ALTER TABLE item ALTER n TYPE bigint; UPDATE item SET n = n + 1"
_NO_TEMPORARY = "DO $$ BEGIN EXECUTE format('REVOKE TEMPORARY ON DATABASE %I FROM PUBLIC', current_database()); END $$"
#: Streamed while it is in progress.
_UPSERT = (
    "INSERT INTO item SELECT n, 's', n, repeat('b', 300), 'k' FROM generate_series(1000, 1400) AS n"
    " ON CONFLICT (id) DO UPDATE SET email = 'again', name = item.name || '{a}'"
)


@pytest.fixture
def source(source_db: Database) -> Database:
    """A publisher whose rows have what the target is not to get."""
    source_db.execute(_SOURCE)
    return source_db


@pytest.fixture
def new_target(target_with: Callable[[str], Database]) -> Callable[[], Database]:
    """Make targets with empty tables."""
    return partial(target_with, _TARGET)


def _check(source: Database, target: Database) -> None:
    for table, (there, here) in _QUERIES.items():
        check_equal(source.rows(there), target.rows(here), table)


def _statement(chooser: random.Random) -> str:
    one, other = chooser.randint(1, 30), chooser.randint(1, 30)
    text = chooser.choice([
        ("INSERT INTO item VALUES ({a}, 'new{b}', {b}, repeat('{b}', 3000 + {a} % 2), 'new', {a}, '2020-07-{b}', 'k')"
        " ON CONFLICT DO NOTHING"),
        "UPDATE item SET name = 'w{b}' WHERE id BETWEEN {a} AND {b}",
        "UPDATE item SET email = email || '{b}', m = {b} WHERE id > {a}",
        "UPDATE item SET big = repeat('{b}', {a} * 400) WHERE id = {b}",
        "UPDATE item SET big = NULL, email = NULL, born = NULL WHERE id = {b}",
        "UPDATE item SET kept = repeat('{b}', 3000) WHERE id = {a}",
        "UPDATE item SET id = -id, n = n + {b} WHERE id IN ({a}, {b}, -{a})",
        "UPDATE item SET id = id + 2000, n = n + 1 WHERE id > 0",
        "UPDATE item SET id = id - 2000 WHERE id > 2000",
        "DELETE FROM item WHERE id = {a}",
        "INSERT INTO account VALUES ('s{b}', {a}, '0{b}', 'c{b}')",
        "UPDATE account SET code = 'c{b}' WHERE id = {a}",
        "UPDATE account SET secret = 't{b}', phone = '{b}' WHERE id < {a}",
        "UPDATE account SET phone = NULL WHERE id = {a}",
        "DELETE FROM account WHERE id = {a}",
        _UPSERT,
    ])  # fmt: skip
    return text.format(a=one, b=other)


@pytest.mark.pg_majors(15, 18)
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
    routes: list[Route] = []
    for way in random_ways(seed):
        settings = {**FAST, "source.decoding_memory_bytes": 65536, **_REPLACES, **way.settings}
        if len(routes) == 1:
            settings['apply.tables."public.account".parallel'] = "never"  # one by one
        route = Route(source=source, target=new_target(), settings=settings)
        done = run_command(route, "init", "--copy", "--connections", "2")
        assert done.returncode == 0, done.stderr
        _check(source, route.target)
        routes.append(route)
    killed = start_daemon(routes[0], environ={"PARAPPLY_FAILPOINT": f"{point}:kill:5"})
    running = [start_daemon(routes[1])]
    write_random(source, seed, _statement, _TRANSACTIONS, amid=_RETYPED)
    assert killed.exit_code() == -signal.SIGKILL, killed.log_tail()
    running += [start_daemon(routes[0]), start_daemon(routes[2])]
    for route, daemon in zip((routes[1], routes[0], routes[2]), running, strict=True):
        daemon.wait_caught_up()
        _check(source, route.target)
        assert route.target.rows("SELECT conflict_type, table_name FROM parapply.conflicts") == []
    verified = run_command(routes[0], "verify", "--json")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    left = {one["table_name"]: one["columns_not_compared"] for one in json.loads(verified.stdout)["tables"]}
    assert left["account"] == ["phone"]
    assert "public.account: not compared, because users' functions replace it: phone" in verified.stderr
    routes[0].target.execute("UPDATE item SET email = 'e1', big = 'x' WHERE id = (SELECT max(id) FROM item)")
    verified = run_command(routes[0], "verify", "--statements")
    assert verified.returncode == 1, verified.stdout + verified.stderr
    assert "md5" not in verified.stdout


def test_conflicts_refresh_and_heal(
    source: Database, new_target: Callable[[], Database], run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """Rows that overwrite have the values; records have none of the publisher's, and replay and heal are refused."""
    policies = {"conflict.insert_exists": "apply_remote", "conflict.update_missing": "apply_remote"}
    policies |= {"conflict.delete_missing": "skip", 'apply.tables."public.item".parallel': "never"}
    route = Route(source=source, target=new_target(), settings={**FAST, **_REPLACES, **policies})
    assert run_command(route, "init", "--copy").returncode == 0
    daemon = start_daemon(route)
    route.target.execute("INSERT INTO item (id, email, own) VALUES (50, 'local', 'mine');"
                         "DELETE FROM account WHERE id IN (1, 2)")  # fmt: skip
    source.execute("INSERT INTO item VALUES (50, 'secret', 5, 'large', 'x', 6, '2021-03-03', 'k');"
                   "UPDATE account SET phone = '+secret' WHERE id = 1; DELETE FROM account WHERE id = 2")  # fmt: skip
    for change in ("name = 'y'", "n = n + 1", "big = repeat('b', 9000)", "id = -id", "email = NULL", "kept = 'k'"):
        source.execute(f"UPDATE item SET {change} WHERE id <> 50")
    daemon.wait_caught_up()
    _check(source, route.target)
    assert route.target.rows("SELECT own FROM item WHERE id = 50") == [("mine",)]
    assert len(route.target.rows("SELECT 1 FROM parapply.conflicts")) == 3
    texts = route.target.rows("SELECT c::text FROM parapply.conflicts AS c")
    assert not [text for (text,) in texts if "secret" in text]
    ((number,),) = route.target.rows("SELECT conflict_id FROM parapply.conflicts WHERE outcome = 'skipped'")
    replayed = run_command(route, "conflicts replay", str(number), "--yes")
    assert replayed.returncode == 4
    assert "the values of replaced columns are not in the history" in replayed.stderr
    route.target.execute("UPDATE item SET email = 'wrong'")
    refreshed = run_command(route, "refresh", "--table", "public.item", "--truncate")
    assert refreshed.returncode == 0, refreshed.stderr
    daemon.wait_caught_up()
    _check(source, route.target)
    daemon.stop()
    source.execute(f"SELECT pg_drop_replication_slot('{route.slot}')")
    healed = run_command(route, "heal")
    assert healed.returncode == 4
    assert "no heal compares rows whose columns are replaced: public.account, public.item" in healed.stderr


@pytest.mark.pg_majors(15, 18)
def test_masked_tenants_with_prepared_transactions(
    source: Database, new_target: Callable[[], Database], run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """Tables of several tenants that become one have their constants and the values of expressions, prepared or not."""
    settings: dict[str, str | float] = {**FAST, "source.two_phase": "true", "apply.workers": 4}
    for number, tenant in enumerate(("t1", "t2")):
        source.execute(f"CREATE SCHEMA {tenant}; CREATE TABLE {tenant}.item (LIKE public.item INCLUDING ALL);"
                       f"INSERT INTO {tenant}.item SELECT * FROM public.item")  # fmt: skip
        settings |= {f'mapping.schemas."{tenant}".{key}': value
                     for key, value in (("schema", "public"), ("set.tenant", str(number)))}  # fmt: skip
        settings |= {f'mapping.tables."{tenant}.item".replace.{name}': text for name, text in _OF_ITEM.items()}
    source.execute("CREATE PUBLICATION tenants FOR TABLES IN SCHEMA t1, t2")
    route = Route(source=source, target=new_target(), publication="tenants", settings=settings)
    route.target.execute("ALTER TABLE item ADD tenant int, DROP CONSTRAINT item_pkey, ADD PRIMARY KEY (id, tenant)")
    assert run_command(route, "init", "--copy").returncode == 0
    daemon = start_daemon(route)
    chooser = random.Random(secrets.randbelow(1_000_000))
    changes = [
        "UPDATE {t}.item SET name = 'w{a}', email = email || '{a}' WHERE id > {a}",
        "UPDATE {t}.item SET big = repeat('{a}', {a} * 400) WHERE id = {a}",
        "UPDATE {t}.item SET id = (SELECT max(id) + 1 FROM {t}.item), n = n + {a} WHERE id = {a}",
        "DELETE FROM {t}.item WHERE id = {a}",
        "INSERT INTO {t}.item VALUES ({a}, 'e{a}', {a}, 'b', 'new', {a}, '2020-07-01', 'k') ON CONFLICT DO NOTHING",
    ]
    for number in range(40):
        texts = [text.format(t=tenant, a=chooser.randint(1, 25)) for tenant in ("t1", "t2")
                 for text in chooser.sample(changes, 2)]  # fmt: skip
        name = f"{route.slot}_{number}"
        source.execute(f"BEGIN; {'; '.join(texts)}; " + (f"PREPARE TRANSACTION '{name}'" if number % 3 else "COMMIT"))
        if number % 3:
            source.execute(f"{('COMMIT', 'ROLLBACK')[number % 2]} PREPARED '{name}'")
    daemon.wait_caught_up()
    there, here = _QUERIES["item"]
    found = [there.replace("SELECT id", f"SELECT {number}, id").replace("FROM item", f"FROM {tenant}.item")
             for number, tenant in enumerate(("t1", "t2"))]  # fmt: skip
    rows = route.target.rows(here.replace("SELECT", "SELECT tenant,", 1))
    check_equal(source.rows(" UNION ALL ".join(found)), rows, "item")
    verified = run_command(route, "verify")
    assert verified.returncode == 0, verified.stdout + verified.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("email; DROP TABLE public.item", "cannot be kept: syntax error"),
        ("email)) ; DROP TABLE public.item; SELECT ((1", "cannot be kept: syntax error"),
        ("md5(email))); DROP TABLE public.item; --", "cannot be kept"),
        ("email) FROM public.item --", "cannot be kept"),
        ("email) UNION SELECT (''", "cannot be kept"),
        ("email /*", "unterminated /* comment"),
        ("email, name", "pseudo-type record"),
        ("(SELECT max(email) FROM public.item)", "it uses table public.item"),
        ("(SELECT email)", "cannot use subquery in index expression"),
        ("max(email)", "aggregate functions are not allowed"),
        ("row_number() OVER ()", "window functions are not allowed"),
        ("generate_series(1, n)", "set-returning functions are not allowed"),
        ("email || random()", "must be marked IMMUTABLE"),
        ("email || now()", "must be marked IMMUTABLE"),
        ("$1", "there is no parameter $1"),
        ("md5(nosuch)", 'column "nosuch" does not exist'),
        ("masked(email)", "function masked(text) does not exist"),
        ("ctid::text", "system columns is not supported"),
        ("name || email", 'it reads several columns, and "email" is not always sent'),
        ("email::json", "has no default operator class"),
        ("public.evil(email)", "it uses function public.evil(text)"),
        ("public.evil('once')", "it uses function public.evil(text)"),
        ("email OPERATOR(public.!!!) email", "it uses operator"),
        ("email::public.short", "it uses type public.short"),
    ],
)
def test_hostile_expressions_are_refused(
    source: Database, new_target: Callable[[], Database], run_command: RunCommand, text: str, words: str
) -> None:
    """`check` names what is wrong, runs nothing of it, and leaves nothing behind."""
    target = new_target()
    role = f"evil_{secrets.token_hex(4)}"
    target.execute(
        f"CREATE ROLE {role}; CREATE DOMAIN short AS text CHECK (length(VALUE) < 9);"
        "CREATE FUNCTION evil(text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN RAISE 'it ran'; END $$;"
        "CREATE FUNCTION evil(text, text) RETURNS text LANGUAGE sql IMMUTABLE AS 'SELECT $1';"
        f"ALTER FUNCTION evil(text) OWNER TO {role}; ALTER FUNCTION evil(text, text) OWNER TO {role};"
        "CREATE OPERATOR !!! (LEFTARG = text, RIGHTARG = text, FUNCTION = evil)"
    )
    settings = {'mapping.tables."public.item".replace.email': text}
    try:
        checked = run_command(Route(source=source, target=target, settings=settings), "check", "--json")
        (found,) = [one for one in json.loads(checked.stdout)["findings"] if one["code"] == "replace_refused"]
        assert words in found["found"]
        assert target.rows("SELECT count(*) FROM item") == [(0,)]
        assert source.rows("SELECT count(*) FROM item") == [(20,)]
        assert target.rows("SELECT relname FROM pg_class WHERE relname LIKE 'parapply%' AND relkind = 'r'") == []
    finally:
        target.execute(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")


@pytest.mark.parametrize(
    ("ddl", "column", "words"),
    [
        ("", "id", 'column "id" is part of the replica identity'),
        ("", "nosuch", "the column is not published"),
        ("CREATE UNIQUE INDEX more ON item (name, email)", "email", '"email" is part of unique index "more"'),
        ("CREATE UNIQUE INDEX more ON item (lower(name))", "email", 'unique index "more" has an expression'),
        ("ALTER TABLE item ADD low text GENERATED ALWAYS AS (lower(email)) STORED UNIQUE", "email", "has an exp"),
        ("CREATE UNIQUE INDEX more ON item (name) WHERE email > ''", "email", 'unique index "more" has an expression'),
        ("CREATE TABLE p (c text PRIMARY KEY); ALTER TABLE item ADD CONSTRAINT f FOREIGN KEY (name) REFERENCES p",
         "name", '"name" is part of foreign key "f"'),
        ("ALTER TABLE item ALTER m SET NOT NULL, ALTER m ADD GENERATED ALWAYS AS IDENTITY", "m", "ALWAYS AS IDENTITY"),
        ("ALTER TABLE item DROP CONSTRAINT item_pkey", "email", "rows are found by all their columns"),
        (_NO_TEMPORARY, "email", "permission denied to create temporary tables"),
    ],
)  # fmt: skip
def test_what_cannot_be_replaced_is_refused(  # noqa: PLR0917  the case
    source: Database,
    new_target: Callable[[], Database],
    run_command: RunCommand,
    start_daemon: StartDaemon,
    ddl: str,
    column: str,
    words: str,
) -> None:
    """`check` says why, and a daemon that meets such a table applies nothing to it."""
    settings: Mapping[str, str | float] = {**FAST, f'mapping.tables."public.item".replace.{column}': f"{column}"}
    source.execute("CREATE PUBLICATION few FOR TABLE item; ALTER TABLE item REPLICA IDENTITY "
                   f"{'FULL' if 'DROP' in ddl else 'DEFAULT'}")  # fmt: skip
    route = Route(source=source, target=new_target(), publication="few", settings=settings)
    route.target.execute(ddl or "SELECT")
    checked = run_command(route, "check", "--json")
    (found,) = [one for one in json.loads(checked.stdout)["findings"] if one["code"] == "replace_refused"]
    assert words in found["found"]
    make_slot(route)
    daemon = start_daemon(route)
    source.execute("INSERT INTO item VALUES (1000, 's')")
    assert daemon.exit_code() != 0
    assert words in daemon.failure
    assert route.target.rows("SELECT count(*) FROM item") == [(0,)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("ALTER TABLE item DROP m", 'column "m" does not exist'),
        ("ALTER TABLE item DROP email", "the column is not published"),
        ("ALTER TABLE item RENAME email TO mail", "the column is not published"),
        ("ALTER TABLE item ALTER big TYPE int USING 1", "function left(integer, integer) does not exist"),
        ("ALTER TABLE item RENAME TO thing", "became public.thing, which has another `replace` or `omit` in [mapping]"),
    ],
)
def test_a_change_of_what_is_read_stops_the_stream(  # noqa: PLR0917  the case
    source: Database,
    new_target: Callable[[], Database],
    run_command: RunCommand,
    start_daemon: StartDaemon,
    change: str,
    words: str,
) -> None:
    """No row comes as it is on the publisher after its column, or the one that is read, has become another."""
    route = Route(source=source, target=new_target(), settings={**FAST, **_REPLACES})
    route.target.execute("CREATE TABLE thing (LIKE item INCLUDING ALL); ALTER TABLE item ADD mail text")
    assert run_command(route, "init", "--copy").returncode == 0
    daemon = start_daemon(route)
    source.execute("UPDATE item SET name = 'before' WHERE id = 1")
    daemon.wait_caught_up()
    source.execute(change)
    source.execute(f"UPDATE {'thing' if 'thing' in change else 'item'} SET kept = 'after' WHERE id = 1")
    assert daemon.exit_code() == 4, daemon.log_tail()
    assert words in daemon.failure
    assert route.target.rows("SELECT count(*) FROM item WHERE kept = 'after'") == [(0,)]
    assert route.target.rows("SELECT count(*) FROM thing") == [(0,)]


@pytest.mark.parametrize("kind", ["replace.email", "set.own"])
@pytest.mark.parametrize("command", ["pause public.account", "refresh", "init --copy"])
def test_no_command_hides_a_rename(  # noqa: PLR0917  the case
    source: Database,
    new_target: Callable[[], Database],
    run_command: RunCommand,
    start_daemon: StartDaemon,
    command: str,
    kind: str,
) -> None:
    """A command that reads the tables' names refuses as the daemon does, and the daemon still stops after it."""
    settings: Mapping[str, str | float] = {**FAST, f'mapping.tables."public.item".{kind}': "NULL::text"}
    route = Route(source=source, target=new_target(), settings=settings)
    route.target.execute("ALTER TABLE item DROP CONSTRAINT item_pkey, ADD PRIMARY KEY (id, own);"
                         "CREATE TABLE thing (LIKE item INCLUDING ALL)")  # fmt: skip
    if kind.startswith("replace"):
        route.target.execute("ALTER TABLE item DROP CONSTRAINT item_pkey, ADD PRIMARY KEY (id)")
    done = run_command(route, "init", "--copy")
    assert done.returncode == 0, done.stderr
    source.execute("ALTER TABLE item RENAME TO thing")
    refused = run_command(route, *command.split())
    assert refused.returncode == 4, refused.stdout + refused.stderr
    assert "public.item became public.thing, which has" in refused.stderr
    source.execute("INSERT INTO thing (id, email) VALUES (50, 'secret')")
    daemon = start_daemon(route)
    assert daemon.exit_code() == 4, daemon.log_tail()
    assert "public.item became public.thing, which has" in daemon.failure
    assert route.target.rows("SELECT count(*) FROM thing") == [(0,)]
    done = run_command(route, "refresh", "--table", "public.thing", "--truncate")
    assert done.returncode == 0, done.stderr
    start_daemon(route).wait_caught_up()
    assert route.target.rows("SELECT count(*) FROM thing") == [(21,)]


@pytest.mark.parametrize("runs", [True, False], ids=["after_a_run", "before_the_first"])
@pytest.mark.parametrize("kind", ["replace.email", "set.own"])
def test_a_rename_while_no_daemon_runs(
    source: Database,
    new_target: Callable[[], Database],
    run_command: RunCommand,
    start_daemon: StartDaemon,
    kind: str,
    *,
    runs: bool,
) -> None:
    """A slot that was begun without a copy also knows the tables' names across its epochs; both names may be given."""
    settings: Mapping[str, str | float] = {**FAST, f'mapping.tables."public.item".{kind}': "NULL::text"}
    route = Route(source=source, target=new_target(), settings=settings)
    route.target.execute("ALTER TABLE item DROP CONSTRAINT item_pkey, ADD PRIMARY KEY (id, own);"
                         "CREATE TABLE thing (LIKE item INCLUDING ALL)")  # fmt: skip
    if kind.startswith("replace"):
        route.target.execute("ALTER TABLE item DROP CONSTRAINT item_pkey, ADD PRIMARY KEY (id)")
    done = run_command(route, "init")
    assert done.returncode == 0, done.stderr
    if runs:
        daemon = start_daemon(route)
        source.execute("INSERT INTO item (id, email) VALUES (50, 'secret')")
        daemon.wait_caught_up()
        daemon.stop()
    source.execute("ALTER TABLE item RENAME TO thing; INSERT INTO thing (id, email) VALUES (51, 'secret')")
    for _ in range(2):
        daemon = start_daemon(route)
        assert daemon.exit_code() == 4, daemon.log_tail()
        assert "public.item became public.thing, which has" in daemon.failure
        assert route.target.rows("SELECT count(*) FROM thing") == [(0,)]
    both: Mapping[str, str | float] = {**settings, f'mapping.tables."public.thing".{kind}': "NULL::text"}
    if runs and "replace" in kind:
        # Its rows stay in the target's table.
        start_daemon(replace(route, settings={**both, 'mapping.tables."public.thing".table': "public.item"}))
        route.target.wait_until("SELECT count(email) = 0 AND count(*) = 2 FROM item")
        return
    start_daemon(replace(route, settings=both)).wait_caught_up()
    assert route.target.rows("SELECT id, email = 'secret' FROM thing") == [(51, None if "replace" in kind else True)]


_ROOT = (
    "CREATE TABLE root (id int PRIMARY KEY, email text) PARTITION BY RANGE (id);"
    "CREATE TABLE leaf PARTITION OF root FOR VALUES FROM (0) TO (9)"
)


@pytest.mark.parametrize(
    ("kind", "is_copy"), [("replace.email", False), ("omit", True), ("omit", False), ("schema_only", False)]
)
def test_partitions_with_other_settings_than_their_root_stop_the_stream(
    source: Database,
    new_target: Callable[[], Database],
    run_command: RunCommand,
    start_daemon: StartDaemon,
    kind: str,
    *,
    is_copy: bool,
) -> None:
    """Rows that were sent under a partition's name come without its root's settings, however it is published now.

    Nor does a command copy them, nor a partition's settings get lost where rows come under the root's name.
    """

    def settings(*tables: str) -> Mapping[str, str | float]:
        if kind == "schema_only":
            return {**FAST, "mapping.schema_only": ",".join(f"public.{table}" for table in tables)}
        text = "md5(email)" if kind.startswith("replace") else "email"
        return {**FAST, **{f'mapping.tables."public.{table}".{kind}': text for table in tables}}

    by_leaf, by_root = (f"ALTER PUBLICATION roots SET (publish_via_partition_root = {text})" for text in (False, True))
    source.execute(f"{_ROOT}; CREATE PUBLICATION roots FOR TABLE root WITH (publish_via_partition_root)")
    route = Route(source=source, target=new_target(), publication="roots", settings=settings("root"))
    route.target.execute(_ROOT)
    plain = "SELECT id FROM root WHERE email = 'secret' OR id > 1"
    copied = ("--copy",) if is_copy else ()
    done = run_command(route, "init", *copied)
    assert done.returncode == 0, done.stderr
    daemon = start_daemon(route)
    source.execute("INSERT INTO root VALUES (1, 'secret')")
    daemon.wait_caught_up()
    source.execute(f"{by_leaf}; INSERT INTO root VALUES (2, 'secret')")
    assert daemon.exit_code() == 4, daemon.log_tail()
    assert "public.leaf is sent by its own name" in daemon.failure
    refused = run_command(route, "refresh", "--table", "public.leaf", "--truncate")
    assert refused.returncode == 4, refused.stdout + refused.stderr
    assert "public.leaf is sent by its own name" in refused.stderr
    source.execute(by_root)
    daemon = start_daemon(route)
    assert daemon.exit_code() == 4, daemon.log_tail()
    assert "public.leaf is sent by its own name" in daemon.failure
    assert route.target.rows(plain) == []
    both = replace(route, settings=settings("root", "leaf"))
    start_daemon(both).wait_caught_up()
    assert route.target.rows("SELECT id FROM root WHERE email = 'secret'") == []
    other = replace(route, slot=f"{route.slot}_other", target=new_target(), settings=settings("leaf"))
    other.target.execute(_ROOT)
    make_slot(other)
    source.execute("INSERT INTO root VALUES (3, 'secret')")
    daemon = start_daemon(other)
    assert daemon.exit_code() == 4, daemon.log_tail()
    assert "public.root is sent by its own name" in daemon.failure
    assert other.target.rows(plain) == []


def test_no_message_has_a_value(
    source: Database, new_target: Callable[[], Database], run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """An expression that fails, be it in a copy, in the stream or in a comparison, is reported by its condition."""
    source.execute("UPDATE item SET email = 'secret'")
    settings: Mapping[str, str | float] = {**FAST, 'mapping.tables."public.item".replace.email': "email::bigint"}
    route = Route(source=source, target=new_target(), settings=settings)
    failed = run_command(route, "init", "--copy")
    words = [failed.stdout + failed.stderr]
    other = replace(route, slot=f"{route.slot}_other", target=new_target())
    assert run_command(other, "init").returncode == 0
    daemon = start_daemon(other)
    verified = run_command(other, "verify", "--table", "public.item")
    words.append(verified.stdout + verified.stderr)
    source.execute("UPDATE item SET email = 'secret' WHERE id = 1; INSERT INTO item (id, email) VALUES (50, 'secret')")
    assert daemon.exit_code() != 0
    words.append(daemon.log_tail())
    for text in words:
        assert "invalid_text_representation" in text
        assert "secret" not in text


@pytest.mark.pg_majors(15, 18)
def test_check_shows_the_expressions(
    source: Database, new_target: Callable[[], Database], run_command: RunCommand
) -> None:
    """Each is a note, as the target prints it, with the columns that it reads."""
    checked = run_command(Route(source=source, target=new_target(), settings=_REPLACES), "check", "--json")
    found = [one["found"] for one in json.loads(checked.stdout)["findings"] if one["code"] == "column_replaced"]
    assert len(found) == len(_OF_ITEM) + len(_OF_ACCOUNT)
    assert 'column "email" of "public"."item" gets md5(email), which reads "email" and is immutable' in found
    assert 'column "n" of "public"."item" gets (((n * 10) + m)), which reads "m", "n" and is immutable' in found
    assert 'column "secret" of "public"."account" gets (NULL::text), which reads nothing and is immutable' in found


def test_a_rule_that_takes_copied_rows_is_refused(
    source: Database, new_target: Callable[[], Database], run_command: RunCommand
) -> None:
    """Rows of a copy with expressions are inserted, which a rule acts on: those that it keeps away are missed."""
    target = new_target()
    target.execute("CREATE RULE kept AS ON INSERT TO item WHERE new.id > 10 DO INSTEAD NOTHING")
    target.execute("ALTER TABLE item ENABLE ALWAYS RULE kept")
    route = Route(source=source, target=target, settings={**FAST, **_REPLACES})
    refused = run_command(route, "init", "--copy")
    assert refused.returncode == 4, refused.stdout + refused.stderr
    assert "of 20 rows copied into public.item 10 came there, because it has rules on INSERT: kept" in refused.stderr
    target.execute("DROP RULE kept ON item")
    done = run_command(route, "init", "--copy")
    assert done.returncode == 0, done.stderr
    _check(source, target)

"""Foreign keys of many new rows, checked by one query (T-25): the result is as by the target's triggers.

All daemons have `session_replication_role = origin`. A batch is one large transaction, or a backlog.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from psycopg import sql

from parapply.demo.server import PgServer
from tests.fixtures.pair import Pair, pair
from tests.fixtures.plain import WORKER_IS_BLOCKED, transaction_of
from tests.fixtures.roles import run_script

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["pair"]

_ORIGIN: dict[str, str | float] = {"target.session_replication_role": "origin", "apply.catalogue_check_s": 3600.0}
_KEY = "REFERENCES parent"
_TABLES = """
CREATE TABLE parent (id int PRIMARY KEY, v int);
CREATE TABLE child (id int PRIMARY KEY, parent int {0}, other int);
INSERT INTO parent SELECT n, 0 FROM generate_series(1, 9) AS n;
"""
#: Far more references than those from which a query checks them.
_CHILDREN = "INSERT INTO child SELECT n, n % 5 + 1, 99 FROM generate_series({0}, {0} + 999) AS n"
#: Triggers look for each child's parent in an index; a query looks at most once for each value.
_LOOKS = "SELECT idx_scan FROM pg_stat_user_tables WHERE relname = 'parent'"
_HAS_LOOKED = "SELECT EXISTS (SELECT FROM pg_stat_user_tables WHERE relname = 'child' AND n_tup_ins >= {})"


def _looks(pair: Pair, n_children: int) -> int:
    """Return how often a parent was looked for, once the counts of that many children have come."""
    pair.target.wait_until(_HAS_LOOKED.format(n_children))
    return int(pair.target.rows(_LOOKS)[0][0])


def _create(pair: Pair, *, key: str = _KEY) -> None:
    pair.create(_TABLES.format(""), _TABLES.format(key))


def test_t25_large_sets_are_checked_by_a_query(pair: Pair) -> None:
    """A thousand children are not looked up one by one; few are, because the plans made again would cost more."""
    _create(pair)
    pair.write(_CHILDREN.format(1), "INSERT INTO parent SELECT n, 0 FROM generate_series(10, 20) AS n",
               "INSERT INTO child SELECT n, n % 11 + 10, 0 FROM generate_series(2001, 3000) AS n")  # fmt: skip
    pair.drain(settings=_ORIGIN)
    pair.check_equal()
    assert _looks(pair, 2000) < 100
    pair.write("INSERT INTO child SELECT n, 1, 0 FROM generate_series(5001, 5100) AS n")
    pair.drain(settings=_ORIGIN)
    assert _looks(pair, 2100) >= 100


@pytest.mark.parametrize(
    "code",
    [
        "ALTER TABLE child ALTER CONSTRAINT child_parent_fkey DEFERRABLE",
        "ALTER TABLE parent ENABLE ROW LEVEL SECURITY; CREATE POLICY all_rows ON parent USING (true)",
        "REVOKE UPDATE ON parent FROM PUBLIC, parapply_target",
        """ALTER TABLE child DROP CONSTRAINT child_parent_fkey; ALTER TABLE parent ADD UNIQUE (id, v);
        ALTER TABLE child ADD w int DEFAULT 0, ADD FOREIGN KEY (parent, w) REFERENCES parent (id, v)""",
        "ALTER TABLE child ALTER parent TYPE bigint",
        "ALTER TABLE child ADD CONSTRAINT later UNIQUE (other, id) DEFERRABLE",
    ],
)
def test_t25_other_keys_are_checked_by_their_triggers(pair: Pair, code: str) -> None:
    """Keys that one query cannot check as the trigger does are left to it, and so is a table with other code."""
    _create(pair)
    pair.target.execute(code)
    pair.write(_CHILDREN.format(1))
    pair.drain(settings=_ORIGIN)
    assert _looks(pair, 1000) >= 1000


@pytest.mark.parametrize("many", [True, False], ids=["checked by a query", "few rows"])
def test_t25_missing_parent_stops_at_its_transaction(pair: Pair, many: bool) -> None:  # noqa: FBT001  a parameter
    """A child whose parent the target lacks stops the daemon at its transaction with 23503, however it was found."""
    _create(pair)
    pair.target.execute("DELETE FROM parent WHERE id = 3")
    n_before = 300 if many else 20
    rows = [f"INSERT INTO child VALUES ({n}, 1), ({-n}, NULL)" for n in range(1, n_before + 1)]
    pair.write(*rows)
    xid = pair.write_one("INSERT INTO child VALUES (1001, 3)")
    pair.write(*[f"INSERT INTO child VALUES ({n}, 2)" for n in range(2001, 2001 + n_before)])
    daemon = pair.start_only(settings=_ORIGIN)
    assert daemon.wait_for_event("batch_retried")["reason"] == "23503"
    pair.check_stopped(daemon, code=5, says=rf"child.*23503.*child_parent_fkey.*transaction {xid}, ")
    assert pair.target.rows("SELECT count(*), max(id) FROM child") == [(2 * n_before, n_before)]


@pytest.mark.parametrize(
    ("type_", "stored", "parent", "sent"),
    [("varchar", "varchar(2)", "ab", "ab  "), ("timestamp", "timestamp(0)", "2026-01-01", "2026-01-01 00:00:00.4")],
)
def test_t25_values_are_checked_as_they_are_stored(pair: Pair, type_: str, stored: str, parent: str, sent: str) -> None:
    """A value that the child's column cuts or rounds needs the parent of the result, and no other one."""
    tables = f"CREATE TABLE parent (k {type_} PRIMARY KEY); CREATE TABLE child (id int PRIMARY KEY, k {{}});"
    key = f"INSERT INTO parent VALUES ('{parent}')"
    pair.create(tables.format(type_) + key, tables.format(f"{stored} REFERENCES parent") + key)
    pair.write(f"INSERT INTO child SELECT n, '{sent}' FROM generate_series(1, 1000) AS n")
    pair.drain(settings=_ORIGIN)
    assert pair.target.rows("SELECT count(*) FROM child JOIN parent USING (k)") == [(1000,)]
    assert _looks(pair, 1000) < 100
    pair.target.execute(f"TRUNCATE child; DELETE FROM parent; INSERT INTO parent VALUES ('{sent}')")
    pair.write(f"INSERT INTO child SELECT n, '{sent}' FROM generate_series(1001, 2000) AS n")
    pair.check_stopped(pair.start_only(settings=_ORIGIN), code=5, says="23503")


@pytest.mark.parametrize("ends", ["COMMIT", "ROLLBACK"])
def test_t25_parent_deleted_by_another_session(pair: Pair, ends: str) -> None:
    """A parent that another session is deleting is waited for, and its end decides."""
    _create(pair)
    daemon = pair.start(settings=_ORIGIN)
    with pair.target.connect() as other, transaction_of(other, "DELETE FROM parent WHERE id = 3"):
        pair.write(_CHILDREN.format(1))
        pair.target.wait_until(WORKER_IS_BLOCKED)
        other.execute(ends.encode())
    if ends == "COMMIT":
        pair.check_stopped(daemon, code=5, says="23503")
        assert pair.target.rows("SELECT count(*) FROM child") == [(0,)]
    else:
        daemon.wait_caught_up()
        pair.check_equal()


def test_t25_parent_that_children_have_cannot_be_deleted(pair: Pair) -> None:
    """Parents are locked until the batch commits, as by the trigger: a delete waits, and then finds the children."""
    _create(pair)
    daemon = pair.start(settings=_ORIGIN)
    waiting = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE query LIKE 'DELETE FROM parent%' AND {})"
    with pair.target.connect() as gate, pair.target.connect() as other:
        with transaction_of(gate, "SELECT FROM parent WHERE id = 5 FOR UPDATE"):
            pair.write(_CHILDREN.format(1))
            pair.target.wait_until(WORKER_IS_BLOCKED)
            other.pgconn.send_query(b"DELETE FROM parent WHERE id = 2")
            pair.target.wait_until(waiting.format("wait_event_type = 'Lock'"))
        daemon.wait_caught_up()
        pair.target.wait_until(waiting.format("state = 'idle'"))
        result = other.pgconn.get_result()
        assert result is not None
        assert b"child_parent_fkey" in result.error_message
        assert other.pgconn.get_result() is None  # the end of the query
    pair.check_equal()


@pytest.mark.parametrize(
    "code",
    [
        "ALTER TABLE child ADD CONSTRAINT late FOREIGN KEY (other) REFERENCES parent NOT VALID",
        """ALTER TABLE child DROP CONSTRAINT child_parent_fkey;
        CREATE TABLE elsewhere (id int PRIMARY KEY); INSERT INTO elsewhere VALUES (1);
        ALTER TABLE child ADD CONSTRAINT late FOREIGN KEY (parent) REFERENCES elsewhere NOT VALID""",
        "ALTER TABLE parent RENAME TO was; CREATE TABLE parent AS TABLE was; DELETE FROM was WHERE id = 3",
        """ALTER TABLE parent RENAME id TO was; ALTER TABLE parent RENAME v TO id;
        UPDATE parent SET id = was; DELETE FROM parent WHERE was = 3; INSERT INTO parent (was, id) VALUES (1000, 3)""",
    ],
    ids=["another key", "a key to another table", "the parent's name", "the column's name"],
)
def test_t23_keys_that_come_while_the_daemon_runs(pair: Pair, code: str) -> None:
    """A key that has come or changed since the catalogue was read refuses the rows that it must refuse (T-23)."""
    _create(pair)
    daemon = pair.start(settings=_ORIGIN)
    pair.write("INSERT INTO child SELECT n, n % 2 + 1, NULL FROM generate_series(1001, 2000) AS n")
    daemon.wait_caught_up()
    pair.target.execute(code)
    pair.write("INSERT INTO child SELECT n, n % 5 + 1, 99 FROM generate_series(1, 1000) AS n")
    pair.check_stopped(daemon, code=5, says="23503")
    assert pair.target.rows("SELECT count(*) FROM child") == [(1000,)]


def test_t62_role_that_may_not_change_its_replication_role(pair: Pair) -> None:
    """Without SET on the parameter keys are left to triggers, also if it is revoked while the daemon runs (T-62)."""
    server, role = pair.target.server, f"limited_{secrets.token_hex(4)}"
    if not isinstance(server, PgServer):
        pytest.skip("roles stay on external servers")
    _create(pair)
    run_script(server, pair.target.dbname, "subscriber", role=role, replica="off")
    pair.route = replace(pair.route, target_dsn=server.dsn(pair.target.dbname, role))
    settings = {**_ORIGIN, "target.state_schema": "limited"}
    may_set = f"SET ON PARAMETER session_replication_role {{}} {role}"
    try:
        pair.write(_CHILDREN.format(1))
        pair.drain(settings=settings)
        n_before = _looks(pair, 1000)
        assert n_before >= 1000
        pair.target.execute(f"GRANT {may_set.format('TO')}")
        pair.write(_CHILDREN.format(1001))
        pair.drain(settings=settings)
        assert _looks(pair, 2000) - n_before < 100
        daemon = pair.start(settings=settings)
        pair.target.execute(f"REVOKE {may_set.format('FROM')}")
        for first in (2001, 3001):
            pair.write(_CHILDREN.format(first))
            pair.target.wait_until(f"SELECT count(*) = {first + 999} FROM child")
        assert daemon.wait_for_event("batch_retried")["reason"] == "42501"
        assert len([line for line in daemon.lines if "batch_retried" in line]) == 1
        daemon.stop()
    finally:
        pair.target.execute(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")
    pair.check_equal()


_RANDOM_TABLES = """
CREATE TABLE one (id int PRIMARY KEY, up int {one}, v int);
CREATE TABLE two (id uuid PRIMARY KEY, code text UNIQUE, one int {two});
CREATE TABLE three (id int PRIMARY KEY, code text {code}, two uuid {three}, at date);
"""
_KEYS = {
    "one": "REFERENCES one",
    "two": "REFERENCES one ON DELETE CASCADE",
    "code": "REFERENCES two (code)",
    "three": "REFERENCES two ON DELETE SET NULL",
}


def _families(chooser: random.Random) -> Iterator[str]:
    """Yield transactions of large and small families that a database with the keys of `_KEYS` takes."""
    for n in range(1, 31):
        size = chooser.choice((1, 5, 200))
        at = n * 1000
        yield (
            f"INSERT INTO one SELECT {at} + k, {at}, k FROM generate_series(0, {size}) AS k;"
            f"INSERT INTO two SELECT md5((({at} + k)::text))::uuid, 'Code ' || ({at} + k), {at} + k % ({size} + 1)"
            f" FROM generate_series(0, {2 * size}) AS k"
        )
        kin = f"FROM two WHERE one / 1000 = {chooser.randint(1, n)}"
        yield (
            f"INSERT INTO three SELECT {at} + k, code, id, date '2026-01-01' + k FROM generate_series(1, {size}) k"
            f" LEFT JOIN (SELECT code, id, row_number() OVER () AS r, count(*) OVER () AS n {kin}) w ON r = k % n + 1"
        )
        yield f"UPDATE one SET v = v + 1 WHERE id % {chooser.randint(2, 9)} = 0"
        yield f"UPDATE three SET code = NULL WHERE id % {chooser.randint(2, 9)} = 0"
        if chooser.random() < 0.5:
            gone = chooser.randint(1, n)
            these = f"FROM two WHERE one / 1000 = {gone}"
            yield (
                f"UPDATE three SET code = NULL, two = NULL WHERE two IN (SELECT id {these});"
                f"UPDATE three SET code = NULL WHERE code IN (SELECT code {these});"
                f"DELETE {these}; DELETE FROM one WHERE id / 1000 = {gone}"
            )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("order", ["preserve", "relaxed"])
def test_t25_random_families_with_kills(pair: Pair, order: str) -> None:
    """Workers that check sets by queries leave the publisher's rows, also when the daemon is killed on the way."""
    pair.create(_RANDOM_TABLES.format(**_KEYS))
    settings = {**_ORIGIN, "apply.commit_order": order}
    chooser = random.Random(7)
    for n, text in enumerate(_families(chooser)):
        pair.write(f"BEGIN; {text}; COMMIT")
        if n % 25 == 24:
            daemon = pair.start(workers=4, settings=settings)
            pair.target.wait_until("SELECT count(*) > 0 FROM parapply.workers WHERE state <> 'idle' OR true")
            daemon.kill()
    pair.drain(workers=4, settings=settings)
    pair.check_equal()
    for child, column, parent, key in (("one", "up", "one", "id"), ("two", "one", "one", "id"),
                                       ("three", "code", "two", "code"), ("three", "two", "two", "id")):  # fmt: skip
        orphans = sql.SQL(
            "SELECT count(*) FROM {} c WHERE {} IS NOT NULL AND NOT EXISTS (SELECT FROM {} p WHERE p.{} = c.{})"
        )
        names = [sql.Identifier(name) for name in (child, column, parent, key, column)]
        assert pair.target.rows(orphans.format(*names)) == [(0,)], child

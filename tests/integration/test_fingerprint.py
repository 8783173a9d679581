"""Fingerprints of tables against real DDL: what changes them, and what does not."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from typing import TYPE_CHECKING

import psycopg
import pytest

from parapply.target.catalogue.fingerprint import change_counts, fingerprints, fingerprints_of_few, gives_access
from tests.integration.table_cases import Refused, Worker, worker_on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.databases import Database

#: Every table below, and one that nothing is done to.
_TABLES = """
CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE SCHEMA s; CREATE TABLE s.other(id int PRIMARY KEY);
CREATE TABLE t(id int PRIMARY KEY, e text, n int NOT NULL, CONSTRAINT positive CHECK (id > 0));
CREATE TRIGGER plain AFTER INSERT ON t EXECUTE FUNCTION f();
CREATE TABLE parent(id int PRIMARY KEY) PARTITION BY RANGE (id);
CREATE TABLE parent1 PARTITION OF parent FOR VALUES FROM (0) TO (5);
CREATE TABLE child(id int PRIMARY KEY, p int, CONSTRAINT up FOREIGN KEY (p) REFERENCES parent);
CREATE TABLE p(id int PRIMARY KEY, e text) PARTITION BY RANGE (id);
CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (5) PARTITION BY RANGE (id);
CREATE TABLE p11 PARTITION OF p1 FOR VALUES FROM (0) TO (2);
CREATE TABLE loose(id int NOT NULL, e text);
"""

#: A table, and a statement that changes what the catalogue says of it.
_CHANGES = (
    ("t", "CREATE UNIQUE INDEX i ON t(e)"),
    ("t", "ALTER INDEX i RENAME TO j"),
    ("t", "DROP INDEX j"),
    ("t", "CREATE UNIQUE INDEX CONCURRENTLY slow ON t(e)"),
    ("t", "CREATE UNIQUE INDEX by_n ON t(n)"),
    ("t", "ALTER TABLE t REPLICA IDENTITY USING INDEX by_n"),
    ("t", "ALTER TABLE t REPLICA IDENTITY FULL"),
    ("t", "CREATE TRIGGER second BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION f()"),
    ("t", "ALTER TABLE t ENABLE ALWAYS TRIGGER plain"),
    ("t", "ALTER TABLE t DISABLE TRIGGER plain"),
    ("t", "DROP TRIGGER second ON t"),
    ("t", "CREATE RULE r AS ON INSERT TO t DO INSTEAD NOTHING"),
    ("t", "ALTER TABLE t ENABLE ALWAYS RULE r"),
    ("t", "DROP RULE r ON t"),
    ("t", "ALTER TABLE t ADD COLUMN x int"),
    ("t", "ALTER TABLE t ALTER x SET DEFAULT 7"),
    ("t", "ALTER TABLE t ALTER x SET DEFAULT 8"),
    ("t", "ALTER TABLE t ALTER x DROP DEFAULT"),
    ("t", "ALTER TABLE t ALTER x TYPE int8"),
    ("t", "ALTER TABLE t RENAME x TO y"),
    ("t", "ALTER TABLE t DROP COLUMN y"),
    ("t", "ALTER TABLE t ADD CONSTRAINT c CHECK (id < 9)"),
    ("t", "ALTER TABLE t DROP CONSTRAINT positive"),
    ("t", "ALTER TABLE t ADD FOREIGN KEY (id) REFERENCES s.other"),
    ("t", "GRANT SELECT ON t TO pg_monitor"),
    ("t", "REVOKE SELECT ON t FROM pg_monitor"),
    ("t", "ALTER TABLE t ENABLE ROW LEVEL SECURITY"),
    ("t", "CREATE POLICY mine ON t USING (true)"),
    ("t", "ALTER TABLE t SET UNLOGGED"),
    ("t", "ALTER TABLE t SET LOGGED"),
    ("t", "ALTER TABLE t RENAME TO u"),
    ("u", "ALTER TABLE u SET SCHEMA s"),
    ("s.other", "ALTER SCHEMA s RENAME TO s2"),
    ("s2.other", "GRANT USAGE ON SCHEMA s2 TO pg_monitor"),
    ("p", "ALTER TABLE p1 ATTACH PARTITION loose FOR VALUES FROM (2) TO (5)"),
    ("p", "ALTER TABLE p11 SET UNLOGGED"),
    ("p", "ALTER TABLE p11 SET LOGGED"),
    ("p", "CREATE UNIQUE INDEX leaf ON p11(e)"),
    ("p", "ALTER TABLE p11 ADD CONSTRAINT leaf_check CHECK (e <> '')"),
    ("p11", "ALTER TABLE p RENAME TO q"),
    ("q", "ALTER TABLE p1 DETACH PARTITION loose"),
    ("p11", "ALTER TABLE q DETACH PARTITION p1"),
    ("child", "ALTER TABLE parent RENAME TO mother"),
    ("child", "ALTER TABLE parent1 DISABLE TRIGGER ALL"),
    ("child", "CREATE TABLE parent2 PARTITION OF mother FOR VALUES FROM (5) TO (9)"),
    ("child", "ALTER TABLE mother RENAME id TO number"),
    ("child", "ALTER TABLE child ALTER CONSTRAINT up DEFERRABLE"),
)


@pytest.fixture
def worker(target_db: Database) -> Iterator[Worker]:
    """A worker's session on an empty database."""
    with worker_on(target_db) as session:
        yield session


class _Looker:
    """One session that looks again and again, as the daemon does."""

    def __init__(self, dsn: str) -> None:
        self._runner = asyncio.Runner()
        connect = psycopg.AsyncConnection.connect
        options = "-c search_path=pg_catalog"
        self._connection = self._runner.run(
            connect(dsn, autocommit=True, options=options, row_factory=psycopg.rows.dict_row)
        )

    def __call__(self, oids: list[int], role: str = "NONE") -> dict[int, str]:
        return self._runner.run(self._look(oids, role))

    async def _look(self, oids: list[int], role: str) -> dict[int, str]:
        await self._connection.execute(f"SET ROLE {role}".encode())
        found = await fingerprints(self._connection, oids)
        assert await fingerprints_of_few(self._connection, oids) == found
        return found

    def close(self) -> None:
        self._runner.run(self._connection.close())
        self._runner.close()


@pytest.fixture
def prints(target_db: Database) -> Iterator[_Looker]:
    """A source of the texts of tables, by oid."""
    with closing(_Looker(target_db.dsn)) as looker:
        yield looker


def _oid(worker: Worker, name: str) -> int:
    ((oid,),) = worker.rows(f"SELECT '{name}'::regclass::oid")
    return int(oid or "")


@pytest.mark.pg_majors(15, 18)
def test_every_change_is_seen(worker: Worker, prints: _Looker) -> None:
    """DDL changes the text of the tables it concerns, and of a table that has nothing to do with it never."""
    worker.run_text(_TABLES)
    worker.run_text("CREATE TABLE still(id int PRIMARY KEY, e text UNIQUE)")
    still = _oid(worker, "still")
    before: dict[int, str] = {}
    for table, statement in _CHANGES:
        oid = _oid(worker, table)
        if oid not in before:
            before = prints([oid, still])
        worker.run_text(statement)
        after = prints([oid, still])
        assert before[oid] != after[oid], statement
        assert before[still] == after[still], statement
        before = after


@pytest.mark.pg_majors(15, 18)
def test_data_changes_nothing(worker: Worker, prints: _Looker) -> None:
    """Rows, statistics, VACUUM, TRUNCATE, rewrites and looking again leave the text as it is."""
    worker.run_text(_TABLES)
    oids = [_oid(worker, name) for name in ("t", "child", "parent", "p", "p11")]
    before = prints(oids)
    assert len(before) == len(oids)
    for statement in (
        "INSERT INTO t SELECT g, g, g FROM generate_series(1, 1000) g; INSERT INTO p VALUES (1, 'a')",
        "INSERT INTO parent VALUES (1); INSERT INTO child VALUES (1, 1)",
        "ANALYZE",
        "VACUUM",
        "VACUUM FREEZE",
        "VACUUM FREEZE pg_class",
        "VACUUM FULL t",
        "CLUSTER child USING child_pkey",
        "REINDEX TABLE p11",
        "DELETE FROM t",
        "TRUNCATE t, child, parent, p",
        "CREATE TABLE more(id int PRIMARY KEY)",
    ):
        worker.run_text(statement)
        if "CLUSTER" in statement:
            before = prints(oids)  # which index it was is a mark on the index
            continue
        assert prints(oids) == before, statement


async def test_changes_of_the_catalogue_are_counted(target_db: Database) -> None:
    """DDL changes the counts soon."""

    async def count() -> str:
        async with await psycopg.AsyncConnection.connect(target_db.dsn, autocommit=True) as conn:
            return await change_counts(conn)

    before = await count()
    assert before
    target_db.execute("CREATE TABLE t(id int PRIMARY KEY); SELECT pg_stat_force_next_flush()")
    async with asyncio.timeout(30):
        while await count() == before:  # noqa: ASYNC110  the server signals nothing
            await asyncio.sleep(0.05)


def test_dropped_tables_are_missing(worker: Worker, prints: _Looker) -> None:
    """A missing table has no text, and a request for no table has an empty answer."""
    worker.run_text("CREATE TABLE a(id int); CREATE TABLE b(id int)")
    a, b = _oid(worker, "a"), _oid(worker, "b")
    assert set(prints([b, a, a])) == {a, b}
    worker.run_text("DROP TABLE a")
    assert set(prints([a, b])) == {b}
    assert prints([]) == {}


def test_privileges_by_membership_count(worker: Worker, prints: _Looker) -> None:
    """A role's privileges come from its roles as well: the text states the privileges, not who granted them."""
    worker.run_text("CREATE TABLE t(id int); GRANT INSERT ON t TO pg_read_all_stats")
    oid = _oid(worker, "t")
    # pg_monitor is a member of pg_read_all_stats.
    assert prints([oid], "pg_monitor") != prints([oid], "pg_signal_backend")
    with pytest.raises(Refused, match="permission denied"):
        worker.run_text("SET ROLE pg_signal_backend; INSERT INTO t VALUES (1)")


@pytest.mark.pg_majors(15, 18)
def test_access_to_a_table_is_read_from_its_text(worker: Worker, prints: _Looker) -> None:
    """Only where all rows may be read and written; the privilege to truncate is asked for when it is needed."""
    worker.run_text(
        "CREATE SCHEMA s; CREATE TABLE s.t(id int); GRANT USAGE ON SCHEMA s TO pg_monitor;"
        " GRANT SELECT, INSERT, UPDATE, DELETE ON s.t TO pg_monitor"
    )
    oid = _oid(worker, "s.t")

    def has_access(role: str = "pg_monitor") -> bool:
        return gives_access(prints([oid], role)[oid])

    assert has_access("NONE")
    assert has_access()
    assert not has_access("pg_signal_backend")
    for privilege in ("SELECT", "INSERT", "UPDATE", "DELETE"):
        worker.run_text(f"REVOKE {privilege} ON s.t FROM pg_monitor; GRANT TRUNCATE ON s.t TO pg_monitor")
        assert not has_access(), privilege
        worker.run_text(f"GRANT {privilege} ON s.t TO pg_monitor")
        assert has_access()
    worker.run_text("ALTER TABLE s.t ENABLE ROW LEVEL SECURITY")
    assert not has_access()
    worker.run_text("ALTER TABLE s.t DISABLE ROW LEVEL SECURITY; REVOKE USAGE ON SCHEMA s FROM pg_monitor")
    assert not has_access()
    assert not gives_access("")


def test_a_thousand_tables_are_cheap(worker: Worker, prints: _Looker) -> None:
    """One look at a thousand tables, some of which refer to one partitioned table, takes little of a second."""
    worker.run_text(
        "CREATE TABLE hub(id int PRIMARY KEY) PARTITION BY RANGE (id);"
        "DO $$ BEGIN FOR n IN 1..50 LOOP EXECUTE format("
        "'CREATE TABLE hub%s PARTITION OF hub FOR VALUES FROM (%s) TO (%s)', n, n, n + 1); END LOOP; END $$"
    )
    for first in range(
        0, 1000, 40
    ):  # each batch has its own transaction: locks of all at once would be too many; no type needs a TOAST table
        worker.run_text(
            f"DO $$ BEGIN FOR n IN {first}..{first + 39} LOOP EXECUTE format('CREATE TABLE t%s(id int PRIMARY KEY,"
            " a int UNIQUE, b int, c int, d int, e bigint, f date, hub int{0})', n); END LOOP; END $$".replace(
                "{0}", " REFERENCES hub" if first == 0 else ""
            )
        )
    oids = [int(oid or "") for (oid,) in worker.rows("SELECT oid FROM pg_class WHERE relname ~ '^t[0-9]+$'")]
    assert len(oids) == 1000
    started_s = time.monotonic()
    assert len(prints(oids)) == 1000
    # Some 0.05 s; a query for each table or a nested loop would take many seconds.
    assert time.monotonic() - started_s < 3

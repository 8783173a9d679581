"""Unique indexes and foreign keys that the catalogue query finds on real servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from parapply.plan.table import Equality, Lane
from parapply.target.catalogue.match import match
from tests.integration.table_cases import Refused, Worker, relation_of, worker_on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from parapply.plan.table import ForeignKeyFacts, UniqueFacts
    from tests.fixtures.databases import Database


@pytest.fixture
def worker(target_db: Database) -> Iterator[Worker]:
    """A worker's session on an empty database."""
    with worker_on(target_db) as session:
        yield session


def _unique(worker: Worker, table: str) -> dict[str, UniqueFacts]:
    return {index.name: index for index in worker.facts(table).unique}


def _foreign(worker: Worker, table: str, *, role: str = "origin") -> dict[str, ForeignKeyFacts]:
    return {each.name: each for each in worker.facts(table, role=role).foreign_keys}


def _always(worker: Worker, table: str) -> None:
    """Make the triggers of a table's foreign keys also fire under the replica role."""
    names = worker.rows(
        f"SELECT quote_ident(tgname) FROM pg_trigger WHERE tgrelid = '{table}'::regclass AND tgisinternal"
    )
    assert names
    for (name,) in names:
        worker.run_text(f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER {name}")


@pytest.mark.pg_majors(15, 18)
def test_columns_of_unique_indexes(worker: Worker) -> None:
    """Key columns come in the index's order without included ones; an expression leaves none to name (trap T-22)."""
    worker.run_text(
        "CREATE TABLE t(id int PRIMARY KEY, a int, n numeric, e text, v varchar(9), active bool, r int4range,"
        " g text GENERATED ALWAYS AS (lower(e)) STORED UNIQUE, CONSTRAINT later UNIQUE (v) DEFERRABLE,"
        " CONSTRAINT x EXCLUDE USING gist (r WITH &&));"
        "CREATE UNIQUE INDEX pair ON t(n, a) INCLUDE (e); CREATE UNIQUE INDEX lowered ON t(a, lower(e));"
        "CREATE UNIQUE INDEX partial ON t(v) WHERE active;"
        "CREATE UNIQUE INDEX nulls ON t(a) NULLS NOT DISTINCT"
    )
    unique = _unique(worker, "t")
    assert sorted(unique) == ["later", "lowered", "nulls", "pair", "partial", "t_g_key", "x"]
    assert unique["pair"].columns == ("n", "a")
    assert unique["pair"].equalities == (Equality.NUMERIC, Equality.BYTES)
    assert (unique["lowered"].columns, unique["lowered"].equalities) == ((), ())
    assert unique["t_g_key"].columns == ("g",)
    assert [name for name, index in unique.items() if index.is_partial] == ["partial"]
    assert [name for name, index in unique.items() if not index.is_nulls_distinct] == ["nulls"]
    assert [name for name, index in unique.items() if index.is_exclusion] == ["x"]
    assert [name for name, index in unique.items() if not index.is_immediate] == ["later"]
    assert unique["partial"].equalities == (Equality.BYTES,)


@pytest.mark.pg_majors(16)
def test_middle_version(worker: Worker) -> None:
    """The query also works on the versions between the oldest and the newest."""
    worker.run_text("CREATE TABLE t(id int PRIMARY KEY, a int UNIQUE, t int REFERENCES t)")
    assert list(_unique(worker, "t")) == ["t_a_key"]
    assert list(_foreign(worker, "t")) == ["t_t_fkey"]


@pytest.mark.pg_majors(15, 18)
def test_equality_of_indexes(worker: Worker) -> None:
    """An index of another operator class or collation compares in its own way; the same column's others do not."""
    worker.run_text(
        "CREATE DOMAIN word AS varchar; CREATE TYPE mood AS ENUM ('a');"
        "CREATE TABLE t(e text, v varchar, w word, m mood, c cidr, d char(3));"
        "CREATE UNIQUE INDEX own ON t(e, v, w, m, c, d); CREATE UNIQUE INDEX pattern ON t(e text_pattern_ops);"
        'CREATE UNIQUE INDEX posix ON t(e COLLATE "POSIX"); CREATE UNIQUE INDEX blanks ON t(v bpchar_ops)'
    )
    unique = _unique(worker, "t")
    assert unique["own"].equalities == (*[Equality.BYTES] * 5, Equality.BPCHAR)
    for name in ("pattern", "posix", "blanks"):
        assert unique[name].equalities == (Equality.UNKNOWN,), name
    # Under char's class 'a' and 'a ' are one value, which no text shows: a key must not be taken for varchar's.
    worker.run_text("ALTER TABLE t ALTER v SET NOT NULL; ALTER TABLE t REPLICA IDENTITY USING INDEX blanks")
    assert worker.facts("t").columns[1].equality is Equality.UNKNOWN
    with pytest.raises(Refused, match="duplicate key"):
        worker.run_text("INSERT INTO t(v) VALUES ('a'), ('a ')")


@pytest.mark.pg_majors(15)  # the embedded servers are built without ICU
def test_nondeterministic_unique_index(worker: Worker) -> None:
    """A unique index under a nondeterministic collation holds different texts equal (trap T-21)."""
    worker.run_text(
        "CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false);"
        "CREATE TABLE t(id int PRIMARY KEY, e text COLLATE ci UNIQUE)"
    )
    assert _unique(worker, "t")["t_e_key"].equalities == (Equality.UNKNOWN,)


@pytest.mark.pg_majors(15, 18)
def test_unique_indexes_of_leaves(worker: Worker) -> None:
    """A leaf's own index names the leaf's columns, wherever they are in it (trap T-23)."""
    worker.run_text(
        "CREATE TABLE p(id int PRIMARY KEY, e text, n int) PARTITION BY RANGE (id);"
        "CREATE TABLE leaf(n int, gone int, e text, id int NOT NULL); ALTER TABLE leaf DROP gone;"
        "ALTER TABLE p ATTACH PARTITION leaf FOR VALUES FROM (0) TO (9); CREATE UNIQUE INDEX own ON leaf(e, n);"
        "CREATE TABLE plain(id int PRIMARY KEY); CREATE TABLE below(x int UNIQUE) INHERITS (plain)"
    )
    unique = _unique(worker, "p")
    assert {name: index.columns for name, index in unique.items()} == {"own on public.leaf": ("e", "n")}
    assert _unique(worker, "plain") == {}


@pytest.mark.pg_majors(15, 18)
def test_root(worker: Worker) -> None:
    """The root is the topmost partitioned table; plain inheritance makes none (trap T-28)."""
    worker.run_text(
        "CREATE TABLE p(id int PRIMARY KEY) PARTITION BY RANGE (id);"
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (9) PARTITION BY RANGE (id);"
        "CREATE TABLE p11 PARTITION OF p1 FOR VALUES FROM (0) TO (5);"
        "CREATE TABLE plain(id int); CREATE TABLE below() INHERITS (plain)"
    )
    root = worker.facts("p").oid
    assert [worker.facts(name).root_oid for name in ("p", "p1", "p11")] == [root] * 3
    for name in ("plain", "below"):
        assert worker.facts(name).root_oid == worker.facts(name).oid


@pytest.mark.pg_majors(15, 18)
def test_foreign_keys(worker: Worker) -> None:
    """A foreign key has its columns in its own order, how the referenced index compares, and what a delete does."""
    worker.run_text(
        'CREATE TABLE parent(a int, b numeric, k text COLLATE "C" UNIQUE, d timestamp UNIQUE, PRIMARY KEY (a, b));'
        "CREATE TABLE child(id int PRIMARY KEY, y int, x int, k varchar, d date, up int,"
        " CONSTRAINT two FOREIGN KEY (y, x) REFERENCES parent(b, a) ON DELETE CASCADE,"
        " CONSTRAINT worded FOREIGN KEY (k) REFERENCES parent(k) ON DELETE SET NULL,"
        " CONSTRAINT dated FOREIGN KEY (d) REFERENCES parent(d) ON DELETE RESTRICT,"
        " CONSTRAINT self FOREIGN KEY (up) REFERENCES child)"
    )
    parent = worker.facts("parent")
    assert parent.foreign_keys == ()
    found = _foreign(worker, "child")
    assert sorted(found) == ["dated", "self", "two", "worded"]
    two = found["two"]
    assert (two.columns, two.parent_columns) == (("y", "x"), ("b", "a"))
    assert two.parent_equalities == (Equality.NUMERIC, Equality.BYTES)
    assert (two.parent_oid, two.parent) == (parent.oid, "public.parent")
    assert [name for name, each in found.items() if each.is_cascading] == ["two", "worded"]
    assert found["worded"].parent_equalities == (Equality.BYTES,)
    # A date prints as no timestamp does, so equal values cannot be seen.
    assert found["dated"].parent_equalities == (Equality.UNKNOWN,)
    assert found["self"].parent_oid == worker.facts("child").oid


@pytest.mark.pg_majors(15, 18)
def test_references(worker: Worker) -> None:
    """Keys that one query can check are named where nothing else acts on an insert, under the role origin (T-25)."""
    worker.run_text(
        "CREATE TABLE up(id int8 PRIMARY KEY, code text UNIQUE, day date UNIQUE);"
        "CREATE TABLE t(id int PRIMARY KEY, up int8 REFERENCES up, code text REFERENCES up(code),"
        " day date REFERENCES up(day), self int REFERENCES t)"
    )

    def references(table: str, role: str = "origin") -> list[tuple[str, str, str, str]] | None:
        found = worker.facts(table, role=role).references
        return (
            None
            if found is None
            else sorted([(one.column, one.parent_name, one.parent_column, one.type_sql) for one in found])
        )

    known = references("t")
    assert known == [
        ("code", "up", "code", "text"),
        ("day", "up", "day", "date"),
        ("self", "t", "id", "integer"),
        ("up", "up", "id", "bigint"),
    ]
    assert worker.facts("up", role="origin").references == ()
    assert references("t", role="replica") is None
    worker.run_text("CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'")
    not_later = "ALTER TABLE t ALTER CONSTRAINT t_up_fkey NOT DEFERRABLE"
    for change, back in {
        "CREATE TRIGGER own BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()": "DROP TRIGGER own ON t",
        """CREATE TRIGGER own BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION f();
        ALTER TABLE t ENABLE REPLICA TRIGGER own""": "DROP TRIGGER own ON t",
        """CREATE RULE own AS ON INSERT TO t DO ALSO NOTHING;
        ALTER TABLE t ENABLE REPLICA RULE own""": "DROP RULE own ON t",
        "ALTER TABLE t ADD CONSTRAINT own UNIQUE (up) DEFERRABLE": "ALTER TABLE t DROP CONSTRAINT own",
        "ALTER TABLE t ALTER CONSTRAINT t_up_fkey DEFERRABLE": not_later,
        "ALTER TABLE t ALTER self TYPE int8": "ALTER TABLE t ALTER self TYPE int4",
        """CREATE TABLE tree(LIKE t INCLUDING ALL) PARTITION BY LIST (id);
        ALTER TABLE tree ATTACH PARTITION t FOR VALUES IN (1)""": "ALTER TABLE tree DETACH PARTITION t",
    }.items():
        worker.run_text(change)
        assert references("t") is None, change
        worker.run_text(back)
        assert references("t") == known, change
    worker.run_text("CREATE TABLE at(at timestamp UNIQUE); CREATE TABLE v(at timestamp(1) REFERENCES at(at))")
    assert references("v") == [("at", "at", "at", "timestamp(1) without time zone")]
    # Versions are of all that a query relies on.
    before = {one.column: one.version for one in worker.facts("t", role="origin").references or ()}
    worker.run_text("ALTER TABLE up RENAME code TO word; ALTER TABLE t RENAME day TO date")
    after = {one.column: one.version for one in worker.facts("t", role="origin").references or ()}
    assert {name for name in before if after.get(name) != before[name]} == {"code", "day"}


@pytest.mark.pg_majors(15, 18)
def test_enforced_by_role(worker: Worker) -> None:
    """A foreign key is enforced if a trigger of it fires under the session's role, on either table (trap T-25)."""
    worker.run_text(
        "CREATE TABLE t(id int PRIMARY KEY); CREATE TABLE c(id int PRIMARY KEY, t int REFERENCES t);"
        "CREATE TABLE d(id int PRIMARY KEY, t int REFERENCES t)"
    )
    assert _foreign(worker, "c", role="origin")["c_t_fkey"].is_enforced
    assert _foreign(worker, "c", role="local")["c_t_fkey"].is_enforced
    assert not _foreign(worker, "c", role="replica")["c_t_fkey"].is_enforced
    _always(worker, "c")
    assert _foreign(worker, "c", role="replica")["c_t_fkey"].is_enforced
    assert not _foreign(worker, "d", role="replica")["d_t_fkey"].is_enforced
    worker.run_text("ALTER TABLE c DROP CONSTRAINT c_t_fkey")
    _always(worker, "t")
    assert _foreign(worker, "d", role="replica")["d_t_fkey"].is_enforced
    worker.run_text("ALTER TABLE t DISABLE TRIGGER ALL; ALTER TABLE d DISABLE TRIGGER ALL")
    assert not _foreign(worker, "d", role="origin")["d_t_fkey"].is_enforced


@pytest.mark.pg_majors(15, 18)
def test_foreign_keys_of_partitions(worker: Worker) -> None:
    """One foreign key is named once whatever its copies, its parent is the root, and a leaf's own one counts."""
    worker.run_text(
        "CREATE TABLE parent(id int PRIMARY KEY) PARTITION BY RANGE (id);"
        "CREATE TABLE parent1 PARTITION OF parent FOR VALUES FROM (0) TO (5);"
        "CREATE TABLE parent2 PARTITION OF parent FOR VALUES FROM (5) TO (9);"
        "CREATE TABLE child(id int PRIMARY KEY, p int, CONSTRAINT up FOREIGN KEY (p) REFERENCES parent)"
        " PARTITION BY RANGE (id);"
        "CREATE TABLE child1 PARTITION OF child FOR VALUES FROM (0) TO (5);"
        "CREATE TABLE child2 PARTITION OF child FOR VALUES FROM (5) TO (9);"
        "ALTER TABLE child2 ADD CONSTRAINT own FOREIGN KEY (p) REFERENCES parent1"
    )
    root = worker.facts("parent").oid
    found = _foreign(worker, "child")
    assert sorted(found) == ["own on public.child2", "up"]
    assert {each.parent_oid for each in found.values()} == {root}
    assert {each.parent_columns for each in found.values()} == {("id",)}
    assert all(each.is_enforced for each in found.values())
    leaves = _foreign(worker, "child1"), _foreign(worker, "child2")
    assert [len(leaf) for leaf in leaves] == [1, 2]
    assert all(each.parent_oid == root and each.is_enforced for leaf in leaves for each in leaf.values())
    assert not any(each.is_enforced for each in _foreign(worker, "child", role="replica").values())
    # The copies' triggers count, those on the referenced partitions too.
    for table in ("child1", "parent2"):
        _always(worker, table)
        assert [name for name, each in _foreign(worker, "child", role="replica").items() if each.is_enforced] == ["up"]
        worker.run_text(f"ALTER TABLE {table} ENABLE TRIGGER ALL")


@pytest.mark.pg_majors(18)
def test_temporal_and_unenforced_foreign_keys(worker: Worker) -> None:
    """PERIOD is covered, not equal, so its values cannot be compared; NOT ENFORCED has no triggers."""
    worker.run_text(
        "CREATE TABLE t(k int4range, d daterange, PRIMARY KEY (k, d WITHOUT OVERLAPS));"
        "CREATE TABLE c(id int PRIMARY KEY, k int4range, d daterange,"
        " FOREIGN KEY (k, PERIOD d) REFERENCES t(k, PERIOD d));"
        "CREATE TABLE q(id int PRIMARY KEY); CREATE TABLE r(id int PRIMARY KEY, q int REFERENCES q NOT ENFORCED)"
    )
    (temporal,) = _foreign(worker, "c").values()
    assert temporal.parent_equalities == (Equality.UNKNOWN, Equality.UNKNOWN)
    assert temporal.is_enforced
    assert not _foreign(worker, "r")["r_q_fkey"].is_enforced


@pytest.mark.pg_majors(15, 18)
def test_what_people_read(worker: Worker) -> None:
    """The reason says what batches wait by, and what is not predicted."""
    worker.run_text(
        "CREATE TABLE owner(id int PRIMARY KEY);"
        "CREATE TABLE car(id int PRIMARY KEY, plate text UNIQUE, owner int REFERENCES owner);"
        "CREATE UNIQUE INDEX car_lower ON car(lower(plate))"
    )
    facts = worker.facts("car", role="origin")
    plan = match(relation_of(facts), facts)
    assert (plan.lane, plan.is_table_exclusive) == (Lane.SET, False)
    assert plan.reason == (
        'set-based by key ("id"); waits by unique index car_plate_key; unique index car_lower is not predicted '
        "(expression): batches that fail are repeated; waits by foreign key car_owner_fkey"
    )
    assert [key.positions for key in plan.unique_keys] == [(1,)]
    assert [(key.positions, key.equalities) for key in plan.foreign_keys] == [((2,), (Equality.BYTES,))]

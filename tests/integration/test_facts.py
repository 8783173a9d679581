"""Facts of a table that the catalogue query finds on real servers: keys, indexes, code, access."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import psycopg
import pytest

from parapply.errors import TargetRefused
from parapply.plan.table import Lane
from parapply.target.catalogue.facts import access_problems, check_table_access, load_facts, load_many
from parapply.target.catalogue.match import match
from tests.integration.table_cases import Refused, Worker, reading, relation_of, worker_on
from tests.system.check_cases import TARGET

if TYPE_CHECKING:
    from collections.abc import Iterator

    from parapply.plan.table import TableFacts
    from tests.fixtures.databases import Database


def unique_names(facts: TableFacts) -> tuple[str, ...]:
    """Return the names of the unique indexes beside the key."""
    return tuple(index.name for index in facts.unique)


@pytest.fixture
def worker(target_db: Database) -> Iterator[Worker]:
    """A worker's session on an empty database."""
    with worker_on(target_db) as session:
        yield session


@pytest.mark.pg_majors(15, 18)
def test_key(worker: Worker) -> None:
    """The key is the identity index that was named, else the primary key, in the index's order; valid ones only."""
    worker.run_text(
        "CREATE TABLE p(b int, a int, c int, PRIMARY KEY (a, b) INCLUDE (c)); CREATE TABLE n(a int UNIQUE);"
        "CREATE TABLE i(a int PRIMARY KEY, e int NOT NULL UNIQUE); ALTER TABLE i REPLICA IDENTITY USING INDEX i_e_key;"
        "CREATE TABLE f(a int PRIMARY KEY); ALTER TABLE f REPLICA IDENTITY FULL;"
        "CREATE TABLE d(a int PRIMARY KEY DEFERRABLE)"
    )
    assert worker.facts("p").key_columns == ("a", "b")
    assert worker.facts("n").key_columns == ()
    assert unique_names(worker.facts("n")) == ("n_a_key",)
    assert worker.facts("i").key_columns == ("e",)
    assert unique_names(worker.facts("i")) == ("i_pkey",)
    assert worker.facts("f").key_columns == ("a",)
    deferrable = worker.facts("d")
    assert deferrable.key_columns == ("a",)
    assert deferrable.key_is_deferrable
    worker.run_text("ALTER TABLE i REPLICA IDENTITY DEFAULT")
    assert worker.facts("i").key_columns == ("a",)


@pytest.mark.pg_majors(15, 18)
def test_other_unique_indexes(worker: Worker) -> None:
    """Every index but the key's that can refuse a row is named, whatever its kind, on partitions too (trap T-22)."""
    worker.run_text(
        "CREATE TABLE t(id int PRIMARY KEY, e text, active bool, r int4range,"
        " CONSTRAINT x EXCLUDE USING gist (r WITH &&), CONSTRAINT nd UNIQUE NULLS NOT DISTINCT (e));"
        "CREATE UNIQUE INDEX lowered ON t(lower(e)); CREATE UNIQUE INDEX partial ON t(e) WHERE active;"
        "CREATE INDEX plain ON t(e);"
        "CREATE TABLE p(id int PRIMARY KEY, e int) PARTITION BY RANGE (id);"
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (9) PARTITION BY RANGE (id);"
        "CREATE TABLE p11 PARTITION OF p1 FOR VALUES FROM (0) TO (5);"
        "CREATE UNIQUE INDEX leaf ON p11(e); CREATE UNIQUE INDEX rooted ON p(id, e)"
    )
    assert unique_names(worker.facts("t")) == ("lowered", "nd", "partial", "x")
    assert unique_names(worker.facts("p")) == ("rooted", "leaf on public.p11")
    # A partition that is published by itself has an index of its own, inherited or not.
    assert worker.facts("p11").key_columns == ("id",)
    assert unique_names(worker.facts("p11")) == ("leaf", "p11_id_e_idx")


def test_index_being_built_counts(worker: Worker) -> None:
    """An invalid unique index already refuses rows; an invalid one is no key."""
    worker.run_text("CREATE TABLE t(id int PRIMARY KEY, e int); INSERT INTO t VALUES (1, 1), (2, 1)")
    with pytest.raises(Refused, match="could not create unique index"):
        worker.run_text("CREATE UNIQUE INDEX CONCURRENTLY half ON t(e)")
    assert unique_names(worker.facts("t")) == ("half",)
    worker.run_text(
        "CREATE TABLE p(a int) PARTITION BY LIST (a); CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1);"
        "CREATE UNIQUE INDEX i ON ONLY p(a)"
    )
    assert worker.facts("p").key_columns == ()


@pytest.mark.pg_majors(18)
def test_key_without_overlaps(worker: Worker) -> None:
    """A temporal primary key finds rows, but different keys can clash, so it counts as an exclusion index too."""
    worker.run_text("CREATE TABLE t(k int4range, d daterange, v int, PRIMARY KEY (k, d WITHOUT OVERLAPS))")
    facts = worker.facts("t")
    assert facts.key_columns == ("k", "d")
    assert [(index.name, index.is_exclusion) for index in facts.unique] == [("t_pkey", True)]
    plan = match(relation_of(facts), facts)
    assert plan.lane is Lane.ROW
    assert plan.is_table_exclusive
    statements = worker.statements("t")
    first, january, new_year = "[1,2)", "[2024-01-01,2024-02-01)", "[2024-01-01,2024-01-02)"
    worker.run(statements.row_insert((0, 1, 2)), [first, january, "1"])
    assert worker.run(statements.row_update((0, 1, 2)), [first, january, "2", "[1,1]", january]) == 1
    assert worker.run(statements.row_delete(), [first, new_year]) == 0
    assert worker.run(statements.row_delete(), [first, january]) == 1


@pytest.mark.pg_majors(15, 18)
def test_triggers_by_role(worker: Worker) -> None:
    """User triggers count if they fire under the session's role, also on partitions; constraint triggers do not."""
    worker.run_text(
        "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
        "CREATE TABLE t(id int PRIMARY KEY, d int UNIQUE DEFERRABLE); CREATE TABLE c(t int REFERENCES t);"
    )
    for name, state in (("plain", ""), ("always_", "ALWAYS"), ("replica_", "REPLICA")):
        worker.run_text(f"CREATE TRIGGER {name} AFTER INSERT ON t EXECUTE FUNCTION f()")
        worker.run_text(f"ALTER TABLE t ENABLE {state} TRIGGER {name}")
    worker.run_text("CREATE TRIGGER off AFTER INSERT ON t EXECUTE FUNCTION f(); ALTER TABLE t DISABLE TRIGGER off")
    assert worker.facts("t").triggers == ("trigger always_", "trigger replica_")
    assert worker.facts("t", role="origin").triggers == ("trigger always_", "trigger plain")
    assert worker.facts("t", role="local").triggers == worker.facts("t", role="origin").triggers
    assert worker.facts("c", role="origin").triggers == ()
    worker.run_text(
        "CREATE TABLE p(a int) PARTITION BY LIST (a); CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1);"
        "CREATE TRIGGER cloned AFTER INSERT ON p FOR EACH ROW EXECUTE FUNCTION f();"
        "CREATE TRIGGER own AFTER INSERT ON p1 FOR EACH ROW EXECUTE FUNCTION f();"
        "CREATE TRIGGER stmt AFTER INSERT ON p1 EXECUTE FUNCTION f()"
    )
    for name in ("cloned", "own", "stmt"):
        worker.run_text(f"ALTER TABLE p1 ENABLE ALWAYS TRIGGER {name}")
    assert worker.facts("p").triggers == ("trigger cloned", "trigger own on public.p1")
    assert worker.facts("p", role="origin").triggers == ("trigger cloned", "trigger own on public.p1")
    assert worker.facts("p1").triggers == ("trigger cloned", "trigger own", "trigger stmt")


_ROW_TRIGGER = "BEFORE INSERT OR UPDATE ON {} FOR EACH ROW EXECUTE FUNCTION computes()"


@pytest.mark.pg_majors(15, 18)
def test_row_triggers(worker: Worker) -> None:
    """A trigger that sees only its row is known by its columns and version; one with anything more is code (T-29)."""
    body = "BEGIN NEW.b := 2 * NEW.a; RETURN NEW; END"
    function = f"CREATE OR REPLACE FUNCTION {{}}() RETURNS trigger LANGUAGE plpgsql {{}} AS '{body}'"
    worker.run_text(
        "CREATE TABLE t(id int PRIMARY KEY, a int, b int); CREATE TABLE p(a int, b int) PARTITION BY LIST (a)"
    )
    worker.run_text(f"{function.format('computes', '')}; {function.format('strays', 'SET search_path = public')}")
    worker.run_text(f"CREATE TRIGGER r {_ROW_TRIGGER.format('t')}; CREATE TRIGGER r {_ROW_TRIGGER.format('p')}")
    found = worker.facts("t", role="origin")
    (known,) = found.row_triggers
    assert (known.name, known.reads, known.writes, known.is_function_of_new) == ("trigger r", ("a",), ("b",), True)
    assert found.triggers == ()
    assert worker.facts("t").row_triggers == ()
    in_tree = worker.facts("p", role="origin")
    assert (in_tree.triggers, in_tree.row_triggers) == (("trigger r",), ())
    worker.run_text(function.format("computes", ""))
    (again,) = worker.facts("t", role="origin").row_triggers
    assert again.version != known.version
    for definition in (
        _ROW_TRIGGER.format("t").replace("INSERT OR UPDATE", "INSERT OR UPDATE OR DELETE"),
        _ROW_TRIGGER.format("t").replace("UPDATE", "UPDATE OF a"),
        _ROW_TRIGGER.format("t").replace("BEFORE", "AFTER"),
        _ROW_TRIGGER.format("t").replace("FOR EACH ROW", "FOR EACH STATEMENT"),
        _ROW_TRIGGER.format("t").replace("EXECUTE", "WHEN (NEW.a > 0) EXECUTE"),
        _ROW_TRIGGER.format("t").replace("computes", "strays"),
    ):
        worker.run_text(f"CREATE TRIGGER other {definition}")
        assert worker.facts("t", role="origin").triggers == ("trigger other",), definition
        worker.run_text("DROP TRIGGER other ON t")
    worker.run_text("CREATE TRIGGER part BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION computes()")
    assert [one.is_function_of_new for one in worker.facts("t", role="origin").row_triggers] == [False, True]


@pytest.mark.parametrize(
    "strange",
    [
        "CREATE FUNCTION pg_catalog.lower(point) RETURNS text LANGUAGE sql AS 'SELECT $1::text'",
        "CREATE OPERATOR pg_catalog.+ (FUNCTION = texteq, LEFTARG = text, RIGHTARG = text)",
        "CREATE CAST (text AS int) WITH INOUT AS IMPLICIT",
    ],
)
def test_no_row_trigger_is_known_where_its_names_may_be_a_users(worker: Worker, strange: str) -> None:
    """A function, operator or cast of a user that expressions could reach makes each trigger code (T-29)."""
    worker.run_text(
        "CREATE TABLE t(id int PRIMARY KEY, a text); CREATE FUNCTION computes() RETURNS trigger LANGUAGE plpgsql"
        f" AS 'BEGIN NEW.a := NEW.id; RETURN NEW; END'; CREATE TRIGGER r {_ROW_TRIGGER.format('t')}"
    )
    assert worker.facts("t", role="origin").row_triggers
    worker.run_text(strange)
    found = worker.facts("t", role="origin")
    assert (found.triggers, found.row_triggers) == (("trigger r",), ())


def test_rules_by_role(worker: Worker) -> None:
    """Rules count if they act under the session's role (trap T-29)."""
    worker.run_text(
        "CREATE TABLE t(a int); CREATE RULE r AS ON INSERT TO t DO INSTEAD NOTHING;"
        "CREATE RULE s AS ON DELETE TO t DO INSTEAD NOTHING; ALTER TABLE t ENABLE ALWAYS RULE s"
    )
    assert worker.facts("t").rules == ("rule s",)
    assert worker.facts("t", role="origin").rules == ("rule r", "rule s")


@pytest.mark.pg_majors(15, 18)
def test_code(worker: Worker) -> None:
    """Functions that are neither built in nor immutable are found in checks, domains, defaults and operators."""
    worker.run_text(
        "CREATE FUNCTION vol(int) RETURNS bool LANGUAGE sql VOLATILE AS 'SELECT true';"
        "CREATE FUNCTION imm(int) RETURNS bool LANGUAGE sql IMMUTABLE AS 'SELECT true';"
        "CREATE FUNCTION seven() RETURNS int LANGUAGE sql STABLE AS 'SELECT 7';"
        "CREATE FUNCTION near(int, int) RETURNS bool LANGUAGE sql STABLE AS 'SELECT true';"
        "CREATE OPERATOR ~~~ (FUNCTION = near, LEFTARG = int, RIGHTARG = int);"
        "CREATE DOMAIN d AS int DEFAULT seven() CHECK (vol(value)); CREATE TYPE pair AS (x d);"
        "CREATE TABLE a(x int CHECK (vol(x)), y int CHECK (imm(y)), z int CHECK (z ~~~ 1),"
        " r int DEFAULT random()::int);"
        "CREATE TABLE b(x pair[], y int DEFAULT seven()); CREATE TABLE c(k int, x d)"
    )
    assert worker.facts("a").code == (
        "check constraint a_x_check calls public.vol(integer)",
        "check constraint a_z_check calls public.near(integer,integer)",
    )
    nested = worker.facts("b")
    assert nested.code == ("check constraint d_check of domain public.d calls public.vol(integer)",)
    assert nested.columns[1].default_code == ("public.seven()",)
    assert worker.facts("c").columns[1].default_code == ("public.seven()",)
    assert worker.facts("a").columns[3].default_code == ()


def test_only_tables_are_taken(worker: Worker) -> None:
    """A missing table is None; a view or a foreign table is refused by name, as a partition too (trap T-29)."""
    worker.run_text(
        "CREATE VIEW v AS SELECT 1 AS a; CREATE SEQUENCE s; CREATE MATERIALIZED VIEW m AS SELECT 1;"
        "CREATE FOREIGN DATA WRAPPER w; CREATE SERVER srv FOREIGN DATA WRAPPER w;"
        "CREATE FOREIGN TABLE f(a int) SERVER srv;"
        "CREATE TABLE p(a int) PARTITION BY LIST (a);"
        "CREATE FOREIGN TABLE p1 PARTITION OF p FOR VALUES IN (1) SERVER srv;"
        'CREATE TABLE "T"(a int)'
    )
    with pytest.raises(AssertionError):
        worker.facts("t")
    assert worker.facts("T").columns[0].name == "a"
    for name, what in (("v", "a view"), ("s", "a sequence"), ("m", "a materialized view"), ("f", "a foreign table")):
        with pytest.raises(TargetRefused, match=rf"public\.{name} is {what}"):
            worker.facts(name)
    with pytest.raises(TargetRefused, match=r"public\.p has foreign tables as partitions: public\.p1"):
        worker.facts("p")


def test_access(worker: Worker) -> None:
    """Missing privileges are all named, and row-level security that would hide rows is refused (traps T-63, T-65)."""
    worker.run_text("CREATE TABLE t(a int); CREATE SCHEMA hidden; CREATE TABLE hidden.h(a int)")
    facts, hidden = worker.facts("t"), worker.facts("h", "hidden")

    async def check(table: TableFacts, *, user: str) -> None:
        async with await psycopg.AsyncConnection.connect(worker.dsn, autocommit=True) as conn:
            # The predefined role stands for any that owns nothing, and needs no cleaning up.
            await conn.execute(f"SET ROLE {user}".encode())
            await check_table_access(conn, table)

    with pytest.raises(TargetRefused, match=r"pg_monitor lacks .* public\.t: INSERT, UPDATE, DELETE, SELECT$"):
        asyncio.run(check(facts, user="pg_monitor"))
    worker.run_text("GRANT INSERT, DELETE ON t TO pg_monitor; GRANT ALL ON hidden.h TO pg_monitor")
    with pytest.raises(TargetRefused, match=r"public\.t: UPDATE, SELECT$"):
        asyncio.run(check(facts, user="pg_monitor"))
    with pytest.raises(TargetRefused, match=r"hidden\.h: USAGE on schema hidden$"):
        asyncio.run(check(hidden, user="pg_monitor"))
    worker.run_text("GRANT ALL ON t TO pg_monitor")
    asyncio.run(check(facts, user="pg_monitor"))
    worker.run_text("ALTER TABLE t ENABLE ROW LEVEL SECURITY")
    with pytest.raises(TargetRefused, match=r"row-level security of target table public\.t applies to role pg_monitor"):
        asyncio.run(check(facts, user="pg_monitor"))
    asyncio.run(check(facts, user="NONE"))
    worker.run_text("DROP TABLE t")
    with pytest.raises(TargetRefused, match=r"public\.t was dropped"):
        asyncio.run(check(facts, user="NONE"))


async def test_session_settings_do_not_matter(worker: Worker) -> None:
    """Types are named with their schema under any search_path and row factory, and odd names are found."""
    worker.run_text("CREATE SCHEMA \"O'd %s\"; CREATE TYPE \"O'd %s\".e AS ENUM ('a')")
    worker.run_text('CREATE TABLE "O\'d %s"."{t}"(a "O\'d %s".e PRIMARY KEY)')
    async with await psycopg.AsyncConnection.connect(
        worker.dsn, autocommit=True, row_factory=psycopg.rows.dict_row, options="-c search_path=public"
    ) as conn:
        facts = await load_facts(conn, "O'd %s", "{t}", role="replica")
    assert facts is not None
    assert facts.columns[0].type_sql == '"O\'d %s".e'


@pytest.mark.pg_majors(15, 18)
async def test_many_tables_are_described_as_each_of_them(worker: Worker) -> None:
    """The query about many tables says of each what the query about one says, refusals and lacking privileges too."""
    worker.run_text(TARGET.format(role="pg_monitor"))
    worker.run_text(
        "CREATE TABLE root (a int, b text, PRIMARY KEY (a, b)) PARTITION BY LIST (a);"
        "CREATE TABLE leaf PARTITION OF root FOR VALUES IN (1); CREATE UNIQUE INDEX ON leaf (lower(b));"
        "CREATE DOMAIN d AS numeric(4,2) CHECK (VALUE > random()); CREATE TABLE typed_too (v d, a int[] PRIMARY KEY)"
    )
    async with await reading(worker.dsn) as conn:
        cursor = await conn.execute("SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace")
        names = [("public", str(name)) for (name,) in await cursor.fetchall()]
        assert len(names) > 40
        many = await load_many(conn, [*names, ("public", "no such")], role="replica")
        assert list(many) == names
        tables = []
        for (schema, name), found in many.items():
            if isinstance(found, TargetRefused):
                with pytest.raises(TargetRefused) as refused:
                    await load_facts(conn, schema, name, role="replica")
                assert (str(refused.value), refused.value.hint) == (str(found), found.hint)
            else:
                assert await load_facts(conn, schema, name, role="replica") == found
                tables.append(found)
        await conn.execute("GRANT ALL ON public.root TO pg_monitor")
        await conn.execute("SET ROLE pg_monitor")
        problems = await access_problems(conn, tables)
        assert {("public", table.name) for table in tables} - set(problems) == {("public", "root")}
        with pytest.raises(TargetRefused, match=r"public\.leaf: INSERT") as denied:
            await check_table_access(conn, next(table for table in tables if table.name == "leaf"))
        assert str(denied.value) == str(problems["public", "leaf"])

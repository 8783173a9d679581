"""The benchmark's loads on a real publisher: they fail nowhere, and hold what the benchmark says they hold."""

from __future__ import annotations

import os
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import psutil
import psycopg
import pytest

from bench import bulk, pglogical
from bench.ceiling import query_sql
from bench.compare import is_equal
from bench.filling import fill, load
from bench.observe import Observer
from bench.options import ALONE, Options
from bench.servers import placed
from bench.workloads import WORKLOADS
from parapply.demo.errors import DemoError
from parapply.demo.race import create_slot, drop_target, make_target
from parapply.demo.stage import BANK, PUBLICATION, Interrupts, Stage
from parapply.source.options import start_options
from tests.fixtures.databases import Database

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.filling import Backlog
    from bench.options import Alone
    from parapply.demo.cluster import Setting
    from parapply.demo.server import PgServer

# For those that throw dice: fewer would leave a kind of change out at times.
MANY, FEW = 1000, 100
LARGE_ROWS = 1000
# Of `unique-taken`, which frees fifty codes before it gives one away.
TURNS = 400

# Messages in the slot: the first byte of a message is its kind.
MESSAGES = """SELECT count(*) FILTER (WHERE kind = ascii('C')),
        count(*) FILTER (WHERE kind IN (ascii('I'), ascii('U'), ascii('D')))
    FROM (SELECT get_byte(data, 0) AS kind FROM pg_logical_slot_peek_binary_changes(
        'check', NULL, NULL, 'proto_version', '1', 'publication_names', 'bank')) AS m"""

#: Results of a load, each a query that must be true.
PROOFS = {
    "simple-update": {"history was made": f"SELECT count(*) = {FEW} FROM pgbench_history"},
    "tpcb": {"branches were updated": "SELECT sum(bbalance) <> 0 FROM pgbench_branches"},
    "inserts": {"events came": f"SELECT count(*) = {FEW} FROM events WHERE id > 10000"},
    "indexes": {
        "articles came": f"SELECT count(*) = {FEW} FROM articles WHERE id > 10000",
        "five more indexes": "SELECT count(*) = 6 FROM pg_indexes WHERE tablename = 'articles'",
    },
    "deletes": {
        "the oldest went": f"SELECT count(*) = 50000 - {FEW} AND min(id) = {FEW} FROM events",
    },
    "hot-rows": {
        "half for ten counters": f"SELECT sum(hits) BETWEEN {FEW} * 0.3 AND {FEW} * 0.7 FROM counters",
        "the others for accounts": f"SELECT sum(balance) = {FEW} - (SELECT sum(hits) FROM counters) FROM accounts",
    },
    "unique-taken": {
        # 200 for each client: fifty freed, fifty taken, fifty freed, fifty taken.
        "every code is taken": "SELECT count(*) = 100 FROM badges WHERE code LIKE 'code %'",
        "by the row after the one that had it": "SELECT min(id) = 2 FROM badges WHERE code LIKE 'code %'",
    },
    "family": {
        "parents came": f"SELECT count(*) = {FEW} FROM parents WHERE id > 10000",
        "with two children each": "SELECT count(*) = 2 * count(DISTINCT parent_id) FROM children WHERE id > 20001",
    },
    "many-tables": {
        "a thousand tables": "SELECT count(*) = 1000 FROM pg_class WHERE relname ~ '^many_[0-9]+$'",
        "a tenth of them partitioned": "SELECT count(*) = 100 FROM pg_class WHERE relkind = 'p'",
        "each was changed in some": f"SELECT sum(n_tup_upd) = {FEW} AND sum(n_tup_ins) = {FEW} + 1000 * 10 AND "
        f"count(*) FILTER (WHERE n_tup_upd > 0) BETWEEN {FEW // 2} AND {FEW} "
        "FROM pg_stat_user_tables WHERE relname ~ '^many_'",
    },
    "schemas": {
        "twenty tables in each of two hundred schemas": "SELECT count(*) = 4000 AND count(DISTINCT schemaname) = 200 "
        "FROM pg_tables WHERE schemaname ~ '^tenant_[0-9]+$'",
        "two rows came with each": f"SELECT sum(n_tup_ins) = 2 * {FEW} AND "
        f"count(*) FILTER (WHERE n_tup_ins > 0) BETWEEN {FEW} AND 2 * {FEW} "
        "FROM pg_stat_user_tables WHERE schemaname ~ '^tenant_'",
    },
    "uuid-keys": {
        "events came": f"SELECT count(*) = {FEW} + 10000 FROM events",
        "an index on time": "SELECT count(*) = 2 FROM pg_indexes WHERE tablename = 'events'",
    },
    "wide-rows": {
        "45 columns": "SELECT count(*) = 45 FROM pg_attribute WHERE attrelid = 'records'::regclass AND attnum > 0",
        "two were updated": f"SELECT sum(number_7 - id - 7) = {FEW} FROM records",
    },
    "toast": {
        "documents were read": f"SELECT sum(reads) = {FEW} FROM documents",
        "their texts lie elsewhere": "SELECT pg_relation_size(reltoastrelid) > 2000 * 2500 FROM pg_class "
        "WHERE oid = 'documents'::regclass",
    },
    "documents": {
        "half of them came": f"SELECT count(*) = 1000 + {FEW // 2} FROM documents",
        "the others changed": f"SELECT sum(revision) = {FEW // 2} FROM documents",
        "rows of 2 kB, in line": "SELECT avg(pg_column_size(body)) BETWEEN 1500 AND 2000 FROM documents",
    },
    "blobs": {
        "files came": f"SELECT count(*) = 1000 + {FEW} FROM files",
        "of 1.5 kB, none compressed": "SELECT min(octet_length(content)) = 1536 AND "
        "min(pg_column_size(content)) > 1536 FROM files",
    },
    "queue": {
        # 50 for each client: 17 jobs came, 17 were begun, 16 went.
        "as many come as go": "SELECT count(*) = 102 FROM jobs",
        "the last of each client is under way": "SELECT count(*) = 2 FROM jobs WHERE state = 'runs'",
        "the oldest go": "SELECT min(id) = 32 FROM jobs",
    },
    "unique-freed": {
        "no row is lost": "SELECT count(*) = 20000 FROM badges",
        "codes of other rows": f"SELECT count(*) BETWEEN {FEW} * 0.9 AND {FEW} FROM badges WHERE code <> id",
        "each is unique": "SELECT count(*) = 1 FROM pg_index WHERE indrelid = 'badges'::regclass AND indisunique "
        "AND NOT indisprimary",
    },
    "full-index": {
        "updates": f"SELECT sum(amount) = {FEW} AND count(*) = 20000 FROM stock",
        "old rows whole, an index, no key": "SELECT relreplident = 'f' AND (SELECT count(*) = 1 FROM pg_index WHERE "
        "indrelid = 'stock'::regclass AND NOT indisunique) FROM pg_class WHERE oid = 'stock'::regclass",
    },
    "full-scan": {
        "updates": f"SELECT sum(amount) = {FEW} AND count(*) = 200 FROM stock",
        "old rows whole, no index": "SELECT relreplident = 'f' AND NOT relhasindex FROM pg_class "
        "WHERE oid = 'stock'::regclass",
    },
    "full-key": {
        "updates": f"SELECT sum(balance) = {FEW} AND count(*) = 20000 FROM accounts",
        "old rows whole, and a key": "SELECT relreplident = 'f' AND relhasindex FROM pg_class "
        "WHERE oid = 'accounts'::regclass",
    },
    "key-change": {
        "as many rows as before": "SELECT count(*) = 10000 FROM places",
        "the lowest have moved to the end": f"SELECT min(id) = {FEW} AND max(id) = {FEW} + 9999 FROM places",
    },
    "trigger-always": {
        "updates that the trigger saw": f"SELECT sum(price) = {FEW} AND sum(total) = 2 * {FEW} FROM articles",
        "also on the target": "SELECT tgenabled = 'A' FROM pg_trigger WHERE tgname = 'set_total'",
    },
    "audit": {
        "updates": f"SELECT sum(price) = {FEW} FROM articles",
        "noted on the target only": "SELECT tgenabled = 'R' AND NOT EXISTS (SELECT FROM price_changes) "
        "FROM pg_trigger WHERE tgname = 'note_price'",
    },
    "partitions-leaf": {
        "rows came and were updated": f"SELECT count(*) = 10000 + {FEW} AND sum(amount) = {FEW} FROM readings",
        "published one by one": "SELECT count(*) = 100 FROM pg_publication_tables WHERE tablename ~ '^readings_'",
    },
    "partitions-root": {
        "in most partitions": "SELECT count(DISTINCT day) > 50 FROM readings WHERE id >= 10000",
        "one table is published": "SELECT count(*) = 1 FROM pg_publication_tables WHERE tablename ~ '^readings'",
    },
    "bulk": {
        "rows came": f"SELECT count(*) = {FEW} FROM items WHERE id > 100000",
        "half as many were updated": f"SELECT count(*) = {FEW // 2} FROM items WHERE amount = 1",
        "a third as many went": f"SELECT 100000 - count(*) = {FEW // 3} FROM items WHERE id <= 100000",
    },
    "large": {
        "rows came": f"SELECT count(*) = {LARGE_ROWS} FROM items",
        "in one transaction": "SELECT count(DISTINCT xmin::text) = 1 FROM items",
        "others beside it": f"SELECT sum(balance) = {FEW} FROM accounts",
    },
    "unique-keys": {
        "an account left and another has its address": "SELECT count(*) > 0 FROM accounts"
        " WHERE id > 100000 AND email ~ '^user[0-9]+@' AND email <> 'user' || id || '@example.org'",
        "addresses were changed": "SELECT count(*) > 0 FROM accounts WHERE email ~ '^user[0-9]+[.][0-9]+@'",
        "money is neither made nor lost": "SELECT sum(balance) = 0 FROM accounts",
    },
    "foreign-keys": {
        "customers came": "SELECT count(*) > 0 FROM customers WHERE id > 50000",
        "new customers placed orders": "SELECT count(*) > 0 FROM orders WHERE customer_id > 50000",
        "new orders have lines": "SELECT count(*) > 0 FROM order_lines WHERE order_id > 10000",
        "old orders went": "SELECT count(*) < 10000 FROM orders WHERE id <= 10000",
        "customers went": "SELECT n_tup_del > 0 FROM pg_stat_user_tables WHERE relname = 'customers'",
    },
    "orders": {
        "four lines each": f"SELECT count(*) = 4 * {FEW} FROM lines",
        "all but the clients' last are shipped": "SELECT count(*) = 2 FROM orders WHERE status = 'open'",
        "items that many want": "SELECT count(*) < 80 FROM items WHERE stock < 1000000",
    },
    "sysbench": {
        "eight tables": "SELECT count(*) = 8 FROM pg_tables WHERE tablename ~ '^sbtest[1-8]$'",
        "two updates, and a row for a row": f"SELECT sum(n_tup_upd) = 2 * {FEW} AND sum(n_tup_del) = {FEW} "
        f"AND sum(n_tup_ins) = 8000 + {FEW} FROM pg_stat_user_tables WHERE relname ~ '^sbtest'",
    },
    "exclusion": {
        "bookings came": f"SELECT count(*) = 1000 + {FEW} FROM bookings",
        "and may not overlap": "SELECT count(*) = 1 FROM pg_constraint WHERE contype = 'x' "
        "AND conrelid = 'bookings'::regclass",
    },
    "identity-index": {
        "updates": f"SELECT sum(balance) = {FEW} AND count(*) = 10000 FROM accounts",
        "known by an index, and no key": "SELECT relreplident = 'i' AND NOT EXISTS (SELECT FROM pg_index "
        "WHERE indrelid = c.oid AND indisprimary) FROM pg_class AS c WHERE oid = 'accounts'::regclass",
    },
    "mixed-sizes": {
        "one transaction of each client is large": f"SELECT sum(balance) = {FEW} - 2 + 2 * 3000 FROM accounts",
    },
    "gin": {
        "documents came": f"SELECT count(*) = 1000 + {FEW} FROM documents",
        "others changed": "SELECT count(*) > 50 FROM documents WHERE body ->> 'state' ~ '^read by'",
        "all are in the index": "SELECT count(*) = 1 FROM pg_indexes WHERE indexdef ~ 'USING gin'",
    },
    "savepoints": {
        "orders came": f"SELECT count(*) = {FEW} FROM orders",
        "two of three updates": "SELECT sum(balance) = 68 FROM accounts",
    },
    "text-keys": {
        "rows came": f"SELECT count(*) = 10000 + {FEW} FROM stock",
        "and were updated": f"SELECT sum(amount) = {FEW} FROM stock",
    },
    "large-values": {
        "updates": f"SELECT sum(revision) = {FEW} FROM pages",
        "of 8 kB out of line": "SELECT min(octet_length(body)) = 8192 AND pg_relation_size((SELECT reltoastrelid "
        "FROM pg_class WHERE oid = 'pages'::regclass)) > 200 * 8192 FROM pages",
    },
    "cascades": {
        "parents went": f"SELECT count(*) = 10000 - {FEW} FROM parents",
        "with their children": f"SELECT count(*) = 30000 - 3 * {FEW} FROM children",
    },
}

pytestmark = pytest.mark.slow


#: Loads that the bulk statements are tried with, so that the subscriber also has their tables: four tables, one of
#: them without a primary key; rows that come, change and go; children that are inserted before their parents.
BULK = ("simple-update", "queue", "family")


class Loaded(NamedTuple):
    """The servers with a load between the marks, and what the benchmark says of it. The slot `check` holds it.

    With `BULK` the stage is as it is; else its publisher is asked in kept sessions, and its subscriber does nothing.
    """

    stage: Stage
    name: str
    backlog: Backlog


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """Two servers of version 18, as the benchmark has them."""
    # Protection against a crash of the machine is not tested, nothing lives long enough for a vacuum, and plans are
    # lookups, however little ANALYZE has read.
    settings: dict[str, Setting] = {
        "fsync": "off", "full_page_writes": "off", "autovacuum": "off", "default_statistics_target": 1,
    }  # fmt: skip
    with Stage(Interrupts(), name="bench-test", settings=settings) as stage:
        yield stage


@pytest.fixture(scope="module")
def loaded(stage: Stage, request: pytest.FixtureRequest) -> Iterator[Loaded]:
    """A workload's tables and load, made once for all tests of it; the servers are without a workload before and after.

    The subscriber has its tables where a test looks at them.
    """
    name: str = request.param
    workload = WORKLOADS[name]
    is_whole = name in BULK
    publisher = _Publisher(stage.source)
    used = stage if is_whole else _publisher_alone(stage, publisher)
    fill(used, workload, scale=1)
    create_slot(used, "check")
    yield Loaded(used, name, load(used, workload, options(name)))
    publisher.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
    drop = "DROP DATABASE IF EXISTS {} WITH (FORCE)"
    publisher.execute(drop.format(BANK))
    publisher.forget()
    for dbname in (BANK, "turn", bulk.TEMPLATE) if is_whole else ():
        stage.target.execute(drop.format(dbname))


class _Publisher:
    """A publisher with one session for each database, where the benchmark opens one for each statement."""

    def __init__(self, server: PgServer) -> None:
        self._server = server
        self._kept: dict[str, Database] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._server, name)

    def execute(self, query: str, params: Sequence[object] | None = None, *, dbname: str = "postgres") -> list[Any]:
        database = self._kept.setdefault(dbname, Database(dbname=dbname, server=self._server))
        rows = database.execute(query, params)
        if dbname == BANK:
            # Its changes count at once, like the changes of a session that has ended.
            database.execute("SELECT pg_stat_force_next_flush()")
        return rows

    def forget(self) -> None:
        for database in self._kept.values():
            database.forget()


def _publisher_alone(stage: Stage, publisher: _Publisher) -> Stage:
    """Return the stage with a subscriber that does nothing: to make the same tables twice is half of the work."""
    nothing = SimpleNamespace(execute=lambda *_, **__: [], run=lambda *_, **__: None, dsn=stage.target.dsn)
    alone = SimpleNamespace(source=publisher, target=nothing, start=stage.start, directory=stage.directory)
    alone.fill_bank = lambda scale: Stage.fill_bank(alone, scale)  # type: ignore[arg-type]
    return cast("Stage", alone)


def options(name: str) -> Options:
    """Return a small backlog of a workload."""
    transactions = {"unique-keys": MANY, "foreign-keys": MANY, "unique-taken": TURNS}.get(name, FEW)
    return Options(transactions=transactions, large_rows=LARGE_ROWS, scale=1, clients=2)


@pytest.mark.parametrize("loaded", PROOFS, indirect=True)
def test_a_load_is_what_it_says(loaded: Loaded) -> None:
    """Every transaction changes rows, transactions are counted correctly, and each promised kind of change occurs."""
    ((commits, changes),) = loaded.stage.source.execute(MESSAGES, dbname=BANK)
    # The two marks beside the load.
    assert (commits, changes) == (loaded.backlog.transactions + 2, loaded.backlog.changes + 2)
    for what, query in PROOFS[loaded.name].items():
        assert loaded.stage.source.execute(query, dbname=BANK) == [(True,)], what


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="needs two cores")
@pytest.mark.parametrize("alone", ALONE)
def test_a_server_alone_has_the_first_core(stage: Stage, alone: Alone) -> None:
    """Its old and new processes run there, and nothing else does: neither the other server nor the test's processes."""
    every = os.sched_getaffinity(0)
    first = {min(every)}
    source, target = stage.source, stage.target
    server, other = (source, target) if alone == "publisher" else (target, source)
    with placed(stage, alone):
        assert os.sched_getaffinity(0) == every - first
        for one, cores in ((server, first), (other, every - first)):
            with psycopg.connect(one.dsn("postgres")) as session:
                assert os.sched_getaffinity(session.info.backend_pid) == cores
            assert {frozenset(os.sched_getaffinity(child.pid)) for child in psutil.Process(one.pid).children()} == {
                frozenset(cores)
            }
    assert os.sched_getaffinity(0) == every


def test_every_workload_is_proven() -> None:
    """A new workload comes with what proves it; two with the same tables and load may share their proofs."""
    assert {WORKLOADS[name].stem or name for name in PROOFS} == {
        workload.stem or str(workload.builtin).removesuffix("-like") for workload in WORKLOADS.values()
    }


def test_without_pglogical_one_line_says_what_to_install(stage: Stage) -> None:
    """The embedded servers come without it: it is refused before anything is made for it."""
    with pytest.raises(DemoError, match=r"^pglogical is not installed for PostgreSQL 18\..*bin\)\.$") as refusal:
        pglogical.prepare(stage, "")
    assert "--bindir-target" in refusal.value.hint
    assert stage.source.execute("SHOW shared_preload_libraries") == [("",)]


@pytest.mark.parametrize("loaded", ["inserts"], indirect=True)
def test_the_query_reads_what_the_slot_holds(loaded: Loaded) -> None:
    """All messages of the backlog count as read by query, including Begin and Commit; the slot still holds them."""
    query = query_sql("check", start_options(180000, [PUBLICATION], "any"))
    with psycopg.connect(loaded.stage.source.dsn(BANK)) as reader, reader.cursor().copy(query) as copy:
        copy.set_types(["pg_lsn", "xid", "bytea"])
        kinds = Counter(chr(data[0]) for _, _, data in copy.rows())
    # One relation message for the marks, and one for the events.
    assert kinds == {"B": FEW + 2, "I": FEW + 2, "C": FEW + 2, "R": 2}
    assert loaded.stage.source.execute(MESSAGES, dbname=BANK) == [(FEW + 2, FEW + 2)]


@pytest.mark.parametrize("loaded", ["inserts"], indirect=True)
def test_the_session_that_reads_a_copy_is_found(loaded: Loaded) -> None:
    """In ranges of WAL no session has the slot itself; the daemon's CPU counts from the copy on."""
    stage = loaded.stage
    create_slot(stage, "turn")
    session = stage.source.dsn(BANK) + " application_name=turn replication=database"
    with psycopg.connect(session, autocommit=True) as reader, Observer(stage, "turn") as observer:
        observer.look(os.getpid(), is_over=True)
        assert "leader_stream" not in observer.usage()
        reader.execute("SELECT pg_copy_logical_replication_slot('turn', 'copy', true)")
        observer.look(os.getpid(), is_over=True)
        assert {"leader_stream", "walsender"} <= set(observer.usage())


@pytest.mark.parametrize("loaded", BULK, indirect=True)
def test_bulk_statements_come_to_the_same(loaded: Loaded) -> None:
    """One DELETE, UPDATE and INSERT a table make what the backlog makes, also of a table without a primary key."""
    stage = loaded.stage
    bulk.make_template(stage)
    make_target(stage, "turn", template=bulk.TEMPLATE)
    with Observer(stage, "turn") as observer:
        assert bulk.apply_changes(stage, "turn", "off", observer) > 0
        assert observer.usage()["target"].peak_bytes > 0
    assert is_equal(stage, "turn")
    drop_target(stage, "turn")

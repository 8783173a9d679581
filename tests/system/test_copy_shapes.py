"""The shapes of a copy: filters, columns, partitions, odd names, large tables in parts; and refusals."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from parapply import failpoints
from tests.fixtures.databases import create_end, drop_database
from tests.fixtures.plain import FAST, check_equal
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import ServerPool

_TABLES = """
CREATE SCHEMA "S.p 1";
CREATE TABLE "S.p 1"."t%s""x" ("a%b" int PRIMARY KEY, "{c}" text, "d'e" text);
CREATE TABLE chosen (id int PRIMARY KEY, kept bool NOT NULL, v text, secret text);
CREATE TABLE made (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED);
CREATE TABLE part_root (id int, region text, v text, PRIMARY KEY (id, region)) PARTITION BY LIST (region);
CREATE TABLE part_a PARTITION OF part_root FOR VALUES IN ('a');
CREATE TABLE part_b (v text, region text NOT NULL, id int NOT NULL);
ALTER TABLE part_root ATTACH PARTITION part_b FOR VALUES IN ('b');
CREATE TABLE leaf_root (id int PRIMARY KEY) PARTITION BY RANGE (id);
CREATE TABLE leaf_1 PARTITION OF leaf_root FOR VALUES FROM (0) TO (100);
CREATE TABLE nothing (id int PRIMARY KEY);
CREATE TABLE large (id int PRIMARY KEY, fill text NOT NULL);
CREATE INDEX large_fill ON large (left(fill, 10));
CREATE TABLE kinds (id int PRIMARY KEY, b bool, i2 int2, i8 int8, r float4, f float8, n numeric, n2 numeric(8, 2),
  t text, c char(5), vc varchar(9), ba bytea, d date, tm time, tz timetz, ts timestamp, tsz timestamptz, u uuid,
  j json, jb jsonb);
CREATE TABLE mixed (id int PRIMARY KEY, a int[], iv interval, wider int);
"""
_ROWS = """
INSERT INTO "S.p 1"."t%s""x" VALUES (1, E'a\\tb\\n\\\\', NULL), (2, '', 'NULL'), (3, '\\N', '\\.');
INSERT INTO chosen SELECT i, i % 2 = 0, 'v' || i, 'geheim' FROM generate_series(1, 100) AS i;
INSERT INTO made SELECT i FROM generate_series(1, 10) AS i;
INSERT INTO part_root SELECT i, CASE i % 2 WHEN 0 THEN 'a' ELSE 'b' END, 'v' FROM generate_series(1, 100) AS i;
INSERT INTO leaf_root SELECT i FROM generate_series(0, 99) AS i;
ALTER TABLE large SET (fillfactor = 10);
INSERT INTO large SELECT i, repeat(md5(i::text), 20) FROM generate_series(1, 2500) AS i;
INSERT INTO kinds VALUES
  (1, true, -32768, 9223372036854775807, '-0', 'NaN', 'NaN', 123456.78, E'a\\tb\\n\\\\ü', 'ab', '', '\\x005c0a',
   'infinity', '24:00', '23:59:59.999999-15:59', '4713-01-01 BC', '294276-12-31 23:59:59.999999+00',
   'ffffffff-ffff-ffff-ffff-ffffffffffff', '{"a" :  1, "a": 2}', '{"b": [1.10, null], "ü": "\\n"}'),
  (2, false, 0, -1, 1e-45, 5e-324, 1e-40, -0.01, '', '', 'ü', '', '4714-11-24 BC', '00:00:00.000001', '00:00+15:59',
   '-infinity', 'infinity', '00000000-0000-0000-0000-000000000000', 'null', 'null'),
  (3, NULL, NULL, NULL, 'infinity', '-infinity', '-infinity', NULL, '\\N', NULL, NULL, NULL, NULL, NULL, NULL, NULL,
   NULL, NULL, NULL, NULL);
INSERT INTO kinds (id) VALUES (4);
INSERT INTO kinds (id, n) SELECT 5, (repeat('9', 2000) || '.' || repeat('1', 3000))::numeric;
INSERT INTO mixed VALUES (1, '{1,NULL,2}', '-1 year 2 days 00:00:00.000001', 7), (2, NULL, NULL, NULL);
"""
_LATER = """
INSERT INTO part_root VALUES (101, 'b', 'later');
INSERT INTO leaf_root VALUES (55) ON CONFLICT DO NOTHING;
DELETE FROM large WHERE id % 2 = 0;
INSERT INTO made VALUES (11);
"""
_PUBLICATIONS = """
CREATE PUBLICATION pub FOR TABLE "S.p 1"."t%s""x", chosen (id, kept, v) WHERE (kept), made, leaf_root, nothing, large,
  kinds, mixed;
CREATE PUBLICATION by_root FOR TABLE part_root WITH (publish_via_partition_root);
"""


@pytest.fixture(scope="module")
def filled(server_pool: ServerPool, pg_major: int) -> Iterator[Database]:
    """Tables of all kinds, filled, on the source: once for all tests, none of which writes to it."""
    source = create_end(server_pool.get("source", pg_major), "source")
    _fill(source)
    yield source
    drop_database(source)


def _fill(source: Database) -> None:
    for text in (_TABLES, _ROWS, _PUBLICATIONS):
        source.execute(text)


@pytest.fixture
def shapes(filled: Database, target_db: Database) -> Iterator[Route]:
    """The tables on the source; the slots that a test makes there end with it."""
    route = Route(source=filled, target=target_db, settings=FAST)
    yield route
    slots = "FROM pg_replication_slots WHERE database = current_database()"
    filled.wait_until(f"SELECT NOT EXISTS (SELECT {slots} AND active)")
    filled.execute(f"SELECT pg_drop_replication_slot(slot_name) {slots}")


# One column more, and one that is wider than on the publisher.
_TARGET = _TABLES.replace("v text, secret text", "v text, secret text DEFAULT 'none'").replace(
    "wider int", "wider bigint"
)


@pytest.mark.pg_majors(15, 18)
def test_what_is_published_is_copied(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """Row filters, column lists, partitions and any names are copied as the stream sends them, then it goes on.

    Values are the same to the last digit, whether they go in binary (`kinds`) or as text (`mixed`).
    """
    _fill(source_db)
    shapes = Route(source=source_db, target=target_db, settings=FAST)
    shapes.target.execute(_TARGET)
    # Beyond what config/roles gives: an index is dropped by its table's owner, and made by who may in its schema.
    shapes.target.execute(f"ALTER TABLE large OWNER TO {shapes.target.target_role}")
    shapes.target.execute(f"GRANT CREATE ON SCHEMA public TO {shapes.target.target_role}")
    # A statement of an index has neither: such an index stays.
    shapes.target.execute("CREATE INDEX told ON large (left(fill, 9)); COMMENT ON INDEX told IS 'why'")
    shapes.target.execute("CREATE INDEX kept ON large (left(fill, 8)); ALTER INDEX kept ALTER 1 SET STATISTICS 7")
    run_command(shapes, "init", "--publication", "by_root", "--copy", "--defer-indexes", code=0)
    shapes.source.execute("INSERT INTO chosen VALUES (101, false, 'x', 'y'), (102, true, 'x', 'y')")
    shapes.source.execute(_LATER)
    daemon = start_daemon(shapes, "--publication", "by_root")
    daemon.finish()
    check_equal(shapes, '"S.p 1"."t%s""x"', "made", "part_root", "part_b", "leaf_root", "nothing", "large", "kinds",
                "mixed")  # fmt: skip
    wanted = shapes.source.rows("SELECT id, kept, v, 'none' FROM chosen WHERE kept ORDER BY id")
    assert shapes.target.rows("SELECT * FROM chosen ORDER BY id") == wanted
    assert shapes.target.rows("SELECT count(*) FROM pg_indexes WHERE indexname = 'large_fill'") == [(1,)]
    kept = "SELECT obj_description('told'::regclass), attstattarget FROM pg_attribute WHERE attrelid = 'kept'::regclass"
    assert shapes.target.rows(kept) == [("why", 7)]
    known = shapes.target.rows('SELECT table_name, rows FROM parapply.copies ORDER BY table_name COLLATE "C"')
    assert dict(known)["large"] == 2500


def test_how_far_a_copy_is_shows_while_it_runs(shapes: Route, run_command: RunCommand) -> None:
    """A table that takes long is in `parapply.copies` and `status` with its rows so far; the others are complete."""
    shapes.target.execute(_TARGET)
    with shapes.target.connect() as foreign:
        # The copy waits at this row to see whether it exists.
        foreign.execute("BEGIN; INSERT INTO large VALUES (2500, '')")
        copying = threading.Thread(target=run_command, args=(shapes, "init", "--copy"))
        copying.start()
        shapes.target.wait_until("SELECT to_regclass('parapply.copies') IS NOT NULL")
        shapes.target.wait_until("SELECT bool_and(state = 'copied' OR table_name = 'large' AND rows > 0)"
                                 " FROM parapply.copies")  # fmt: skip
        shown = " ".join(run_command(shapes, "status").stdout.split())
        assert "rows so far" in shown
        assert "public.large copying" in shown
        foreign.execute("ROLLBACK")
    copying.join(60)
    check_equal(shapes, "large")
    assert shapes.target.rows("SELECT rows FROM parapply.copies WHERE table_name = 'large'") == [(2500,)]


def test_tables_with_rows_are_refused(shapes: Route, run_command: RunCommand) -> None:
    """Rows on the target are never mixed with a copy: exit 4 and no slot without `--truncate`, replaced with it."""
    shapes.target.execute(_TARGET)
    shapes.target.execute("INSERT INTO nothing VALUES (1)")
    refused = run_command(shapes, "init", "--copy", code=4)
    assert '"public"."nothing" holds rows already' in refused.stderr
    assert "--truncate" in refused.stderr
    assert shapes.source.rows("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == [(0,)]
    run_command(shapes, "init", "--copy", "--truncate", code=0)
    assert shapes.target.rows("SELECT count(*) FROM nothing") == [(0,)]


@pytest.mark.bare_target
def test_missing_tables_are_refused(shapes: Route, run_command: RunCommand) -> None:
    """All that is missing is named at once, with what to do, before anything is made."""
    shapes.target.execute("CREATE TABLE chosen (id int PRIMARY KEY); CREATE TABLE nothing (id int PRIMARY KEY)")
    refused = run_command(shapes, "init", "--copy", code=4)
    assert 'target table public.chosen is missing replicated columns: "kept", "v"' in refused.stderr
    assert '"public"."made" is published but missing here' in refused.stderr
    # The stream could wait for such tables, but the copy cannot, so the copy itself refuses them.
    refused = run_command(
        shapes, "init", "--copy", "--despite", "table_missing", "--despite", "columns_refused", code=4
    )
    assert "table public.made is missing" in refused.stderr
    _check_nothing_is_left(shapes)


#: The privilege taken away on an end, the options, exit code, words of the message, and the SQL that gives it back.
_REFUSALS = [
    ("source", "REVOKE SELECT ON large FROM {}", "", 3, 'may not read "public"."large"', "GRANT SELECT ON large TO {}"),
    ("target", "REVOKE INSERT ON large FROM {}", "", 4, "lacks privileges on target table public.large: INSERT",
     "GRANT INSERT ON large TO {}"),
    ("target", "REVOKE TRUNCATE ON nothing FROM {}; INSERT INTO nothing VALUES (1)", "--truncate", 4,
     "TRUNCATE on public.nothing", "GRANT TRUNCATE ON nothing TO {}; TRUNCATE nothing"),
    ("target", "", "--defer-indexes", 4, "may not drop the indexes of public.large", ""),
    ("target", "REVOKE CREATE ON DATABASE {db} FROM {}", "", 4, 'may not create schema "parapply"',
     "GRANT CREATE ON DATABASE {db} TO {}"),
    ("target", "ALTER TABLE made ALTER twice DROP EXPRESSION; DROP TABLE mixed", "--schema", 4, "leave out --schema",
     "CREATE TABLE mixed (id int PRIMARY KEY, a int[], iv interval, wider bigint)"),
    ("source", "SELECT pg_create_physical_replication_slot('{slot}')", "", 3, "is a physical slot",
     "SELECT pg_drop_replication_slot('{slot}')"),
]  # fmt: skip


@pytest.mark.bare_target
def test_a_refusal_leaves_nothing(shapes: Route, run_command: RunCommand) -> None:
    """Whatever is refused is refused before anything is made, or what was made is taken away: then it goes on."""
    shapes.target.execute(_TARGET)
    roles = {"source": shapes.source.source_role, "target": shapes.target.target_role}
    ends = {"source": shapes.source, "target": shapes.target}
    for end, take, options, code, words, give in _REFUSALS:
        names = {"db": ends[end].dbname, "slot": shapes.slot}
        if take:
            ends[end].execute(take.format(roles[end], **names))
        more = ["--pg-dump", _pg_dump()] if options == "--schema" else []
        refused = run_command(shapes, "init", "--copy", *options.split(), *more)
        assert refused.returncode == code, f"{take}: {refused.stdout}{refused.stderr}"
        assert words in refused.stderr
        assert len(refused.stderr.splitlines()) == 1, refused.stderr
        if give:
            ends[end].execute(give.format(roles[end], **names))
        _check_nothing_is_left(shapes)
    run_command(shapes, "init", "--copy", code=0)


def test_indexes_wait_for_whom_may_make_them(shapes: Route, run_command: RunCommand) -> None:
    """Only dropped indexes are noted; one that exists again needs no owner, one that does not says so."""
    role = shapes.target.target_role
    shapes.target.execute(_TARGET)
    shapes.target.execute(f"ALTER TABLE large OWNER TO {role}; GRANT CREATE ON SCHEMA public TO {role}")
    environ = {"PARAPPLY_FAILPOINT": f"{failpoints.COPY_PART}:kill"}
    killed = run_command(shapes, "init", "--copy", "--defer-indexes", environ=environ)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    noted = "SELECT table_name, cardinality(indexes) FROM parapply.copies WHERE indexes <> '{}'"
    assert shapes.target.rows(noted) == [("large", 1)]
    shapes.target.execute(f"ALTER TABLE large OWNER TO CURRENT_USER; GRANT ALL ON large TO {role}")
    refused = run_command(shapes, "init", "--copy", code=4)
    (line,) = refused.stderr.splitlines()
    assert "making the indexes of public.large again: must be owner" in line
    assert "tables that are complete stay, and the same command goes on with the others" in line
    shapes.target.execute("CREATE INDEX large_fill ON large (left(fill, 10))")
    run_command(shapes, "init", "--copy", code=0)
    check_equal(shapes, "large")


def _check_nothing_is_left(route: Route) -> None:
    slots = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
    assert route.source.rows(slots) == [(0,)]
    assert route.target.rows("SELECT count(*) FROM pg_namespace WHERE nspname = 'parapply'") == [(0,)]


def test_the_schema_is_brought_over(shapes: Route, run_command: RunCommand) -> None:
    """With `--schema` an empty database becomes a copy, keys and indexes included.

    Like the daemon, pg_dump takes what the DSN leaves open, here the port, from libpq's variables.
    """
    shapes.target.execute(f"GRANT CREATE ON SCHEMA public TO {shapes.target.target_role}")
    parameters: dict[str, Any] = conninfo_to_dict(shapes.source.source_role_dsn)
    port = str(parameters.pop("port"))
    open_route = replace(shapes, source_dsn=make_conninfo(**parameters))
    arguments = ("--publication", "by_root", "--copy", "--schema", "--pg-dump")
    run_command(open_route, "init", *arguments, _pg_dump(), environ={"PGPORT": port}, code=0)
    check_equal(shapes, '"S.p 1"."t%s""x"', "made", "part_root", "leaf_root", "nothing", "large")
    assert shapes.target.rows("SELECT count(*) FROM pg_indexes WHERE indexname = 'large_fill'") == [(1,)]


@pytest.mark.bare_target
def test_a_dump_is_made_to_fit(shapes: Route, run_command: RunCommand, tmp_path: Path) -> None:
    """Settings of a newer pg_dump are left out; what the target does not take is shown, and nothing is made of it.

    A dump makes no schema public: where it is missing, the hint says so, and works.
    """
    shapes.target.execute("DROP SCHEMA public")
    refused = run_command(
        shapes, "init", "--publication", "by_root", "--copy", "--schema", "--pg-dump", _pg_dump(), code=4
    )
    assert "CREATE SCHEMA it on the target, and run the same command again" in refused.stderr
    shapes.target.execute(f"CREATE SCHEMA public; GRANT CREATE ON SCHEMA public TO {shapes.target.target_role}")
    # A newer pg_dump, which writes what this target does not know.
    newer = tmp_path / "pg_dump"
    program = f'#!/bin/sh\n{_pg_dump()} "$@" | sed "s/^SET lock_timeout/SET newer_timeout/'
    arguments = ("--publication", "by_root", "--copy", "--schema", "--pg-dump", str(newer))
    newer.write_text(f'{program}; s/ numeric(8,2)/ newer_type/"\n')
    newer.chmod(0o755)
    refused = run_command(shapes, "init", *arguments, code=4)
    assert 'type "newer_type" does not exist in the dump\'s line: n2 newer_type' in refused.stderr
    _check_nothing_is_left(shapes)
    newer.write_text(f'{program}"\n')
    run_command(shapes, "init", *arguments, code=0)


@pytest.mark.bare_target
def test_a_schema_is_made_by_who_may(shapes: Route, run_command: RunCommand) -> None:
    """The role of the scripts may make no tables in `public`: the message says who can, and nothing is left."""
    shapes.target.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    refused = run_command(shapes, "init", "--copy", "--schema", "--pg-dump", _pg_dump(), code=4)
    assert "permission denied for schema public" in refused.stderr
    assert "make the schema as the role that shall own it" in refused.stderr
    _check_nothing_is_left(shapes)
    # Made in the same transaction.
    assert shapes.target.rows("SELECT count(*) FROM pg_namespace WHERE nspname = 'S.p 1'") == [(0,)]


def _pg_dump() -> str:
    from parapply.demo.binaries import find_binaries, find_program  # noqa: PLC0415

    return str(find_program("pg_dump", find_binaries()))


def test_a_root_without_partitions_is_emptied(
    source_db: Database, target_db: Database, run_command: RunCommand
) -> None:
    """`--truncate` takes the target's rows out of a table that has nowhere to hold rows at the publisher."""
    root = "CREATE TABLE m (id int PRIMARY KEY) PARTITION BY RANGE (id)"
    source_db.execute(f"{root}; CREATE PUBLICATION pub FOR TABLE m WITH (publish_via_partition_root)")
    target_db.execute(f"{root}; CREATE TABLE m1 PARTITION OF m FOR VALUES FROM (0) TO (9); INSERT INTO m VALUES (1)")
    route = Route(source=source_db, target=target_db, settings=FAST)
    run_command(route, "init", "--copy", "--truncate", code=0)
    check_equal(route, "m")


@pytest.mark.pg_majors(18)
def test_generated_columns_that_are_published(
    source_db: Database, target_db: Database, run_command: RunCommand, start_daemon: StartDaemon
) -> None:
    """They are copied and applied as values, where COPY refuses them by name."""
    source_db.execute("CREATE TABLE made (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED)")
    target_db.execute("CREATE TABLE made (id int PRIMARY KEY, twice int)")
    source_db.execute("INSERT INTO made VALUES (1), (2)")
    source_db.execute("CREATE PUBLICATION pub FOR TABLE made WITH (publish_generated_columns = stored)")
    route = Route(source=source_db, target=target_db, settings=FAST)
    run_command(route, "init", "--copy", code=0)
    daemon = start_daemon(route)
    source_db.execute("INSERT INTO made VALUES (3); UPDATE made SET id = 4 WHERE id = 1")
    daemon.finish()
    check_equal(route, "made")

"""Tables that have another name on the target: copied, applied, compared, and named by both names where people look."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from parapply.applylog_schema import BatchRecord, read_record
from tests.fixtures.endpoint import LISTEN, Endpoint
from tests.fixtures.plain import FAST
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database

_TABLES = """
CREATE SCHEMA {schema};
CREATE TABLE {item} (id int PRIMARY KEY, v int);
CREATE TABLE {schema}.evt (n int NOT NULL);
CREATE TABLE public.plain (id int PRIMARY KEY);
"""
_MAPPING = {'mapping.tables."public.item"': "archive.item_2026", "mapping.schemas.sales": "shop"}
_TARGET_REFUSED = 4


@pytest.fixture
def route(source_db: Database, target_db: Database) -> Route:
    """Two tables that have other names on the target, and one that has not; all have rows already."""
    source_db.execute(_TABLES.format(schema="sales", item="public.item"))
    target_db.execute("CREATE SCHEMA archive;" + _TABLES.format(schema="shop", item="archive.item_2026"))
    source_db.execute("INSERT INTO item SELECT n, 0 FROM generate_series(1, 100) AS n;"
                      "INSERT INTO sales.evt SELECT generate_series(1, 100);"
                      "CREATE PUBLICATION pub FOR ALL TABLES")  # fmt: skip
    return Route(source=source_db, target=target_db, settings={**FAST, **_MAPPING})


def test_other_names_all_the_way(
    route: Route, run_command: RunCommand, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """Copy, stream, a kept conflict and its replay, and verify act on the target's tables, and say both names.

    So do the metrics and the apply log, from which the report has them.
    """
    run_command(route, "init", "--copy", code=0)
    settings = {**LISTEN, "conflict.update_missing": "skip", "applylog.directory": str(tmp_path)}
    daemon = start_daemon(route, settings=settings)
    route.source.execute(
        "UPDATE item SET v = 1 WHERE id > 50; DELETE FROM item WHERE id < 10; INSERT INTO plain VALUES (1)"
    )
    route.source.execute("TRUNCATE sales.evt; INSERT INTO sales.evt SELECT generate_series(1, 7)")
    daemon.wait_caught_up()
    verified = run_command(route, "verify", code=0)
    assert "public.item (archive.item_2026 on the target): equal, 91 rows" in verified.stdout
    assert "sales.evt (shop.evt on the target): equal, 7 rows" in verified.stdout
    assert "public.plain: equal, 1 rows" in verified.stdout
    route.target.wait_until(
        "SELECT reason LIKE '%on the target archive.item_2026' FROM parapply.tables WHERE table_name = 'item'"
    )
    route.target.execute("DELETE FROM archive.item_2026 WHERE id = 99")
    route.source.execute("UPDATE item SET v = 2 WHERE id = 99")
    daemon.wait_caught_up()
    route.target.wait_until("SELECT count(*) = 1 FROM parapply.conflicts")
    shown = run_command(route, "conflicts show", "1").stdout
    assert "update_missing on public.item (archive.item_2026 on the target)" in shown
    run_command(route, "conflicts replay", "1", "--yes", code=0)
    assert route.target.rows("SELECT v FROM archive.item_2026 WHERE id = 99") == [(2,)]
    both = {("public.item", "archive.item_2026"), ("sales.evt", "shop.evt")}
    assert Endpoint(daemon).samples()["parapply_table_target"] == dict.fromkeys(both, 1.0)
    daemon.stop()
    records = [read_record(line) for path in tmp_path.rglob("*.jsonl") for line in path.read_bytes().splitlines()]
    said = [one for record in records if isinstance(record, BatchRecord) for one in record.target_names]
    assert sorted((one.table, one.target) for one in said) == sorted(both)


def test_two_tables_for_one_are_refused(route: Route, run_command: RunCommand, start_daemon: StartDaemon) -> None:
    """Their dependencies could not be known: `init` makes nothing, a daemon stops before the second one's change."""
    twice = Route(
        source=route.source, target=route.target, slot=route.slot,
        settings={**route.settings, 'mapping.tables."public.item"': "public.plain"},
    )  # fmt: skip
    route.target.execute("ALTER TABLE plain ADD v int")
    refused = run_command(twice, "init", "--copy")
    assert refused.returncode != 0
    assert "public.item and public.plain are both published and lead to target table public.plain" in refused.stderr
    run_command(route, "init", code=0)
    route.source.execute("INSERT INTO item VALUES (1000, 0); INSERT INTO plain VALUES (2000)")
    daemon = start_daemon(twice)
    assert daemon.exit_code() == _TARGET_REFUSED, daemon.log_tail()
    assert "public.item and public.plain are both applied to target table public.plain" in daemon.log_tail()
    assert route.target.rows("SELECT count(*) FROM plain") == [(0,)]

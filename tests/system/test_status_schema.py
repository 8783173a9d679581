"""`status --json` is what `status --json-schema` says, in each state that it can be asked in."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import msgspec
import pytest
from psycopg.conninfo import make_conninfo

from parapply.commands.status_schema import StatusDocument, schema
from tests.fixtures.plain import FAST
from tests.fixtures.route import Route
from tests.fixtures.two_phase import TWO_PHASE

if TYPE_CHECKING:
    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database

_TABLES = "CREATE TABLE item (id int PRIMARY KEY, v int)"


def _check(run_command: RunCommand, route: Route) -> dict[str, Any]:
    """Return the document, which must be valid, with each field of its types and no other."""
    done = run_command(route, "status", "--json", code=0)
    found: dict[str, Any] = json.loads(done.stdout)
    jsonschema.validate(found, schema(), jsonschema.Draft202012Validator)
    assert msgspec.to_builtins(msgspec.convert(found, StatusDocument)) == found
    return found


def test_the_schema_is_printed_and_describes_every_field(run_command: RunCommand, route: Route) -> None:
    """The command needs no server for it; it is a schema, and each field says what it is."""
    away = Route(source=route.source, target=route.target, source_dsn="host=192.0.2.1", target_dsn="host=192.0.2.1")
    done = run_command(away, "status", "--json-schema", code=0)
    printed = json.loads(done.stdout)
    jsonschema.Draft202012Validator.check_schema(printed)
    assert printed == schema()
    fields = [
        (name, field, told.get("description"))
        for name, one in printed["$defs"].items()
        for field, told in one.get("properties", {}).items()
    ]
    assert len(fields) > 100
    assert [one for one in fields if not one[2]] == []


@pytest.fixture
def route(source_db: Database, target_db: Database) -> Route:
    """One table on both sides, published."""
    for database in (source_db, target_db):
        database.execute(_TABLES)
    source_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    settings: dict[str, str | float] = {**FAST, **TWO_PHASE, "apply.workers": 2, "conflict.update_missing": "skip"}
    return Route(source=source_db, target=target_db, settings=settings)


def test_every_state_of_a_slot_is_valid(route: Route, run_command: RunCommand, start_daemon: StartDaemon) -> None:
    """Before the slot is made, before its first daemon, with one of everything, with an end away, and afterwards."""
    run_command(route, "init", "--copy", code=0)
    assert _check(run_command, route)["started_at"] is None
    daemon = start_daemon(route)
    route.source.execute("INSERT INTO item VALUES (1, 0), (2, 0)")
    daemon.wait_caught_up()
    route.target.execute("DELETE FROM item WHERE id = 2")
    route.source.execute("UPDATE item SET v = 1 WHERE id = 2")
    # Not on the target: it waits.
    route.source.execute("CREATE TABLE late (id int PRIMARY KEY); INSERT INTO late VALUES (1)")
    route.source.execute("BEGIN; INSERT INTO item VALUES (3, 0); PREPARE TRANSACTION 'schema-test'")
    daemon.wait_for_event("table_waits")
    daemon.wait_caught_up()
    route.target.execute(
        "INSERT INTO parapply.migrations (slot_name, system_identifier, step, state, done, total, unit)"
        " SELECT slot_name, system_identifier, 'check', 'done', 3, 9, 'rows' FROM parapply.slots;"
        "INSERT INTO parapply.migrations (slot_name, system_identifier, step, state)"
        " SELECT 'planned', system_identifier, 'check', 'running' FROM parapply.slots;"
        "INSERT INTO parapply.cutovers (slot_id, step, reverse_slot, made_slot, made_publication, fence, opens)"
        " SELECT slot_id, 'draining', 'back', true, true, 'database', '' FROM parapply.slots;"
        "INSERT INTO parapply.ddl (slot_id, commit_lsn, number, tag, command, source_role, outcome, reason)"
        " SELECT slot_id, '0/1', 1, 'CREATE INDEX', '', 'app', 'left_out', 'why' FROM parapply.slots"
    )
    try:
        route.target.wait_until("SELECT limits IS NOT NULL FROM parapply.slots")
        running = _check(run_command, route)
        lists = ("workers", "tables", "copies", "ddl", "prepared", "conflicts", "migration")
        assert [name for name in (*lists, "cutover", "limits") if not running[name]] == []
        assert running["source"]["is_reachable"]
        planned = Route(source=route.source, target=route.target, slot="planned", settings=route.settings)
        assert _check(run_command, planned).keys() == running.keys()
        away = Route(
            source=route.source,
            target=route.target,
            slot=route.slot,
            settings=route.settings,
            source_dsn=make_conninfo(route.source.dsn, port=1),
        )
        assert _check(run_command, away)["source"].keys() == running["source"].keys()
    finally:
        route.source.execute("ROLLBACK PREPARED 'schema-test'")
    daemon.finish()
    stopped = _check(run_command, route)
    assert (stopped["workers"], stopped["limits"], stopped["state"]) == ([], None, "stopped")
    assert stopped.keys() == running.keys()

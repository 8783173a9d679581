"""Code of a table's owner never runs as the daemon's role, whichever way rows come: it would leave a trace."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from parapply.model import format_lsn
from parapply.target.state.schema import SCHEMA_VERSION
from tests.fixtures.daemon import Daemon, error_of
from tests.fixtures.mallory import Traced, make_traced, mallory
from tests.fixtures.plain import WORKER_IS_BLOCKED, lsn_of
from tests.fixtures.streams import FOLLOW, LITTLE_MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.fixtures.daemon import RunCommand
    from tests.fixtures.route import Route

    MakeTraced = Callable[[Mapping[str, str | float]], Traced]

__all__ = ["make_traced", "mallory"]

_ROW_TRIGGER = """CREATE TRIGGER trace BEFORE INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW
  EXECUTE FUNCTION {role}.trace(); ALTER TABLE {table} ENABLE ALWAYS TRIGGER trace"""
_TRUNCATE_TRIGGER = """CREATE TRIGGER trace BEFORE TRUNCATE ON {table} EXECUTE FUNCTION {role}.trace();
  ALTER TABLE {table} ENABLE ALWAYS TRIGGER trace"""
#: Constant expressions, which run as soon as a statement is planned, a SELECT as well.
_INDEX = "CREATE INDEX traced ON {table} (id) WHERE {role}.constant(1) > 0"
_STATISTICS = "CREATE STATISTICS {role}.{name} ON id, ({role}.constant(1)) FROM {table}"
_POLICY = """CREATE POLICY p ON {table} USING ({role}.constant(1) > 0);
  ALTER TABLE {table} ENABLE ROW LEVEL SECURITY"""
_UPDATE = "UPDATE {table} SET v = 'b' WHERE id = 1"
_LARGE = "INSERT INTO {table} SELECT g, repeat('x', 300) FROM generate_series(2, 20000) AS g"


@pytest.mark.parametrize(
    ("settings", "code", "change"),
    [
        pytest.param({}, _ROW_TRIGGER, "INSERT INTO {table} VALUES (2), (3)", id="set"),
        pytest.param({'apply.tables."{table}".parallel': "never"}, _ROW_TRIGGER, _UPDATE, id="row"),
        pytest.param({**LITTLE_MEMORY, "apply.stream_start_bytes": 1 << 30}, _ROW_TRIGGER, _LARGE, id="pieces"),
        pytest.param({**FOLLOW, "source.decoding_memory_bytes": 1 << 16}, _ROW_TRIGGER, _LARGE, id="streamed"),
        pytest.param({}, _TRUNCATE_TRIGGER, "TRUNCATE {table}", id="truncate"),
        pytest.param({}, _INDEX, _UPDATE, id="index"),
        pytest.param({}, _STATISTICS, _UPDATE, id="statistics"),
        pytest.param({}, _POLICY, _UPDATE, id="policy"),
    ],
)
def test_code_that_comes_after_the_plan_does_not_run(
    make_traced: MakeTraced, new_slot: Callable[[Route], None], settings: dict[str, str | float], code: str, change: str
) -> None:
    """A batch looks under a lock before it writes, whichever way its changes are applied."""
    traced = make_traced(settings)
    route = traced.route
    if code == _POLICY:
        # Policies do not act for a superuser.
        route = replace(route, target_dsn="")
        role = route.target.target_role
        traced.on(route.target, f"GRANT USAGE ON SCHEMA {{role}} TO {role}; GRANT ALL ON {{table}} TO {role}")
    new_slot(route)
    daemon = Daemon(route)
    try:
        traced.on(route.source, "INSERT INTO {table} VALUES (1, 'a')")
        daemon.wait_caught_up()
        traced.on(route.target, code)
        traced.forget()
        traced.on(route.source, change)
        assert daemon.exit_code(60) == 4, daemon.log_tail()
        assert not traced.has_run
    finally:
        daemon.end()


def test_the_lock_outlives_a_conflict(make_traced: MakeTraced, new_slot: Callable[[Route], None]) -> None:
    """To go back to the savepoint of a conflict lets no code come between the look and what follows."""
    traced, other = make_traced({"conflict.insert_exists": "skip", "apply.workers": 1}), make_traced({})
    route = traced.route
    route.source.execute(f"ALTER PUBLICATION {route.publication} ADD TABLE {other.table}")
    traced.on(route.target, "INSERT INTO {table} VALUES (1, 'here')")
    for end in (route.source, route.target):
        other.on(end, "INSERT INTO {table} VALUES (1, 'held')")
    new_slot(route)
    daemon = Daemon(route)
    try:
        with route.target.connect() as foreign:
            foreign.execute(f"BEGIN; SELECT FROM {other.table} WHERE id = 1 FOR UPDATE")
            # The conflict comes first in every attempt, so what waits is the one in which it has been settled.
            route.source.execute(
                f"BEGIN; INSERT INTO {traced.table} VALUES (1, 'a');"
                f" UPDATE {other.table} SET v = 'b' WHERE id = 1; COMMIT"
            )
            route.target.wait_until(WORKER_IS_BLOCKED)
            held = (
                f"SELECT mode FROM pg_locks WHERE relation = '{traced.table}'::regclass AND mode = 'RowExclusiveLock'"
            )
            assert len(route.target.rows(held)) == 1
            foreign.execute("COMMIT")
        daemon.wait_caught_up()
    finally:
        daemon.end()


@pytest.mark.parametrize(
    ("code", "command"),
    [
        pytest.param(_ROW_TRIGGER, ("init", "--copy"), id="copy"),
        pytest.param(_TRUNCATE_TRIGGER, ("init", "--copy", "--truncate"), id="empty"),
        pytest.param(_INDEX, ("init", "--copy", "--truncate"), id="look"),
    ],
)
def test_no_code_runs_for_a_copy(
    make_traced: MakeTraced, run_command: RunCommand, code: str, command: tuple[str, ...]
) -> None:
    """Neither when rows come, nor when the old ones go, nor to see whether there are any."""
    traced = make_traced({})
    traced.on(traced.route.source, "INSERT INTO {table} VALUES (1, 'a')")
    traced.on(traced.route.target, code)
    traced.forget()
    done = run_command(traced.route, *command, "--despite", "owner_code")
    assert "its code would run" in done.stderr
    assert done.returncode == 4, done.stderr
    assert not traced.has_run


@pytest.mark.parametrize(
    ("code", "change"),
    [
        pytest.param(_ROW_TRIGGER, _UPDATE, id="row"),
        pytest.param(_TRUNCATE_TRIGGER, "TRUNCATE OTHER, {table}", id="truncate"),
    ],
)
def test_no_code_runs_for_refresh_and_replay(
    make_traced: MakeTraced, init_route: Callable[[Route], None], run_command: RunCommand, code: str, change: str
) -> None:
    """A table whose code comes later is not copied again, and no change that was left out is applied."""
    other, traced = make_traced({}), make_traced({})
    route = traced.route
    route.source.execute(f"ALTER PUBLICATION {route.publication} ADD TABLE {other.table}")
    init_route(route)
    traced.on(route.source, "INSERT INTO {table} VALUES (1, 'a')")
    traced.on(route.source, change.replace("OTHER", other.table))
    lsn = format_lsn(lsn_of(route.source))
    run_command(route, "skip", "--lsn", lsn, code=0)
    daemon = Daemon(route)
    try:
        daemon.finish()
    finally:
        daemon.end()
    traced.on(route.target, code)
    traced.forget()
    for command in (("refresh", "--table", traced.table, "--truncate"), ("conflicts replay", "--lsn", lsn, "--yes")):
        done = run_command(route, *command)
        assert done.returncode == 4, (done.stdout, done.stderr)
        assert "its code would run" in done.stderr
        assert not traced.has_run


#: A table in which others would note that a cut-over is under way; to plan or run a SELECT from it runs code.
_CUTOVERS = """
CREATE FUNCTION {role}.word({role}.step) RETURNS text IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN
  PERFORM nextval('{role}.ran'); RETURN 'done'; END $$;
CREATE CAST ({role}.step AS text) WITH FUNCTION {role}.word AS IMPLICIT;
CREATE TABLE {role}.schema_version (id int CONSTRAINT schema_version_one_row PRIMARY KEY);
CREATE TABLE {role}.cutovers (step {role}.step, reverse_slot text);
CREATE TABLE {role}.heir () INHERITS ({role}.cutovers);
CREATE INDEX ON {role}.cutovers (step) WHERE {role}.constant(1) > 0;
CREATE INDEX ON {role}.heir (step) WHERE {role}.constant(1) > 0;
INSERT INTO {role}.cutovers VALUES ('steps', 'other');
GRANT USAGE ON SCHEMA {role} TO PUBLIC; GRANT SELECT ON {role}.cutovers TO PUBLIC;
ALTER SEQUENCE {role}.ran RESTART"""


def test_no_code_runs_on_the_publisher_to_look_for_a_cut_over(make_traced: MakeTraced, run_command: RunCommand) -> None:
    """Any owner of a schema there may make such a table; one that keeps the daemon out is named."""
    traced = make_traced({})
    source = traced.route.source
    ours = ("--set", "target.state_schema=looked")  # `drop` would take the one that the module's daemons use
    traced.on(source, "CREATE TYPE {role}.step AS ENUM ('steps')")
    traced.on(source, _CUTOVERS)
    try:
        run_command(traced.route, "init", *ours, code=0)
        assert not traced.has_run
        traced.on(source, f"INSERT INTO {{role}}.cutovers VALUES ('steps', '{traced.route.slot}')")
        traced.on(source, "ALTER SEQUENCE {role}.ran RESTART")
        refused = run_command(traced.route, "init", *ours, code=3)
        role = traced.table.partition(".")[0]
        assert f"at the step steps, says the schema '{role}' of the role '{role}'" in refused.stderr
        assert not traced.has_run
    finally:
        traced.on(source, "DROP TABLE {role}.schema_version, {role}.cutovers CASCADE; DROP TYPE {role}.step CASCADE")
        run_command(traced.route, "drop", "--yes", *ours)


#: A state schema of the present version as others would make it, with code in a view.
_STATE = """
CREATE TABLE {role}_state.schema_version AS SELECT VERSION AS version;
CREATE UNIQUE INDEX schema_version_one_row ON {role}_state.schema_version ((true));
CREATE VIEW {role}_state.progress AS SELECT {role}.constant(1)"""
_QUEUE = "DROP TABLE {role}_state.schema_version; DROP VIEW {role}_state.progress"


def test_a_state_schema_of_another_role_is_refused(make_traced: MakeTraced, run_command: RunCommand) -> None:
    """With or without a state in it, its owner could have code run as the daemon's role."""
    traced = make_traced({})
    route, role = traced.route, traced.table.partition(".")[0]
    ours = ("--set", f"target.state_schema={role}_state")
    why = f"target.state_schema = '{role}_state' belongs to the role '{role}'"
    route.target.execute(f"CREATE SCHEMA {role}_state AUTHORIZATION {role}")
    try:
        traced.on(route.target, _STATE.replace("VERSION", str(SCHEMA_VERSION)))
        traced.forget()
        for command in (["status"], ["wait", "--lsn", "0/1", "--timeout", "0"], ["init"], ["check"], ["run"]):
            refused = run_command(route, *command, *ours, code=4)
            assert why in refused.stdout + refused.stderr
            assert not traced.has_run
        traced.on(route.target, _QUEUE)
        refused = run_command(route, "init", *ours, code=4)
        assert why in refused.stderr
        route.target.execute(f"ALTER SCHEMA {role}_state OWNER TO pg_database_owner")
        run_command(route, "init", *ours, code=0)
        # A queue of commands may have been there before the state; the way on is said.
        route.target.execute(f"ALTER SCHEMA {role}_state OWNER TO {role}")
        refused = run_command(route, "run", *ours, code=4)
        (remedy,) = re.findall(
            r"as an administrator: (ALTER SCHEMA .* OWNER TO .*;)", error_of(refused.stderr.splitlines())
        )
        route.target.execute(remedy)
        run_command(route, "run", "--until", route.end_of_source_lsn(), *ours, code=0)
    finally:
        run_command(route, "drop", "--yes", *ours)
        route.target.execute(f"DROP SCHEMA IF EXISTS {role}_state CASCADE")

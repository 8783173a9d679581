"""The threat model of docs/PRIVILEGES.md: what each actor may not do, tried on one pair of servers."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

import psycopg
import pytest

from parapply.login import Login
from parapply.target.catalogue.facts import load_facts
from parapply.target.session import settings
from parapply.target.session.prepared import gid_of
from parapply.wire.decode import decode
from parapply.wire.messages import Prepare
from tests.fixtures.daemon import Daemon
from tests.fixtures.fan import make_slot
from tests.fixtures.mallory import Mallory, mallory
from tests.fixtures.plain import FAST
from tests.fixtures.route import Route
from tests.fixtures.two_phase import decide, write_prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from parapply.plan.table import TableFacts
    from tests.fixtures.daemon import RunCommand

pytestmark = pytest.mark.each_session

__all__ = ["mallory"]

_TRIGGER = """
CREATE TRIGGER attack BEFORE INSERT ON {role}.{table} FOR EACH ROW EXECUTE FUNCTION {role}.attack();
ALTER TABLE {role}.{table} ENABLE ALWAYS TRIGGER attack;
"""


@pytest.mark.parametrize("table", ["early", "late"])
def test_an_owner_has_no_code_run_as_the_daemon(
    mallory: Mallory, table: str, new_slot: Callable[[Route], None], run_command: RunCommand
) -> None:
    """No code runs of a trigger from before the daemon, nor of one that comes while the daemon is unaware of it."""
    route = Route(source=mallory.route.source, target=mallory.route.target, target_dsn=mallory.route.target_dsn,
                  settings={**FAST, "apply.catalogue_check_s": 3600})  # fmt: skip
    new_slot(route)
    if table == "early":
        mallory.on(route.target, _TRIGGER, table=table)
        done = run_command(route, "check")
        assert "its code would run with the rights of role" in done.stdout, done.stderr
    daemon = Daemon(route)
    try:
        if table == "late":
            mallory.on(route.source, "INSERT INTO {role}.late VALUES (1)")
            daemon.wait_caught_up()
            mallory.on(route.target, _TRIGGER, table=table)
        mallory.on(route.source, "INSERT INTO {role}.{table} VALUES (2)", table=table)
        assert daemon.exit_code(60) == 4, daemon.log_tail()
        assert f"target table {mallory.role}.{table} belongs to" in daemon.log_tail()
    finally:
        daemon.end()
        mallory.on(route.target, "DROP TRIGGER attack ON {role}.{table}", table=table)
    assert not mallory.is_superuser
    # Without the trigger the same change is applied.
    daemon = Daemon(route)
    try:
        daemon.wait_caught_up()
    finally:
        daemon.end()
    assert route.target.rows(f"SELECT id FROM {mallory.role}.{table} WHERE id = 2") == [(2,)]


def test_the_switch_says_that_the_code_may_run(mallory: Mallory, new_slot: Callable[[Route], None]) -> None:
    """With `role` an owner's code has all rights of the daemon's role: the attack is a real one."""
    route = Route(source=mallory.route.source, target=mallory.route.target, target_dsn=mallory.route.target_dsn,
                  settings={**FAST, "target.apply_as": "role"})  # fmt: skip
    new_slot(route)
    mallory.on(route.target, _TRIGGER, table="early")
    mallory.on(route.source, "INSERT INTO {role}.early VALUES (9)")
    daemon = Daemon(route)
    try:
        daemon.wait_caught_up()
        assert mallory.is_superuser
    finally:
        daemon.end()
        route.target.execute(f"ALTER ROLE {mallory.role} NOSUPERUSER")
        mallory.on(route.target, "DROP TRIGGER attack ON {role}.early")


_HARMLESS = """CREATE TABLE {role}.c (id int PRIMARY KEY DEFAULT nextval('{role}.n'),
  v text CHECK (v <> '' AND length(v) < 9),
  at timestamptz DEFAULT now() CHECK (at > '2000-01-01'), w text GENERATED ALWAYS AS (lower(v)) STORED);
CREATE INDEX ON {role}.c (upper(v)) WHERE id > 0"""


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (_HARMLESS, []),
        ("CREATE TABLE {role}.c (id int CHECK ({role}.rise() > id))", ["check constraint c_id_check"]),
        ("CREATE TABLE {role}.c (id int CHECK (query_to_xml('SELECT 1', true, true, '') IS NOT NULL))",
         ["check constraint c_check"]),
        ("CREATE TABLE {role}.c (id int DEFAULT {role}.rise())", ["default of column id"]),
        (("CREATE FUNCTION {role}.calm(int) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT 1';"
         " CREATE TABLE {role}.c (id int); CREATE INDEX i ON {role}.c ({role}.calm(id))"), ["index {role}.i"]),
        ("CREATE DOMAIN {role}.d AS int CHECK (VALUE > {role}.rise()); CREATE TABLE {role}.c (id {role}.d[])",
         ["domain {role}.d"]),
        (("CREATE DOMAIN {role}.d AS text CHECK (VALUE ~ '@');"
          " CREATE TABLE {role}.c (id {role}.d CHECK (id <> ''))"), []),
        # The content of a type is made from text as well; a cast to json is called by to_json.
        (("CREATE DOMAIN {role}.d AS int CHECK (VALUE > {role}.rise()); CREATE TABLE {role}.c (id int,"
          " v text CHECK (v::{role}.d[] IS NOT NULL))"), ["check constraint c_v_check"]),
        ("CREATE TABLE {role}.c (id int, v text CHECK (to_jsonb(v) IS NOT NULL))", ["check constraint c_v_check"]),
        ("CREATE TABLE {role}.c (v text CHECK (JSON_OBJECT('a': v) IS NOT NULL))", ["check constraint c_v_check"]),
        # Fires for TRUNCATE of the root.
        (("CREATE TABLE {role}.c (id int) PARTITION BY LIST (id); CREATE TABLE {role}.c1 PARTITION OF {role}.c DEFAULT;"
          " CREATE TRIGGER x BEFORE TRUNCATE ON {role}.c1 EXECUTE FUNCTION {role}.attack();"
          " ALTER TABLE {role}.c1 ENABLE ALWAYS TRIGGER x"), ["trigger x on {role}.c1"]),
        (("CREATE TABLE {role}.c (id int); CREATE RULE r AS ON INSERT TO {role}.c DO ALSO SELECT 1;"
         " ALTER TABLE {role}.c ENABLE ALWAYS RULE r"), ["rule r"]),
        (("CREATE TYPE {role}.e AS ENUM ('a'); CREATE FUNCTION {role}.cast(text) RETURNS {role}.e LANGUAGE sql"
         " AS $$SELECT 'a'::{role}.e$$; CREATE CAST (text AS {role}.e) WITH FUNCTION {role}.cast(text);"
         " CREATE TABLE {role}.c (id {role}.e)"), ["cast from text to {role}.e"]),
        (("CREATE TABLE {role}.c (id int) PARTITION BY LIST (id); CREATE TABLE {role}.c1 PARTITION OF {role}.c DEFAULT;"
         " ALTER TABLE {role}.c1 ADD CHECK ({role}.rise() > id)"), ["check constraint c1_id_check"]),
    ],
)  # fmt: skip
def test_every_kind_of_code_is_found(mallory: Mallory, code: str, found: list[str]) -> None:
    """Expressions of functions that cannot do harm are no code; a built-in function that runs SQL is."""
    target = mallory.route.target

    async def load() -> TableFacts | None:
        async with await settings.connect_control(Login(target.dsn), role="replica", application_name="test") as conn:
            return await load_facts(conn, mallory.role, "c", role="replica")

    mallory.on(target, "CREATE SEQUENCE {role}.n")
    try:
        mallory.on(target, code)
        facts = asyncio.run(load())
        assert facts is not None
        assert facts.foreign is not None
        assert facts.foreign.owners == (mallory.role,)
        assert sorted(what for what, _ in facts.foreign.code) == [mallory.text(each) for each in found]
    finally:
        target.execute(
            f"DROP TABLE IF EXISTS {mallory.role}.c CASCADE; DROP SEQUENCE {mallory.role}.n CASCADE;"
            f" DROP TYPE IF EXISTS {mallory.role}.e CASCADE; DROP DOMAIN IF EXISTS {mallory.role}.d CASCADE;"
            f" DROP FUNCTION IF EXISTS {mallory.role}.calm(int) CASCADE"
        )


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE parapply.slots SET lowest_lsn = 'FFFF/0'", "DELETE FROM parapply.applied",
        "SELECT * FROM parapply.conflicts", "CREATE TABLE parapply.x ()", "DROP SCHEMA parapply CASCADE",
    ],
)  # fmt: skip
def test_a_role_of_the_target_has_no_part_in_the_state(mallory: Mallory, statement: str) -> None:
    """A role without grants neither changes progress nor reads the rows of conflicts."""
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        mallory.on(mallory.route.target, statement)


def test_values_are_neither_run_nor_told(mallory: Mallory, new_slot: Callable[[Route], None], tmp_path: Path) -> None:
    """A value that reads like SQL is a value, written by a role that may only INSERT, by sets and row by row.

    Neither the log of its conflict nor the apply log has a value of a row, the DSN or the password.
    """
    value = f"'); ALTER ROLE {mallory.role} SUPERUSER; -- \\' $1 %s"
    ends = mallory.route
    route = Route(
        source=ends.source, target=ends.target, target_dsn=f"{ends.target_dsn} password=unsaid",
        settings={**FAST, "applylog.directory": str(tmp_path)},
    )  # fmt: skip
    for end in (route.source, route.target):
        mallory.on(end, "CREATE TABLE {role}.word (v text PRIMARY KEY, w text)")
    new_slot(route)
    quoted = value.replace("'", "''")
    guest = f"guest_{secrets.token_hex(4)}"
    route.source.execute(
        f"CREATE ROLE {guest}; GRANT USAGE ON SCHEMA {mallory.role} TO {guest};"
        f" GRANT INSERT ON {mallory.role}.word TO {guest}; BEGIN; SET LOCAL ROLE {guest};"
        f" INSERT INTO {mallory.role}.word VALUES ('{quoted}', 'a'); COMMIT; DROP OWNED BY {guest}; DROP ROLE {guest}"
    )
    daemon = Daemon(route)
    try:
        daemon.wait_caught_up()
        assert route.target.rows(f"SELECT v FROM {mallory.role}.word") == [(value,)]
        route.target.execute(f"DELETE FROM {mallory.role}.word")
        route.source.execute(f"UPDATE {mallory.role}.word SET w = 'secret of a row'")
        assert daemon.exit_code(60) == 5, daemon.log_tail()
    finally:
        daemon.end()
    written = [path.read_text() for path in tmp_path.iterdir()]
    assert written
    log = "\n".join([*daemon.lines, *written])
    assert [word for word in ("secret of a row", "ALTER ROLE", "unsaid", "host=") if word in log] == []
    assert not mallory.is_superuser


@pytest.fixture
def prepared(mallory: Mallory) -> Iterator[Callable[[str], None]]:
    """Prepares a transaction without changes on the target as Mallory; it is rolled back after the test."""
    target, gids = mallory.route.target, list[str]()

    def prepare(gid: str) -> None:
        mallory.on(target, f"BEGIN; PREPARE TRANSACTION '{gid}'")
        gids.append(gid)

    yield prepare
    for gid in gids:
        if target.rows(f"SELECT FROM pg_prepared_xacts WHERE gid = '{gid}'"):
            target.execute(f"ROLLBACK PREPARED '{gid}'")


def _slot_id(route: Route) -> int:
    """Have a daemon make the state of a slot, and return its id, which locks and origins show to every role."""
    daemon = Daemon(route)
    try:
        daemon.finish()
    finally:
        daemon.end()
    return int(route.target.rows(f"SELECT slot_id FROM parapply.slots WHERE slot_name = '{route.slot}'")[0][0])


def test_what_others_prepare_is_not_the_slots(
    mallory: Mallory, new_slot: Callable[[Route], None], prepared: Callable[[str], None], run_command: RunCommand
) -> None:
    """A name of a slot's and an LSN to come do not make the publisher look like an older copy; `drop` says it stays."""
    route = Route(source=mallory.route.source, target=mallory.route.target, target_dsn=mallory.route.target_dsn,
                  settings=FAST)  # fmt: skip
    # With the last slot the state would go, which other tests need.
    other = Route(source=route.source, target=route.target, target_dsn=route.target_dsn, settings=FAST)
    for each in (other, route):
        new_slot(each)
    _slot_id(other)
    slot_id = _slot_id(route)
    gid = f"parapply_{slot_id}_1000_FFFFFFFF/FFFFFFF0"
    prepared(gid)
    prepared(f"parapply_{slot_id}_{'9' * 20}_0/0")
    assert route.target.rows("SELECT gid FROM parapply.prepared") == [], "nor shown as its own, or by an error"
    daemon = Daemon(route)
    try:
        daemon.wait_caught_up()
    finally:
        daemon.end()
    dropped = run_command(route, "drop", "--yes")
    assert (dropped.returncode, gid in dropped.stdout) == (0, True), dropped


def test_what_others_prepare_is_not_taken_for_applied(mallory: Mallory, prepared: Callable[[str], None]) -> None:
    """A transaction of another role under the name of the slot's next one is not committed in its place.

    The daemon stops, because the name is taken, until that one is rolled back.
    """
    route = Route(source=mallory.route.source, target=mallory.route.target, target_dsn=mallory.route.target_dsn,
                  settings={**FAST, "source.two_phase": "true"})  # fmt: skip
    make_slot(route, is_two_phase=True)
    slot_id = _slot_id(route)
    write_prepared(route.source, "g", f"INSERT INTO {mallory.role}.early VALUES (100)")
    decide(route.source, "g", "COMMIT")
    ((data,),) = route.source.rows(
        f"SELECT data FROM pg_logical_slot_peek_binary_changes('{route.slot}', NULL, NULL, 'proto_version', '3',"
        f" 'publication_names', 'pub', 'two_phase', 'on') WHERE get_byte(data, 0) = 80"
    )
    message = decode(bytes(data))
    assert isinstance(message, Prepare)
    gid = gid_of(slot_id, message.xid, message.end_lsn)
    prepared(gid)
    daemon = Daemon(route)
    try:
        assert daemon.exit_code(60) == 5, daemon.log_tail()
        assert "duplicate_object (42710)" in daemon.failure
        route.target.execute(f"ROLLBACK PREPARED '{gid}'")
        daemon.end()
        daemon = Daemon(route)
        daemon.wait_caught_up()
        assert route.target.rows(f"SELECT id FROM {mallory.role}.early WHERE id = 100") == [(100,)]
    finally:
        daemon.end()

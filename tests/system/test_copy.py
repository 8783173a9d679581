"""The hand-over from the copy to the stream: `init --copy` while clients write, killed at every step and begun again.

The bank's checks see a row that is lost or there twice, and a transaction in part.
"""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import psycopg
import pytest

from parapply import failpoints
from tests.fixtures.fan import make_slot
from tests.fixtures.plain import FAST, check_equal
from tests.fixtures.route import Route
from tests.fixtures.workloads import BankLoad, check_bank, create_bank

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database

pytestmark = pytest.mark.each_session

_COPIED = "SELECT state, count(*) FROM parapply.copies GROUP BY 1 ORDER BY 1"


@pytest.fixture
def bank(source_db: Database, target_db: Database) -> Route:
    """The bank with rows from before, on the source only."""
    create_bank(source_db, target_db)
    with BankLoad(source_db, seed=0, clients=1, pace_s=0) as load:
        load.wait_for_more(1)
    source_db.execute("TRUNCATE evt, xfer; UPDATE acct SET bal = 1000, v = 0")
    target_db.execute("TRUNCATE acct")
    return Route(source=source_db, target=target_db, settings={**FAST, "apply.workers": 2})


#: Each kill is of the command that goes on behind the one before.
_KILLS = [
    [failpoints.COPY_SLOT, failpoints.COPY_BEGUN, failpoints.COPY_PART],
    [failpoints.COPY_STATE, failpoints.COPY_PART_DONE, failpoints.COPY_TABLE_DONE, failpoints.COPY_DONE],
]


@pytest.mark.in_turn("kills")
@pytest.mark.parametrize("kills", _KILLS, ids=lambda kills: kills[0])
def test_the_hand_over_is_exact(
    bank: Route, run_command: RunCommand, start_daemon: StartDaemon, kills: Sequence[str]
) -> None:
    """Clients write from before the copy until after it; it is killed at any step and goes on: rows are equal."""
    with BankLoad(bank.source, seed=1, pace_s=0.1) as load:
        load.wait_for_more(20)
        for point in kills:
            environ = {"PARAPPLY_FAILPOINT": f"{point}:kill"}
            killed = run_command(bank, "init", "--copy", environ=environ)
            assert killed.returncode == -signal.SIGKILL, f"{point} was not reached: {killed.stdout}{killed.stderr}"
            load.wait_for_more(10)
        run_command(bank, "init", "--copy", code=0)
        assert bank.target.rows(_COPIED) == [("copied", 3)]
        load.wait_for_more(10)
        daemon = start_daemon(bank)
        daemon.wait_for_event("source_connected")
        load.wait_for_more(20)
        load.stop()
        daemon.wait_caught_up()
    daemon.stop()
    check_bank(bank.source, bank.target, load)
    assert run_command(bank, "init", "--copy").stdout.endswith("nothing to do\n")


def test_two_phase_begins_behind_the_copy(bank: Route, run_command: RunCommand, start_daemon: StartDaemon) -> None:
    """The tri-state: pending until the stream is behind the last table's start, then enabled by itself.

    A transaction prepared in between comes whole with its commit; one prepared later is prepared on the target.
    """
    environ = {"PARAPPLY_FAILPOINT": f"{failpoints.COPY_TABLE_DONE}:kill"}
    assert run_command(bank, "init", "--copy", environ=environ).returncode == -signal.SIGKILL
    bank.source.execute("UPDATE acct SET v = v + 1")
    run_command(bank, "init", "--copy", code=0)
    name = bank.source.dbname
    bank.source.execute(f"BEGIN; INSERT INTO evt VALUES (1, 1); UPDATE acct SET v = 7 WHERE id = 1;"
                        f" PREPARE TRANSACTION '{name}_1'")  # fmt: skip
    daemon = start_daemon(bank, settings={"source.two_phase": "true"})
    daemon.wait_for_event("source_connected", count=2)
    bank.target.wait_until("SELECT two_phase = 'enabled' FROM parapply.progress")
    bank.source.execute(f"BEGIN; INSERT INTO evt VALUES (2, 2); PREPARE TRANSACTION '{name}_2'")
    bank.target.wait_until("SELECT count(*) = 1 FROM parapply.prepared")
    assert bank.target.rows("SELECT count(*) FROM evt") == [(0,)]
    for number in (1, 2):
        bank.source.execute(f"COMMIT PREPARED '{name}_{number}'")
    bank.target.execute("CREATE TABLE late (id int PRIMARY KEY)")
    bank.source.execute("CREATE TABLE late (id int PRIMARY KEY); INSERT INTO late VALUES (1)")
    bank.source.execute("ALTER PUBLICATION pub ADD TABLE late; INSERT INTO late VALUES (2)")
    daemon.wait_for_event("table_waits")
    daemon.finish()
    check_equal(bank, "acct", "xfer", "evt")
    for command, *options in (("refresh",), ("init", "--copy")):
        refused = run_command(bank, command, *options, "--set", "source.two_phase=true")
        assert (refused.returncode, "has two_phase: a transaction prepared" in refused.stderr) == (3, True), refused
    assert bank.target.rows("SELECT count(*) FROM late") == [(0,)]


def test_a_slot_that_has_two_phase_is_not_adopted_with_a_copy(bank: Route, run_command: RunCommand) -> None:
    """A transaction prepared before the snapshot and committed after it would be in neither: nothing is made.

    Not even where nothing is prepared now.
    """
    make_slot(bank, is_two_phase=True)
    refused = run_command(bank, "init", "--copy", "--set", "source.two_phase=true")
    assert (refused.returncode, "has two_phase: a transaction prepared" in refused.stderr) == (3, True), refused
    assert bank.target.rows("SELECT count(*) FROM parapply.slots") == [(0,)]


# Before PostgreSQL 18 only the start of a stream gives a slot two_phase.
@pytest.mark.pg_majors(18)
def test_two_phase_that_begins_beside_a_copy_ends_it(
    bank: Route, run_command: RunCommand, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """The slot gets two_phase behind the copy's first look: refused before the snapshot, and the table waits."""
    run_command(bank, "init", "--copy", code=0)
    environ = {"PARAPPLY_FAILPOINT": f"{failpoints.COPY_STATE}:hold", "PARAPPLY_FAILPOINT_DIR": str(tmp_path)}
    held = tmp_path / f"{failpoints.COPY_STATE}.held"
    options = ("--table", "public.evt", "--set", "source.two_phase=true")
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(run_command, bank, "refresh", *options, environ=environ)
        while not held.exists():
            assert not wait([copying], timeout=0.05).done, copying.result()
        with psycopg.connect(bank.source.dsn_with(replication="database"), autocommit=True) as connection:
            connection.execute(f"ALTER_REPLICATION_SLOT {bank.slot} (TWO_PHASE true)".encode())
        held.unlink()
        refused = copying.result()
    assert (refused.returncode, "has two_phase: a transaction prepared" in refused.stderr) == (3, True), refused
    known = "SELECT state, reason <> '' FROM parapply.copies WHERE table_name = 'evt'"
    assert bank.target.rows(known) == [("waiting", True)]
    daemon = start_daemon(bank, settings={"source.two_phase": "true"})
    bank.target.wait_until("SELECT two_phase = 'enabled' FROM parapply.progress")
    assert daemon.wait_for_event("table_waits")["relation"] == "public.evt"
    daemon.stop()


def test_transactions_stay_prepared_across_the_copy(
    bank: Route, run_command: RunCommand, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """A transaction prepared while the copy runs is no part of it: prepared on the target behind it, ended there once.

    One ends while the copy still runs, two stay open until two-phase is enabled, one is prepared after that.
    """
    environ = {"PARAPPLY_FAILPOINT": f"{failpoints.COPY_BEGUN}:hold", "PARAPPLY_FAILPOINT_DIR": str(tmp_path)}
    held, name = tmp_path / f"{failpoints.COPY_BEGUN}.held", bank.source.dbname
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(run_command, bank, "init", "--copy", environ=environ)
        while not held.exists():
            assert not wait([copying], timeout=0.05).done, copying.result()
        for number in range(3):
            changes = f"INSERT INTO evt VALUES ({number}, 1); UPDATE acct SET v = 7 WHERE id = {number + 1}"
            bank.source.execute(f"BEGIN; {changes}; PREPARE TRANSACTION '{name}_{number}'")
        bank.source.execute(f"COMMIT PREPARED '{name}_0'")
        held.unlink()
        assert copying.result().returncode == 0
    assert bank.target.rows("SELECT count(*) FROM evt") == [(0,)]
    daemon = start_daemon(bank, settings={"source.two_phase": "true"})
    bank.target.wait_until("SELECT two_phase = 'enabled' FROM parapply.progress")
    bank.source.execute(f"BEGIN; INSERT INTO evt VALUES (3, 1); PREPARE TRANSACTION '{name}_3'")
    bank.target.wait_until("SELECT count(*) = 3 FROM parapply.prepared")
    for number, outcome in ((1, "COMMIT"), (2, "ROLLBACK"), (3, "COMMIT")):
        bank.source.execute(f"{outcome} PREPARED '{name}_{number}'")
    daemon.finish()
    check_equal(bank, "acct", "xfer", "evt")
    assert bank.target.rows("SELECT txid FROM evt ORDER BY 1") == [(0,), (1,), (3,)]


_PARTS = "CREATE TABLE item (id int PRIMARY KEY) PARTITION BY RANGE (id)"
_PART = "CREATE TABLE item_1 PARTITION OF item FOR VALUES FROM (1) TO (9)"


def test_a_row_that_the_target_does_not_take_leads_to_the_difference(
    source_db: Database, target_db: Database, run_command: RunCommand
) -> None:
    """The refusal names `check`, whose SQL, run as it stands, lets the same command go on."""
    for database, labels in ((source_db, "'a', 'it''s'"), (target_db, "'a'")):
        database.execute(f"CREATE TYPE label AS ENUM ({labels}); CREATE TABLE item (id int PRIMARY KEY, k label)")
    source_db.execute("INSERT INTO item VALUES (1, 'it''s'); CREATE PUBLICATION pub FOR ALL TABLES")
    route = Route(source=source_db, target=target_db, settings=FAST)
    refused = run_command(route, "init", "--copy", code=4)
    assert "invalid input value for enum" in refused.stderr
    assert "Hint: `parapply check` names what differs on the target; tables that are complete stay" in refused.stderr
    findings = json.loads(run_command(route, "check", "--json").stdout)["findings"]
    (fix,) = [one["fix"] for one in findings if one["code"] == "enum_labels"]
    target_db.execute(fix)
    run_command(route, "init", "--copy", code=0)
    check_equal(route, "item")


def test_a_row_without_a_partition_on_the_target_leads_to_it(
    source_db: Database, target_db: Database, run_command: RunCommand
) -> None:
    """The partition that the refusal asks for lets the same command go on."""
    source_db.execute(f"{_PARTS}; {_PART}; INSERT INTO item VALUES (1)")
    source_db.execute("CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root)")
    target_db.execute(_PARTS)
    route = Route(source=source_db, target=target_db, settings=FAST)
    refused = run_command(route, "init", "--copy", code=4)
    assert "no partition of relation" in refused.stderr
    assert "Hint: make the partition of the row on the target; tables that are complete stay" in refused.stderr
    target_db.execute(_PART)
    run_command(route, "init", "--copy", code=0)
    check_equal(route, "item")

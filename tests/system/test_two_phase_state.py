"""Names of prepared transactions, who sees them, whom they block, and who rolls them back (T-37, T-56, F34)."""

from __future__ import annotations

import json
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from parapply.login import Login
from parapply.target.session import prepared, settings
from tests.fixtures.databases import create_database
from tests.fixtures.pair import Pair, pair
from tests.fixtures.plain import end_sessions, wait_until_unread
from tests.fixtures.proxy import CutProxy
from tests.fixtures.route import Route
from tests.fixtures.two_phase import TABLES, TWO_PHASE, check_nothing_is_left, decide, n_prepared, write_prepared

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import OwnServers

__all__ = ["pair"]

_PREPARED = "SELECT slot_name, gid, source_xid, owner, age > interval '0' FROM parapply.prepared ORDER BY gid"
#: The command found the workers' lock taken: it has just asked who holds it, which it then says.
_DROP_WAITS = (
    "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name LIKE 'parapply drop%' AND state = 'idle'"
    " AND query LIKE '%a.application_name%pg_locks%')"
)

_WAITS_FOR_STANDBY = (
    "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'another' AND wait_event = 'SyncRep')"
)


@pytest.fixture
def applier(target_db: Database) -> Iterator[str]:
    """A role that is no superuser and may just apply."""
    name = f"applier_{secrets.token_hex(4)}"
    for command in (
        f"CREATE ROLE {name} LOGIN",
        f"GRANT CREATE ON DATABASE {target_db.dbname} TO {name}",
        f"GRANT ALL ON SCHEMA public TO {name}",
        f"GRANT SET ON PARAMETER session_replication_role TO {name}",
    ):
        target_db.execute(command)
    yield name
    for (gid,) in target_db.rows("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"):
        target_db.execute(f"ROLLBACK PREPARED '{gid}'")
    target_db.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


@pytest.mark.bare_target
def test_t56_two_slots_one_target(
    source_db: Database, target_db: Database, applier: str, start_daemon: StartDaemon, run_command: RunCommand
) -> None:
    """T-56, F34: one xid from two slots is prepared twice; each is shown, and `drop` rolls back its own only.

    021_twophase.pl has this as two subscriptions. The daemons' role is no superuser.
    """
    source_db.execute(f"{TABLES} CREATE PUBLICATION pub_t FOR TABLE t; CREATE PUBLICATION pub_evt FOR TABLE evt;")
    with target_db.connect(user=applier) as connection:
        connection.execute(TABLES)
    routes = [
        Route(source=source_db, target=target_db, target_dsn=target_db.dsn_with(user=applier), publication=publication)
        for publication in ("pub_t", "pub_evt")
    ]
    daemons = []
    for route in routes:
        run_command(route, "init", "--set", "source.two_phase=true", code=0)
        daemons.append(start_daemon(route, settings=TWO_PHASE))
        daemons[-1].wait_for_event("source_connected")
    kept, dropped = routes
    of_both = f"FROM pg_replication_slots WHERE slot_name IN ('{kept.slot}', '{dropped.slot}')"
    assert source_db.rows(f"SELECT two_phase {of_both}") == [(True,), (True,)]
    with target_db.connect() as foreign:
        foreign.execute("BEGIN")
        foreign.execute("INSERT INTO t VALUES (7, 'foreign')")
        foreign.execute("PREPARE TRANSACTION 'parapply_foreign'")
    for gid in ("", "rolled back"):
        write_prepared(source_db, gid, f"INSERT INTO t VALUES ({len(gid)}, '')", "INSERT INTO evt VALUES (1, '')")
    for daemon in daemons:
        daemon.wait_caught_up()
    found = target_db.rows(_PREPARED)
    assert sorted(name for name, *_ in found) == sorted([kept.slot, dropped.slot] * 2)
    assert len({xid for _, _, xid, *_ in found}) == 2
    assert {(owner, is_old) for *_, owner, is_old in found} == {(applier, True)}
    _check_status(run_command, dropped, [gid for name, gid, *_ in found if name == dropped.slot])
    daemons[1].stop()
    wait_until_unread(dropped)
    done = run_command(dropped, "drop", "--yes")
    assert (done.returncode, "2 prepared transactions rolled back" in done.stdout) == (0, True), done.stdout
    assert {name for name, *_ in target_db.rows(_PREPARED)} == {kept.slot}
    assert n_prepared(target_db) == 3
    decide(source_db, "", "COMMIT")
    decide(source_db, "rolled back", "ROLLBACK")
    daemons[0].wait_caught_up()
    target_db.execute("ROLLBACK PREPARED 'parapply_foreign'")
    assert target_db.rows("SELECT id FROM t") == [(0,)]
    assert target_db.rows("SELECT id FROM evt") == []
    check_nothing_is_left(target_db)
    daemons[0].stop()


def _check_status(run_command: RunCommand, route: Route, gids: list[str]) -> None:
    """`parapply status` shows the slot's prepared transactions on the screen and in JSON, and no other's."""
    shown = json.loads(run_command(route, "status", "--json").stdout)
    assert shown["two_phase"] == "enabled"
    assert sorted(held["gid"] for held in shown["prepared"]) == sorted(gids)
    assert all(held["age_s"] > 0 for held in shown["prepared"])
    screen = run_command(route, "status").stdout
    assert all(gid.rpartition("_")[2] in screen for gid in gids), screen


def test_f34_drop_does_not_wait_for_the_slots_own_prepared_transactions(pair: Pair, run_command: RunCommand) -> None:
    """F34: they hold rows of the state, where foreign keys act on workers; `drop` rolls them back and ends."""
    pair.create(TABLES)
    daemon = pair.start(
        settings={**TWO_PHASE, "target.session_replication_role": "origin", "conflict.insert_exists": "apply_remote"}
    )
    pair.target.execute("INSERT INTO t VALUES (1, 'here')")
    # A settled conflict is kept inside the prepared transaction.
    write_prepared(pair.source, "a", "INSERT INTO t VALUES (1, 'there')")
    daemon.wait_caught_up()
    assert n_prepared(pair.target) == 1
    daemon.stop()
    wait_until_unread(pair.route)
    done = run_command(pair.route, "drop", "--yes")
    assert (done.returncode, "1 prepared transactions rolled back" in done.stdout) == (0, True), done.stdout
    assert n_prepared(pair.target) == 0
    decide(pair.source, "a", "ROLLBACK")


def test_drop_waits_for_a_prepare_on_its_way(pair: Pair, start_daemon: StartDaemon, run_command: RunCommand) -> None:
    """F34: a daemon is killed while its PREPARE is held up in the network: `drop` waits for it and leaves nothing."""
    pair.create(TABLES)
    target = pair.target
    with CutProxy("127.0.0.1", int(target.rows("SELECT inet_server_port()")[0][0])) as proxy:
        behind = Route(
            source=pair.source, target=target, slot=pair.route.slot, target_dsn=proxy.dsn(target.target_role_dsn)
        )
        daemon = start_daemon(behind, settings=TWO_PHASE)
        daemon.wait_for_event("source_connected")
        held = proxy.freeze_before(b"PREPARE TRANSACTION '")
        write_prepared(pair.source, "a", "INSERT INTO t VALUES (1, '')")
        assert held.wait(30)
        daemon.kill()
        wait_until_unread(pair.route)
        leader = f"application_name = 'parapply leader {pair.route.slot}'"
        end_sessions(target, f"parapply leader {pair.route.slot}")
        target.wait_until(f"SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE {leader})")
        with ThreadPoolExecutor(1) as pool:
            dropping = pool.submit(run_command, pair.route, "drop", "--yes")
            target.wait_until(_DROP_WAITS)
            proxy.thaw()
            done = dropping.result()
    assert (done.returncode, "waiting for the end of pid" in done.stdout) == (0, True), done.stdout + done.stderr
    assert n_prepared(target) == 0
    assert target.rows("SELECT count(*) FROM pg_namespace WHERE nspname = 'parapply'") == [(0,)]
    decide(pair.source, "a", "ROLLBACK")


@pytest.mark.pg_majors(15, 18)
def test_t37_a_prepared_transaction_in_the_way(pair: Pair, pg_major: int) -> None:
    """T-37: with a unique index that only the target has, a batch that waits for a prepared transaction names it.

    Every other batch passes it. Rolled back on the publisher it is in the way of none, although the rollback comes
    later in the stream than the batch that waits for it. On the older version in relaxed order.
    """
    order = "preserve" if pg_major == 18 else "relaxed"
    pair.create(TABLES, TABLES + "CREATE UNIQUE INDEX ON t (v);")
    daemon = pair.start(settings={**TWO_PHASE, "apply.commit_order": order, "apply.max_batch_transactions": 1})
    write_prepared(pair.source, "a", "INSERT INTO t VALUES (1, 'same')")
    pair.write("INSERT INTO evt VALUES (1, 'passes')")
    daemon.wait_caught_up()
    ((gid,),) = pair.target.rows("SELECT gid FROM parapply.prepared")
    pair.write("INSERT INTO t VALUES (2, 'same')")
    waits = f"a lock held by prepared transaction {gid}"
    pair.target.wait_until(f"SELECT '{waits}' = ANY (SELECT waits_for FROM parapply.workers)")
    decide(pair.source, "a", "ROLLBACK")
    assert daemon.wait_for_event("rolled_back_early")["gid"] == [gid]
    daemon.finish()
    pair.check_equal()
    check_nothing_is_left(pair.target)


async def test_an_outcome_that_another_session_is_ending(
    source_db: Database, own_servers: OwnServers, start_daemon: StartDaemon
) -> None:
    """While another session ends a prepared transaction, the server calls it busy: the outcome waits, and fails not.

    The rollback that is sent early passes it over.
    """
    target = create_database(own_servers("target", settings={"max_prepared_transactions": 10}), "target")
    pair = Pair(source_db, target, start_daemon)
    pair.create(TABLES)
    daemon = pair.start(settings=TWO_PHASE)
    write_prepared(pair.source, "a", "INSERT INTO t VALUES (1, '')")
    daemon.wait_caught_up()
    ((gid,),) = target.rows("SELECT gid FROM parapply.prepared")
    target.execute("ALTER SYSTEM SET synchronous_standby_names = 'none'")
    target.execute("SELECT pg_reload_conf()")
    with ThreadPoolExecutor(1) as pool, target.connect(application_name="another") as another:
        another.execute("SET synchronous_commit = on")
        ending = pool.submit(another.execute, f"COMMIT PREPARED '{gid}'".encode())
        try:
            target.wait_until(_WAITS_FOR_STANDBY)
            login = Login(target.dsn)
            async with await settings.connect_control(login, role="replica", application_name="test") as conn:
                await prepared.roll_back(conn, [gid])
            decide(pair.source, "a", "COMMIT")
            daemon.wait_for_event("outcome_waits")
        finally:
            target.execute("ALTER SYSTEM RESET synchronous_standby_names")
            target.execute("SELECT pg_reload_conf()")
        ending.result()
    daemon.finish()
    pair.check_equal()
    check_nothing_is_left(target)


@pytest.mark.in_turn("here", "there", "says")
@pytest.mark.parametrize(
    ("here", "there", "says"),
    [
        (
            "ROLLBACK",
            "COMMIT",
            "COMMIT PREPARED of transaction .*neither prepared nor committed.* Hint: another session",
        ),
        ("COMMIT", "ROLLBACK", "ROLLBACK PREPARED of transaction .*it is committed on the target.* Hint: another"),
    ],
    ids=["lost", "committed"],
)
def test_f33_ended_otherwise_by_somebody_else(pair: Pair, here: str, there: str, says: str) -> None:
    """F33: ended on the target by hand, and not as on the publisher: that is reported (exit 5), nothing goes on."""
    pair.create(TABLES)
    daemon = pair.start(settings=TWO_PHASE)
    write_prepared(pair.source, "a", "INSERT INTO t VALUES (1, 'geheim')")
    daemon.wait_caught_up()
    ((gid,),) = pair.target.rows("SELECT gid FROM parapply.prepared")
    pair.target.execute(f"{here} PREPARED '{gid}'")
    decide(pair.source, "a", there)
    pair.check_stopped(daemon, code=5, says=says)
    again = pair.start(settings=TWO_PHASE)
    pair.check_stopped(again, code=5, says=says)

"""Commits whose outcome no session saw, and commits that failed (traps T-11, T-12, T-14, faults F2, F16)."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import pytest

from parapply.errors import StatementFailed
from parapply.login import Login
from parapply.target.session import lease, settings
from parapply.target.session.session import Record, SessionOptions, WorkerSession
from parapply.target.sql.commands import Command
from parapply.target.sql.statements import sql_set
from tests.fixtures.daemon import EVENT_TIMEOUT_S
from tests.fixtures.plain import FAST, check_equal, commit_each, end_sessions, plain_route
from tests.fixtures.proxy import CutProxy
from tests.fixtures.route import Route
from tests.fixtures.workloads import BankLoad, BankReader, check_bank, create_bank

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from parapply.plan.table import TablePlan
    from tests.fixtures.daemon import StartDaemon
    from tests.fixtures.databases import Database

pytestmark = pytest.mark.crash

# In a Bind message: the name of COMMIT, and of the record of a flight that commits at its end.
_COMMIT = b"to commit\0"
# ReadyForQuery outside of a transaction.
_COMMIT_DONE = b"Z\0\0\0\5I"
_CUTS = 4
# Enough for the wait to grow twice, were it to grow.
_UNSEEN_CUTS = 3

_FAILS_AT_COMMIT = """
CREATE SEQUENCE attempts;
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
$$BEGIN IF nextval('public.attempts') <> 2 THEN RAISE EXCEPTION 'not now'; END IF; RETURN NULL; END$$;
CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON item DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW WHEN (NEW.id IN (7, 14)) EXECUTE FUNCTION refuse();
ALTER TABLE item ENABLE ALWAYS TRIGGER refuse;
"""


@pytest.fixture
def proxy(target_db: Database) -> Iterator[CutProxy]:
    """A network before the target that breaks."""
    with CutProxy("127.0.0.1", int(target_db.rows("SELECT inet_server_port()")[0][0])) as made:
        yield made


@pytest.fixture
def bank(source_db: Database, target_db: Database, proxy: CutProxy, new_slot: Callable[[Route], None]) -> Route:
    """A bank on both sides, the target behind the proxy, a target transaction for each few source transactions."""
    create_bank(source_db, target_db)
    made = Route(
        source=source_db,
        target=target_db,
        target_dsn=proxy.dsn(target_db.target_role_dsn),
        settings={**FAST, "apply.max_batch_transactions": 5, "target.lease_wait_s": 20},
    )
    new_slot(made)
    return made


@pytest.mark.slow
def test_t11_t14_commits_in_doubt(bank: Route, proxy: CutProxy, start_daemon: StartDaemon) -> None:
    """T-11, T-14, F16: again and again a COMMIT is lost on its way, or its answer is: once applied, exactly.

    The daemon, the same process all the time, reads from the target's state which of the two it was.
    """
    with BankReader(bank.target) as reader, BankLoad(bank.source, seed=11, pace_s=0.1) as load:
        daemon = start_daemon(bank)
        daemon.wait_for_event("source_connected")
        for number in range(_CUTS):
            cut = proxy.drop_before(_COMMIT) if number % 2 else proxy.drop_reply_after(_COMMIT, reply=_COMMIT_DONE)
            assert cut.wait(EVENT_TIMEOUT_S), f"no commit came after cut {number}:\n{daemon.log_tail()}"
            daemon.wait_for_event("target_lost", count=number + 1)
        load.wait_for_more(30)
        load.stop()
        daemon.wait_caught_up()
        reader.wait_for_snapshot()
        daemon.stop()
    check_bank(bank.source, bank.target, load)


def test_f16_an_unseen_commit_is_progress(
    source_db: Database,
    target_db: Database,
    proxy: CutProxy,
    new_slot: Callable[[Route], None],
    start_daemon: StartDaemon,
) -> None:
    """F16: a commit whose answer is lost is progress once it is seen: the wait before the next attempt does not grow.

    Each connection of the daemon achieves just that: its first commit happens, and is known only to the next one.
    """
    direct = plain_route(source_db, target_db, new_slot)
    # Armed all at once: the daemon's next connection may be faster than the test. One worker sends one at a time.
    cuts = [proxy.drop_reply_after(_COMMIT, reply=_COMMIT_DONE) for _ in range(_UNSEEN_CUTS)]
    commit_each(source_db, 1, 2 * _UNSEEN_CUTS)
    behind = Route(
        source=source_db, target=target_db, target_dsn=proxy.dsn(target_db.target_role_dsn), slot=direct.slot,
        settings={**direct.settings, "target.lease_wait_s": 20},
    )  # fmt: skip
    daemon = start_daemon(behind, settings={"apply.workers": 1, "apply.max_batch_transactions": 1})
    daemon.finish()
    assert all(cut.is_set() for cut in cuts)
    waits_s = [event["wait_s"] for event in daemon.events_of("target_lost")]
    assert waits_s == [FAST["source.reconnect_min_s"]] * _UNSEEN_CUTS, daemon.log_tail()
    check_equal(behind)


@pytest.mark.in_turn("holder")
@pytest.mark.parametrize("holder", ["leader", "worker"])
def test_t14_the_next_daemon_waits_for_a_commit_on_its_way(
    bank: Route, proxy: CutProxy, start_daemon: StartDaemon, holder: str
) -> None:
    """T-14, F1 at K5: killed while its COMMIT is held up in the network; the next daemon waits until it is decided.

    The commit arrives after the daemon that sent it is gone, while its successor already asks for the lease; or has
    it, because the old control session has ended, and waits behind the fence for the old worker only.
    """
    direct = Route(
        source=bank.source, target=bank.target, slot=bank.slot, settings=bank.settings, publication=bank.publication
    )
    first = start_daemon(bank)
    first.wait_caught_up()
    held = proxy.freeze_before(_COMMIT)
    with BankLoad(bank.source, seed=14, clients=1) as load:
        assert held.wait(EVENT_TIMEOUT_S)
        first.kill()
        if holder == "worker":
            # One that is still dying would be the first holder that the second daemon meets.
            leader = f"application_name = 'parapply leader {bank.slot}'"
            end_sessions(bank.target, f"parapply leader {bank.slot}")
            bank.target.wait_until(f"SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE {leader})")
        second = start_daemon(direct)
        waiting = second.wait_for_event("lease_waiting")
        assert f"parapply {holder}" in waiting["holder"][0]
        before = bank.target.rows("SELECT count(*) FROM evt")
        proxy.thaw()
        second.wait_for_event("source_connected")
        assert bank.target.rows("SELECT count(*) FROM evt") != before, "the held commit never arrived"
        load.wait_for_more(20)
    second.finish()
    check_bank(bank.source, bank.target, load)


def test_t12_a_commit_that_rolls_back(
    source_db: Database, target_db: Database, new_slot: Callable[[Route], None], start_daemon: StartDaemon
) -> None:
    """T-12: a deferred check fails at COMMIT: nothing of it is applied or recorded, and it is repeated.

    Failing once, the transaction is applied by the repetition. Failing there, too, it stops the daemon with exit 5;
    started again after the repair, the daemon goes on with this very transaction.
    """
    route = plain_route(source_db, target_db, new_slot)
    target_db.execute(_FAILS_AT_COMMIT)
    daemon = start_daemon(route)
    daemon.wait_caught_up()
    commit_each(source_db, 1, 10)
    daemon.wait_caught_up()
    assert target_db.rows("SELECT last_value FROM attempts") == [(2,)], "it did not fail once"
    commit_each(source_db, 11, 20)
    assert daemon.exit_code() == 5, daemon.log_tail()
    assert target_db.rows("SELECT max(id), count(*) FROM item") == [(13, 13)]
    assert daemon.failure.startswith("commit: raise_exception (P0001)")
    ((state, reason),) = target_db.rows("SELECT state, reason FROM parapply.progress")
    assert state == "stopped"
    assert "P0001" in reason
    target_db.execute("DROP TRIGGER refuse ON item")
    daemon = start_daemon(route)
    daemon.finish()
    check_equal(route)


async def test_t12_the_command_tag_is_believed(
    source_db: Database, target_db: Database, init_route: Callable[[Route], None]
) -> None:
    """T-12: COMMIT of a failed transaction succeeds, with the tag ROLLBACK: the session takes it for a failure."""
    plain_route(source_db, target_db, init_route)
    ((slot_id,),) = target_db.rows("SELECT slot_id FROM parapply.slots")
    async with _worker_session(target_db, slot_id) as session:
        await session.begin()
        # An unknown savepoint: any statement that fails inside the transaction.
        with pytest.raises(StatementFailed):
            await session.undo_piece()
        with pytest.raises(StatementFailed, match="rolled back instead"):
            await session.commit()


@pytest.mark.parametrize("in_a_flight", [3, 2])
async def test_t11_a_transaction_of_several_flights_is_one(
    source_db: Database, target_db: Database, init_route: Callable[[Route], None], monkeypatch: pytest.MonkeyPatch,
    in_a_flight: int,
) -> None:  # fmt: skip
    """T-11: a flight that commits at its end must hold all of it; what does not fit is begun and committed."""
    plain_route(source_db, target_db, init_route)
    ((slot_id,),) = target_db.rows("SELECT slot_id FROM parapply.slots")
    monkeypatch.setattr("parapply.target.session.pipeline.FLIGHT_STATEMENTS", in_a_flight)
    insert = sql_set("INSERT INTO public.item (id, v) SELECT $1::int8, 0")

    def one(number: int, expected: int) -> Command:
        key = number.to_bytes(8, "big")
        return Command(insert, [key], expected=expected, operation="insert", plan=cast("TablePlan", None))

    async with _worker_session(target_db, slot_id) as session:
        with pytest.raises(StatementFailed) as failed:
            await session.execute_and_commit(Record(1, 1, 0, 1, 1), [one(1, 1), one(2, 2)])
        assert failed.value.statement == 1
        await session.rollback()
        assert target_db.rows("SELECT count(*) FROM item") == [(0,)]
        assert target_db.rows("SELECT count(*) FROM parapply.applied") == [(0,)]
        await session.execute_and_commit(Record(1, 1, 0, 1, 1), [one(1, 1), one(2, 1)])
        assert target_db.rows("SELECT id FROM item ORDER BY id") == [(1,), (2,)]
        assert target_db.rows("SELECT count(*) FROM parapply.applied") == [(1,)]


@asynccontextmanager
async def _worker_session(target: Database, slot_id: int) -> AsyncIterator[WorkerSession]:
    login = Login(target.dsn)
    async with await settings.connect_control(login, role="replica", application_name="leader") as control:
        await lease.take_lease(control, slot_id, 0)
        session = await WorkerSession.connect(
            SessionOptions(
                login=login,
                schema="parapply",
                slot_id=slot_id,
                leader_pid=control.info.backend_pid,
                role="replica",
                synchronous_commit="off",
                application_name="worker",
            )
        )
        try:
            yield session
        finally:
            await session.close()

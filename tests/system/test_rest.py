"""A daemon at rest, whose looks never come by themselves here: it notices rows, commands, lost ends, another daemon.

Rest begins after a moment instead of ten seconds, so that no test waits for it.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from parapply.conflict import asking
from parapply.driver import Session
from parapply.errors import TargetRefused
from parapply.target.state import cutovers, slots
from parapply.vocabulary import CutoverStep
from tests.fixtures.daemon import FEW_WORKERS, Daemon
from tests.fixtures.endpoint import LISTEN, Endpoint
from tests.fixtures.fan import QUICK
from tests.fixtures.pair import Pair, pair
from tests.fixtures.plain import closed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.daemon import RunCommand

__all__ = ["pair"]

_TABLES = "CREATE TABLE item (id int PRIMARY KEY, v int);"
#: Before any other module takes the values over. Moves are read more often than rest begins, as always.
_PROGRAM = (
    "import sys; from parapply.runtime import rest; rest.QUIET_S, rest.LONG_S = 0.2, 1e6; {}"
    " from parapply.runtime.observe import monitor; monitor._MOVES_S, monitor._INTERVAL_S = 0.05, 0.1;"
    " from parapply.__main__ import run; sys.exit(run())"
)
#: A position that brought nothing is not written by itself.
_UNMOVED = "from parapply.engine import durability; durability.MOVED_S = 1e6;"
_SETTINGS = {**QUICK, "apply.workers": FEW_WORKERS, "log.level": "debug", **LISTEN}


@contextmanager
def _at_rest(pair: Pair, more: str = "") -> Iterator[Daemon]:
    """Give a daemon that has applied a row and rests; its program begins with something more."""
    pair.create(_TABLES)
    pair.write("INSERT INTO item VALUES (1, 0)")
    words = ["run", *pair.route.arguments(_SETTINGS)]
    daemon = Daemon(pair.route, command=[sys.executable, "-c", _PROGRAM.format(more), *words])
    try:
        daemon.wait_for_event("batch_committed")
        daemon.wait_for_event("rest_begun")
        yield daemon
    finally:
        daemon.end()


def test_a_row_ends_the_rest(pair: Pair) -> None:
    """It is applied and confirmed, and counted for people; then rest begins again."""
    with _at_rest(pair) as daemon:
        for number in (2, 3):
            before = len(daemon.events_of("rest_begun"))
            pair.write(f"INSERT INTO item VALUES ({number}, 0)")
            daemon.wait_caught_up()
            daemon.wait_for_event("rest_begun", count=before + 1)
        pair.check_equal()
        pair.target.wait_until("SELECT inserts = 3 FROM parapply.tables WHERE table_name = 'item'")
        pair.target.wait_until(
            f"SELECT confirmed_flush_lsn = lowest_lsn FROM parapply.slots WHERE slot_name = '{pair.route.slot}'"
        )
        daemon.stop()


def test_commands_are_heard_at_rest(pair: Pair, run_command: RunCommand) -> None:
    """A command that changes the state calls, or it would wait for a look that never comes."""
    with _at_rest(pair) as daemon:
        for command in ("pause", "resume"):
            before = len(daemon.events_of("rest_begun"))
            run_command(pair.route, command, "public.item", code=0)
            pair.write("INSERT INTO item SELECT 1 + max(id), 0 FROM item")
            daemon.wait_for_event("rest_begun", count=before + 1)
        daemon.wait_caught_up()
        pair.check_equal()
        daemon.stop()


def _lsn_of_nothing(pair: Pair) -> str:
    """Return a position after WAL that brings nothing."""
    pair.source.execute("SELECT pg_logical_emit_message(true, 'nothing', 'for us')")
    return str(pair.source.rows("SELECT pg_current_wal_insert_lsn()")[0][0])


def test_a_wait_is_heard_at_rest(pair: Pair, run_command: RunCommand) -> None:
    """For a position that brings nothing, which the daemon would write much later by itself."""
    with _at_rest(pair, _UNMOVED) as daemon:
        pair.target.wait_until("SELECT shown_every_s > 1 FROM parapply.progress")
        run_command(pair.route, "wait", "--lsn", _lsn_of_nothing(pair), "--timeout", "20", code=0)
        daemon.wait_for_event("rest_begun", count=2)
        daemon.stop()
    assert pair.target.rows("SELECT shown_every_s FROM parapply.progress") == [(1.0,)]


def test_a_wait_in_sql_is_heard_when_it_has_ended(pair: Pair) -> None:
    """It cannot call before, so the first one may be in vain; a short one does not call."""
    with _at_rest(pair, _UNMOVED) as daemon:
        pair.target.wait_until("SELECT shown_every_s > 1 FROM parapply.progress")
        lsn = _lsn_of_nothing(pair)
        for timeout_s, is_reached in ((0.0, False), (1.1, False), (20, True)):
            found = pair.target.rows(f"SELECT parapply.wait_for('{lsn}', {timeout_s})")
            assert found == [(is_reached,)], timeout_s
        daemon.stop()


async def test_a_request_to_skip_is_heard_at_rest(pair: Pair) -> None:
    """The daemon accepts it, and what is taken back is gone."""
    with _at_rest(pair) as daemon:
        async with await Session.connect(pair.target.dsn, autocommit=True) as conn:
            slot_id = await slots.find_slot(conn, "parapply", pair.route.slot)
            lsn = 1 << 60
            asked = await asking.ask(conn, "parapply", slot_id, lsn, 0.0, source_lsn=lsn)
            assert asked.outcome == "accepted"
            assert await asking.take_back(conn, "parapply", slot_id, lsn)
        daemon.wait_for_event("rest_begun", count=2)
        daemon.stop()


async def test_a_step_of_a_cut_over_is_heard_at_rest(pair: Pair) -> None:
    """The daemon shows it, and does not rest again before it is taken back; the publisher counts as seen all along."""
    with _at_rest(pair) as daemon:
        endpoint = Endpoint(daemon)
        step = CutoverStep.PREPARING
        cutover = cutovers.Cutover(
            step=step, reverse_slot="back", made_slot=False, made_publication=False, fence="database", opens="",
            fence_lsn=None, takeover_lsn=None, fenced_s=None, gap_s=None,
        )  # fmt: skip
        async with await Session.connect(pair.target.dsn, autocommit=True) as conn:
            slot_id = await slots.find_slot(conn, "parapply", pair.route.slot)
            await cutovers.begin(conn, "parapply", slot_id, cutover)
            endpoint.wait_until(lambda: ("back", step) in endpoint.samples().get("parapply_cutover_step", {}))
            n_before = len(daemon.events_of("rest_begun"))
            await cutovers.forget(conn, "parapply", slot_id)
        daemon.wait_for_event("rest_begun", count=n_before + 1)
        assert endpoint.samples()["parapply_lag_seconds"] == {(): 0}
        daemon.stop()


def test_lost_ends_are_noticed_at_rest(pair: Pair) -> None:
    """Each server's end is: by the stream, by the workers' sessions."""
    with _at_rest(pair) as daemon:
        for database, event in ((pair.source, "source_lost"), (pair.target, "target_lost")):
            n_before = len(daemon.events_of("rest_begun"))
            with closed(database):
                daemon.wait_for_event(event)
            daemon.wait_for_event("rest_begun", count=n_before + 1)
        pair.write("INSERT INTO item VALUES (2, 0)")
        daemon.wait_caught_up()
        pair.check_equal()
        daemon.stop()


def test_a_takeover_is_noticed_at_rest(pair: Pair) -> None:
    """The first daemon finds the lease taken and ends; the second goes on."""
    with _at_rest(pair) as first:
        second = pair.start("--takeover")
        assert first.exit_code() == TargetRefused.exit_code, first.log_tail()
        assert "another parapply holds the lease" in first.failure
        pair.write("INSERT INTO item VALUES (2, 0)")
        second.wait_caught_up()
        pair.check_equal()
        second.stop()

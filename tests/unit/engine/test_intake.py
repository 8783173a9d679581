"""When the open batch closes, and what may enter: by what is in flight, by place, by time."""

from __future__ import annotations

import math

from parapply.engine.flight import Flight
from parapply.engine.intake import AHEAD, BEHIND_S, COLLECT_S, WORTH_A_WORKER, Closing, DueTimes, Hold, Room
from parapply.engine.job import SetJob
from parapply.engine.shares import Share
from parapply.engine.state import EngineState
from parapply.model import Transaction
from parapply.plan.batch import Batch

_LINGER_S = 0.02


def _transaction(commit_lsn: int, *, time_us: int = 0, late_us: int = 0) -> Transaction:
    one = Transaction(1, commit_lsn, time_us)
    one.end_lsn = commit_lsn + 8
    one.send_time_us = time_us + late_us
    return one


def _flight(*, n_running: int = 0, is_relaxed: bool = False) -> Flight:
    """Return a flight with an idle worker and batches that others have."""
    flight = Flight(EngineState(0, 0.0, is_relaxed=is_relaxed))
    for seq in range(1, n_running + 1):
        job = SetJob(Batch(seq), {})
        job.batch.end_lsn, job.batch.size_bytes = seq, 100
        flight.submit(job, 0.0)
        flight.ask(seq)
    flight.ask(0)
    return flight


def _closing(flight: Flight, *, is_late: bool = False) -> Closing:
    closing = Closing(flight, linger_s=_LINGER_S)
    closing.received(_transaction(1, late_us=60_000 if is_late else 0))
    return closing


def test_without_a_backlog_it_closes_at_once_or_waits_for_the_one_under_way() -> None:
    """Nothing under way: at once. Else for a moment, but not with many changes, and not in relaxed order."""
    assert _closing(_flight()).look(Batch(1), 0.0) == 0.0
    assert _closing(_flight(n_running=1, is_relaxed=True)).look(Batch(2), 0.0) == 0.0
    large = Batch(2)
    large.n_changes = WORTH_A_WORKER
    assert _closing(_flight(n_running=1)).look(large, 0.0) == 0.0
    closing = _closing(_flight(n_running=1))
    assert closing.look(Batch(2), 0.0) == BEHIND_S
    assert closing.look(Batch(2), 0.0) is None, "it waits already"
    assert closing.waited(Batch(2), BEHIND_S) == 0.0


def test_with_a_backlog_it_waits_until_nothing_has_come_for_a_while() -> None:
    """A change that has come since makes it wait as long again, and so does a hold."""
    closing = _closing(_flight(), is_late=True)
    assert closing.pause_s == COLLECT_S
    after_s = closing.look(Batch(1), 1.0)
    assert after_s == _LINGER_S + COLLECT_S
    assert closing.look(Batch(1), 1.01) is None
    assert closing.waited(Batch(1), 1.03) == after_s
    closing.hold_open(2.0)
    assert closing.waited(Batch(1), 1.06) == after_s
    assert closing.waited(Batch(1), 2.0) == 0.0
    closing.closed()
    assert closing.look(Batch(2), 2.0) == after_s


def test_without_an_idle_worker_it_waits_for_a_change() -> None:
    """It grows until one is free."""
    flight = _flight()
    flight.withdraw(0)
    for is_late in (False, True):
        assert _closing(flight, is_late=is_late).look(Batch(1), 0.0) is None


def _share(memory_bytes: int) -> Share:
    return Share(least_workers=1, first_workers=1, most_workers=1, memory_bytes=memory_bytes)


def test_room_ends_with_the_queue_and_with_the_memory() -> None:
    """Two batches ahead of the workers; bytes of the open batch count; a single batch may be larger than the limit."""
    flight = _flight(n_running=3)
    flight.state.n_workers = 2
    room = Room(flight, _share(1000))
    assert room.is_left(699)
    assert not room.is_left(700)
    assert room.is_memory_full(1000)
    flight.state.n_workers = 3 - AHEAD
    assert not room.is_left(0)
    assert Room(_flight(), _share(1)).is_left(1 << 30)


def test_a_hold_lets_pass_what_lies_before_it() -> None:
    """Pieces of a transaction that has passed continue, and one without an LSN is not over yet."""
    hold = Hold()
    before, after = _transaction(100), _transaction(200)
    assert hold.lets_pass([before, after])
    hold.is_reached = True
    hold.close(200)
    assert not hold.is_reached
    assert hold.lets_pass([before])
    assert not hold.lets_pass([before, after])
    assert (hold.holds(before), hold.holds(after), hold.holds(_transaction(0))) == (False, True, False)
    after.is_first = False
    assert not hold.holds(after)
    hold.open()
    assert hold.lets_pass([after])


def test_due_times_are_those_of_the_publisher() -> None:
    """Not before the delay is over by its clock, again soon while that is not known, and never after `--until`."""
    due = DueTimes(2.0, 10_000_000)
    early, late = _transaction(1, time_us=1_000_000), _transaction(2, time_us=10_000_001)
    assert due.left_s(early, 2_000_000) == 1.0
    assert due.left_s(early, 3_000_000) == 0.0
    assert 0.0 < due.left_s(early, None) < 1.0
    assert due.left_s(late, 1 << 40) == math.inf
    assert due.first_not_due([early, late], 0, 1 << 40) == 1
    assert not DueTimes(0.0, None).is_limited

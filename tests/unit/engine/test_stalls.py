"""Stalls: which batch makes room for another, which waits are reported, and when a stream is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from parapply.engine.flight import Flight
from parapply.engine.job import OutcomeJob, SetJob, StreamJob
from parapply.engine.stalls import FallingBehind, Stalls, StreamSeen
from parapply.engine.state import EngineState
from parapply.limits import BLOCKED_S, next_line_s
from parapply.plan.batch import Batch
from parapply.vocabulary import Reading, WorkerState
from parapply.wire.messages import RollbackPrepared

if TYPE_CHECKING:
    from parapply.engine.job import Job

_CHECK_S = 1.0


def _stalls(n_jobs: int, *, is_relaxed: bool = False) -> tuple[Stalls, EngineState, list[Any]]:
    """Return stalls and state of a number of batches, and a worker for each."""
    state = EngineState(0, 0.0, is_relaxed=is_relaxed)
    for seq in range(1, n_jobs + 1):
        state.jobs[seq] = SetJob(Batch(seq), {})
    state.head = state.jobs[1]
    workers = [_worker(seq, job) for seq, job in state.jobs.items()]
    return Stalls(Flight(state), _CHECK_S), state, workers


def _worker(number: int, job: Job, state: WorkerState = WorkerState.EXECUTING) -> Any:  # noqa: ANN401  a worker
    return SimpleNamespace(number=number, job=job, state=state, since_s=0.0)


@pytest.mark.parametrize("is_relaxed", [False, True])
def test_the_head_is_looked_at_and_in_relaxed_order_each(*, is_relaxed: bool) -> None:
    """Once it has been at work for long, whatever it waits for."""
    stalls, _, (head, other) = _stalls(2, is_relaxed=is_relaxed)
    assert not stalls.stands_still(head, 0.9)
    assert stalls.stands_still(head, 1.0)
    assert stalls.stands_still(other, 1.0) is is_relaxed
    head.state = WorkerState.WAITING
    assert not stalls.stands_still(head, 1.0)


def test_whoever_blocks_the_head_yields_and_others_only_to_their_holder() -> None:
    """A worker that executes, or waits for anything else, ends by itself (trap T-30)."""
    stalls, state, (head, other) = _stalls(2, is_relaxed=True)
    assert stalls.may_break(head.job, other)
    third = SetJob(Batch(3), {})
    assert not stalls.may_break(third, other)
    other.job = None
    assert not stalls.may_break(head.job, other)
    follower = _worker(4, SetJob(Batch(0), {}))
    assert stalls.may_break(third, follower), "what follows a transaction in progress may not end for long"
    assert state.head is head.job


def test_a_follower_that_waits_for_a_batch_makes_room_for_it() -> None:
    """Its locks may be in the way of one that is not the head, and nothing else ends that: it waits for all earlier."""
    state = EngineState(0, 0.0, is_relaxed=True)
    flight = Flight(state, max_followers=1)
    stalls = Stalls(flight, _CHECK_S)
    for asker in range(1, 4):
        flight.ask(asker)
    head, second = SetJob(Batch(1), {}), SetJob(Batch(2), {})
    for job in (head, second):
        job.batch.end_lsn = job.batch.seq
        flight.submit(job, 0.0)
    flight.park(head)
    stream = SimpleNamespace(is_followed=True, end=None)
    following = StreamJob(Batch(0), {}, stream)
    flight.follow(following)
    follower = _worker(3, following, WorkerState.WAITING)
    following.batch = Batch(3)
    following.batch.is_barrier, following.batch.end_lsn = True, 3
    flight.submit(following, 0.0)
    assert stalls.may_break(second, follower)
    follower.state = WorkerState.EXECUTING
    assert not stalls.may_break(second, follower)


def test_a_wait_for_a_foreign_session_is_logged_once_it_is_long_and_shown_until_it_is_over() -> None:
    """The longest is shown; a line comes at twice the time of the one before."""
    stalls, state, (one, other) = _stalls(2, is_relaxed=True)
    assert stalls.waits(one, one.job, "pid 1", 1.0) is None
    assert stalls.looked() == []
    assert state.blocked == (0.0, "pid 1")
    state.foreign_waits.clear()
    blocked = stalls.waits(one, one.job, "pid 1", BLOCKED_S)
    assert blocked is not None
    blocked.next_s = next_line_s(BLOCKED_S)
    assert stalls.waits(one, one.job, "pid 2", BLOCKED_S + 1) is None
    other.since_s = 1.0
    stalls.waits(other, other.job, "pid 3", BLOCKED_S)
    stalls.looked()
    assert state.blocked == (0.0, "pid 2")
    state.foreign_waits = {other.number: "pid 3"}
    assert [number for number, _ in stalls.looked()] == [one.number]
    assert state.blocked == (1.0, "pid 3")


def test_a_worker_that_waits_for_another_batch_for_long_is_wanted_back_in_relaxed_order() -> None:
    """Four checks: to repeat a batch costs work."""
    for is_relaxed in (False, True):
        stalls, _, (worker,) = _stalls(1, is_relaxed=is_relaxed)
        worker.state = WorkerState.WAITING
        assert not stalls.holds_up(worker, 3.9)
        assert stalls.holds_up(worker, 4.0) is is_relaxed


def test_rollbacks_in_flight_need_not_wait_for_their_turn() -> None:
    """The transactions that they roll back come to nothing (T-37)."""
    stalls, state, _ = _stalls(1)
    message = RollbackPrepared(
        prepare_end_lsn=1, rollback_end_lsn=2, prepare_time_us=0, rollback_time_us=0, xid=7, gid="g"
    )
    state.jobs[2] = OutcomeJob(Batch(2), message)
    assert stalls.rollbacks() == [message]


def test_a_stream_is_left_after_three_checks_behind_in_a_row() -> None:
    """One that is not behind in between starts the count again; what is begun keeps the stream."""
    behind = FallingBehind(behind_bytes=100, pause_s=5.0, now_s=0.0)
    seen = StreamSeen(Reading.STREAM, 1000, may_be_left=True, is_paused=False, begun=(False,))
    looks = [(1100, 6.0), (1100, 7.0), (1099, 8.0), (1100, 9.0), (1100, 10.0), (1150, 11.0)]
    assert [behind.look(seen, *look) for look in looks] == [None, None, None, None, None, 150]
    assert behind.look(seen._replace(begun=(False, True)), 1100, 12.0) is None
    assert behind.look(seen._replace(reading=Reading.RANGES), 1100, 13.0) is None


def test_with_no_least_amount_a_stream_is_always_behind() -> None:
    """`source.catch_up_bytes = 0` asks for ranges whenever they may be read."""
    behind = FallingBehind(behind_bytes=0, pause_s=0.0, now_s=0.0)
    seen = StreamSeen(Reading.STREAM, 1000, may_be_left=True, is_paused=False, begun=())
    assert [behind.look(seen, 1000, 1.0 * number) for number in (1, 2, 3)] == [None, None, 0]

"""Choice of the batch that starts, and effects of a commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from parapply.engine.flight import Flight, Given, LetGo, News
from parapply.engine.job import SetJob, StreamJob
from parapply.engine.state import EngineState
from parapply.plan.batch import Batch
from tests.unit.changes_model import PLAIN
from tests.unit.dependency_model import batch_of

if TYPE_CHECKING:
    from parapply.model import Transaction


def _job(seq: int) -> SetJob:
    job = SetJob(Batch(seq), {})
    job.batch.end_lsn = 10 * seq
    return job


def test_a_worker_that_asks_is_answered_at_once_or_by_the_next_batch() -> None:
    """The last that has asked is given it: its caches are warm; the one that is longest idle leaves first."""
    state = EngineState(0, 0.0)
    flight = Flight(state)
    state.n_workers = 3
    first, second = _job(1), _job(2)
    assert flight.submit(first, 0.0) == []
    assert flight.ask(1) == [Given(1, first)]
    assert flight.ask(2) == []
    assert flight.ask(3) == []
    assert flight.submit(second, 0.0) == [Given(3, second)]
    assert flight.release(1) == [LetGo(2)]
    assert state.n_workers == 2
    assert flight.committed(first, 1.0) == []
    assert (state.watermark.low_lsn, state.head) == (10, second)


def test_batches_have_no_more_locks_together_than_the_target_has_room_for() -> None:
    """One that would have more waits until another has committed; the head always starts, or nothing would."""
    flight = Flight(EngineState(0, 0.0), most_places=10)
    first, second, third, fourth = jobs = [_job(seq) for seq in range(1, 5)]
    for job, n_places in zip(jobs, (11, 6, 4, 1), strict=True):
        job.batch.n_places = n_places
        flight.submit(job, 0.0)
    assert flight.ask(1) == [Given(1, first)]
    assert flight.ask(2) == []
    assert flight.committed(first, 1.0) == [Given(2, second)]
    assert flight.ask(1) == [Given(1, third)]
    assert not flight.wants(fourth.batch)
    assert flight.ask(3) == []
    assert flight.committed(second, 2.0) == [Given(3, fourth)]


def test_a_later_batch_leaves_locks_for_an_earlier_one_that_waits() -> None:
    """The earlier one becomes the head, and starts whatever the later one holds until its turn."""
    flight = Flight(EngineState(0, 0.0), most_places=10)
    alone = replace(PLAIN.plan(0), is_table_exclusive=True)
    first, second = [SetJob(batch_of(seq, alone, b"%d" % seq), {}) for seq in (1, 2)]
    third = _job(3)
    for job, n_places in ((first, 1), (second, 7), (third, 5)):
        job.batch.n_places = n_places
        flight.submit(job, 0.0)
    assert flight.ask(1) == [Given(1, first)]
    assert flight.ask(2) == []
    assert flight.committed(first, 1.0) == [Given(2, second)]
    assert flight.ask(1) == []
    assert flight.committed(second, 2.0) == [Given(1, third)]


def test_a_question_taken_back_has_no_answer() -> None:
    """A worker that is cancelled asks no more; one that was answered has its batch."""
    flight = Flight(EngineState(0, 0.0))
    flight.ask(1)
    flight.withdraw(1)
    assert flight.submit(_job(1), 0.0) == []
    flight.withdraw(1)


class _Stream:
    is_followed = True
    end: Transaction | None = None


def test_only_a_job_that_follows_gives_way() -> None:
    """It is asked once, also before it has a number; a batch of sets has no end to wait for, nor has one at its end."""
    flight = Flight(EngineState(0, 0.0), max_followers=1)
    assert flight.give_way(_job(1)) is None
    job = StreamJob(Batch(0), {}, _Stream())
    flight.follow(job)
    flight.ask(1)
    assert flight.give_way(job) == [News(job)]
    assert flight.give_way(job) is None
    job.batch.seq = job.batch.end_lsn = 1
    flight.submit(job, 0.0)
    job.must_yield = job.stream.is_followed = False
    assert flight.give_way(job) is None
    assert flight.yield_to(_job(0), job) is None


def test_a_parked_head_waits_for_its_repair() -> None:
    """Relaxed, the commit of a later batch does not end its pause: it would fail as often as others commit."""
    state = EngineState(0, 0.0, is_relaxed=True)
    flight = Flight(state)
    first, second, third = _job(1), _job(2), _job(3)
    for job in (first, second, third):
        flight.submit(job, 0.0)
    for asker in range(1, 4):
        flight.ask(asker)
    flight.park(second)
    assert flight.committed(first, 1.0) == []
    assert flight.ask(4) == [Given(4, second)]
    assert flight.ask(5) == []
    flight.park(second)
    assert flight.committed(third, 2.0) == []
    assert flight.unpark(second.batch.seq) == [Given(5, second)]

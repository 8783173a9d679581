"""Which batch starts and what a commit brings about: schedules of seeds, and broken engines that they catch."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from parapply.engine.durability import Durability
from parapply.engine.flight import Flight, Given, LetGo, News
from parapply.engine.job import SetJob, StreamJob
from parapply.engine.state import EngineState
from parapply.engine.turns import CommitTurn, Turns
from parapply.plan.batch import Batch
from parapply.plan.scheduler import Scheduler
from tests.simulate.__main__ import RARE
from tests.simulate.core import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.model import Transaction

    Mutant = Callable[[pytest.MonkeyPatch], None]

#: A broken engine must be caught by so many schedules.
_SEEDS = range(1_000)


def _turn_given_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Turns, "ask", lambda *_, **__: CommitTurn.COMMIT)


def _release_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Flight, "count_out", lambda *_: None)


def _parked_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Flight, "unpark", lambda *_: [])


def _late_key_dropped(patch: pytest.MonkeyPatch) -> None:
    add = Scheduler.add

    def without(scheduler: Scheduler, batch: Batch) -> bool:
        may_start = add(scheduler, batch)
        for changes in batch.table_changes:
            changes.late_keys.clear()
        return may_start

    patch.setattr(Scheduler, "add", without)


def _watermark_not_written(patch: pytest.MonkeyPatch) -> None:
    def ahead(durability: Durability, _low_lsn: int) -> bool:
        durability.state.durable_lsn = durability.state.watermark.high_lsn + 1
        return True

    patch.setattr(Durability, "made_durable", ahead)


def _answer_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Turns, "passed_to", lambda *_: [])


@pytest.mark.parametrize(
    "mutant",
    [
        _turn_given_early,
        _release_forgotten,
        _parked_forgotten,
        _late_key_dropped,
        _watermark_not_written,
        _answer_lost,
    ],
)
def test_a_broken_engine_is_caught(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    """Order, dependencies, exactly once, what a crash takes, what waits for ever, what is held: one of them fails."""
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        _play_all()


def _play_all() -> None:
    for seed in _SEEDS:
        Schedule(seed).run()


def test_schedules_keep_every_promise() -> None:
    """As `tests/simulate/core.py` says; and each rare state is met, or the schedules prove nothing."""
    seen: Counter[str] = Counter()
    for seed in range(400):
        schedule = Schedule(seed)
        schedule.run()
        seen += schedule.seen
    # Too few schedules for the rarest one.
    assert {*RARE} - {str(CommitTurn.GIVE_BACK)} <= seen.keys()


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
    """It is asked once, also before it has a number; a batch of sets has no end to wait for."""
    flight = Flight(EngineState(0, 0.0), max_followers=1)
    assert flight.give_way(_job(1)) is None
    job = StreamJob(Batch(0), {}, _Stream())
    flight.follow(job)
    assert flight.give_way(job) == [News(job)]
    assert flight.give_way(job) is None


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

"""Each question for the turn to commit has one answer, whichever part wants the worker's batch to yield."""

from __future__ import annotations

from parapply.engine.flight import Answer, CommitTurn, Flight
from parapply.engine.job import SetJob
from parapply.engine.state import EngineState
from parapply.plan.batch import Batch


def _flight(n_jobs: int) -> tuple[Flight, list[SetJob]]:
    """Return batches with nothing in common, each with a worker."""
    flight = Flight(EngineState(0, 0.0))
    jobs = [SetJob(Batch(seq), {}) for seq in range(1, n_jobs + 1)]
    for job in jobs:
        job.batch.end_lsn = 10 * job.batch.seq
        flight.submit(job, 0.0)
        flight.ask(job.batch.seq)
    return flight, jobs


def test_the_turn_passes_with_the_commit() -> None:
    """The head has it at once, the next one when the head has committed, and only then."""
    flight, (first, second) = _flight(2)
    assert flight.turns.ask(second) is None
    assert flight.turns.ask(first) is CommitTurn.COMMIT
    assert flight.committed(first, 0.0) == [Answer(2, CommitTurn.COMMIT)]
    flight.turns.heard(second)
    assert flight.turns.ask(second) is CommitTurn.COMMIT


def test_a_wish_to_yield_is_answered_once() -> None:
    """One that waits has it by an effect, one that executes with its question; a later one cannot ask an earlier."""
    flight, (first, second, third) = _flight(3)
    assert flight.yield_to(second, first) is None
    assert flight.turns.ask(second) is None
    assert flight.yield_to(first, second) == [Answer(2, CommitTurn.YIELD)]
    assert flight.yield_to(first, second) is None, "it has an answer that it has not taken yet"
    assert flight.yield_to(first, third) == []
    assert flight.yield_to(first, third) is None
    assert flight.turns.ask(third) is CommitTurn.YIELD
    assert flight.turns.ask(third) is None


def test_one_that_must_be_the_head_neither_yields_nor_commits_before() -> None:
    """It holds nothing on the target, so it is in the way of none."""
    flight, (first, second) = _flight(2)
    assert flight.turns.ask(second, needs_head=True) is None
    assert flight.yield_to(first, second) is None
    assert flight.committed(first, 0.0) == [Answer(2, CommitTurn.COMMIT)]

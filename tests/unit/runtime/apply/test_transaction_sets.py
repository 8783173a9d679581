"""Commands of a batch that waits for another, made ahead: the same as made later, or none."""

from __future__ import annotations

import asyncio

import pytest

from parapply.engine.flight import Flight
from parapply.engine.job import SetJob
from parapply.engine.state import EngineState
from parapply.plan.batch import Batch
from parapply.plan.table import Plans
from parapply.runtime.apply.transaction import Ahead, SetCommands
from parapply.runtime.pool.pool import WorkerPool
from parapply.target.catalogue.match import match
from parapply.target.sql.commands import CommandBuilder
from parapply.wire.assembler import Assembler
from tests import build
from tests.unit.plans import column, relation, sent, table

_ROLE = "replica"
_PLAN = match(
    relation(sent("a", "text", is_key=True), sent("b", "text", is_key=True), identity="f"),
    table([column("a", "text"), column("b", "text")], indexed_columns=("a",)),
)


def _row(number: int, text: bytes) -> bytes:
    return build.row(build.text(b"%d" % number), build.text(text))


def _job(seq: int, n_changes: int) -> SetJob:
    """Return the job of a closed batch that updates rows of a table without a key."""
    plans = Plans()
    plans.known[_PLAN.relation] = _PLAN
    plans.announce(_PLAN.relation)
    oid = _PLAN.relation.oid
    updates = [build.update(_row(n, b"new"), old=_row(n, b"old"), oid=oid) for n in range(n_changes)]
    frames = [build.xlog_data(payload) for payload in (build.begin(), *updates, build.commit(end_lsn=0x130 * seq))]
    batch = Batch(seq)
    for transaction in Assembler(1 << 30).push(frames):
        batch.add(transaction, plans)
    batch.close()
    return SetJob(batch, {})


def _texts(commands: SetCommands) -> list[tuple[bytes, list[bytes | None]]]:
    return [(command.prepared.text, list(command.parameters)) for command in commands.all]


async def _made(job: SetJob, builder: CommandBuilder, ahead: Ahead | None = None) -> SetCommands:
    return await SetCommands.made(job.batch, builder, _ROLE, ahead)


def test_what_is_made_ahead_is_taken_once_and_is_the_same() -> None:
    """A worker that has the batch takes what was made, or makes it."""
    builder, ahead, job = CommandBuilder(), Ahead(), _job(1, 300)
    ahead.make(job, builder, _ROLE)
    first = ahead.take(job.batch, builder)
    assert first is not None
    assert ahead.take(job.batch, builder) is None
    ahead.make(job, builder, _ROLE)
    taken = asyncio.run(_made(job, builder, ahead))
    assert taken.first[0].prepared is first[0].prepared
    assert _texts(taken) == _texts(asyncio.run(_made(job, CommandBuilder())))


@pytest.mark.parametrize("was_prepared", [False, True])
def test_a_transaction_that_is_prepared_after_that_decides(*, was_prepared: bool) -> None:
    """Rows that are found by all their columns go one by one while one is, whatever was made before (T-24)."""
    is_prepared = was_prepared
    builder, ahead, job = CommandBuilder(lambda: is_prepared), Ahead(), _job(1, 300)
    ahead.make(job, builder, _ROLE)
    is_prepared = not was_prepared
    sets = asyncio.run(_made(job, builder, ahead))
    assert len(sets.all) == (2 if was_prepared else 301)  # the last one looks for triggers


def test_one_change_in_its_turn_looks_for_no_code() -> None:
    """It is applied as in source order, which sees triggers as they are; several changes are not (T-29)."""
    one, several = (asyncio.run(_made(_job(1, n), CommandBuilder())) for n in (1, 2))
    assert [command.operation for command in one.all] == ["update", "code"]
    assert one.in_turn == one.all[:1]
    assert several.in_turn == several.all
    assert several.in_turn[-1].operation == "code"


def test_small_batches_and_those_that_are_repeated_are_left() -> None:
    """Those take no time to make, and these are not applied as they are."""
    builder, ahead = CommandBuilder(), Ahead()
    suspect, small = _job(1, 300), _job(2, 256)
    suspect.batch.is_suspect = True
    for job in (suspect, small):
        ahead.make(job, builder, _ROLE)
        assert ahead.take(job.batch, builder) is None


async def test_the_next_batch_that_waits_for_another_is_the_one() -> None:
    """Batches of a table without a key follow one another."""
    pool = WorkerPool(Flight(EngineState(0, 0.0)))
    asked = asyncio.ensure_future(pool.next_job())
    await asyncio.sleep(0)
    jobs = [_job(seq, 1) for seq in (1, 2, 3)]
    for job in jobs:
        pool.submit(job, 0.0)
    assert await asked is jobs[0]
    assert pool.flight.next_blocked is jobs[1]
    pool.committed(jobs[0], 0.0)
    assert await pool.next_job() is jobs[1]
    assert pool.flight.next_blocked is jobs[2]

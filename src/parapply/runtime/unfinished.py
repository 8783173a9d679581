"""What intake does with transactions that do not simply come whole: streamed in progress, prepared, decided later.

A streamed transaction has its place in the order when its end comes (trap T-54). A small one is then taken like any
other. A large one is a batch of its own, with everything earlier committed before it and everything later after it; a
worker may have followed it since its first chunks. PREPARE and the outcome of a prepared transaction are batches of
their own, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from parapply.plan.batch import Batch
from parapply.runtime.job import Job
from parapply.runtime.streams import piece_of
from parapply.wire.chunk import Chunk
from parapply.wire.messages import (
    BeginPrepare,
    CommitPrepared,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.model import Relation, Transaction
    from parapply.runtime.crew import Crew
    from parapply.runtime.streams import Stream, Streams
    from parapply.runtime.two_phase import TwoPhase
    from parapply.target.state import SlotState


class Door(Protocol):
    """What intake lets this do."""

    @property
    def last_seq(self) -> int:
        """Return the number of the last batch begun, closed or not."""
        ...

    def close_open(self) -> None:
        """Close the batch that is open, if one is: what comes next is not for it."""
        ...

    def new_job(self) -> Job:
        """Return a job with a batch behind all others."""
        ...

    def submit(self, job: Job, event: Transaction) -> None:
        """Hand over a job that an event has ended, and whose batch is complete."""
        ...

    async def take_whole(self, transaction: Transaction) -> None:
        """Take a transaction like any other."""
        ...

    async def announce(self, relations: Sequence[Relation]) -> None:
        """Put relations in force for what comes next."""
        ...

    def received(self, transaction: Transaction) -> None:
        """Take note of where the stream stands."""
        ...

    @property
    def received_lsn(self) -> int:
        """Return where the stream stands."""
        ...

    def is_apart(self, relations: Sequence[Relation], lsn: int) -> bool:
        """Tell whether changes of relations may be left out, or must wait for a copy, in a commit at an LSN."""
        ...

    async def kept_of(self, relations: Sequence[Relation], commit_lsn: int) -> Callable[[Transaction], Transaction]:
        """Return what takes out of a transaction what is not applied, when every table is there that it needs."""
        ...


class Unfinished:
    """Used by intake only, which passes itself as the door."""

    def __init__(
        self, streams: Streams, two_phase: TwoPhase, crew: Crew, state: SlotState, *, piece_bytes: int
    ) -> None:
        """Start with nothing in progress.

        Args:
            streams: transactions in progress.
            two_phase: prepared ones.
            crew: that applies.
            state: what the target had at the start.
            piece_bytes: a streamed transaction of less is taken like any other.
        """
        self._streams = streams
        self._two_phase = two_phase
        self._crew = crew
        self._state = state
        self._piece_bytes = piece_bytes

    async def take(self, event: Transaction, door: Door) -> None:
        """Take one event at its place in the stream.

        Raises:
            SpillFailed: what a streamed transaction consists of could not be kept until now.
            TargetLost, TargetRefused, ProtocolError: as intake.
        """
        message = event.event
        if isinstance(message, Chunk):
            await self._chunk(event, message, door)
        elif isinstance(message, StreamAbort):
            self._streams.abort(message)
        elif isinstance(message, StreamCommit | StreamPrepare):
            await self._end(event, message, door)
        else:
            assert isinstance(message, CommitPrepared | RollbackPrepared), "the assembler makes no other events"
            if isinstance(message, RollbackPrepared):
                # Of one prepared before the slot had two_phase nothing else ends what was streamed of it (trap T-58).
                self._streams.abort(
                    StreamAbort(xid=message.xid, subxid=message.xid, abort_lsn=None, abort_time_us=None)
                )
            self._decide(event, message, door)

    def is_prepared(self, message: object) -> bool:
        """Tell whether what comes again was prepared here before (trap T-57)."""
        return isinstance(message, BeginPrepare | Prepare | StreamPrepare) and self._two_phase.is_prepared(message)

    def record_prepared(self, event: Transaction, message: Prepare | StreamPrepare, door: Door) -> None:
        """Have it recorded that a transaction is prepared, which was done before."""
        self._decide(event, message, door)

    def close(self) -> None:
        """Forget what is in progress; it comes again after a reconnect (trap T-55)."""
        self._streams.close()

    async def _chunk(self, piece: Transaction, chunk: Chunk, door: Door) -> None:
        stream = await self._streams.add(piece, chunk, door.last_seq)
        if stream.follower is not None and door.is_apart(stream.relations, door.received_lsn):
            stream.follower.must_yield = True
            stream.news.set()
        if not self._streams.is_worth_a_worker(stream) or not self._crew.may_follow:
            return
        # Its commit lies behind all that has come; what may have to be left out of it is not applied before.
        if not door.is_apart(stream.relations, door.received_lsn):
            job = Job(Batch(0), {})
            job.stream = stream
            self._streams.follow(stream, job)
            self._crew.follow(job)

    async def _end(self, event: Transaction, message: StreamCommit | StreamPrepare, door: Door) -> None:
        stream = self._streams.ending(event)
        is_done = self._state.is_applied(event.end_lsn) or self.is_prepared(message)
        if stream.follower is None and not is_done and stream.size_bytes < self._piece_bytes:
            await door.take_whole(await _whole(self._streams.take(event), event, message))
            return
        door.close_open()
        door.received(event)
        await door.announce(stream.relations)
        if not is_done and door.is_apart(stream.relations, event.commit_lsn):
            if stream.follower is not None:
                # Its locks would hold up the copy that it waits for.
                stream.follower.must_yield = True
                stream.news.set()
            stream.kept = await door.kept_of(stream.relations, event.commit_lsn)
        # Nothing waits from here on: who follows learns of the end and has its batch at once, or has given up before.
        if is_done:
            # By an earlier run, out of order or without a record of it. A worker that follows rolls back.
            self._streams.drop(event.xid)
            if isinstance(message, StreamPrepare):
                self.record_prepared(event, message, door)
            return
        self._streams.take(event)
        job = door.new_job()
        if stream.follower is not None:
            stream.follower.batch, stream.follower.received_s = job.batch, job.received_s
            job = stream.follower
        job.stream = stream
        job.prepare = message if isinstance(message, StreamPrepare) else None
        job.batch.is_large = True
        _submit_alone(job, event, door)

    def _decide(
        self,
        event: Transaction,
        message: CommitPrepared | RollbackPrepared | Prepare | StreamPrepare,
        door: Door,
    ) -> None:
        if self._state.is_applied(event.end_lsn):
            return
        door.close_open()
        door.received(event)
        job = door.new_job()
        job.outcome = message
        _submit_alone(job, event, door)


def _submit_alone(job: Job, event: Transaction, door: Door) -> None:
    """Hand a job over behind everything earlier and before everything later."""
    batch = job.batch
    batch.is_barrier = True
    batch.first_lsn = batch.end_lsn = event.end_lsn
    batch.first_commit_time_us = batch.commit_time_us = event.commit_time_us
    job.n_transactions = 1
    job.xids = (event.xid,)
    door.submit(job, event)


async def _whole(stream: Stream, event: Transaction, message: StreamCommit | StreamPrepare) -> Transaction:
    """Return what fits into memory as if it had come whole."""
    changes = [change for block in stream.blocks for change in await stream.read(block)]
    whole = piece_of(event.xid, changes, stream.size_bytes)
    stream.close()
    whole.commit_lsn, whole.end_lsn = event.commit_lsn, event.end_lsn
    whole.commit_time_us, whole.send_time_us = event.commit_time_us, event.send_time_us
    if isinstance(message, StreamPrepare):
        whole.event = Prepare(
            prepare_lsn=message.prepare_lsn,
            end_lsn=message.end_lsn,
            prepare_time_us=message.prepare_time_us,
            xid=message.xid,
            gid=message.gid,
        )
    return whole

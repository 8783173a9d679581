"""Intake of transactions that do not simply come whole: streamed in progress, prepared, decided later.

A streamed transaction has its place in the order when its end comes (trap T-54). A small one is then taken like any
other. A large one is a batch of its own, with everything earlier committed before it and everything later after it; a
worker may have followed it since its first chunks. PREPARE and the outcome of a prepared transaction are also separate
batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.engine.job import OutcomeJob, StreamJob
from parapply.plan.batch import Batch
from parapply.runtime.intake.commands import check_not_prepared
from parapply.runtime.pool.pool import give_way
from parapply.runtime.pool.streams import piece_of
from parapply.wire.messages import (
    Chunk,
    CommitPrepared,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.engine.job import Job
    from parapply.model import Relation, Transaction
    from parapply.plan.commands import JudgedFrames
    from parapply.runtime.intake.batcher import Admission
    from parapply.runtime.intake.commands import CommandTransactions
    from parapply.runtime.pool.streams import StreamBuffer, StreamBuffers


class SpecialTransactions:
    """Used by intake only."""

    def __init__(
        self, admission: Admission, commands: CommandTransactions, streams: StreamBuffers, *, piece_bytes: int
    ) -> None:
        """Start with nothing in progress.

        Args:
            admission: rules of entry; its batcher numbers their batches, and hands them over.
            commands: of the publisher, in a streamed transaction.
            streams: transactions in progress.
            piece_bytes: a streamed transaction of less is taken like any other.
        """
        self._batcher = admission.batcher
        self._admission = admission
        self.commands = commands
        self._streams = streams
        self._pool = admission.batcher.pool
        self._piece_bytes = piece_bytes

    async def take(self, event: Transaction) -> Transaction | None:
        """Take one event at its place in the stream.

        Returns:
            The transaction that ends with it, if it is to be taken like any other; None if all is done.

        Raises:
            SpillFailed: the changes of a streamed transaction could not be kept until now.
            TargetLost, TargetRefused, ProtocolError: as intake.
        """
        message = event.event
        if isinstance(message, Chunk):
            await self._chunk(event, message)
        elif isinstance(message, StreamAbort):
            self._streams.abort(message)
        elif isinstance(message, StreamCommit | StreamPrepare):
            stream = self._streams.ending(event)
            if stream.has_changes or isinstance(message, StreamPrepare) or message.was_prepared:
                return await self._end(event, message, stream)
            # Its end is sent only because it was streamed. `source/history.py` would not find what a record says of it.
            own, others = self._streams.comes_in_force(stream)
            await self._admission.announce([*own, *others])
            self._streams.drop(event.xid)
        else:
            assert isinstance(message, CommitPrepared | RollbackPrepared), "the assembler makes no other events"
            if isinstance(message, RollbackPrepared):
                # If it was prepared before the slot had two_phase, nothing else ends its stream (trap T-58).
                self._streams.abort(
                    StreamAbort(xid=message.xid, subxid=message.xid, abort_lsn=None, abort_time_us=None)
                )
            self._decide(event, message)
        return None

    def record_prepared(self, event: Transaction, message: Prepare | StreamPrepare) -> None:
        """Have a PREPARE recorded that was done before, or that needs none: the publisher has rolled it back."""
        self._decide(event, message)

    def announce(self, relations: Sequence[Relation]) -> None:
        """Note relations that a transaction not in progress announces, at its place in the stream."""
        self._streams.announce(relations)

    def close(self) -> None:
        """Forget the transactions in progress; they come again after a reconnect (trap T-55)."""
        self._streams.close()

    async def _chunk(self, piece: Transaction, chunk: Chunk) -> None:
        stream = await self._streams.add(piece, chunk, self._batcher.last_seq)
        follower = self._pool.flight.follower_of(stream)
        if follower is not None and not self._may_follow(stream, self._batcher.received_lsn):
            give_way(follower)
        if chunk.was_prepared or not self._streams.is_worth_a_worker(stream) or not self._pool.flight.may_follow:
            return
        # Its commit lies after all that has come; what may have to be left out of it is not applied before that.
        if self._may_follow(stream, self._batcher.received_lsn):
            self._streams.follow(stream)
            self._pool.follow(StreamJob(Batch(0), {}, stream))

    def _may_follow(self, stream: StreamBuffer, lsn: int) -> bool:
        """Return whether all of it is sure to be applied, if it commits at an LSN or later."""
        starts = self._admission.starts
        return not starts.is_apart(stream.relations, lsn) and self._admission.copied.may_follow(stream.relations)

    async def _end(
        self, event: Transaction, message: StreamCommit | StreamPrepare, stream: StreamBuffer
    ) -> Transaction | None:
        is_done = self._admission.is_applied(event.end_lsn) or self._admission.is_prepared(message)
        if not stream.is_followed and not is_done and stream.size_bytes < self._piece_bytes:
            _, others = self._streams.comes_in_force(stream)
            return await _whole(self._streams.take(event), event, message, others)
        self._batcher.close_open()
        # One that was prepared before the slot had two_phase need not announce what was in force (trap T-58).
        plans_before = self._batcher.plans_now
        own, others = self._streams.comes_in_force(stream)
        in_force = [*own, *others]
        has_commands = stream.has_ddl and not is_done
        commands: JudgedFrames = {}
        if has_commands:
            check_not_prepared(message)
            for block in stream.blocks:
                commands.update(await self.commands.judged(await stream.read(block)))
            await self.commands.before(stream.relations)
        else:
            await self._admission.announce(in_force)
        if not is_done:
            # Of what was prepared before the slot had two_phase, also relations in force that it does not announce.
            # None of them is being copied: two_phase begins behind every copy, and no copy begins beside it.
            follower = self._pool.flight.follower_of(stream)
            if follower is not None and not self._may_follow(stream, event.commit_lsn):
                # Its locks would hold up the copy that it waits for.
                give_way(follower)
            stream.kept = await self._admission.kept_of(stream.relations, event.commit_lsn)
        # Not before: the copy that it waits for waits for all that is received.
        self._batcher.received(event)
        # No await below this line: the following worker must see the end of the stream and its batch in one step.
        if is_done:
            # By an earlier run, out of order or without a record of it. A worker that follows rolls back.
            self._streams.drop(event.xid)
            if isinstance(message, StreamPrepare):
                self.record_prepared(event, message)
            return None
        self._streams.take(event)
        batch = self._batcher.new_batch()
        job = self._pool.flight.follower_of(stream)
        if job is None:
            job = StreamJob(batch, plans_before, stream)
        else:
            job.batch = batch
        job.prepare = message if isinstance(message, StreamPrepare) else None
        job.commands = commands
        self._submit_alone(job, event)
        if has_commands:
            await self.commands.after(in_force)
        return None

    def _decide(self, event: Transaction, message: CommitPrepared | RollbackPrepared | Prepare | StreamPrepare) -> None:
        if self._admission.is_applied(event.end_lsn):
            return
        self._batcher.close_open()
        self._batcher.received(event)
        self._submit_alone(OutcomeJob(self._batcher.new_batch(), message), event)

    def _submit_alone(self, job: Job, event: Transaction) -> None:
        """Hand a job over after everything earlier and before everything later."""
        batch = job.batch
        batch.is_barrier = True
        batch.first_lsn = batch.end_lsn = event.end_lsn
        batch.first_commit_time_us = batch.commit_time_us = event.commit_time_us
        job.counts.n_transactions = 1
        job.counts.xids = (event.xid,)
        self._batcher.submit(job, event)


async def _whole(
    stream: StreamBuffer, event: Transaction, message: StreamCommit | StreamPrepare, others: Sequence[Relation]
) -> Transaction:
    """Return a transaction that fits into memory as if it had come whole.

    Args:
        stream: its changes.
        event: its end.
        message: of the event.
        others: announced later than what it announces of them; in force behind it.
    """
    changes = [change for block in stream.blocks for change in await stream.read(block)]
    changes += others
    whole = piece_of(event.xid, changes, stream.size_bytes, has_ddl=stream.has_ddl)
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

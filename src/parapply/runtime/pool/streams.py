"""Transactions that are still in progress on the publisher, as far as they have come.

Every change of one is kept until its end, in memory while there are few, on disk afterwards (`spill.py`). So a worker
may follow it, applying chunk by chunk (`streamed.py`), and still go back: when it blocks another it rolls back, and all
is applied at the commit. Reading never waits for such a worker (trap T-53): changes not taken yet are on disk.

Both ways come from Amit Kapila, "Perform streaming logical transactions by background workers and parallel apply"
(pgsql-hackers, 2022-04-06): a worker from the first chunk on, or a file until the commit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from parapply import failpoints
from parapply.errors import SpillFailed
from parapply.logs import get_logger
from parapply.model import Relation, Transaction
from parapply.wire.rows import KIND_AT, TRUNCATE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from parapply.engine.job import StreamJob
    from parapply.spill import BlockPlace, Spill, SpillFile
    from parapply.wire.messages import Chunk, StreamAbort


class Block(NamedTuple):
    """A chunk, or a part of one. Its changes are in `piece`, or at `place` in the stream's file."""

    piece: Transaction | None
    place: BlockPlace | None
    runs: tuple[tuple[int, int], ...]  # as in `Chunk`
    n_changes: int  # that count: those after them were rolled back on the publisher
    size_bytes: int
    after_seq: int  # of the last batch that came before it


class SubAborted(NamedTuple):
    """A subtransaction was rolled back on the publisher, with all that began inside it."""

    subxid: int


class Announced(NamedTuple):
    """A relation that a transaction in progress has announced."""

    place: tuple[int, int]  # as in `StreamBuffer.subs`
    number: int  # of all announcements, as they came
    relation: Relation


class StreamBuffer:
    """One transaction in progress. Written by intake through `StreamBuffers`; its follower takes from `todo`."""

    def __init__(self, xid: int) -> None:
        self.xid = xid
        self.blocks: list[Block] = []
        #: Relations announced in it, in order.
        self.announced: list[Announced] = []
        #: Place of the first change of each subtransaction, in order: (number of the block, index in it).
        self.subs: dict[int, tuple[int, int]] = {}
        #: Commands of the publisher's queue are among its changes, or were and were rolled back.
        self.has_ddl = False
        self.size_bytes = 0
        #: Part of `size_bytes` that is in memory only.
        self.memory_bytes = 0
        self.file: SpillFile | None = None
        #: True if a worker follows it, or will; the pool knows which one. Set by intake, cleared by that worker.
        self.is_followed = False
        #: Items that the worker has not taken yet. A block that is only on disk has no piece.
        self.todo: deque[Block | SubAborted] = deque()
        #: Bytes of pieces in `todo`.
        self.todo_bytes = 0
        #: Set when that worker has to look: at work, the end, a batch that has committed, a wish to yield.
        self.news = asyncio.Event()
        #: How it ended: the event of its commit or prepare, or of its abort.
        self.end: Transaction | None = None
        self.is_aborted = False
        #: Takes changes out of a piece that a copy holds; None if all are applied. Known at the end.
        self.kept: Callable[[Transaction], Transaction] | None = None
        #: Reason why no worker follows it now, or ever did; shown in the apply log.
        self.why_spilled = ""
        #: Its changes could not be kept: they are dropped, and the commit will fail with this.
        self.failure: SpillFailed | None = None

    @property
    def relations(self) -> list[Relation]:
        """Return the relations announced in it, in order; rolled back ones come again if needed (trap T-52)."""
        return [one.relation for one in self.announced]

    @property
    def has_changes(self) -> bool:
        """Return whether more than relations is left in it."""
        return sum([block.n_changes for block in self.blocks]) > len(self.announced)

    def stop_following(self, why: str) -> None:
        """Detach the worker, which has rolled back and gives up; the kept chunks are applied at the commit."""
        self.is_followed = False
        self.why_spilled = why
        self.todo.clear()
        self.todo_bytes = 0
        if self.failure is not None or self.is_aborted:
            self.close()

    async def read(self, block: Block) -> list[bytes | Relation]:
        """Return the changes of a block that count; raise SpillFailed if the file is not as it was written."""
        if block.piece is not None:
            changes = block.piece.changes
        else:
            assert self.file is not None, "what is not in memory is in a file"
            assert block.place is not None, "what is not in memory is in a file"
            changes = await asyncio.to_thread(self.file.read, block.place)
        return changes if len(changes) == block.n_changes else changes[: block.n_changes]

    async def pieces(self, piece_bytes: int) -> AsyncIterator[Transaction]:
        """Yield all changes that count, in pieces of about the given size.

        Raises:
            SpillFailed: as `read`.
        """
        changes: list[bytes | Relation] = []
        size_bytes = 0
        for block in self.blocks:
            changes += await self.read(block)
            size_bytes += block.size_bytes
            if size_bytes >= piece_bytes:
                yield self._kept(piece_of(self.xid, changes, size_bytes, has_ddl=self.has_ddl))
                changes, size_bytes = [], 0
        if changes:
            yield self._kept(piece_of(self.xid, changes, size_bytes, has_ddl=self.has_ddl))

    def _kept(self, piece: Transaction) -> Transaction:
        return piece if self.kept is None else self.kept(piece)

    def close(self) -> None:
        """Forget all changes."""
        self.blocks = []
        self.todo.clear()
        if self.file is not None:
            self.file.close()
            self.file = None


def buffer_of(job: StreamJob) -> StreamBuffer:
    """Return the buffer of a job's transaction."""
    assert isinstance(job.stream, StreamBuffer), "this process keeps what is in progress there"
    return job.stream


def piece_of(xid: int, changes: list[bytes | Relation], size_bytes: int, *, has_ddl: bool = False) -> Transaction:
    """Return changes as the planner takes them."""
    piece = Transaction(xid, 0, 0)
    piece.changes = changes
    piece.size_bytes = size_bytes
    piece.has_ddl = has_ddl
    piece.relations = [change for change in changes if isinstance(change, Relation)]
    piece.has_truncate = any(change[KIND_AT] == TRUNCATE for change in changes if not isinstance(change, Relation))
    return piece


class StreamLimits(NamedTuple):
    """Memory and file limits of streams."""

    start_bytes: int  # of a transaction before a worker follows it, and before its changes go to disk
    memory_bytes: int  # of all streams that no worker follows, in memory
    todo_bytes: int  # of one stream that a worker follows, in memory besides the file


class StreamBuffers:
    """The transactions in progress, by xid. Written by intake only."""

    def __init__(self, spill: Spill, limits: StreamLimits) -> None:
        self._spill = spill
        self._limits = limits
        self._open: dict[int, StreamBuffer] = {}
        self._memory_bytes = 0
        self._n_announced = 0
        #: Latest announcement in force by OID and by name, of those made while a transaction was in progress.
        self._in_force: dict[int | tuple[str, str], Announced] = {}
        self._log = get_logger()

    def __len__(self) -> int:
        return len(self._open)

    async def add(self, piece: Transaction, chunk: Chunk, after_seq: int) -> StreamBuffer:
        """Keep a chunk that came after a batch, and give it to the worker that follows the transaction.

        Returns:
            Its stream. If it is large and not followed, a worker might follow it.
        """
        stream = self._open.get(chunk.xid)
        if stream is None:
            stream = self._open[chunk.xid] = StreamBuffer(chunk.xid)
        if stream.failure is not None:
            return stream
        for index, xid in chunk.runs:
            if xid != chunk.xid:
                stream.subs.setdefault(xid, (len(stream.blocks), index))
        stream.has_ddl = stream.has_ddl or piece.has_ddl
        if piece.relations:
            number = len(stream.blocks)
            changes = enumerate(piece.changes)
            stream.announced += [
                self._numbered((number, at), change) for at, change in changes if isinstance(change, Relation)
            ]
        block = Block(piece, None, chunk.runs, len(piece.changes), piece.size_bytes, after_seq)
        stream.blocks.append(block)
        stream.size_bytes += block.size_bytes
        stream.memory_bytes += block.size_bytes
        self._memory_bytes += block.size_bytes
        is_small = stream.size_bytes < self._limits.start_bytes and self._memory_bytes <= self._limits.memory_bytes
        if stream.is_followed or not is_small:
            await self._to_disk(stream)
        return stream

    def _numbered(self, place: tuple[int, int], relation: Relation) -> Announced:
        self._n_announced += 1
        return Announced(place, self._n_announced, relation)

    def announce(self, relations: Sequence[Relation]) -> None:
        """Note relations announced outside of streams: they stay in force when a stream ends that had others before."""
        for relation in relations if self._open else ():
            self._put_in_force(self._numbered((0, 0), relation))

    def _put_in_force(self, one: Announced) -> None:
        for key in (one.relation.oid, one.relation.full_name):
            if (other := self._in_force.get(key)) is None or other.number < one.number:
                self._in_force[key] = one

    def comes_in_force(self, stream: StreamBuffer) -> tuple[list[Relation], list[Relation]]:
        """Return the relations that come in force with a stream's end, and others' to be in force behind them.

        For the publisher the one that it sent last is in force, in whichever transaction: once a table has changed, it
        no longer knows that a stream had it before, and announces it only to the next one that needs it.
        """
        for one in stream.announced:
            self._put_in_force(one)
        latest, mine = self._in_force, set(stream.announced)
        own = [one.relation for one in stream.announced if latest[one.relation.oid] in mine]
        others = {latest[key] for one in mine for key in (one.relation.oid, one.relation.full_name)} - mine
        stay = [one for one in others if latest[one.relation.oid] is latest[one.relation.full_name]]
        return own, [one.relation for one in sorted(stay, key=itemgetter(1))]

    def is_worth_a_worker(self, stream: StreamBuffer) -> bool:
        """Return whether a worker should follow it, and none does yet."""
        is_alone = not (stream.is_followed or stream.why_spilled or stream.has_ddl) and stream.failure is None
        return is_alone and stream.size_bytes >= self._limits.start_bytes

    def follow(self, stream: StreamBuffer) -> None:
        """Give a stream to a worker, from its beginning."""
        stream.is_followed = True
        stream.todo.extend(stream.blocks)
        stream.todo_bytes = 0

    def abort(self, message: StreamAbort) -> None:
        """Forget a transaction, or the subtransaction that was rolled back."""
        if message.subxid == message.xid:
            self.drop(message.xid)
            return
        stream = self._open.get(message.xid)
        if stream is None or stream.failure is not None or message.subxid not in stream.subs:
            return
        self._cut(stream, *stream.subs[message.subxid])
        if stream.is_followed:
            stream.todo.append(SubAborted(message.subxid))
        stream.news.set()

    def drop(self, xid: int) -> None:
        """Forget a transaction, if it has a stream; a worker that follows it rolls back."""
        stream = self._open.get(xid)
        if stream is None:
            return
        self._forget(stream)
        stream.is_aborted = True
        if not stream.is_followed:
            stream.close()
        stream.news.set()

    def ending(self, event: Transaction) -> StreamBuffer:
        """Return the stream that ends with an event, which may have had no changes; its follower is not notified yet.

        Raises:
            SpillFailed: its changes could not be kept.
        """
        stream = self._open.get(event.xid) or StreamBuffer(event.xid)
        if stream.failure is not None:
            raise SpillFailed(str(stream.failure), hint=stream.failure.hint, end_lsn=event.end_lsn)
        self._open[event.xid] = stream
        return stream

    def take(self, event: Transaction) -> StreamBuffer:
        """Let a stream of `ending` end, and return it."""
        stream = self._open[event.xid]
        self._forget(stream)
        stream.end = event
        stream.news.set()
        return stream

    def close(self) -> None:
        """Forget all: after a reconnect they come again from their beginning (trap T-55)."""
        for stream in self._open.values():
            stream.is_aborted = True
            stream.news.set()
            if not stream.is_followed:
                stream.close()
        self._open.clear()

    def _forget(self, stream: StreamBuffer) -> None:
        self._open.pop(stream.xid, None)
        if not self._open:
            # The next announcement of a stream is later than all of these.
            self._in_force.clear()
        self._memory_bytes -= stream.memory_bytes
        stream.memory_bytes = 0

    async def _to_disk(self, stream: StreamBuffer) -> None:
        """Write the pieces in memory only; keep as many of them there as the worker will soon take."""
        first = len(stream.blocks)
        while first and stream.blocks[first - 1].place is None:
            first -= 1
        try:
            if stream.file is None:
                stream.file = await asyncio.to_thread(self._spill.open, stream.xid)
            for number in range(first, len(stream.blocks)):
                block = stream.blocks[number]
                assert block.piece is not None, "what is not on disk is in memory"
                place = await asyncio.to_thread(stream.file.append, block.piece.changes[: block.n_changes])
                failpoints.probe(failpoints.SPOOLED)
                stream.blocks[number] = block._replace(piece=None, place=place)
                if stream.is_followed:
                    self._hand_over(stream, block._replace(place=place))
        except SpillFailed as error:
            self._fail(stream, error)
        self._memory_bytes -= stream.memory_bytes
        stream.memory_bytes = 0

    def _hand_over(self, stream: StreamBuffer, block: Block) -> None:
        if stream.todo_bytes + block.size_bytes <= self._limits.todo_bytes:
            stream.todo_bytes += block.size_bytes
        else:
            block = block._replace(piece=None)
        stream.todo.append(block)
        stream.news.set()

    def _fail(self, stream: StreamBuffer, error: SpillFailed) -> None:
        """Drop a stream that cannot be kept; everything else continues until its commit."""
        self._log.error("spill_failed", xid=stream.xid, size_bytes=stream.size_bytes, error=str(error), hint=error.hint)
        stream.failure = error
        if not stream.is_followed:
            stream.close()
        stream.news.set()

    def _cut(self, stream: StreamBuffer, number: int, index: int) -> None:
        """Forget the changes from a place on."""
        dropped = stream.blocks[number:]
        kept = []
        if index:
            runs = tuple([run for run in dropped[0].runs if run[0] < index])
            kept = [dropped[0]._replace(runs=runs, n_changes=index)]
        stream.blocks[number:] = kept
        stream.subs = {xid: place for xid, place in stream.subs.items() if place < (number, index)}
        stream.announced = [one for one in stream.announced if one.place < (number, index)]
        gone = dropped[len(kept) :]
        stream.size_bytes -= sum([block.size_bytes for block in gone])
        in_memory = sum([block.size_bytes for block in gone if block.place is None])
        stream.memory_bytes -= in_memory
        self._memory_bytes -= in_memory
        places = [block.place for block in gone if block.place is not None]
        if stream.file is not None and places and not stream.is_followed:
            stream.file.cut(places[0].offset)

"""Transactions in progress: what counts of them at the end, followed or kept, in memory or on disk."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from parapply.errors import SpillFailed
from parapply.model import Column, Relation, Transaction
from parapply.runtime.pool.streams import StreamBuffers, StreamLimits
from parapply.spill import Spill
from parapply.wire.messages import Chunk, StreamAbort
from tests import build
from tests.unit.streams_model import CHANGE_BYTES, XID, Publisher, Subscriber

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LARGE = 1 << 30
ALL_IN_MEMORY = StreamLimits(LARGE, LARGE, LARGE)
ALL_ON_DISK = StreamLimits(0, 0, 0)
LIMITS = (
    ALL_IN_MEMORY,
    ALL_ON_DISK,
    StreamLimits(0, LARGE, LARGE),
    StreamLimits(8 * CHANGE_BYTES, LARGE, 4 * CHANGE_BYTES),
    StreamLimits(12 * CHANGE_BYTES, 5 * CHANGE_BYTES, LARGE),
)
WISHES = ("write", "write", "write", "savepoint", "savepoint", "release", "rollback", "rollback", "chunk", "chunk")
BEHIND = Relation(oid=1, schema="s", name="t", replica_identity="d", columns=())


# Nothing is drawn but a seed, which cannot be made simpler.
@settings(max_examples=8 * settings().max_examples, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(seed=st.integers(0, 1 << 32))
def test_what_was_not_rolled_back_is_applied_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Any tree of subtransactions, cut into chunks anywhere, followed from any point on and given up at any other.

    The applied changes are the ones left on the publisher (trap T-51), and no file stays.
    """
    asyncio.run(_random_transaction(tmp_path_factory.getbasetemp(), random.Random(seed)))


async def _random_transaction(directory: Path, chooser: random.Random) -> None:
    publisher = Publisher()
    piece_bytes = chooser.choice((2, 7, 1000)) * CHANGE_BYTES
    subscriber = Subscriber(directory, chooser.choice(LIMITS), piece_bytes=piece_bytes)
    n_wishes = chooser.randint(10, 80)
    follow_from = chooser.randrange(n_wishes) if chooser.random() < 0.5 else 0
    for number in range(n_wishes):
        frames = publisher.do(chooser.choice(WISHES), chooser.randint(1, 4))
        await subscriber.take(frames, may_follow=number >= follow_from)
        if chooser.random() < 0.5:
            await subscriber.settle()
        if chooser.random() < 0.005:
            subscriber.yield_to_others()
        if chooser.random() < 0.005:
            subscriber.refuse()
    if chooser.random() < 0.1:
        await subscriber.close()
    else:
        await subscriber.take(publisher.end(), may_follow=False)
        assert await subscriber.end(Transaction(XID, 0, 0)) == publisher.changes
    assert len(subscriber.streams) == 0
    assert subscriber.spill.used_bytes == 0


def _piece(*changes: bytes | Relation) -> Transaction:
    piece = Transaction(XID, 0, 0)
    piece.changes = list(changes)
    piece.relations = [change for change in changes if isinstance(change, Relation)]
    piece.size_bytes = len(changes) * CHANGE_BYTES
    return piece


def _row(number: int) -> bytes:
    return build.xlog_data(build.insert(build.row(build.text(b"%d" % number))))


@pytest.mark.parametrize("limits", [ALL_IN_MEMORY, ALL_ON_DISK], ids=["memory", "disk"])
async def test_t52_what_was_announced_in_a_rolled_back_subtransaction_is_forgotten(
    tmp_path: Path, limits: StreamLimits
) -> None:
    """The publisher sends it again if it is needed (trap T-52)."""
    streams = StreamBuffers(Spill(tmp_path, LARGE), limits)
    kept = Relation(oid=1, schema="s", name="kept", replica_identity="d", columns=())
    chunk = Chunk(xid=XID, runs=((0, XID), (2, 701)))
    stream = await streams.add(_piece(kept, _row(1), BEHIND, _row(2)), chunk, 0)
    await streams.add(_piece(BEHIND, _row(3)), Chunk(xid=XID, runs=((0, 701),)), 0)
    assert stream.relations == [kept, BEHIND, BEHIND]
    streams.abort(StreamAbort(xid=XID, subxid=701, abort_lsn=None, abort_time_us=None))
    assert stream.relations == [kept]
    streams.close()


@settings(deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(seed=st.integers(0, 1 << 32))
def test_the_announcement_in_force_is_the_publishers(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Whatever changes a table's columns or name, and however streams end, nothing is read by an older announcement."""
    asyncio.run(_random_announcements(tmp_path_factory.getbasetemp(), random.Random(seed)))


class _Entry:
    """Of a table in the publisher's cache. Source: PostgreSQL, pgoutput.c, `RelationSyncEntry`."""

    def __init__(self, oid: int) -> None:
        self.relation = Relation(oid=oid, schema="s", name=str(oid), replica_identity="d", columns=())
        self.schema_sent = False
        self.streamed_txns: set[int] = set()

    def alter(self, name: str, version: int) -> None:
        """Invalidate it, because the table has got other columns or another name."""
        column = Column(is_key=False, name=str(version), type_oid=23, type_modifier=-1)
        self.relation = msgspec.structs.replace(self.relation, name=name, columns=(column,))
        self.schema_sent = False
        self.streamed_txns.clear()


class _Announcing:
    """A publisher of two tables with transactions in progress, and what is in force for its subscriber."""

    def __init__(self, directory: Path, chooser: random.Random) -> None:
        self._streams = StreamBuffers(Spill(directory, LARGE), ALL_IN_MEMORY)
        self._chooser = chooser
        self._entries = [_Entry(oid) for oid in (1, 2)]
        self.xids: list[int] = []
        self._in_force: dict[int, Relation] = {}

    def alter(self, number: int) -> None:
        """Give a table other columns, and perhaps a name that is free."""
        entry = self._chooser.choice(self._entries)
        free = {"1", "2", "3"} - {one.relation.name for one in self._entries}
        entry.alter(self._chooser.choice([entry.relation.name, *sorted(free)]), number)

    def change(self) -> None:
        """Change a row in a transaction that comes whole."""
        entry = self._chooser.choice(self._entries)
        if not entry.schema_sent:
            self._streams.announce([entry.relation])
            self._announce([entry.relation])
            entry.schema_sent = True
        assert self._in_force[entry.relation.oid] == entry.relation

    async def stream(self, number: int) -> None:
        """Change a row in a transaction in progress."""
        entry = self._chooser.choice(self._entries)
        xid = self._chooser.choice([*self.xids, 100 + number])
        if xid not in self.xids:
            self.xids.append(xid)
        if xid not in entry.streamed_txns:
            await self._streams.add(_piece(entry.relation), Chunk(xid=xid, runs=((0, xid),)), 0)
            entry.streamed_txns.add(xid)

    def end(self) -> None:
        """Commit a transaction in progress, or roll it back."""
        xid = self.xids.pop(self._chooser.randrange(len(self.xids)))
        is_commit = self._chooser.random() < 0.7
        for one in self._entries:
            one.schema_sent |= is_commit and xid in one.streamed_txns
            one.streamed_txns.discard(xid)
        if is_commit:
            own, others = self._streams.comes_in_force(self._streams.ending(Transaction(xid, 0, 0)))
            self._announce([*own, *others])
        self._streams.drop(xid)

    def _announce(self, relations: Sequence[Relation]) -> None:
        self._in_force.update({one.oid: one for one in relations})
        last = {one.full_name: one.oid for one in relations}
        self._in_force = {oid: one for oid, one in self._in_force.items() if last.get(one.full_name, oid) == oid}


async def _random_announcements(directory: Path, chooser: random.Random) -> None:
    publisher = _Announcing(directory, chooser)
    for number in range(chooser.randint(5, 40)):
        wish = chooser.choice(("alter", "change", "change", "stream", "stream", "end"))
        if wish == "alter":
            publisher.alter(number)
        elif wish == "change":
            publisher.change()
        elif wish == "stream":
            await publisher.stream(number)
        elif publisher.xids:
            publisher.end()


async def test_f21_what_cannot_be_kept_fails_at_its_end_and_not_before(tmp_path: Path) -> None:
    """The limit drops one transaction, whose end fails; it takes no room any more, and others go on (fault F21)."""
    spill = Spill(tmp_path, 1000)
    streams = StreamBuffers(spill, ALL_ON_DISK)
    await streams.add(_piece(_row(1)), Chunk(xid=1, runs=((0, 1),)), 0)
    for _ in range(2):
        await streams.add(_piece(_row(2) * 20), Chunk(xid=2, runs=((0, 2),)), 0)
    used_bytes = spill.used_bytes
    with pytest.raises(SpillFailed, match="spill_limit_bytes"):
        streams.ending(Transaction(2, 0, 0))
    assert 0 < used_bytes < 200
    assert streams.ending(Transaction(1, 0, 0)).size_bytes == CHANGE_BYTES
    streams.close()
    assert spill.used_bytes == 0


async def test_f21_what_was_rolled_back_need_not_be_kept(tmp_path: Path) -> None:
    """A transaction that could not be kept, and is rolled back on the publisher, has no effect (fault F21)."""
    streams = StreamBuffers(Spill(tmp_path, 100), ALL_ON_DISK)
    await streams.add(_piece(_row(2) * 20), Chunk(xid=2, runs=((0, 2),)), 0)
    streams.abort(StreamAbort(xid=2, subxid=2, abort_lsn=None, abort_time_us=None))
    assert len(streams) == 0


async def test_f21_a_part_of_what_cannot_be_kept_may_be_rolled_back(tmp_path: Path) -> None:
    """A subtransaction of it that is rolled back afterwards changes nothing: the end fails (fault F21)."""
    streams = StreamBuffers(Spill(tmp_path, 1000), ALL_ON_DISK)
    await streams.add(_piece(_row(1), _row(2)), Chunk(xid=2, runs=((0, 2), (1, 701))), 0)
    for _ in range(2):
        await streams.add(_piece(_row(2) * 20), Chunk(xid=2, runs=((0, 701),)), 0)
    streams.abort(StreamAbort(xid=2, subxid=701, abort_lsn=None, abort_time_us=None))
    with pytest.raises(SpillFailed, match="spill_limit_bytes"):
        streams.ending(Transaction(2, 0, 0))
    streams.close()


async def test_many_small_ones_take_no_more_memory_than_they_may(tmp_path: Path) -> None:
    """Each is small, all together are not: the ones that grow go to disk (fault F36)."""
    spill = Spill(tmp_path, LARGE)
    streams = StreamBuffers(spill, StreamLimits(LARGE, 10 * CHANGE_BYTES, LARGE))
    held = []
    for xid in range(1, 41):
        stream = await streams.add(_piece(_row(xid)), Chunk(xid=xid, runs=((0, xid),)), 0)
        held.append(stream)
    assert sum(stream.memory_bytes for stream in held) <= 10 * CHANGE_BYTES
    streams.close()
    assert spill.used_bytes == 0


async def test_the_abort_of_what_was_never_streamed_is_nothing(tmp_path: Path) -> None:
    """PostgreSQL 18.4 sends a Stream Abort for a subtransaction of what it found rolled back, asked to stream or not.

    The apply worker of the built-in subscription ends there with a segmentation fault.
    """
    streams = StreamBuffers(Spill(tmp_path, LARGE), ALL_ON_DISK)
    await streams.add(_piece(_row(1)), Chunk(xid=1, runs=((0, 1),)), 0)
    for xid, subxid in ((2, 3), (2, 2), (1, 4)):
        streams.abort(StreamAbort(xid=xid, subxid=subxid, abort_lsn=None, abort_time_us=None))
    assert streams.ending(Transaction(1, 0, 0)).size_bytes == CHANGE_BYTES
    streams.close()

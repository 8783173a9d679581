"""The frames of a capture, as a publisher would send them from an LSN on: the same messages, nothing that ended before.

Files are read by a task of the daemon's, a block at a time; intake takes what is at hand as it takes it from a socket.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from parapply.capture import folder as folders
from parapply.capture.blocks import KIND, XID, BlockKind
from parapply.capture.recorder import abort_frame
from parapply.model import POSTGRES_EPOCH_US
from parapply.source.history import end_of
from parapply.source.slot import SourcePosition
from parapply.vocabulary import Reading
from parapply.wire.copy import Keepalive
from parapply.wire.decode import decode
from parapply.wire.messages import (
    BeginPrepare,
    Commit,
    CommitPrepared,
    Prepare,
    RollbackPrepared,
    StreamCommit,
    StreamPrepare,
)
from parapply.wire.partitions import FramedPartitions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from parapply.capture.blocks import CapturedBlock, FrameGroup
    from parapply.capture.lateness import Lateness

#: Bytes of frames that are read before intake has taken any.
_HELD_BYTES: Final = 16 * 1024 * 1024
_BEGIN_LSN: Final = slice(KIND.stop, KIND.stop + 8)
_OID: Final = XID  # of an announcement without xid
_SUB_XID: Final = slice(XID.stop, XID.stop + 4)
#: Blocks whose frames came, also those that the capture made.
WITH_FRAMES: Final = frozenset({BlockKind.FRAMES, BlockKind.RESUMED})


class Read(NamedTuple):
    """A capture to be read."""

    folder: Path
    places: Sequence[CapturedBlock]  # of all blocks up to the last moment between transactions
    is_parallel: bool  # streaming was 'parallel'
    speed: float  # 1.0: as it came; infinity: as fast as it goes
    until_lsn: int  # end of the last transaction that is read

    @property
    def begin_lsn(self) -> int:
        """Return where its slot began; 0: without blocks."""
        return folders.begin_lsn(self.places)


class After:
    """Leaves out transactions that ended up to an LSN, as a publisher does. Announcements stay, streams abort.

    For the publisher the announcement holds that it sent last, once the transaction that has it ends. One that came to
    hold by something that is left out is handed on before the next transaction begins.

    A late transaction was prepared before the slot began: it is sent together with its COMMIT PREPARED, and ends there
    (trap T-58). Up to then it is held in memory, whatever its size, unless it was streamed.
    """

    def __init__(self, lsn: int, *, begin_lsn: int, is_parallel: bool) -> None:
        self._lsn = lsn
        self._begin_lsn = begin_lsn
        self._is_parallel = is_parallel
        self._is_over = False
        self._is_left_out = False
        #: Inside a transaction, not a streamed one, that is handed on.
        self._is_inside = False
        #: Announcements in streamed transactions that are open; and the xid of the one that is being sent, 0: none.
        self._announced: dict[int, list[tuple[int, bytes]]] = {}
        self._xid = 0
        #: Number of announcements, and how many there were when some were last handed on behind their place.
        self._n_announced = self._n_moved = 0
        #: By OID, the number of the announcement that holds; and those, with it, that are to come before the next
        #: transaction begins.
        self._in_force: dict[bytes, int] = {}
        self._due: dict[bytes, tuple[int, bytes]] = {}
        #: As in transactions that are left out, and at the beginning of a file.
        self._partitions = FramedPartitions()
        #: Frames from the beginning or the PREPARE of a late transaction on; and the end of the last one that was late.
        self._late: list[bytes] = []
        self._late_lsn = 0
        #: End of the last transaction that was seen.
        self.end_lsn = lsn

    def take(self, frames: Sequence[bytes]) -> list[bytes]:
        """Return the frames to hand on; raise ProtocolError if a frame cannot be read."""
        kept: list[bytes] = []
        for frame in self._decided(frames):
            kind = frame[KIND]
            if kind in _BEGINS:
                self._partitions.near.clear()
            if kind in _ENDS:
                kept += self._end(kind, frame)
            elif kind in _IN_STREAMS:
                kept += self._note(kind, frame)
            elif self._is_left_out:
                # A type is announced between two tables.
                if self._partitions.near and kind in _ROWS:
                    self._partitions.meet(0 if kind == b"T" else int.from_bytes(frame[_OID]), is_change=True)
            elif kind != b"B":
                kept.append(frame)
            elif self._is_over or int.from_bytes(frame[_BEGIN_LSN]) >= self._lsn:
                kept += self._begin(frame)
            else:
                self._is_left_out = True
        return kept

    def _decided(self, frames: Sequence[bytes]) -> Iterator[bytes]:
        """Yield frames, but hold a late transaction until its end is known."""
        for frame in frames:
            kind = frame[KIND]
            if kind in _PREPARES and not (self._late and kind == b"P"):
                message = decode(frame[KIND.start :])
                assert isinstance(message, BeginPrepare | Prepare | StreamPrepare), "by its kind"
                if message.end_lsn <= self._begin_lsn:
                    # It comes again if a capture was killed before its outcome, which counts then for this one.
                    yield from self._release(0)
                    self._late.append(frame)
                    continue
            if not self._late:
                yield frame
                continue
            self._late.append(frame)
            if kind == b"K":
                yield from self._release(end_of(frame[KIND.start :])[0])

    def _release(self, end_lsn: int) -> list[bytes]:
        late, self._late, self._late_lsn = self._late, [], end_lsn
        return late

    def _note(self, kind: bytes, frame: bytes) -> list[bytes]:
        if kind == b"S":
            self._xid = int.from_bytes(frame[XID])
        elif kind == b"E":
            self._xid = 0
        elif kind == b"A":
            if frame[XID] == frame[_SUB_XID]:
                self._announced.pop(int.from_bytes(frame[XID]), None)
        elif self._xid:
            self._n_announced += 1
            # Without the xid that it has there.
            bare = frame[: XID.start] + frame[XID.stop :]
            self._announced.setdefault(self._xid, []).append((self._n_announced, bare))
        else:
            self._n_announced += 1
            if not self._is_inside:
                self._partitions.meet(int.from_bytes(frame[_OID]), is_change=False)
            self._put_in_force(self._n_announced, frame, is_due=not self._is_inside)
            return [frame] if self._is_inside else []
        return [frame]

    def _put_in_force(self, number: int, frame: bytes, *, is_due: bool) -> None:
        oid = frame[_OID]
        if number > self._in_force.get(oid, 0):
            self._in_force[oid] = number
            self._due.pop(oid, None)
            if is_due:
                self._due[oid] = number, frame

    def _begin(self, frame: bytes) -> list[bytes]:
        due, self._due = sorted(self._due.values()), {}
        if due:
            self._n_moved = self._n_announced
        self._is_inside = True
        return [*self._partitions.in_order({int.from_bytes(one[_OID]): one for _, one in due}), frame]

    def _end(self, kind: bytes, frame: bytes) -> list[bytes]:
        message = decode(frame[KIND.start :])
        if isinstance(message, RollbackPrepared):
            end_lsn = message.rollback_end_lsn
            self._announced.pop(message.xid, None)
        else:
            assert isinstance(
                message, BeginPrepare | Commit | CommitPrepared | Prepare | StreamCommit | StreamPrepare
            ), "these have an end"
            end_lsn = message.end_lsn if message.end_lsn > self._begin_lsn else self._late_lsn
        is_handed_on = end_lsn > self._lsn
        # The stream of a late one that is rolled back has no other end.
        xid = message.xid if isinstance(message, StreamCommit | StreamPrepare | RollbackPrepared) else 0
        for number, bare in self._announced.pop(xid, []):
            # The one that was handed on behind its place would hold where this is the later one.
            self._put_in_force(number, bare, is_due=not is_handed_on or number <= self._n_moved)
        self._is_inside = False
        self._is_left_out = kind == b"b" and not is_handed_on
        if not is_handed_on:
            return [abort_frame(xid, end_lsn, is_parallel=self._is_parallel)] if xid else []
        self._is_over = True
        if kind == b"b":
            return self._begin(frame)
        self.end_lsn = end_lsn
        return [frame]


_BEGINS: Final = frozenset({b"B", b"b"})
_ROWS: Final = frozenset({b"I", b"U", b"D", b"T"})
_IN_STREAMS: Final = frozenset({b"S", b"E", b"A", b"R"})
_PREPARES: Final = frozenset({b"b", b"P", b"p"})
_ENDS: Final = frozenset({b"C", b"c", b"K", b"r", *_PREPARES})


def first_place(places: Sequence[CapturedBlock], lsn: int) -> int:
    """Return the index of the block to begin with: of the last file that no earlier transaction reaches into."""
    found = 0
    for index, place in enumerate(places):
        header = place.header
        if header.kind is BlockKind.HEAD and header.end_lsn <= lsn and not header.n_open and header.is_between:
            found = index
    return found


class CapturedStream:
    """One reading of a capture. Only the leader uses it; the methods without a word are as of `SlotStream`."""

    def __init__(self, read: Read, lateness: Lateness) -> None:
        self._read = read
        self._lateness = lateness
        self._loop = asyncio.get_running_loop()
        self._held: deque[tuple[list[bytes], int] | Keepalive] = deque()
        self._held_bytes = 0
        self._has_room = asyncio.Event()
        self._on_readable: Callable[[], None] | None = None
        self._is_calling = False
        self._after = After(0, begin_lsn=0, is_parallel=read.is_parallel)
        #: Beginning of the pace: by the loop's clock, and as arrival.
        self._begun_s = 0.0
        self._begun_us = 0
        self._arrived_us = 0
        self._given_lsn = 0
        #: Everything is held or taken.
        self._has_ended = False
        self.keepalive: Keepalive | None = None
        self.is_synchronous = False
        self.reading = Reading.STREAM
        self.reason = "from a capture"
        self.confirmed_flush_lsn = 0
        self.sender_pid = 0
        self.standby_name = ""
        self.gathers = False

    def begin(self, lsn: int) -> None:
        """Leave out all that ends up to an LSN."""
        self._after = After(lsn, begin_lsn=self._read.begin_lsn, is_parallel=self._read.is_parallel)
        self._given_lsn = self.confirmed_flush_lsn = lsn

    @property
    def shown(self) -> str:
        """Return how it is read, for people."""
        return self.reason

    def reading_of(self, end_lsn: int) -> Reading:  # noqa: ARG002  all is read in one way
        """Return how a transaction was read."""
        return self.reading

    @property
    def is_drained(self) -> bool:
        """Return whether nothing is at hand."""
        return not self._held

    @property
    def waiting_bytes(self) -> int:
        """Return the number of bytes at hand."""
        return self._held_bytes

    async def position(self) -> SourcePosition:
        """Return where a publisher would be now: without a pace it has written everything from the beginning."""
        now_us = self._arrived_us or time.time_ns() // 1000
        if self._begun_s and self._read.speed < float("inf"):
            now_us = self._begun_us + int((self._loop.time() - self._begun_s) * self._read.speed * 1e6)
        clock_us = now_us - POSTGRES_EPOCH_US
        has_all = self._read.speed == float("inf") and not self._has_ended
        flush_lsn = max(self._given_lsn, self._read.until_lsn) if has_all else self._given_lsn
        return SourcePosition(
            clock_us=clock_us, passed_us=clock_us, flush_lsn=flush_lsn, insert_lsn=self._given_lsn,
            standby_names="", timeline=1,
        )  # fmt: skip

    async def run(self) -> None:
        """Read the files to their end, and wait to be cancelled.

        Raises:
            CaptureRefused: a block is not what was written.
        """
        places = self._read.places
        first = first_place(places, self._given_lsn)
        for place in places[first:]:
            if self._given_lsn >= self._read.until_lsn:
                break
            kind = place.header.kind
            is_first = kind is BlockKind.RELATIONS and place.file == places[first].file
            if kind in WITH_FRAMES or is_first:
                _, groups = await asyncio.to_thread(folders.groups, self._read.folder, place)
                for group in groups:
                    if self._given_lsn < self._read.until_lsn:
                        await self._give(group)
            elif kind is BlockKind.POSITION and place.header.end_lsn > self._given_lsn:
                self._given_lsn = place.header.end_lsn
                self._hold(self._position_frame())
        self._has_ended = True
        self._hold(self._position_frame())
        await asyncio.Event().wait()

    async def _give(self, group: FrameGroup) -> None:
        before_lsn = self._after.end_lsn
        frames = self._after.take(group.frames)
        if not frames:
            return
        due_s = await self._due(group.arrival_us)
        while self._held_bytes >= _HELD_BYTES:
            self._has_room.clear()
            await self._has_room.wait()
        self._arrived_us = max(self._arrived_us, group.arrival_us)
        if self._after.end_lsn > before_lsn:
            self._given_lsn = max(self._given_lsn, self._after.end_lsn)
            self._lateness.given(self._after.end_lsn, group.arrival_us, due_s)
        n_bytes = sum(map(len, frames))
        self._held_bytes += n_bytes
        self._hold((frames, n_bytes))

    async def _due(self, arrival_us: int) -> float:
        """Wait until frames are due, and return when they were."""
        if self._read.speed == float("inf"):
            return self._loop.time()
        if not self._begun_s:
            self._begun_s, self._begun_us = self._loop.time(), arrival_us
        due_s = self._begun_s + (arrival_us - self._begun_us) / 1e6 / self._read.speed
        if due_s > self._loop.time():
            await asyncio.sleep(due_s - self._loop.time())
        return due_s

    def _position_frame(self) -> Keepalive:
        return Keepalive(end_lsn=self._given_lsn, send_time_us=0, reply_requested=False)

    def _hold(self, item: tuple[list[bytes], int] | Keepalive) -> None:
        self._held.append(item)
        self._call()

    def resume_reading(self, on_readable: Callable[[], None]) -> None:
        """Call whenever something is at hand."""
        self._on_readable = on_readable
        self._call()

    def pause_reading(self) -> None:
        """Stop calling."""
        self._on_readable = None

    def _call(self) -> None:
        # In the next round, as a socket's descriptor does.
        if self._held and self._on_readable is not None and not self._is_calling:
            self._is_calling = True
            self._loop.call_soon(self._called)

    def _called(self) -> None:
        self._is_calling = False
        if self._held and self._on_readable is not None:
            self._on_readable()

    def drain(self, limit_bytes: int) -> list[bytes]:
        """Return frames at hand; a position comes after all that was before it."""
        found: list[bytes] = []
        size = 0
        while self._held and size < limit_bytes:
            item = self._held.popleft()
            if isinstance(item, Keepalive):
                self.keepalive = item
                break
            found += item[0]
            size += item[1]
        self._held_bytes -= size
        self._has_room.set()
        self._call()
        return found

    @property
    def gap_lsn(self) -> int | None:
        """Return nothing: a capture has no gap."""
        return None

    def forget_gap(self, lsn: int) -> None:
        """See `SlotStream`."""

    def send_status(
        self,
        written_lsn: int,  # noqa: ARG002  only the applied LSN counts
        flushed_lsn: int,
        applied_lsn: int,
        *,
        reply_requested: bool = False,
    ) -> None:
        """Take how far all is applied, and answer if that is asked for."""
        self.confirmed_flush_lsn = max(self.confirmed_flush_lsn, flushed_lsn)
        self._lateness.applied(applied_lsn, self._loop.time())
        # With frames at hand their own position follows.
        if reply_requested and not self._held:
            self._hold(self._position_frame())

    async def close(self) -> None:
        """Hold nothing any more."""
        self.pause_reading()
        self._held.clear()

"""A capture that is read from an LSN on: what a publisher would send again comes, and nothing that ended before."""

from __future__ import annotations

import asyncio
import math
from itertools import permutations
from typing import TYPE_CHECKING, cast

import pytest

from parapply.capture.arrivals import Arrivals
from parapply.capture.blocks import BlockKind, CaptureStart
from parapply.capture.folder import CaptureLimits, CaptureWriter
from parapply.capture.lateness import Late, Lateness
from parapply.capture.recorder import Recorder
from parapply.capture.replay import CapturedConnector
from parapply.capture.stream import After, CapturedStream, Read
from parapply.config import Config
from parapply.errors import CaptureRefused
from parapply.model import FRAME_HEADER_BYTES, Relation, Transaction
from parapply.runtime.shares import share_of
from parapply.wire.assembler import Assembler
from parapply.wire.messages import (
    BeginPrepare,
    Chunk,
    CommitPrepared,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
)
from parapply.wire.partitions import FramedPartitions
from tests import build
from tests.fixtures.recorded import STREAMS, frames_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from parapply.source.slot import Connection

_ENDS = (CommitPrepared, Prepare, RollbackPrepared, StreamCommit, StreamPrepare)


def _read(frames: list[bytes]) -> list[Transaction]:
    return Assembler(1 << 30, streaming_parallel=True).push(frames)


def _end_of(one: Transaction) -> int:
    """Return where it ends, 0 for a chunk, an abort, or a part."""
    return one.end_lsn if one.event is None or isinstance(one.event, _ENDS) else 0


def _rows(one: Transaction) -> list[bytes]:
    return [change for change in one.changes if isinstance(change, bytes)]


@pytest.mark.parametrize("name", STREAMS)
def test_whatever_ended_before_does_not_come(name: str) -> None:
    """From each end on: the later ends come, with the same rows, the earlier ones do not."""
    frames = list(frames_of(name))
    whole = _read(frames)
    ends = sorted({_end_of(one) for one in whole} - {0})
    assert len(ends) >= 3
    for lsn in [0, *ends]:
        after = After(lsn, begin_lsn=0, is_parallel=True)
        kept = _read(after.take(frames))
        found = [(_end_of(one), _rows(one)) for one in kept if _end_of(one)]
        assert found == [(_end_of(one), _rows(one)) for one in whole if _end_of(one) > lsn]
        assert after.end_lsn == max(ends)


@pytest.mark.parametrize("name", STREAMS)
def test_every_announcement_stays(name: str) -> None:
    """A table that was announced in something that is left out is known all the same, as the publisher counts on."""
    frames = list(frames_of(name))
    last = max(_end_of(one) for one in _read(frames))
    # One more transaction behind all that is left out carries the announcements that stand outside.
    begin = next(frame for frame in frames_of("whole") if frame[FRAME_HEADER_BYTES : FRAME_HEADER_BYTES + 1] == b"B")
    at = FRAME_HEADER_BYTES + 1
    end = begin[:FRAME_HEADER_BYTES] + b"C\0" + (last + 8).to_bytes(8) + (last + 16).to_bytes(8) + bytes(8)
    more = [begin[:at] + (last + 8).to_bytes(8) + begin[at + 8 :], end]
    known = {one for transaction in _read(frames) for one in transaction.changes if isinstance(one, Relation)}
    *_, latest = _read(After(last, begin_lsn=0, is_parallel=True).take([*frames, *more]))
    there = {one for one in latest.changes if isinstance(one, Relation)}
    assert {one.full_name for one in there} == {one.full_name for one in known}


def _relation(column: str, xid: int | None = None) -> bytes:
    return build.relation(build.ColumnSpec(column), xid=xid)


def _frames(words: Sequence[str]) -> list[bytes]:
    """Return the frames of streams that announce (7), commit (c7) or abort (A7), and of whole transactions."""
    messages = []
    for number, word in enumerate(words):
        begin, end = 10 * number + 10, 10 * number + 15
        xid = int(word[-1]) if word[-1].isdigit() else 1
        match word[0]:
            case "c":
                messages.append(build.stream_commit(xid=xid, commit_lsn=begin, end_lsn=end))
            case "A":
                messages.append(build.stream_abort_parallel(xid=xid, subxid=xid))
            case "B" | "K" | "R":
                announced = [_relation(word)] if word != "B" else []
                commit = build.commit(commit_lsn=begin, end_lsn=end)
                messages += [build.begin(final_lsn=begin), *announced, commit]
            case _:
                messages += [build.stream_start(xid=xid), _relation(word, xid), build.stream_stop()]
    return [build.xlog_data(one) for one in messages]


def _in_force(frames: list[bytes]) -> dict[int, str]:
    """Return the column of the table as it is in force for each transaction but streams, by end: the last one sent."""
    found: dict[int, str] = {}
    open_streams: dict[int, tuple[int, str]] = {}
    latest = (0, "")
    for number, one in enumerate(_read(frames), 1):
        columns = [change.columns[0].name for change in one.changes if isinstance(change, Relation)]
        if isinstance(one.event, Chunk):
            open_streams[one.xid] = (number, columns[-1])
        elif isinstance(one.event, StreamAbort):
            del open_streams[one.xid]
        elif isinstance(one.event, StreamCommit):
            latest = max(latest, open_streams.pop(one.xid))
        else:
            latest = (number, columns[-1]) if columns else latest
            found[one.end_lsn] = latest[1]
    return found


@pytest.mark.parametrize("ends", [("c7", "c8"), ("c7", "A8"), ("A7", "c8")])
def test_an_announcement_comes_in_force_as_if_nothing_was_left_out(ends: tuple[str, str]) -> None:
    """Whatever overlaps, and from each end on: neither is the last one missing, nor does an older one replace it."""
    for words in permutations(["7", "8", *ends, "R", "B"]):
        if words.index("7") > words.index(ends[0]) or words.index("8") > words.index(ends[1]):
            continue
        frames = _frames(["K", *words, "B"])
        whole = _in_force(frames)
        for lsn in range(15, 10 * len(words) + 25, 10):
            # Of the first one a file has only what it announced.
            left = _in_force(After(lsn, begin_lsn=0, is_parallel=True).take([frames[1], *frames[3:]]))
            assert left == {end: column for end, column in whole.items() if end > lsn}, (words, lsn)


def _of(oid: int, identity: str, *keys: str) -> bytes:
    columns = [build.ColumnSpec(name, flags=int(name in keys)) for name in ("a", "b")]
    return build.xlog_data(build.relation(*columns, oid=oid, name=f"t{oid}", replica_identity=identity))


def _root_of(frames: list[bytes]) -> list[tuple[str, list[str]]]:
    """Return identity and key of the root as the last transaction has it, as often as it is announced there."""
    roots = [one for one in _read(frames)[-1].relations if one.oid == 1]
    return [(one.replica_identity, [column.name for column in one.columns if column.is_key]) for one in roots]


def test_a_root_keeps_what_old_rows_of_its_partitions_hold() -> None:
    """Where the change is left out that showed them, and in a later file, whose head has the announcements (T-28)."""
    insert = build.xlog_data(build.insert(build.row(build.null(), build.null()), oid=1))
    begins = [build.xlog_data(build.begin(final_lsn=lsn)) for lsn in (100, 200, 300)]
    ends = [build.xlog_data(build.commit(commit_lsn=lsn, end_lsn=lsn + 10)) for lsn in (100, 200, 300)]
    root = _of(1, "f", "a", "b")
    # Before each table that has a column of it.
    mood = build.xlog_data(build.type_())
    first = [begins[0], _of(7, "f", "a", "b"), _of(8, "d", "a"), mood, root, mood, _of(2, "d", "a"), insert]
    first += [root, _of(3, "f", "a", "b"), insert, ends[0]]
    last = [begins[1], insert, ends[1]]
    held = ("d", ["a"])
    after = After(110, begin_lsn=0, is_parallel=False)
    assert _root_of(after.take([*first, *last])) == [held]
    # Known for good, also where the root is announced again behind that.
    again = [begins[2], root, _of(3, "f", "a", "b"), insert, ends[2]]
    after = After(110, begin_lsn=0, is_parallel=False)
    assert _root_of(after.take([*first, *last, *again])) == [held]
    # As the head of a file has them, in the order of which a reader learns as much.
    partitions = FramedPartitions()
    for oid in (7, 8, 1, 2):
        partitions.meet(oid, is_change=False)
    partitions.meet(1, is_change=True)
    head = partitions.in_order({7: _of(7, "f", "a", "b"), 1: root, 8: _of(8, "d", "a"), 2: _of(2, "d", "a")})
    after = After(110, begin_lsn=0, is_parallel=False)
    assert _root_of(after.take([*head, *last])) == [held]
    # A table next to it is no partition.
    prepared = [build.begin_prepare(prepare_lsn=50, end_lsn=60), build.prepare(prepare_lsn=50, end_lsn=60)]
    for begin, end in ((begins[0], ends[0]), _wire(prepared)):
        after = After(110, begin_lsn=0, is_parallel=False)
        assert _root_of(after.take([root, _of(8, "d", "a"), begin, insert, end, *last])) == [("f", ["a", "b"])]


def test_a_transaction_without_room_is_refused_only_if_nothing_was_applied_in_between(tmp_path: Path) -> None:
    """Neither is one whose failure had another cause, so that it names no end."""
    start = CaptureStart(
        version="", server_version_num=180000, system_identifier="1", timeline=1, database="", slot="s", is_kept=True,
        publications=(), operations=(), options={}, settings={},
    )  # fmt: skip
    read = Read(folder=tmp_path, places=(), is_parallel=True, speed=1.0, until_lsn=90)
    connector = CapturedConnector(
        Config(), share_of(Config().apply), start=start, read=read, lateness=Lateness(is_paced=True), tables=()
    )
    for connector._low_lsn in (10, 20):
        for end_lsn in (50, 0, 0, 60):
            connector.take_whole(end_lsn)
    with pytest.raises(CaptureRefused, match="over and over"):
        connector.take_whole(50)


@pytest.mark.parametrize(("speed", "flush_lsn"), [(1.0, 10), (math.inf, 90)])
async def test_a_replay_without_a_pace_is_behind_all_of_the_capture(
    tmp_path: Path, speed: float, flush_lsn: int
) -> None:
    """So its report names the reader where that limits; with a pace what is not due yet is not late."""
    read = Read(folder=tmp_path, places=(), is_parallel=True, speed=speed, until_lsn=90)
    stream = CapturedStream(read, Lateness(is_paced=speed == 1.0))
    stream.begin(10)
    assert (await stream.position()).flush_lsn == flush_lsn
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(stream.run())
        at_hand = asyncio.Event()
        stream.resume_reading(at_hand.set)
        await at_hand.wait()
        reading.cancel()
    assert (await stream.position()).flush_lsn == 10


def test_lateness_of_a_pace_is_the_time_since_it_was_due() -> None:
    """Each end is late by the time from when it was due to when it was applied, and the worst moment is named."""
    late = Lateness(is_paced=True)
    late.given(10, 60_000_000, 100.0)
    late.given(20, 61_000_000, 101.0)
    late.given(30, 120_000_000, 160.0)
    late.applied(5, 100.5)
    late.applied(20, 103.5)
    late.applied(30, 160.25)
    assert late.result == Late(most_s=3.5, most_at_us=60_000_000, minutes={1: 3.5, 2: 0.25})


def test_lateness_of_a_run_without_a_pace_is_that_of_a_queue() -> None:
    """Work that took longer than the stream took to come makes the rest late, until the stream pauses."""
    late = Lateness(is_paced=False)
    for number in range(4):
        late.given(number + 1, number * 1_000_000, 50.0)
    late.given(5, 600_000_000, 50.0)
    for number in range(5):
        late.applied(number + 1, 50.0 + 2.0 * (number + 1))
    # Two seconds of work each, one second apart: 2, 3, 4, 5 seconds late; the last one found the queue empty.
    assert late.result == Late(most_s=5.0, most_at_us=3_000_000, minutes={0: 5.0, 10: 2.0})
    assert late.result.joined(Late(most_s=1.0, minutes={0: 6.0})).minutes == {0: 6.0, 10: 2.0}


def test_a_message_between_begin_and_end_of_a_prepared_one_is_left_out() -> None:
    """A prepared transaction that ended before is left out whole, and no event of it comes."""
    frames = list(frames_of("whole"))
    prepared = [one for one in _read(frames) if isinstance(one.event, Prepare | BeginPrepare)]
    assert prepared
    lsn = max(one.end_lsn for one in prepared)
    left = [
        one for one in _read(After(lsn, begin_lsn=0, is_parallel=True).take(frames)) if isinstance(one.event, Prepare)
    ]
    assert [one.end_lsn for one in left if one.end_lsn <= lsn] == []


_CHANGES = [build.insert(build.row(build.text(b"x"))), build.insert(build.row(build.text(b"y")))]
#: Prepared from 900 to 950, before the slot began at 1000, and committed from 1100 to 1150: whole, and streamed.
_LATE = {
    "whole": [
        build.begin_prepare(prepare_lsn=900, end_lsn=950),
        *_CHANGES,
        build.prepare(prepare_lsn=900, end_lsn=950),
    ],
    "streamed": [
        build.stream_start(xid=700),
        *[build.insert(build.row(build.text(value)), xid=700) for value in (b"x", b"y")],
        build.stream_stop(),
        build.stream_prepare(prepare_lsn=900, end_lsn=950),
    ],
}
_DECIDED = build.commit_prepared(commit_lsn=1100, end_lsn=1150)


def _wire(messages: Sequence[bytes]) -> list[bytes]:
    return [build.xlog_data(one) for one in messages]


@pytest.mark.parametrize("way", _LATE)
def test_whatever_was_prepared_before_the_slot_began_ends_with_its_commit(way: str) -> None:
    """It comes as the publisher sends it, however the frames are divided, or not at all (trap T-58).

    A capture that was killed between its PREPARE and its commit may have it twice.
    """

    def seen(frames: Sequence[bytes]) -> list[tuple[str, int, int]]:
        whole = Assembler(1 << 30, streaming_parallel=True, start_lsn=1000).push(frames)
        return [(type(one.event).__name__, one.end_lsn, len(_rows(one))) for one in whole]

    frames = _wire([*_LATE[way], _DECIDED])
    for divided in ([frames], [[frame] for frame in frames]):
        after = After(1000, begin_lsn=1000, is_parallel=True)
        assert seen([one for group in divided for one in after.take(group)]) == seen(frames)
        assert after.end_lsn == 1150
    assert {n_rows for _, _, n_rows in seen(frames)} - {0} == {2}
    assert not any(end_lsn for _, end_lsn, _ in seen(After(1150, begin_lsn=1000, is_parallel=True).take(frames)))
    twice = After(1000, begin_lsn=1000, is_parallel=True).take(_wire([*_LATE[way], *_LATE[way], _DECIDED]))
    assert seen(twice)[-len(seen(frames)) :] == seen(frames)
    is_ended = [isinstance(one.event, StreamAbort) for one in Assembler(1 << 30, streaming_parallel=True).push(twice)]
    assert sum(is_ended) == (way == "streamed")


def test_a_stream_that_is_rolled_back_after_its_prepare_ends() -> None:
    """Of one that was prepared before the slot began nothing but its ROLLBACK PREPARED ends it (trap T-58)."""
    undone = build.rollback_prepared(prepare_end_lsn=950, rollback_end_lsn=1150)
    frames = _wire([*_LATE["streamed"][:-1], undone])
    left = _read(After(1150, begin_lsn=1000, is_parallel=True).take(frames))
    assert [type(one.event) for one in left] == [Chunk, StreamAbort]


@pytest.mark.parametrize("way", _LATE)
async def test_a_capture_is_not_cut_between_a_late_transaction_and_its_commit(way: str, tmp_path: Path) -> None:
    """It would come whole once more with the commit (trap T-58)."""
    writer = CaptureWriter(tmp_path / "day", CaptureLimits(0, 1 << 30))
    writer.write(BlockKind.POSITION, b"", time_us=0, end_lsn=1000)
    recorder = Recorder(writer, cast("Connection", None), None, is_parallel=True)  # no table is announced
    await recorder.take(_wire(_LATE[way]), 1)
    # Of a stream all up to its PREPARE is written, and aborted if that is cut off.
    assert (recorder.write(is_end=True), recorder.is_idle, writer.end_lsn) == (way == "streamed", False, 1000)
    assert writer._open == ((700,) if way == "streamed" else ())
    await recorder.take(_wire([_DECIDED]), 1)
    assert (recorder.write(is_end=True), recorder.is_idle, writer.end_lsn) == (True, True, 1150)
    assert not writer._open
    writer.close()


def test_changes_that_take_as_long_as_each_other_queue_by_their_arrival() -> None:
    """The lateness is of the capture's clock: what comes faster than it can be applied is late, until a pause."""
    came = Arrivals([0, 1_000_000, 600_000_000], [10, 10, 20], 40, 0)
    assert came.late(80.0) == Late(most_s=40.0, most_at_us=600_000_000, minutes={0: 39.0, 10: 40.0})
    assert came.late(4.0) == Late(most_s=2.0, most_at_us=600_000_000, minutes={0: 1.0, 10: 2.0})


def test_a_part_of_the_changes_ends_with_a_transaction() -> None:
    """The last end that is kept at or before the number, else the first; without changes the end."""
    came = Arrivals([], [], 4000, 99, 4000, [(1500, 10), (2500, 20), (4000, 30)])
    assert [came.lsn_of(number) for number in (0, 2499, 2500, 3999, 9999)] == [10, 10, 20, 20, 30]
    assert Arrivals([], [], 0, 99).lsn_of(0) == 99

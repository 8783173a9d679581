"""Frames of streamed and prepared transactions to chunks and events, at their place between the others."""

from __future__ import annotations

import pytest

from parapply.errors import ProtocolError
from parapply.model import Relation, Transaction
from parapply.wire.assembler import OVERHEAD_BYTES, Assembler
from parapply.wire.messages import (
    Chunk,
    CommitPrepared,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
)
from tests import build

WHOLE_BYTES = 1 << 30
ROW = build.row(build.text(b"1"))
#: A subtransaction of 700, which is the top-level transaction of every message that the builders make.
SUB = 701
START, STOP = build.stream_start(), build.stream_stop()


def _push(*payloads: bytes, piece_bytes: int = WHOLE_BYTES, start_lsn: int = 0) -> list[Transaction]:
    frames = [build.xlog_data(payload) for payload in payloads]
    return Assembler(piece_bytes, start_lsn=start_lsn).push(frames)


def _runs(one: Transaction) -> tuple[tuple[int, int], ...]:
    assert isinstance(one.event, Chunk)
    return one.event.runs


def test_changes_in_a_stream_lose_their_xid_and_are_counted_by_it() -> None:
    """Behind the assembler a streamed change is like any other; the chunk says which subtransaction it belongs to."""
    streamed = [build.insert(ROW, xid=700), build.update(ROW, xid=SUB), build.delete(key=ROW, xid=SUB)]
    bare = [build.insert(ROW), build.update(ROW), build.delete(key=ROW)]
    [chunk] = _push(START, *streamed, build.insert(ROW, xid=700), STOP)
    assert chunk.changes == [build.xlog_data(payload) for payload in [*bare, build.insert(ROW)]]
    assert chunk.xid == 700
    assert _runs(chunk) == ((0, 700), (1, SUB), (3, 700))
    assert chunk.size_bytes == sum(
        len(change) + OVERHEAD_BYTES for change in chunk.changes if isinstance(change, bytes)
    )


def test_chunks_of_several_transactions_and_whole_ones_interleave() -> None:
    """Between two chunks of one transaction come other transactions' chunks, and whole ones; nothing is mixed up."""
    other = [build.stream_start(xid=900), build.insert(ROW, xid=900), STOP]
    whole = [build.begin(xid=5), build.insert(ROW), build.commit()]
    mine = [START, build.insert(ROW, xid=700), STOP]
    found = _push(*mine, *other, *whole, *mine)
    assert [(one.xid, isinstance(one.event, Chunk)) for one in found] == [
        (700, True),
        (900, True),
        (5, False),
        (700, True),
    ]


def test_a_relation_in_a_stream_belongs_to_it() -> None:
    """A relation announced inside a stream is not in force for the next whole transaction (trap T-52)."""
    announced = build.relation(build.ColumnSpec("a"), oid=1, xid=SUB)
    whole = [build.begin(xid=5), build.insert(ROW), build.commit()]
    chunk, plain = _push(START, announced, build.insert(ROW, oid=1, xid=SUB), STOP, *whole)
    assert [isinstance(change, Relation) for change in chunk.changes] == [True, False]
    assert [relation.oid for relation in chunk.relations] == [1]
    assert _runs(chunk) == ((0, SUB),)
    assert plain.relations == []


def test_a_large_chunk_leaves_in_pieces_and_an_empty_one_not_at_all() -> None:
    """Memory does not grow with the size of a chunk; a Stream Start and Stop alone say nothing."""
    rows = [build.insert(ROW, xid=xid) for xid in (700, 700, SUB, SUB, SUB)]
    found = _push(START, *rows, STOP, START, STOP, piece_bytes=2 * OVERHEAD_BYTES)
    assert [len(chunk.changes) for chunk in found] == [2, 2, 1]
    assert [_runs(chunk) for chunk in found] == [((0, 700),), ((0, SUB),), ((0, SUB),)]


def test_a_truncate_in_a_stream_is_marked() -> None:
    """The receiver of the chunk knows without looking that a TRUNCATE is in it; a malformed one is refused."""
    [chunk] = _push(START, build.truncate(1, xid=700), STOP)
    assert chunk.has_truncate
    with pytest.raises(ProtocolError):
        _push(START, build.truncate(1, xid=700)[:-1], STOP)


def test_ends_of_streams_are_events_at_their_place() -> None:
    """Commit, prepare and abort of a streamed transaction carry their message and the LSNs that count."""
    commit = build.xlog_data(build.stream_commit(commit_lsn=0x200, end_lsn=0x230, commit_time_us=-3), send_time_us=9)
    [committed] = Assembler(WHOLE_BYTES).push([commit])
    assert isinstance(committed.event, StreamCommit)
    assert (committed.commit_lsn, committed.end_lsn, committed.commit_time_us) == (0x200, 0x230, -3)
    assert committed.send_time_us == 9
    [prepared] = _push(build.stream_prepare(end_lsn=0x240))
    assert isinstance(prepared.event, StreamPrepare)
    assert prepared.end_lsn == 0x240
    [aborted] = _push(build.stream_abort(subxid=SUB))
    assert isinstance(aborted.event, StreamAbort)
    assert (aborted.event.xid, aborted.event.subxid, aborted.event.abort_lsn) == (700, SUB, None)


def test_the_abort_of_a_parallel_stream_has_an_lsn() -> None:
    """The two forms of Stream Abort are distinguished by the session's request, not by their length."""
    frame = build.xlog_data(build.stream_abort_parallel())
    [aborted] = Assembler(WHOLE_BYTES, streaming_parallel=True).push([frame])
    assert isinstance(aborted.event, StreamAbort)
    assert aborted.event.abort_lsn is not None
    with pytest.raises(ProtocolError):
        Assembler(WHOLE_BYTES).push([frame])


def test_a_prepared_transaction_is_whole_and_says_so() -> None:
    """Begin Prepare and Prepare enclose one transaction that ends with the PREPARE."""
    [one] = _push(build.begin_prepare(), build.insert(ROW), build.prepare())
    assert isinstance(one.event, Prepare)
    assert one.end_lsn == one.event.end_lsn
    assert len(one.changes) == 1
    assert one.is_first
    assert one.is_last


def test_outcomes_of_prepared_transactions_are_events() -> None:
    """COMMIT PREPARED and ROLLBACK PREPARED come by themselves, with the LSN that progress counts."""
    committed, rolled_back = _push(
        build.commit_prepared(end_lsn=0x300), build.rollback_prepared(rollback_end_lsn=0x310)
    )
    assert isinstance(committed.event, CommitPrepared)
    assert committed.end_lsn == 0x300
    assert isinstance(rolled_back.event, RollbackPrepared)
    assert rolled_back.end_lsn == 0x310


def test_a_prepare_without_a_begin_is_an_empty_transaction() -> None:
    """Some minor releases of 15 send PREPARE without BEGIN PREPARE for an empty transaction (trap T-58)."""
    [one] = _push(build.prepare())
    assert isinstance(one.event, Prepare)
    assert one.changes == []


def test_what_was_prepared_before_the_start_is_committed_as_a_whole() -> None:
    """Prepared before the slot got two_phase, a transaction comes whole with its COMMIT PREPARED (trap T-58)."""
    begun, prepared = build.begin_prepare(end_lsn=0x80), build.prepare(end_lsn=0x80)
    committed = build.commit_prepared(commit_lsn=0x200, end_lsn=0x230)
    [one] = _push(begun, build.insert(ROW), prepared, committed, start_lsn=0x80)
    assert one.event is None
    assert (one.commit_lsn, one.end_lsn) == (0x200, 0x230)
    assert len(one.changes) == 1
    with pytest.raises(ProtocolError):
        _push(begun, prepared, build.commit_prepared(xid=701), start_lsn=0x80)
    with pytest.raises(ProtocolError):
        _push(begun, prepared, build.begin(), start_lsn=0x80)


def test_pieces_of_what_was_prepared_before_have_no_place_until_their_end() -> None:
    """A large one is in progress: with the PREPARE's place it would be behind or before the wrong ones (trap T-58)."""
    begun, prepared = build.begin_prepare(end_lsn=0x80), build.prepare(end_lsn=0x80)
    committed = build.commit_prepared(commit_lsn=0x200, end_lsn=0x230)
    rows = [build.insert(ROW)] * 3
    found = _push(begun, *rows, prepared, committed, start_lsn=0x100, piece_bytes=2 * OVERHEAD_BYTES)
    assert [len(piece.changes) for piece in found] == [2, 1, 0]
    *pieces, end = found
    assert [piece.event for piece in pieces] == [Chunk(xid=700, runs=((0, 700),), was_prepared=True)] * 2
    assert all(not piece.commit_lsn and piece.is_first and piece.is_last for piece in pieces)
    assert isinstance(end.event, StreamCommit)
    assert (end.xid, end.commit_lsn, end.end_lsn, end.event.was_prepared) == (700, 0x200, 0x230, True)


def test_a_stream_that_was_prepared_before_is_committed() -> None:
    """The publisher may stream it, to make room: it ends with its COMMIT PREPARED like any stream (trap T-58)."""
    chunk, prepared = [START, build.insert(ROW, xid=700), STOP], build.stream_prepare(end_lsn=0x80)
    committed = build.commit_prepared(commit_lsn=0x200, end_lsn=0x230)
    _, one = _push(*chunk, prepared, committed, start_lsn=0x80)
    assert isinstance(one.event, StreamCommit)
    assert (one.xid, one.commit_lsn, one.end_lsn) == (700, 0x200, 0x230)
    with pytest.raises(ProtocolError):
        _push(*chunk, prepared, build.commit_prepared(xid=701), start_lsn=0x80)


def test_what_is_prepared_on_the_target_ends_there() -> None:
    """Whatever the slot was told in between, its PREPARE and its outcome are what they say."""
    chunk = [START, build.insert(ROW, xid=700), STOP]
    for begun in ([build.begin_prepare(end_lsn=0x80), build.prepare(end_lsn=0x80)],
                  [*chunk, build.stream_prepare(end_lsn=0x80)]):  # fmt: skip
        frames = [build.xlog_data(payload) for payload in [*begun, build.commit_prepared(end_lsn=0x230)]]
        found = Assembler(WHOLE_BYTES, start_lsn=0x100, prepared_lsns=frozenset([0x80])).push(frames)
        assert isinstance(found[-2].event, Prepare | StreamPrepare)
        assert isinstance(found[-1].event, CommitPrepared)


def test_a_chunk_is_open_until_it_stops() -> None:
    """A keep-alive proves nothing inside a chunk; between two chunks it does."""
    assembler = Assembler(WHOLE_BYTES)
    seen = []
    for payload in (START, build.insert(ROW, xid=700), STOP, build.stream_commit()):
        assembler.push([build.xlog_data(payload)])
        seen.append(assembler.is_open)
    assert seen == [True, True, False, False]

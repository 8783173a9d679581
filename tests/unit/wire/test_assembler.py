"""Frames to transactions: whole ones, pieces of large ones, and everything that is out of place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parapply.errors import ProtocolError
from parapply.model import FRAME_HEADER_BYTES, Relation, Transaction
from parapply.wire.assembler import OVERHEAD_BYTES, Assembler
from tests import build
from tests.unit.changes_stream import Op, Publisher, ops
from tests.unit.wire_cases import CASES

if TYPE_CHECKING:
    from collections.abc import Iterable

WHOLE_BYTES = 1 << 30
HIGH_LSN = 0xFFFF_FFFF_0000_0001
ROW = build.row(build.text(b"1"))
BEGIN, COMMIT, INSERT = build.begin(), build.commit(), build.insert(ROW)


def _frames(*payloads: bytes) -> list[bytes]:
    return [build.xlog_data(payload) for payload in payloads]


def _push(*payloads: bytes, piece_bytes: int = WHOLE_BYTES) -> list[Transaction]:
    return Assembler(piece_bytes).push(_frames(*payloads))


def _seen(transactions: Iterable[Transaction]) -> list[object]:
    return [[getattr(each, name) for name in Transaction.__slots__] for each in transactions]


def test_a_transaction_has_what_its_messages_say() -> None:
    """Numbers come from Begin and Commit, LSNs and xids unsigned, changes as they came, the send time from Commit."""
    update, delete, truncate = build.update(ROW), build.delete(key=ROW), build.truncate(16384)
    frames = _frames(build.begin(final_lsn=HIGH_LSN, commit_time_us=-7, xid=2**32 - 1), INSERT, update, delete)
    frames += _frames(truncate)
    frames.append(build.xlog_data(build.commit(commit_lsn=HIGH_LSN, end_lsn=HIGH_LSN + 48), send_time_us=99))
    [transaction] = Assembler(WHOLE_BYTES).push(frames)
    assert (transaction.commit_lsn, transaction.end_lsn) == (HIGH_LSN, HIGH_LSN + 48)
    assert (transaction.xid, transaction.commit_time_us, transaction.send_time_us) == (2**32 - 1, -7, 99)
    assert transaction.changes == frames[1:5]
    assert transaction.size_bytes == sum(map(len, frames[1:5])) + 4 * OVERHEAD_BYTES
    assert transaction.has_truncate
    assert transaction.is_first
    assert transaction.is_last


def test_an_empty_transaction_is_a_transaction() -> None:
    """Publishers before 15 send Begin and Commit alone; their end LSN counts."""
    [transaction] = _push(BEGIN, COMMIT)
    assert transaction.changes == []
    assert transaction.end_lsn == 0x130


def test_relations_stand_where_they_were_announced() -> None:
    """A Relation inside is a change in its place; one before Begin belongs to the next transaction, once."""
    loose, inside = build.relation(build.ColumnSpec("a"), oid=1), build.relation(build.ColumnSpec("b"), oid=2)
    first, second = _push(loose, BEGIN, INSERT, inside, INSERT, COMMIT, BEGIN, INSERT, COMMIT)
    kinds = [change.oid if isinstance(change, Relation) else "row" for change in first.changes]
    assert kinds == [1, "row", 2, "row"]
    assert [relation.oid for relation in first.relations] == [1, 2]
    assert second.relations == []


def test_messages_that_change_nothing_are_taken() -> None:
    """Origin inside a transaction, Type and logical messages anywhere leave no trace."""
    origin, type_, message = build.origin(), build.type_(), build.message()
    assembler = Assembler(WHOLE_BYTES)
    assert assembler.push(_frames(build.message(flags=0), type_)) == []
    assert not assembler.is_open
    [transaction] = assembler.push(_frames(BEGIN, origin, type_, message, INSERT, COMMIT))
    assert transaction.changes == _frames(INSERT)


def test_a_transaction_is_open_between_begin_and_commit() -> None:
    """A keep-alive proves nothing as long as a transaction is open."""
    assembler = Assembler(WHOLE_BYTES)
    seen = []
    for frame in _frames(BEGIN, INSERT, COMMIT, BEGIN):
        assembler.push([frame])
        seen.append(assembler.is_open)
    assert seen == [True, True, False, True]


@pytest.mark.parametrize(
    "payloads",
    [
        (INSERT,),
        (build.update(ROW),),
        (build.delete(key=ROW),),
        (build.truncate(1),),
        (COMMIT,),
        (build.origin(),),
        (BEGIN, BEGIN),
        (BEGIN, COMMIT, COMMIT),
        (BEGIN, COMMIT, INSERT),
        (BEGIN, build.commit(commit_lsn=0x101)),
        (BEGIN, build.commit(end_lsn=0xFF)),
        (BEGIN, build.commit(flags=1)),
        (b"",),
        (b"?",),
        *[(BEGIN, CASES[name].payload) for name in sorted(CASES) if CASES[name].payload[:1] in b"SEcAbPKrp"],
        (build.stream_stop(),),
        (build.stream_start(), build.stream_start()),
        (build.stream_start(), BEGIN),
        (build.stream_start(), COMMIT),
        (build.stream_start(), build.stream_commit()),
        (build.stream_start(), build.stream_abort()),
        (build.stream_start(), build.begin_prepare()),
        (build.stream_start(), b"I\0\0"),
        (build.begin_prepare(), build.begin_prepare()),
        (build.begin_prepare(), COMMIT),
        (build.begin_prepare(), build.commit_prepared()),
        (build.begin_prepare(), build.prepare(xid=701)),
        (build.begin_prepare(), build.prepare(gid="other")),
        (build.begin_prepare(), INSERT, build.stream_start()),
    ],
)
def test_a_message_out_of_place_is_a_protocol_error(payloads: tuple[bytes, ...]) -> None:
    """Changes and ends need a Begin, a Begin needs the end of the one before, and nothing streamed was asked for."""
    with pytest.raises(ProtocolError):
        _push(*payloads)


@pytest.mark.parametrize(
    "payload",
    [
        BEGIN,
        COMMIT,
        build.relation(build.ColumnSpec("a"), build.ColumnSpec("b")),
        build.truncate(1, 2),
        build.origin(),
        build.type_(),
        build.message(content=b"abc"),
    ],
    ids=lambda payload: chr(payload[0]),
)
def test_every_truncation_is_a_protocol_error(payload: bytes) -> None:
    """A frame cut at any length, also inside its header, or with a byte too many raises ProtocolError."""
    before = [] if payload is BEGIN else _frames(BEGIN)
    frame = build.xlog_data(payload)
    for cut in [*[frame[:size] for size in range(len(frame))], frame + b"\0"]:
        with pytest.raises(ProtocolError):
            Assembler(WHOLE_BYTES).push([*before, cut])


@given(wishes=ops(), piece_bytes=st.integers(1, 4000), data=st.data())
def test_the_size_of_a_read_does_not_matter(wishes: list[Op], piece_bytes: int, data: st.DataObject) -> None:
    """The same frames give the same transactions and pieces, however many come at a time."""
    frames = Publisher().run(wishes)
    at_once = Assembler(piece_bytes).push(frames)
    assembler = Assembler(piece_bytes)
    in_parts: list[Transaction] = []
    start = 0
    while start < len(frames):
        end = start + data.draw(st.integers(1, 9), label="frames")
        in_parts += assembler.push(frames[start:end])
        start = end
    assert _seen(in_parts) == _seen(at_once)
    assert not assembler.is_open


@given(wishes=ops(), piece_bytes=st.integers(1, 4000))
def test_pieces_make_the_transaction(wishes: list[Op], piece_bytes: int) -> None:
    """Pieces come in order: one first, one last, which alone has the end; together they have every change once."""
    frames = Publisher().run(wishes)
    whole = Assembler(WHOLE_BYTES).push(frames)
    pieces = iter(Assembler(piece_bytes).push(frames))
    for transaction in whole:
        parts = [next(pieces)]
        while not parts[-1].is_last:
            assert parts[-1].end_lsn == 0
            assert parts[-1].size_bytes >= piece_bytes
            parts.append(next(pieces))
        assert [part.is_first for part in parts] == [True, *[False] * (len(parts) - 1)]
        assert parts[-1].end_lsn == transaction.end_lsn
        assert [change for part in parts for change in part.changes] == transaction.changes
        assert [relation for part in parts for relation in part.relations] == transaction.relations
        assert {(part.xid, part.commit_lsn, part.commit_time_us) for part in parts} == {
            (transaction.xid, transaction.commit_lsn, transaction.commit_time_us)
        }
    assert next(pieces, None) is None


def test_a_piece_holds_little_more_than_asked_for() -> None:
    """A large transaction never lies in memory: a piece leaves with the change that fills it."""
    pieces = _push(BEGIN, *[INSERT] * 10, COMMIT, piece_bytes=3 * OVERHEAD_BYTES)
    assert [len(piece.changes) for piece in pieces] == [3, 3, 3, 1]
    assert all(
        len(frame) > FRAME_HEADER_BYTES for piece in pieces for frame in piece.changes if isinstance(frame, bytes)
    )

"""Streams of real publishers with bytes changed: all the way to the parameters, nothing but an error of ours comes out.

Nothing that a length or a count says is believed: memory stays in proportion to the bytes that came.
"""

from __future__ import annotations

import struct
import tracemalloc
from contextlib import nullcontext, suppress
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parapply.errors import ParapplyError, ProtocolError, TargetRefused
from parapply.model import FRAME_HEADER_BYTES, Relation, Transaction
from parapply.plan.batch import Batch
from parapply.plan.steps import ordered_changes
from parapply.plan.table import ColumnFacts, Equality, Plans
from parapply.target.catalogue.match import match
from parapply.target.sql.commands import CommandBuilder
from parapply.wire.assembler import Assembler
from parapply.wire.copy import BUFFER_BYTES, CopyReader, RowReader, parse_keepalive
from parapply.wire.decode import decode
from parapply.wire.messages import RelationMessage
from tests.fixtures.recorded import STREAMS, frames_of
from tests.unit.plans import table

_FRAMES = {name: frames_of(name) for name in STREAMS}
#: Relations that the target knows: the tables as they were recorded.
_ANNOUNCED = {
    message.relation.qualified_name: message.relation
    for frame in _FRAMES["whole"]
    if frame[FRAME_HEADER_BYTES:][:1] == b"R"
    and isinstance(message := decode(frame[FRAME_HEADER_BYTES:], in_stream=False), RelationMessage)
}
_PIECE_BYTES = 4000
_KEEPALIVE_BYTES = 18
#: For a stream of some kilobytes: frames, rows and statements, and what they are made from.
_MEMORY_BYTES = 8 << 20
_SIZES = st.sampled_from(
    [b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\xff\xff", b"\x7f\xff", b"\0\0\0\0", b"\0\0"]
)


class _Mutation(NamedTuple):
    """Bytes of one message, or the message itself, are replaced."""

    kind: str
    at: int
    offset: int
    size: int
    text: bytes

    def apply(self, frames: list[bytes]) -> None:
        """Change a stream."""
        if not frames:
            return
        at = self.at % len(frames)
        frame = frames[at]
        # The header of the frame, too, if seldom: it comes from the same hostile hand.
        offset = self.offset % (len(frame) + 1)
        if self.kind == "drop":
            del frames[at]
        elif self.kind == "repeat":
            frames.insert(at, frame)
        elif self.kind == "swap":
            other = self.offset % len(frames)
            frames[at], frames[other] = frames[other], frame
        elif self.kind == "cut":
            frames[at] = frame[:offset]
        elif self.kind == "insert":
            frames[at] = frame[:offset] + self.text + frame[offset:]
        else:
            frames[at] = frame[:offset] + self.text + frame[offset + (self.size or len(self.text)) :]


_MUTATIONS = st.lists(
    st.builds(
        _Mutation,
        st.sampled_from(["replace", "replace", "replace", "insert", "cut", "drop", "repeat", "swap"]),
        st.integers(0, 2000),
        st.integers(0, 4000),
        st.integers(0, 5),
        _SIZES | st.binary(max_size=5),
    ),
    min_size=1,
    max_size=6,
)


def _resolve(relation: Relation, plans: Plans) -> None:
    """Do what the leader does with an announcement: plan it, or keep why it cannot be applied."""
    known = _ANNOUNCED.get(relation.qualified_name)
    if relation in plans.known or relation in plans.refused:
        return
    if known is None:
        plans.refused[relation] = TargetRefused(f"target table {relation.qualified_name} does not exist")
        return
    columns = [
        ColumnFacts(
            name=column.name, type_sql="pg_catalog.text", type_oid=column.type_oid, base_type_oid=column.type_oid,
            is_generated=False, is_identity_always=False, has_equality=True, equality=Equality.BYTES,
        )
        for column in known.columns
    ]  # fmt: skip
    keys = [column.name for column in known.columns if column.is_key and known.replica_identity == "d"]
    try:
        plans.known[relation] = match(relation, table(columns, keys, name=known.name, schema=known.schema))
    except TargetRefused as refusal:
        plans.refused[relation] = refusal


def _apply(transaction: Transaction, plans: Plans, builder: CommandBuilder) -> int:
    """Plan one transaction both ways, as a set and in order, and return how many statements they are."""
    for relation in transaction.relations:
        _resolve(relation, plans)
    view = plans.view()
    batch = Batch(1)
    batch.add(transaction, plans)
    batch.close()
    n_commands = len(builder.of_steps(batch.steps, transaction.size_bytes))
    return n_commands + len(builder.in_order(ordered_changes(transaction, view)))


def _run(frames: list[bytes]) -> int:
    """Take a stream as far as it goes; return how many statements came of it.

    Raises:
        ParapplyError: what the operator would be told.
    """
    assembler = Assembler(_PIECE_BYTES, streaming_parallel=True)
    plans, builder = Plans(), CommandBuilder()
    n_commands = 0
    for frame in frames:
        for transaction in assembler.push([frame]):
            n_commands += _apply(transaction, plans, builder) if transaction.changes or transaction.relations else 0
    return n_commands


def test_the_recorded_streams_are_understood() -> None:
    """Unchanged, each stream is read to its end and makes statements: else the properties below would say nothing."""
    kinds = set()
    for frames in _FRAMES.values():
        assert _run(frames) > 20
        kinds |= {frame[FRAME_HEADER_BYTES : FRAME_HEADER_BYTES + 1] for frame in frames}
    assert b"".join(sorted(kinds)) == b"ABCDEIKMPRSTUYbcpr"


@settings(max_examples=4 * settings().max_examples)
@given(name=st.sampled_from(STREAMS), mutations=_MUTATIONS)
def test_a_broken_stream_ends_in_an_error_of_ours(name: str, mutations: list[_Mutation]) -> None:
    """Whatever is changed, left out, repeated or moved: it is applied, or an error with an exit code says so."""
    frames = list(_FRAMES[name])
    for mutation in mutations:
        mutation.apply(frames)
    outcome: ParapplyError | None = None
    try:
        _run(frames)
    except ParapplyError as error:
        outcome = error
    assert outcome is None or (outcome.exit_code in {3, 4} and outcome.line())


@given(name=st.sampled_from(STREAMS), at=st.integers(0, 2000), offset=st.integers(0, 4000), size=_SIZES)
def test_memory_follows_the_bytes_and_not_what_they_say(name: str, at: int, offset: int, size: bytes) -> None:
    """A length or a count of two thousand millions takes no memory that a stream of some kilobytes would not take."""
    frames = list(_FRAMES[name])
    _Mutation("replace", at, offset, 0, size).apply(frames)
    tracemalloc.start()
    try:
        with suppress(ParapplyError):
            _run(frames)
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < _MEMORY_BYTES


@given(
    mutations=st.lists(st.tuples(st.integers(0, 20_000), _SIZES | st.binary(max_size=5)), max_size=5),
    piece_bytes=st.integers(1, 5000),
    rows=st.booleans(),
)
def test_broken_messages_are_told_or_waited_for(
    mutations: list[tuple[int, bytes]], piece_bytes: int, *, rows: bool
) -> None:
    """Where lengths of the connection lie: the readers hold no more than has come, and say what cannot be."""
    contents = [struct.pack(">cI", b"d", len(frame) + 4) + frame for frame in _FRAMES["whole"]]
    data = bytearray(b"".join(contents))
    for at, text in mutations:
        data[at % len(data) : at % len(data) + len(text)] = text
    reader: CopyReader | RowReader = RowReader() if rows else CopyReader()
    frames: list[bytes] = []
    with suppress(ProtocolError):
        for start in range(0, len(data), piece_bytes):
            room = reader.room()
            piece = data[start : start + piece_bytes]
            room[: len(piece)] = piece
            if isinstance(reader, CopyReader):
                reader.received(len(piece), frames)
            else:
                reader.received(len(piece))
            assert len(reader.room()) <= BUFFER_BYTES + 2 * len(data)
    assert sum(map(len, frames)) <= len(data)


@given(st.binary(max_size=30).map(lambda rest: b"k" + rest))
def test_a_broken_keepalive_is_told(message: bytes) -> None:
    """A keep-alive of another length, or with unknown flags, is a ProtocolError."""
    is_right = len(message) == _KEEPALIVE_BYTES and message[-1] in b"\0\1"
    with nullcontext() if is_right else pytest.raises(ProtocolError):
        parse_keepalive(message)

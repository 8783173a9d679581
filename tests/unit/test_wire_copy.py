"""Messages cut out of the server's bytes, however the network cuts those."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parapply.errors import ProtocolError
from parapply.wire.copy import CopyReader, RowReader, error_fields


def message(kind: bytes, contents: bytes) -> bytes:
    """Return one message of the protocol."""
    return kind + struct.pack(">I", len(contents) + 4) + contents


CONTENTS = st.binary(max_size=40)
MESSAGES = st.lists(
    st.one_of(
        st.tuples(st.just(b"d"), CONTENTS.map(lambda contents: b"w" + contents)),
        st.tuples(st.just(b"d"), CONTENTS.map(lambda contents: b"k" + contents)),
        st.tuples(st.just(b"d"), st.just(b"")),
        st.tuples(st.sampled_from([b"E", b"N", b"S", b"c", b"Z"]), CONTENTS),
    ),
    max_size=12,
)


def push(reader: CopyReader, data: bytes, frames: list[bytes]) -> None:
    """Give the reader some bytes, as a socket would: as many at once as it has room for."""
    while data:
        room = reader.room()
        n_bytes = min(len(room), len(data))
        room[:n_bytes] = data[:n_bytes]
        reader.received(n_bytes, frames)
        data = data[n_bytes:]


@given(messages=MESSAGES, cuts=st.lists(st.integers(0, 600), max_size=12), buffer_bytes=st.integers(5, 100))
def test_any_cutting_of_the_bytes_gives_the_same_messages(
    messages: list[tuple[bytes, bytes]], cuts: list[int], buffer_bytes: int
) -> None:
    """TCP keeps the order of bytes, not their grouping; and a message may be larger than the buffer."""
    data = b"".join(message(kind, contents) for kind, contents in messages)
    reader = CopyReader(buffer_bytes)
    frames: list[bytes] = []
    bounds = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    for start, end in pairwise(bounds):
        push(reader, data[start:end], frames)
    copies = [contents for kind, contents in messages if kind == b"d"]
    assert frames == [contents for contents in copies if contents[:1] == b"w"]
    keepalives = [contents for contents in copies if contents[:1] == b"k"]
    assert reader.keepalive == (keepalives[-1] if keepalives else None)
    others = [(kind[0], contents) for kind, contents in messages if kind != b"d" or not contents]
    assert reader.others == others


@given(messages=MESSAGES, cuts=st.lists(st.integers(0, 600), max_size=12), buffer_bytes=st.integers(5, 100))
def test_any_cutting_of_the_bytes_gives_the_same_rows(
    messages: list[tuple[bytes, bytes]], cuts: list[int], buffer_bytes: int
) -> None:
    """Data comes without headers and in order; a row larger than the buffer is handed on as it comes."""
    data = b"".join(message(kind, contents) for kind, contents in messages)
    reader = RowReader(buffer_bytes)
    rows = b""
    bounds = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    for start, end in pairwise(bounds):
        piece = data[start:end]
        while piece:
            room = reader.room()
            n_bytes = min(len(room), len(piece))
            room[:n_bytes] = piece[:n_bytes]
            rows += reader.received(n_bytes)
            piece = piece[n_bytes:]
    assert rows == b"".join(contents for kind, contents in messages if kind == b"d")
    assert reader.n_rows == sum(kind == b"d" for kind, _ in messages)
    assert reader.others == [(kind[0], contents) for kind, contents in messages if kind != b"d"]


def test_memory_follows_a_large_message() -> None:
    """The buffer grows with what has come, not with what a length promises, and shrinks again afterwards."""
    reader = CopyReader(1000)
    frames: list[bytes] = []
    large, small = message(b"d", b"w" + b"x" * 100_000), message(b"d", b"wy")
    came = 0
    for start in range(0, len(large), 1000):
        piece = large[start : start + 1000]
        push(reader, piece, frames)
        came += len(piece)
        assert len(reader.room()) <= max(came, 1000)
    push(reader, small + small[:3], frames)
    assert frames == [large[5:], small[5:]]
    assert len(reader.room()) == 1000 - 3


@pytest.mark.parametrize("length", [0, 3, (1 << 31), 0xFFFFFFFF])
def test_an_impossible_length_is_an_error(length: int) -> None:
    """Waiting for bytes that never come would look like a silent publisher."""
    with pytest.raises(ProtocolError, match="a message of"):
        push(CopyReader(), b"d" + struct.pack(">I", length) + b"w", [])


def test_error_fields() -> None:
    """An ErrorResponse is a list of fields, each a type byte and a string."""
    contents = b'SERROR\0VERROR\0C55006\0Mslot "s" is active\0\0'
    assert error_fields(contents) == {"S": "ERROR", "V": "ERROR", "C": "55006", "M": 'slot "s" is active'}

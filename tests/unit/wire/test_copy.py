"""Messages cut out of the server's bytes, however the network cuts those."""

from __future__ import annotations

import struct
import tracemalloc
from io import BytesIO
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parapply.errors import ProtocolError
from parapply.wire import copy
from parapply.wire.copy import CopyReader, RowReader, error_fields

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


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


def row(lsn: int, change: bytes, *, columns: int = 2) -> bytes:
    """Return a row of COPY in binary with an LSN and a change."""
    return struct.pack(">hiQi", columns, 8, lsn, len(change)) + change


CHANGES = st.lists(st.tuples(st.integers(0, (1 << 64) - 1), st.binary(min_size=1, max_size=40)), max_size=12)
SIGNATURE = b"PGCOPY\n\xff\r\n\0" + bytes(8)


@given(changes=CHANGES, cuts=st.lists(st.integers(0, 900), max_size=12), buffer_bytes=st.integers(5, 120))
def test_a_row_is_the_frame_that_a_walsender_sends(
    changes: list[tuple[int, bytes]], cuts: list[int], buffer_bytes: int
) -> None:
    """Kind, the LSN twice, send time, change; however the network cuts rows, and without all from a Stream Start on."""
    rows = [row(lsn, change) for lsn, change in changes]
    contents = [SIGNATURE + rows[0], *rows[1:], b"\xff\xff"] if rows else [SIGNATURE + b"\xff\xff"]
    data = b"".join(message(b"d", each) for each in contents) + message(b"c", b"")
    reader = CopyReader(buffer_bytes)
    reader.expect_rows(-7)
    frames: list[bytes] = []
    bounds = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    for start, end in pairwise(bounds):
        push(reader, data[start:end], frames)
    streams = [number for number, (_, change) in enumerate(changes) if change[:1] == b"S"]
    wanted = changes[: streams[0]] if streams else changes
    assert frames == [b"w" + struct.pack(">QQq", lsn, lsn, -7) + change for lsn, change in wanted]
    assert reader.has_stream == bool(streams)
    assert reader.others == [(ord("c"), b"")]
    # The next message is a walsender's again.
    reader.expect_stream()
    push(reader, message(b"d", b"wx"), frames)
    assert frames[-1] == b"wx"


@pytest.mark.parametrize(
    "contents",
    [b"x", row(1, b""), row(1, b"I", columns=3), row(1, b"I") + b"x", row(1, b"IU")[:-1], b"PGCOPY\n" + bytes(12)],
    ids=["short", "no change", "columns", "long", "cut", "signature"],
)
def test_what_is_no_row_is_refused(contents: bytes) -> None:
    """Bytes out of place would be read as a change, or as none."""
    reader = CopyReader()
    reader.expect_rows(0)
    with pytest.raises(ProtocolError, match="not a row of an LSN and a change"):
        push(reader, message(b"d", contents), [])


class CountedBuffer(BytesIO):
    """Counts the bytes put into all of its kind."""

    n_written = 0

    def write(self, data: ReadableBuffer, /) -> int:
        """Count and write."""
        CountedBuffer.n_written += memoryview(data).nbytes
        return super().write(data)


@pytest.mark.parametrize("kind", [b"w", b"k"])
def test_a_large_message_is_copied_once(monkeypatch: pytest.MonkeyPatch, kind: bytes) -> None:
    """The bytes that have come of a message are never touched again, however small the reads, and it is held once."""
    large, small = message(b"d", kind + b"x" * 4_000_000), message(b"d", b"wy")
    contents = large[5:]
    monkeypatch.setattr(copy, "BytesIO", CountedBuffer)
    monkeypatch.setattr(CountedBuffer, "n_written", 0)
    reader = CopyReader(1000)
    frames: list[bytes] = []
    tracemalloc.start()
    try:
        for start in range(0, len(large), 999):
            push(reader, large[start : start + 999], frames)
            # All that a read looks at.
            assert len(reader.room()) <= 1000
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert CountedBuffer.n_written <= len(large)
    # It grows by an eighth at a time.
    assert peak_bytes < 1.3 * len(large)
    push(reader, small + small[:3], frames)
    assert [*frames, reader.keepalive] == ([contents, small[5:], None] if kind == b"w" else [small[5:], contents])
    assert len(reader.room()) == 1000 - 3


def test_what_never_comes_takes_no_memory() -> None:
    """A length promises a gigabyte, and some kilobytes come."""
    reader = CopyReader(1000)
    tracemalloc.start()
    try:
        push(reader, b"d" + struct.pack(">I", 1 << 30) + b"w" + bytes(5000), [])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 20_000


@pytest.mark.parametrize("length", [0, 3, (1 << 31), 0xFFFFFFFF])
def test_an_impossible_length_is_an_error(length: int) -> None:
    """Waiting for bytes that never come would look like a silent publisher."""
    with pytest.raises(ProtocolError, match="a message of"):
        push(CopyReader(), b"d" + struct.pack(">I", length) + b"w", [])


def test_error_fields() -> None:
    """An ErrorResponse is a list of fields, each a type byte and a string."""
    contents = b'SERROR\0VERROR\0C55006\0Mslot "s" is active\0\0'
    assert error_fields(contents) == {"S": "ERROR", "V": "ERROR", "C": "55006", "M": 'slot "s" is active'}

"""The fast row readers against the reference decoder."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parapply.errors import ProtocolError
from parapply.model import FRAME_HEADER_BYTES
from parapply.wire.decode import decode
from parapply.wire.messages import ColumnKind, Delete, Insert, TupleColumn, Update
from parapply.wire.rows import KIND_AT, MARK_AT, NULL, UNCHANGED, Row, read_delete, read_insert, read_update, text_of
from tests import build

if TYPE_CHECKING:
    from collections.abc import Callable

OIDS = st.integers(0, 2**32 - 1)
CELLS = st.one_of(
    st.just(build.null()),
    st.just(build.unchanged()),
    # Bytes that look like kinds, marks and lengths.
    st.one_of(st.binary(max_size=12), st.text("nutbNKO\0\xff", max_size=5).map(str.encode)).map(build.text),
)


@st.composite
def changes(draw: st.DrawFn) -> tuple[bytes, int]:
    """Return a change message and its number of columns."""
    n_columns = draw(st.integers(0, 6), label="columns")
    rows = st.lists(CELLS, min_size=n_columns, max_size=n_columns).map(lambda cells: build.row(*cells))
    oid = draw(OIDS)

    def before() -> build.Before:
        old = draw(rows)
        return {"key": old} if draw(st.booleans()) else {"old": old}

    kind = draw(st.sampled_from("IUuD"))
    if kind == "I":
        payload = build.insert(draw(rows), oid=oid)
    elif kind == "D":
        payload = build.delete(oid=oid, **before())
    else:
        sent = before() if kind == "u" else build.Before()
        payload = build.update(draw(rows), oid=oid, **sent)
    return payload, n_columns


READERS: dict[str, Callable[[bytes, int], object]] = {"I": read_insert, "U": read_update, "D": read_delete}


def _expected(row: tuple[TupleColumn, ...] | None, unchanged: bytes | None = NULL) -> Row | None:
    if row is None:
        return None
    values: Row = []
    for kind, value in row:
        if value is not None:
            values.append(struct.pack("!i", len(value)) + value)
        else:
            values.append(NULL if kind is ColumnKind.NULL else unchanged)
    return values


@given(changes())
def test_values_are_those_of_the_reference_decoder(change: tuple[bytes, int]) -> None:
    """Each value is its length and bytes; NULL is length -1; only new rows know UNCHANGED."""
    payload, n_columns = change
    frame = build.xlog_data(payload)
    message = decode(payload)
    if isinstance(message, Insert):
        assert read_insert(frame, n_columns) == _expected(message.new, UNCHANGED)
    elif isinstance(message, Update):
        old, new = read_update(frame, n_columns)
        assert old == _expected(message.old if message.key is None else message.key)
        assert new == _expected(message.new, UNCHANGED)
    else:
        assert isinstance(message, Delete)
        assert read_delete(frame, n_columns) == _expected(message.old or message.key or ())


@given(changes())
def test_a_row_of_another_width_is_refused(change: tuple[bytes, int]) -> None:
    """A row has exactly the columns its relation announced."""
    payload, n_columns = change
    for other in {n_columns + 1, max(n_columns - 1, 0), n_columns + 0x10000} - {n_columns}:
        with pytest.raises(ProtocolError):
            READERS[chr(payload[0])](build.xlog_data(payload), other)


@given(changes())
def test_every_truncation_is_a_protocol_error(change: tuple[bytes, int]) -> None:
    """A frame cut at any length, also inside its header, and one with a byte too many raise ProtocolError."""
    payload, n_columns = change
    frame = build.xlog_data(payload)
    for reader in READERS.values():
        for size in range(len(frame)):
            with pytest.raises(ProtocolError):
                reader(frame[:size], n_columns)
        with pytest.raises(ProtocolError):
            reader(frame + b"n", n_columns)


@given(changes(), st.integers(0, 255))
def test_another_kind_or_mark_is_a_protocol_error(change: tuple[bytes, int], byte: int) -> None:
    """The type byte must be the one asked for, the mark before a row one that the message may have."""
    payload, n_columns = change
    kind = chr(payload[0])
    frame = build.xlog_data(payload)
    if chr(byte) != kind:
        flipped = _with(frame, KIND_AT, byte)
        with pytest.raises(ProtocolError) as error:
            READERS[kind](flipped, n_columns)
        assert error.value.kind == chr(byte)
    for other, reader in READERS.items():
        if other != kind:
            with pytest.raises(ProtocolError):
                reader(frame, n_columns)
    is_both_old = {byte, frame[MARK_AT]} <= set(b"KO")
    if byte != frame[MARK_AT] and not is_both_old:
        with pytest.raises(ProtocolError):
            READERS[kind](_with(frame, MARK_AT, byte), n_columns)


@given(changes(), st.data())
def test_any_flipped_byte_reads_as_the_reference_or_is_a_protocol_error(
    change: tuple[bytes, int], data: st.DataObject
) -> None:
    """Whatever byte is wrong, the readers take the message only if the reference decoder does, with its values."""
    payload, n_columns = change
    frame = build.xlog_data(payload)
    at = data.draw(st.integers(FRAME_HEADER_BYTES, len(frame) - 1), label="offset")
    flipped = _with(frame, at, data.draw(st.integers(0, 255), label="byte"))
    try:
        read = READERS[chr(payload[0])](flipped, n_columns)
    except ProtocolError:
        return
    message = decode(flipped[FRAME_HEADER_BYTES:])
    if isinstance(message, Update):
        assert isinstance(read, tuple)
        assert read[1] == _expected(message.new, UNCHANGED)
    elif isinstance(message, Insert):
        assert read == _expected(message.new, UNCHANGED)
    else:
        assert isinstance(message, Delete)
        assert read == _expected(message.old or message.key or ())


def _with(frame: bytes, at: int, byte: int) -> bytes:
    return frame[:at] + bytes([byte]) + frame[at + 1 :]


@pytest.mark.parametrize("mark", [b"K", b"O", b"n", b"\0"])
def test_the_new_row_of_an_update_is_marked(mark: bytes) -> None:
    """Behind an old row stands 'N'."""
    row = build.row(build.text(b"1"))
    payload = build.update(row, key=row)
    frame = build.xlog_data(payload[:6] + row + mark + row)
    with pytest.raises(ProtocolError):
        read_update(frame, 1)
    assert read_update(build.xlog_data(payload), 1) == ([b"\0\0\0\x011"], [b"\0\0\0\x011"])


@pytest.mark.parametrize(("n_old", "n_new"), [(1, 2), (2, 1), (0, 2)])
def test_both_rows_of_an_update_have_every_column(n_old: int, n_new: int) -> None:
    """Old and new row are of one relation."""
    old, new = (build.row(*[build.null()] * count) for count in (n_old, n_new))
    with pytest.raises(ProtocolError, match="2 columns"):
        read_update(build.xlog_data(build.update(new, old=old)), 2)


@pytest.mark.parametrize("count", [-1, -(2**15)])
def test_a_negative_number_of_columns_is_a_protocol_error(count: int) -> None:
    """The number of columns is signed on the wire."""
    cells = build.null() * (count & 0xFFFF)
    frame = build.xlog_data(build.insert(struct.pack("!h", count) + cells))
    with pytest.raises(ProtocolError, match="negative"):
        read_insert(frame, 1)


@pytest.mark.parametrize("length", [-1, -5, 2**31 - 1])
def test_a_length_beyond_the_frame_is_a_protocol_error(length: int) -> None:
    """The length of a value is signed on the wire, and -1 there is not NULL."""
    cell = b"t" + struct.pack("!i", length)
    for row in (build.row(cell), build.row(cell, build.null())):
        frame = build.xlog_data(build.insert(row))
        with pytest.raises(ProtocolError, match=r"length of text value|text value needs"):
            read_insert(frame, int.from_bytes(row[:2], "big"))


def test_binary_values_were_not_asked_for() -> None:
    """The session asks for text; another format would be cast as if it were text."""
    payload = build.insert(build.row(build.text(b"1"), build.binary(b"\0")))
    with pytest.raises(ProtocolError, match="not asked for") as error:
        read_insert(build.xlog_data(payload), 2)
    assert payload[error.value.offset : error.value.offset + 1] == b"b"


def test_a_value_that_an_insert_lacks_is_not_null() -> None:
    """An update that a row filter made an insert lacks unchanged TOAST values, which must not be taken for NULL."""
    frame = build.xlog_data(build.insert(build.row(build.text(b"1"), build.unchanged(), build.null())))
    assert read_insert(frame, 3) == [b"\0\0\0\x011", UNCHANGED, NULL]


def test_values_as_parameters() -> None:
    """A parameter in text format has no length; NULL is None; the empty string is not NULL."""
    assert text_of(b"\0\0\0\x02ab") == b"ab"
    assert text_of(b"\0\0\0\0") == b""
    assert text_of(b"\0\0\0\x04\xff\xff\xff\xff") == b"\xff\xff\xff\xff"
    assert text_of(bytes(bytearray(NULL))) is None

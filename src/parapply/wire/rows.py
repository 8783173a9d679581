"""Row data of change messages as slices, for the hot path. The checked reference is ``wire/decode.py``.

A text column on the wire is ``'t'``, a four-byte length and the bytes. From the length on, that is exactly one element
of a binary ``text[]``: so a value is sliced out once, length included, and travels like that from the socket to the
parameter; nothing is parsed, escaped or copied again. (PostgreSQL manual, "Logical Replication Message Formats",
TupleData; the array layout is the one that ``array_recv`` reads.)

UNCHANGED occurs in new rows of updates, and in the insert that a publisher's row filter makes of an update: that row is
not on the target yet, so nobody has the value. The built-in apply worker stores NULL for it (``slot_store_data`` in
worker.c); here such an insert is applied by no set and refused (`target/sql/commands.py`). Old rows have all their
values (``ExtractReplicaIdentity`` in heapam.c).

One bytes object is made a value, which is the cheapest way plain Python has to move it; no other object is made per
column. The compiled twin makes none at all for most rows: there a row stays the frame it came in (`KeptRow`) if that
holds no other, and is read where it lies (``walk.pxd``), once for its key and once for the parameters.
The types of the compiled twin are in ``rows.pxd``; the differences between the twins are in `read_row`, `values_of`,
`value_at`, `by_columns` and `columns_of`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from parapply.errors import ProtocolError
from parapply.model import FRAME_HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import cython  # read by the compiler only
else:
    from parapply import uncompiled as cython

#: A column value: its length-prefixed slice, NULL, or UNCHANGED (a TOAST value that was not sent, trap T-41).
Value = bytes | None
Row = list[Value]
#: A row as a segment keeps it: its values, or in the compiled twin the frame that holds them and nothing else.
KeptRow = Row | bytes

#: Length -1: the NULL element of a binary array.
NULL = b"\xff\xff\xff\xff"
UNCHANGED = None

_TEXT = ord("t")
_NULL = ord("n")
_UNCHANGED = ord("u")
_length_at = struct.Struct(">I").unpack_from
#: Dimensions, has-null flag, element type, length and lower bound of each dimension. (PostgreSQL's array_recv.)
_array_header = struct.Struct(">iiIii").pack

TEXT_OID = 25
#: Types of pg_catalog whose values `columns_of` makes from their text: bool, bytea, int8, int2, int4, float8, date,
#: timestamp, timestamptz, uuid. None in the interpreted twin: there it costs the leader more than it spares the target.
BINARY_TYPES: frozenset[int] = (
    frozenset((16, 17, 20, 21, 23, 701, 1082, 1114, 1184, 2950)) if cython.compiled else frozenset()
)

#: Offsets inside a CopyData frame that holds Insert, Update or Delete outside a stream block.
KIND_AT = FRAME_HEADER_BYTES
RELATION_AT = FRAME_HEADER_BYTES + 1
MARK_AT = FRAME_HEADER_BYTES + 5
ROW_AT = FRAME_HEADER_BYTES + 6

INSERT = ord("I")
UPDATE = ord("U")
DELETE = ord("D")
TRUNCATE = ord("T")
NEW = ord("N")
_OLD_MARKS = b"KO"

# The same for this module alone: C numbers in the compiled twin, where a comparison with an object costs as much as the
# rest of the loop.
_KIND_AT, _MARK_AT, _ROW_AT = KIND_AT, MARK_AT, ROW_AT
_INSERT, _UPDATE, _DELETE, _NEW = INSERT, UPDATE, DELETE, NEW


def read_row(frame: bytes, at: int, unchanged: Value, row: Row) -> int:
    """Read the TupleData at an offset into a row.

    Args:
        frame: a whole CopyData frame.
        at: offset of the column count.
        unchanged: object in place of a TOAST value that was not sent.
        row: an empty list; gets one value per column in wire order.

    Returns:
        The offset behind the row. One beyond the frame means that the message was cut: callers compare it with the
        length, because slices shorten silently.

    Raises:
        IndexError, struct.error: the frame ends early. Callers turn these into ProtocolError with ``malformed``.
        ProtocolError: a column kind that was not asked for.
    """
    count = frame[at] << 8 | frame[at + 1]
    at += 2
    if cython.compiled:
        untrack(row)  # type: ignore[name-defined]  # noqa: F821  collector.pxd
    data = frame
    size = len(frame)
    for _ in range(count):
        kind = frame[at]
        at += 1
        if kind == _TEXT:
            if cython.compiled:
                # `data` is a bare pointer: nothing below looks behind `size`.
                if at + 4 > size:
                    raise IndexError(at)
                length = data[at]
                length = length << 8 | data[at + 1]
                length = length << 8 | data[at + 2]
                end = at + 4 + (length << 8 | data[at + 3])
                if end > size:
                    raise IndexError(end)
                row.append(data[at:end])
            else:
                end = at + 4 + _length_at(frame, at)[0]
                row.append(frame[at:end])
            at = end
        elif kind == _NULL:
            row.append(NULL)
        elif kind == _UNCHANGED:
            row.append(unchanged)
        else:
            offset = at - 1 - FRAME_HEADER_BYTES
            raise ProtocolError(chr(frame[_KIND_AT]), offset, f"column kind {kind:#x} was not asked for")
    return at


def read_insert(frame: bytes, n_columns: int) -> Row:
    """Return the new row of an Insert frame; one with UNCHANGED in it cannot be made (see above).

    Raises:
        ProtocolError: the bytes are not an Insert of ``n_columns`` columns.
    """
    try:
        if frame[_KIND_AT] == _INSERT and frame[_MARK_AT] == _NEW:
            row: Row = []
            if read_row(frame, _ROW_AT, UNCHANGED, row) == len(frame) and len(row) == n_columns:
                return row
    except (IndexError, struct.error):
        pass
    raise malformed(frame, n_columns, INSERT)


def read_update(frame: bytes, n_columns: int) -> tuple[Row | None, Row]:
    """Return the old row (None if it was not sent) and the new row of an Update frame.

    In an old key ('K') the columns outside the publisher's replica identity are NULL: they were not sent, they are not
    values (PROTOCOL.md 5.3). So are they behind 'O' in a row of a partition that is published as its root
    (`partitions.py`).

    Raises:
        ProtocolError: the bytes are not an Update of ``n_columns`` columns.
    """
    row: Row = []
    try:
        if frame[_KIND_AT] != _UPDATE:
            pass
        elif frame[_MARK_AT] == _NEW:
            if read_row(frame, _ROW_AT, UNCHANGED, row) == len(frame) and len(row) == n_columns:
                return None, row
        elif frame[_MARK_AT] in _OLD_MARKS:
            old: Row = []
            middle = read_row(frame, _ROW_AT, NULL, old)
            if frame[middle] == _NEW:
                end = read_row(frame, middle + 1, UNCHANGED, row)
                if end == len(frame) and len(row) == n_columns == len(old):
                    return old, row
    except (IndexError, struct.error):
        pass
    raise malformed(frame, n_columns, UPDATE)


def has_unchanged(row: Row) -> bool:
    """Return whether a value of a new row was not sent."""
    if cython.compiled:
        found = False
        # `in` would compare by value whatever is something else.
        for value in row:
            if value is UNCHANGED:
                found = True
    else:
        found = UNCHANGED in row
    return found


def read_delete(frame: bytes, n_columns: int) -> Row:
    """Return the old row of a Delete frame; as in ``read_update`` only identity columns are values.

    Raises:
        ProtocolError: the bytes are not a Delete of ``n_columns`` columns.
    """
    try:
        if frame[_KIND_AT] == _DELETE and frame[_MARK_AT] in _OLD_MARKS:
            row: Row = []
            if read_row(frame, _ROW_AT, NULL, row) == len(frame) and len(row) == n_columns:
                return row
    except (IndexError, struct.error):
        pass
    raise malformed(frame, n_columns, DELETE)


def values_of(row: KeptRow) -> Row:
    """Return the values of a row that a segment keeps."""
    if cython.compiled and isinstance(row, bytes):
        values: Row = []
        read_row(row, _ROW_AT, UNCHANGED, values)
        return values
    return row  # type: ignore[return-value]  # the interpreted twin keeps values only


def texts_of(rows: list[KeptRow]) -> list[bytes | None]:
    """Return the values of rows, none of them UNCHANGED, as text-format parameters: one row after the other."""
    texts: list[bytes | None] = []
    for row in rows:
        for value in values_of(row):
            texts.append(None if value == NULL else value[4:])  # type: ignore[index]  # noqa: PERF401  fast if compiled
    return texts


def value_at(row: KeptRow, position: int) -> Value:
    """Return one value of a row that a segment keeps."""
    if cython.compiled and isinstance(row, bytes):
        return frame_value(row, position)  # type: ignore[name-defined, no-any-return]  # noqa: F821  walk.pxd
    return row[position]  # type: ignore[return-value]  # as above


def by_columns(rows: list[KeptRow], n_columns: int) -> dict[tuple[int, ...], list[KeptRow]]:
    """Group rows by the columns that have a value, and keep their order."""
    if cython.compiled:
        groups = split_by_columns(rows, n_columns)  # type: ignore[name-defined]  # noqa: F821  walk.pxd
        return {
            tuple([position for position, is_there in enumerate(found) if is_there]): group
            for found, group in groups.items()
        }
    groups = {}
    for row in rows:
        present = tuple([position for position, value in enumerate(row) if value is not UNCHANGED])
        groups.setdefault(present, []).append(row)
    return groups


def columns_of(
    rows: Sequence[KeptRow], positions: tuple[int, ...], type_oids: tuple[int, ...], n_columns: int
) -> list[bytes | None]:
    """Return, for each position, a binary array of the values that the rows have there, none of them UNCHANGED.

    None stands for a column of which a value has no binary form that is known to be exact: it must be sent as text.

    Args:
        rows: at least one; each of `n_columns` columns.
        positions: of columns, each at most once.
        type_oids: of the elements, for each position: `TEXT_OID` or one of `BINARY_TYPES`.
        n_columns: of the relation.
    """
    if cython.compiled:
        return join_columns(rows, positions, type_oids, n_columns)  # type: ignore[name-defined, no-any-return]  # noqa: F821  walk.pxd
    columns = list(zip(*rows, strict=True))
    header = _array_header(1, 1, TEXT_OID, len(rows), 1)
    return [b"".join((header, *columns[position])) for position in positions]


def malformed(frame: bytes, n_columns: int, expected: int | None = None) -> ProtocolError:
    """Return the exact error for a frame the fast readers could not take, by way of the checked decoder.

    Args:
        frame: a whole CopyData frame.
        n_columns: as many as its relation announced.
        expected: the type byte the caller looked for, if it looked for one.
    """
    # Imported here: the reference decoder is needed only when something is already wrong.
    from parapply.wire.decode import decode  # noqa: PLC0415

    kind = chr(frame[KIND_AT]) if len(frame) > KIND_AT else ""
    try:
        decode(frame[FRAME_HEADER_BYTES:])
    except ProtocolError as error:
        return error
    if expected is not None and kind != chr(expected):
        return ProtocolError(kind, 0, f"a message of kind {chr(expected)!r} was expected")
    return ProtocolError(kind, 0, f"the row does not have the {n_columns} columns its relation announced")


def text_of(value: bytes) -> bytes | None:
    """Return a value as a text-format parameter: its bytes without the length, or None for NULL."""
    return None if value == NULL else value[4:]

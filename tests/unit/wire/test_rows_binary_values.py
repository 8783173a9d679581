"""Binary array elements made from texts: as the type's input function makes them, or none at all.

The interpreted twin makes none; the compiled one is held against Python's own types here, and against the server in
`tests/integration/test_statement_types.py`.
"""

from __future__ import annotations

import struct
import uuid
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parapply import WHY_INTERPRETED
from parapply.wire.rows import BINARY_TYPES, NULL, columns_of

if TYPE_CHECKING:
    from collections.abc import Callable

BOOL, BYTEA, INT8, INT2, INT4, FLOAT8 = 16, 17, 20, 21, 23, 701
DATE, TIMESTAMP, TIMESTAMPTZ, UUID = 1082, 1114, 1184, 2950
_EPOCH = datetime(2000, 1, 1)  # noqa: DTZ001  of timestamps without a zone
_MICROSECOND = timedelta(microseconds=1)


def _iso(moment: datetime) -> str:
    """Return a moment as PostgreSQL prints it: no more digits behind the point than needed."""
    text = f"{moment.year:04}-{moment:%m-%d %H:%M:%S}"
    return f"{text}.{moment.microsecond:06}".rstrip("0") if moment.microsecond else text


def _microseconds(moment: datetime) -> bytes:
    return struct.pack("!q", (moment - _EPOCH) // _MICROSECOND)


def _numbers(bits: int) -> st.SearchStrategy[int]:
    most = 1 << (bits - 1)
    return st.one_of(st.integers(-most, most - 1), st.sampled_from([-most, most - 1, 0]))


MOMENTS = st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999999))  # noqa: DTZ001
#: A type, its values, their text and their binary form.
FORMS: dict[int, tuple[st.SearchStrategy[object], Callable[..., str], Callable[..., bytes]]] = {
    BOOL: (st.booleans(), lambda value: "t" if value else "f", lambda value: b"\1" if value else b"\0"),
    BYTEA: (st.binary(max_size=70), lambda value: "\\x" + value.hex(), lambda value: value),
    INT2: (_numbers(16), str, lambda value: struct.pack("!h", value)),
    INT4: (_numbers(32), str, lambda value: struct.pack("!i", value)),
    INT8: (_numbers(64), str, lambda value: struct.pack("!q", value)),
    FLOAT8: (
        st.floats(allow_nan=False, allow_infinity=False),
        lambda value: repr(value).removesuffix(".0"),
        lambda value: struct.pack("!d", value),
    ),
    DATE: (st.dates(), date.isoformat, lambda value: struct.pack("!i", (value - date(2000, 1, 1)).days)),
    TIMESTAMP: (MOMENTS, _iso, _microseconds),
    TIMESTAMPTZ: (MOMENTS, lambda value: _iso(value) + "+00", _microseconds),
    UUID: (st.uuids(), str, lambda value: value.bytes),
}
#: Texts that the input functions take or refuse, and that PostgreSQL does not print in a session of ours.
ODD: dict[int, tuple[str, ...]] = {
    BOOL: ("true", "T", "1", "on", "", "tt"),
    BYTEA: (
        "", "\\", "\\x0", "\\xABCD", "\\x0g", "\\xg0", "\\x 00", "\\x0/", "\\x:0", "\\x0`", "\\\\000", "abcd", "x00",
        "\\X00",
    ),
    INT2: ("32768", "-32769", "", "-", "+1", " 1", "1 ", "0x1", "1_0", "1.0", "--1"),
    INT4: ("2147483648", "-2147483649", "1e3", "99999999999999999999"),
    INT8: ("9223372036854775808", "-9223372036854775809", "10000000000000000000", "99999999999999999999"),
    FLOAT8: ("NaN", "Infinity", "-Infinity", "1e400", "1e-400", "", "-", ".5", "+1", "0x1p3", "1_0", "1e", "1.5.5"),
    DATE: ("2026-02-29", "2026-13-01", "2026-00-01", "2026-01-00", "0000-01-01", "infinity", "0044-03-15 BC", "1-1-1"),
    TIMESTAMP: (
        "2026-01-01", "2026-01-01 24:00:00", "2026-01-01 23:59:60", "2026-01-01 00:00:00.", "2026-01-01T00:00:00",
        "2026-01-01 00:00:00.1234567", "2026-01-01 00:00:00+00", "infinity", "0044-03-15 12:00:00 BC",
        "2026-02-30 00:00:00", "12026-01-01 00:00:00", "2026-01-01 00:60:00", "2026-01-01 0a:00:00",
    ),
    TIMESTAMPTZ: (
        "2026-01-01 00:00:00", "2026-01-01 00:00:00+01", "2026-01-01 00:00:00-00", "2026-01-01 00:00:00+00:30",
        "2026-01-01 00:00:00 UTC", "-infinity", "0044-03-15 12:00:00+00 BC", "+00",
    ),
    UUID: (
        "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11", "a0eebc999c0b4ef8bb6d6bb9bd380a11", "", "g" * 36,
        "{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}", "a0eebc99-9c0b4-ef8-bb6d-6bb9bd380a11",
    ),
}  # fmt: skip


def _array(type_oid: int, texts: list[str | None]) -> bytes | None:
    rows = [[NULL if text is None else struct.pack("!i", len(text)) + text.encode()] for text in texts]
    (array,) = columns_of(rows, (0,), (type_oid,), 1)  # type: ignore[arg-type]  # a list of lists is one of kept rows
    return array


def test_the_compiled_twin_makes_these() -> None:
    """The types that need not be parsed on the target; none where the interpreter would have to make their values."""
    assert frozenset(() if WHY_INTERPRETED else FORMS) == BINARY_TYPES


@pytest.mark.parametrize("type_oid", FORMS)
@given(data=st.data())
def test_printed_values_become_binary(type_oid: int, data: st.DataObject) -> None:
    """A printed value has the binary form that its own send function gives it; NULL stays NULL."""
    values, text_of, binary_of = FORMS[type_oid]
    wanted = data.draw(st.lists(st.one_of(st.none(), values), min_size=1, max_size=5))
    if type_oid not in BINARY_TYPES:
        return
    elements = [NULL if value is None else binary_of(value) for value in wanted]
    joined = b"".join(one if one is NULL else struct.pack("!i", len(one)) + one for one in elements)
    found = _array(type_oid, [None if value is None else text_of(value) for value in wanted])
    assert found == struct.pack("!iiIii", 1, 1, type_oid, len(wanted), 1) + joined


@pytest.mark.parametrize("type_oid", ODD)
def test_other_spellings_are_left_to_the_target(type_oid: int) -> None:
    """One value that is spelled in another way, or cannot be, leaves its whole column to the type's input function."""
    if type_oid not in BINARY_TYPES:
        return
    _, text_of, _ = FORMS[type_oid]
    usual = {BYTEA: "\\x00ff", DATE: "2026-01-01", UUID: str(uuid.UUID(int=7)), BOOL: "t"}.get(type_oid, "1")
    if type_oid in (TIMESTAMP, TIMESTAMPTZ):
        usual = text_of(datetime(2026, 1, 1, tzinfo=UTC).replace(tzinfo=None))
    assert _array(type_oid, [usual]) is not None
    for odd in ODD[type_oid]:
        assert _array(type_oid, [usual, odd, usual]) is None, odd


@given(st.sampled_from(sorted(FORMS)), st.text(alphabet="0123456789-+.: eE\\x", max_size=30))
def test_no_text_is_too_odd(type_oid: int, text: str) -> None:
    """Any text is refused or becomes one element; nothing is read behind its end."""
    if type_oid in BINARY_TYPES:
        array = _array(type_oid, [text])
        assert array is None or len(array) == 24 + int.from_bytes(array[20:24])

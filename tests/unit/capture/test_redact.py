"""Replaced values: of the same type and form, equal where the originals are, and nothing else is left of them."""

from __future__ import annotations

import json
import re
from datetime import date, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parapply.capture.blocks import CapturedColumn, CapturedTable, CapturedType
from parapply.capture.permute import Permutation
from parapply.capture.redact import FrameReplacement, ValueReplacement
from parapply.errors import CaptureRefused

_ONE = Permutation(bytes(range(32)))
_VALUES = ValueReplacement(_ONE)
_WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=70)


def _type(oid: int, name: str, kind: str = "b", element: int = 0, labels: tuple[str, ...] = ()) -> CapturedType:
    return CapturedType(oid=oid, schema="public", name=name, kind=kind, element=element, labels=labels)


@given(_WORDS, _WORDS)
def test_texts_keep_length_bytes_and_equality(one: str, other: str) -> None:
    """Characters and bytes are as many; equal texts stay equal, others stay different; marks of ASCII stay."""
    first, second = _ONE.text(one), _ONE.text(other)
    assert (len(first), len(first.encode())) == (len(one), len(one.encode()))
    assert (first == second) == (one == other)
    assert re.sub(r"[A-Za-z0-9]|[^\x00-\x7f]", "", first) == re.sub(r"[A-Za-z0-9]|[^\x00-\x7f]", "", one)


@pytest.mark.parametrize("size", [1, 2, 10, 1000, 1025, 5000])
def test_a_range_is_permuted(size: int) -> None:
    """Every number of a range is given once."""
    assert sorted(_ONE.within("x", number, size) for number in range(size)) == list(range(size))


@pytest.mark.parametrize("bits", [16, 32, 64])
@given(data=st.data())
def test_integers_stay_in_their_range(bits: int, data: st.DataObject) -> None:
    """A number keeps sign and digits, fits where it was, and is one to one, also against a wider column."""
    numbers = st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)
    one, other = data.draw(numbers), data.draw(numbers)
    first, second = int(_VALUES.whole(str(one))), int(_VALUES.whole(str(other)))
    assert -(1 << bits - 1) <= first < 1 << bits - 1
    assert (first == second, (first < 0) == (one < 0)) == (one == other, True)
    assert len(str(abs(first + (one < 0)))) == len(str(abs(one + (one < 0))))


@given(st.decimals(allow_nan=False, allow_infinity=False, places=5, min_value=-(10**30), max_value=10**30))
def test_numerics_keep_their_digits(number: object) -> None:
    """Digits before and behind the point stay as many, and a replacement is a number."""
    text = f"{number:f}"
    replaced = _VALUES.numeric(text)
    assert re.fullmatch(r"-?[0-9]+\.[0-9]{5}", replaced)
    assert len(replaced) == len(text)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "infinity"])
def test_what_is_no_number_and_no_time_stays(text: str) -> None:
    """Values without digits say nothing."""
    assert _VALUES.numeric(text) == _VALUES.float(1e308, text) == _VALUES.time(text) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_stay_floats(number: float) -> None:
    """A replacement can be read, and stays in its range."""
    assert abs(float(_VALUES.float(1.79e308, repr(number)))) <= 1.79e308


@given(st.datetimes(min_value=datetime(1, 1, 1), max_value=datetime(9999, 12, 31)), st.dates())  # noqa: DTZ001
def test_times_stay_valid(at: datetime, day: date) -> None:
    """Dates and timestamps are replaced by valid ones of the same form."""
    text = at.isoformat(" ") + "+00"
    replaced = _VALUES.time(text)
    assert datetime.fromisoformat(replaced).year >= 1
    assert len(replaced) == len(text)
    assert date.fromisoformat(_VALUES.time(day.isoformat())).year >= 1
    assert _VALUES.time(day.isoformat()) == _VALUES.time(f"{day.isoformat()} 00:00:00")[:10]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | _WORDS,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_WORDS, inner, max_size=4),
    )
)
def test_json_keeps_its_form(value: object) -> None:
    """A replaced JSON can be read, and has the same shape; a digit-only form shows it."""
    text = json.dumps(value, ensure_ascii=False)
    replaced = json.loads(_VALUES.json(text))
    assert _shape(replaced) == _shape(value)


def _shape(value: object) -> object:
    if isinstance(value, dict):
        return sorted([(len(key), repr(_shape(each))) for key, each in value.items()])
    if isinstance(value, list):
        return [_shape(each) for each in value]
    return type(value).__name__


def test_arrays_enums_and_domains_are_replaced_by_their_elements() -> None:
    """Elements go by the element's type, NULL and bounds stay, labels become labels, a domain is its base."""
    types = {
        900: _type(900, "_text", element=25),
        901: _type(901, "mood", kind="e", labels=("sad", "ok", "glad")),
        902: CapturedType(oid=902, schema="public", name="code", kind="d", base=901),
    }
    array = _VALUES.of(900, types)
    assert array is not None
    replaced = array('[0:2]={"say \\"hi\\", {you}",NULL,plain}')
    assert re.fullmatch(r'\[0:2\]=\{"\w{3} \\"\w\w\\", \{\w{3}\}",NULL,"\w{5}"\}', replaced)
    assert "say" not in replaced
    enum, domain = _VALUES.of(901, types), _VALUES.of(902, types)
    assert enum is not None
    assert domain is not None
    assert {enum(label) for label in ("sad", "ok", "glad")} == {"sad", "ok", "glad"}
    assert domain("ok") == enum("ok")


def test_an_unknown_type_is_null_or_refused_by_name() -> None:
    """A column that may be NULL becomes NULL, any other one is refused with its table and type."""
    frames = FrameReplacement(_ONE)
    types = {600: _type(600, "point")}
    table = CapturedTable(
        oid=1, schema="s", name="t", identity="d", columns=(CapturedColumn(name="at", type_oid=600, modifier=-1),)
    )
    frames.announce(table, types)
    insert = b"w" + bytes(24) + b"I" + (1).to_bytes(4) + b"N" + (1).to_bytes(2) + b"t" + (5).to_bytes(4) + b"(1,2)"
    assert frames.replaced(insert, in_stream=False) == insert[: -len(b"t\0\0\0\x05(1,2)")] + b"n"
    needed = CapturedTable(
        oid=1, schema="s", name="t", identity="d",
        columns=(CapturedColumn(name="at", type_oid=600, modifier=-1, is_not_null=True),),
    )  # fmt: skip
    with pytest.raises(CaptureRefused, match=r"s\.t: column 'at' is of type public\.point"):
        frames.announce(needed, types)

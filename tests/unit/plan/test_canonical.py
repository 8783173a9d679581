"""Canonical texts against models of the types; `tests/integration/test_equality.py` asks the server the same."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parapply.errors import ProtocolError
from parapply.plan import canonical

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_DAY_US = 86_400_000_000
TIMES_US = st.sampled_from([0, 1, -1, 5, 500_000, -1_500_000, _DAY_US, -_DAY_US, 30 * _DAY_US, 45_296_789_000])
INTERVALS = st.tuples(st.integers(-25, 25), st.integers(-65, 65), TIMES_US)
Interval = tuple[int, int, int]

NUMBERS = ["0", "0.0", "0.00", "1", "1.0", "1.00", "10", "10.0", "-1.5", "-1.50", "0.05", "0.050", "100"]
#: Strings of JSON as they are printed.
STRINGS = ['""', '"1"', '"1.0"', '"1.00"', '".0"', r'"\""', r'"\\"', r'"\"1.0"', r'"\"1.00"', r'"\\\".0"', '"a, 2.0"']
JSON = st.recursive(
    st.sampled_from([*NUMBERS, *STRINGS, "true", "false", "null"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda values: f"[{', '.join(values)}]")
        | st.dictionaries(st.sampled_from(STRINGS), inner, max_size=3).map(
            lambda pairs: f"{{{', '.join(f'{key}: {pairs[key]}' for key in sorted(pairs))}}}"
        )
    ),
    max_leaves=4,
)

#: Lower bounds, and rows, of an array of two dimensions.
Shape = tuple[tuple[int, int], int]
Array = tuple[Shape, list[str | None]]
SHAPES: list[Shape] = [((1, 1), 1), ((1, 1), 2), ((0, 1), 1), ((1, -1), 2)]


@st.composite
def near_intervals(draw: st.DrawFn) -> tuple[Interval, Interval]:
    """Draw two intervals that are often of one length: as much is taken from one field as goes to another."""
    months, days, time_us = draw(INTERVALS)
    more_months, more_days = draw(st.integers(-13, 13)), draw(st.integers(-2, 2))
    more_us = draw(st.just(0) | TIMES_US)
    other = (months + more_months, days - 30 * more_months + more_days, time_us - more_days * _DAY_US + more_us)
    return (months, days, time_us), other


@st.composite
def near_arrays(draw: st.DrawFn, *groups: list[str]) -> tuple[Array, Array]:
    """Draw two arrays with elements of one group of texts that are equal or nearly so."""
    elements = st.sampled_from([*draw(st.sampled_from(groups)), None])
    shape, size = draw(st.sampled_from(SHAPES)), draw(st.integers(0, 3))
    first = draw(st.lists(elements, min_size=size, max_size=size))
    second = draw(st.lists(elements, min_size=size, max_size=size) | st.lists(elements, max_size=3))
    return (shape, first), (draw(st.just(shape) | st.sampled_from(SHAPES)), second)


@st.composite
def near_json(draw: st.DrawFn) -> tuple[str, str]:
    """Draw two documents: any, or the second with more or fewer zeros in numbers and strings."""
    document = draw(JSON)
    old, new = draw(st.sampled_from([(".0", ".00"), (".5", ".50"), ("0.0", "0.00")]))
    return document, draw(st.just(document.replace(old, new)) | JSON)


def _interval(months: int, days: int, time_us: int) -> bytes:
    """Print an interval as EncodeInterval does under IntervalStyle postgres."""
    parts = []
    is_before = False
    years = abs(months) // 12 * (-1 if months < 0 else 1)
    for value, unit in ((years, "year"), (months - years * 12, "mon"), (days, "day")):
        if value:
            parts.append(f"{'+' if is_before and value > 0 else ''}{value} {unit}{'' if value == 1 else 's'}")
            is_before = value < 0
    if time_us or not parts:
        sign = "-" if time_us < 0 else "+" if is_before else ""
        seconds, fraction = divmod(abs(time_us), 1_000_000)
        clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        parts.append(sign + clock + (f".{fraction:06}".rstrip("0") if fraction else ""))
    return " ".join(parts).encode()


@given(pair=near_intervals())
def test_intervals_compare_by_their_length(pair: tuple[Interval, Interval]) -> None:
    """A month has 30 days and a day 24 hours, whatever the signs of the fields."""
    first, second = [(months * 30 + days) * _DAY_US + time_us for months, days, time_us in pair]
    one, other = [canonical.interval(_interval(*fields)) for fields in pair]
    assert (one == other) is (first == second)


@pytest.mark.parametrize("text", ["", " ", "P1M", "1 month", "@ 1 mon", "1-2 3 4:05:06", "00:00", "1 mon,", "Infinity"])
def test_intervals_of_another_style_are_refused(text: str) -> None:
    """A guess would lose rows; the error does not hold the value."""
    with pytest.raises(ProtocolError) as error:
        canonical.interval(text.encode())
    assert not text.strip() or text not in str(error.value)


@given(pair=near_json())
def test_json_compares_numbers_by_value_and_strings_by_bytes(pair: tuple[str, str]) -> None:
    """1.0 is 1 but for inside a string or a key."""
    first, second = pair
    is_same = canonical.jsonb(first.encode()) == canonical.jsonb(second.encode())
    assert is_same is (_model_of_json(first) == _model_of_json(second))


@given(document=JSON, data=st.data())
def test_json_with_other_scales_is_the_same(document: str, data: st.DataObject) -> None:
    """However deep a number is, its scale does not count."""

    def number(text: str) -> Decimal:
        return Decimal(text)

    def spelled(value: object) -> str:
        if isinstance(value, Decimal):
            extra = data.draw(st.integers(0, 2))
            text = format(value, "f")
            return text + (("" if "." in text else ".") + "0" * extra if extra else "")
        if isinstance(value, list):
            return f"[{', '.join(map(spelled, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{json.dumps(key)}: {spelled(inner)}' for key, inner in value.items())}}}"
        return json.dumps(value)

    other = spelled(json.loads(document, parse_float=number, parse_int=number))
    assert canonical.jsonb(document.encode()) == canonical.jsonb(other.encode())


def _model_of_json(text: str) -> object:
    """Return the document with every scalar beside its type: in Python true is 1."""

    def tagged(value: Any) -> object:  # noqa: ANN401 - any JSON
        if isinstance(value, list):
            return [tagged(inner) for inner in value]
        if isinstance(value, dict):
            return {key: tagged(inner) for key, inner in value.items()}
        return type(value), value

    return tagged(json.loads(text, parse_float=Decimal, parse_int=Decimal))


def _array(bounds: tuple[int, int], n_rows: int, elements: Sequence[str | None]) -> bytes:
    """Print an array of two dimensions as array_out does; without elements it has none."""
    if not elements:
        return b"{}"
    printed = []
    for element in elements:
        if element is None:
            printed.append("NULL")
        elif not element or element.upper() == "NULL" or set(element) & set(' "\\{},\t\n'):
            printed.append('"' + element.replace("\\", "\\\\").replace('"', '\\"') + '"')
        else:
            printed.append(element)
    rows = [f"{{{','.join(printed)}}}"] * n_rows
    low, inner_low = bounds
    prefix = "" if bounds == (1, 1) else f"[{low}:{low + n_rows - 1}][{inner_low}:{inner_low + len(printed) - 1}]="
    return f"{prefix}{{{','.join(rows)}}}".encode()


def _assert_arrays(form: Callable[[bytes], bytes], model: Callable[[str], object], pair: tuple[Array, Array]) -> None:
    first, second = [
        (shape, [None if text is None else ("value", model(text)) for text in texts]) if texts else None
        for shape, texts in pair
    ]
    one, other = [form(_array(*shape, texts)) for shape, texts in pair]
    assert (one == other) is (first == second)


PADDED = [["a", "a ", "a  ", " a"], ["", " ", "  "], ["NULL", "NULL ", "null"], ["a,b", "a", "b ", 'a","b', 'a","b '],
          ['"', '" ', '\\"', '\\" '], ["\\", "\\ ", "\\\\"], ["{}", "{} ", "}"]]  # fmt: skip


@given(pair=near_arrays(*PADDED))
def test_arrays_of_blank_padded_text(pair: tuple[Array, Array]) -> None:
    """Trailing blanks of elements do not count, quoted or not; bounds, nesting and NULL do."""
    _assert_arrays(canonical.array_of(canonical.unpadded), lambda text: text.rstrip(" "), pair)


@given(pair=near_arrays(["0", "-0"], ["1", "-1"], ["NaN", "0", "1e-05"]))
def test_arrays_of_floats(pair: tuple[Array, Array]) -> None:
    """-0 is 0 as an element, too, and NaN is itself."""
    form = canonical.array_of(canonical.floating)
    _assert_arrays(form, lambda text: text if text == "NaN" else float(text), pair)


@given(pair=near_arrays(["0", "0.0", "0.00"], ["1", "1.0", "10.0", "100"], ["0.05", "0.050", "0.5"], ["NaN", "1.50"]))
def test_arrays_of_numerics(pair: tuple[Array, Array]) -> None:
    """The scale of no element counts."""
    _assert_arrays(canonical.numbers, lambda text: text if text == "NaN" else Decimal(text), pair)


@given(pair=near_arrays(["1 mon", "30 days", "720:00:00"], ["infinity", "-infinity"], ["1 day", "24:00:00", "-1 days"]))
def test_arrays_of_intervals(pair: tuple[Array, Array]) -> None:
    """An interval is its length whether it is quoted (blanks) or not."""
    _assert_arrays(canonical.array_of(canonical.interval), lambda text: canonical.interval(text.encode()), pair)


@given(pair=near_arrays(["1", "1.0", '"1"', '"1.0"'], [r'"\"1.0"', r'"\"1.00"'], ['{"a": 1.0}', '{"a": 1}', "null"]))
def test_arrays_of_json(pair: tuple[Array, Array]) -> None:
    """Quotes of strings are escaped in an array, and still keep the digits inside them."""
    _assert_arrays(canonical.array_of(canonical.jsonb), _model_of_json, pair)


def test_an_element_is_not_two() -> None:
    """The separator of elements may be inside one (trap T-33)."""
    form = canonical.array_of(canonical.unpadded)
    texts = [
        b"{a,b}",
        rb'{"a\",\"b"}',
        b'{"a,b"}',
        b"{{a},{b}}",
        rb'{"a},{b"}',
        rb'{"{a},{b}"}',
        b"{NULL}",
        b'{"NULL"}',
    ]
    assert len({form(text) for text in texts}) == len(texts)


def test_what_is_no_array_is_refused() -> None:
    """A guess would lose rows."""
    with pytest.raises(ProtocolError):
        canonical.array_of(canonical.unpadded)(b"a")


BOUNDS = st.sampled_from(["", *NUMBERS, "Infinity", "-Infinity", "NaN"])
RANGES = st.tuples(st.sampled_from("[("), BOUNDS, BOUNDS, st.sampled_from("])"))


@given(first=st.lists(RANGES, max_size=2), second=st.lists(RANGES, max_size=2), data=st.data())
def test_ranges_of_numerics(first: list[tuple[str, ...]], second: list[tuple[str, ...]], data: st.DataObject) -> None:
    """Bounds compare as numbers; brackets, missing bounds and infinities count."""
    if data.draw(st.booleans()):
        second = [tuple(part.replace(".0", ".00") for part in bounds) for bounds in first]

    def text(ranges: list[tuple[str, ...]]) -> bytes:
        return f"{{{','.join(f'{left}{low},{high}{right}' for left, low, high, right in ranges)}}}".encode()

    def model(ranges: list[tuple[str, ...]]) -> object:
        return [[Decimal(part) if part[-1:].isdigit() else part for part in bounds] for bounds in ranges]

    assert (canonical.numbers(text(first)) == canonical.numbers(text(second))) is (model(first) == model(second))

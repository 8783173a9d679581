"""Keys: equal exactly when the target's index holds them equal."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from parapply.plan.keys import Key, key_form, key_reader, value_reader
from parapply.plan.table import Equality, TablePlan
from parapply.target.catalogue.match import match
from parapply.wire.rows import NULL, UNCHANGED
from tests.unit import plans

FLOATS = st.floats().map(lambda number: "NaN" if math.isnan(number) else repr(number).removesuffix(".0"))
DECIMALS = st.builds(
    lambda digits, scale: format(Decimal(digits).scaleb(-scale), "f"), st.integers(-2000, 2000), st.integers(0, 4)
)
TEXTS = st.text("ab ", max_size=4)


def _plan(*types: tuple[str, Equality]) -> TablePlan:
    names = [f"k{number}" for number in range(len(types))]
    columns = [
        plans.column(name, type_, equality=equality) for name, (type_, equality) in zip(names, types, strict=True)
    ]
    columns.insert(0, plans.column("a", "text"))
    sent = [plans.sent("a", "text"), *[plans.sent(name, types[n][0], is_key=True) for n, name in enumerate(names)]]
    return match(plans.relation(*sent), plans.table(columns, names))


def _value(text: str | None) -> bytes:
    return NULL if text is None else len(text.encode()).to_bytes(4, "big") + text.encode()


def _key(plan: TablePlan, *texts: str | None) -> Key:
    return key_reader(plan)([NULL, *map(_value, texts)])


def _decimal(text: str) -> Decimal:
    return abs(Decimal(text)) if not Decimal(text) else Decimal(text)


@pytest.mark.parametrize("others", [0, 1, 2])
@given(first=DECIMALS, second=DECIMALS)
def test_numeric_keys_compare_as_numbers(first: str, second: str, others: int) -> None:
    """Scale does not count in numeric, alone or beside other columns."""
    plan = _plan(("numeric", Equality.NUMERIC), *[("int4", Equality.BYTES)] * others)
    first, second = (text.replace("-0", "0", 1) if not Decimal(text) else text for text in (first, second))
    rest = ["7"] * others
    assert (_key(plan, first, *rest) == _key(plan, second, *rest)) is (_decimal(first) == _decimal(second))


@pytest.mark.parametrize(
    ("first", "second", "is_equal"),
    [
        ("1.0", "1.00", True),
        ("1", "1.000", True),
        ("10", "1", False),
        ("100", "10.0", False),
        ("0", "0.00", True),
        ("-1.50", "-1.5", True),
        ("-1", "1", False),
        ("NaN", "NaN", True),
        ("Infinity", "-Infinity", False),
    ],
)
def test_numeric_keys_by_example(first: str, second: str, *, is_equal: bool) -> None:
    """Zeros behind the point do not count, those before it do."""
    plan = _plan(("numeric", Equality.NUMERIC))
    assert (_key(plan, first) == _key(plan, second)) is is_equal


@given(first=FLOATS, second=FLOATS)
def test_float_keys_compare_as_numbers(first: str, second: str) -> None:
    """-0 is 0, and NaN is itself, as in PostgreSQL's index."""
    plan = _plan(("float8", Equality.FLOAT))
    is_equal = first == second or float(first) == float(second)
    assert (_key(plan, first) == _key(plan, second)) is is_equal


@pytest.mark.parametrize(("first", "second"), [("-0", "0"), ("0", "-0"), ("-0", "-0"), ("-0", "1"), ("0", "NaN")])
def test_zeros_of_both_signs_are_one_float_key(first: str, second: str) -> None:
    """Alone or beside other columns, -0 is 0 and nothing else is."""
    for others in ([], ["7"], ["7", "8"]):
        plan = _plan(("float8", Equality.FLOAT), *[("int4", Equality.BYTES)] * len(others))
        is_equal = _key(plan, first, *others) == _key(plan, second, *others)
        assert is_equal is (float(first) == float(second))


@given(first=TEXTS, second=TEXTS)
def test_blank_padded_keys_compare_without_trailing_blanks(first: str, second: str) -> None:
    """In char(n) trailing blanks do not count, leading ones do; in text all do."""
    padded, plain = _plan(("bpchar", Equality.BPCHAR)), _plan(("text", Equality.BYTES))
    assert (_key(padded, first) == _key(padded, second)) is (first.rstrip(" ") == second.rstrip(" "))
    assert (_key(plain, first) == _key(plain, second)) is (first == second)


@given(
    first=st.lists(TEXTS | st.none(), min_size=3, max_size=3),
    second=st.lists(TEXTS | st.none(), min_size=3, max_size=3),
)
@pytest.mark.parametrize("n_columns", [1, 2, 3])
def test_keys_of_several_columns_keep_them_apart(
    first: list[str | None], second: list[str | None], n_columns: int
) -> None:
    """('ab','c') is not ('a','bc'), and NULL is neither '' nor 'NULL' (trap T-33)."""
    plan = _plan(*[("text", Equality.BYTES)] * n_columns)
    first, second = first[:n_columns], second[:n_columns]
    assert (_key(plan, *first) == _key(plan, *second)) is (first == second)


#: A text of each class.
KNOWN = {
    Equality.BYTES: "0",
    Equality.NUMERIC: "0",
    Equality.FLOAT: "0",
    Equality.BPCHAR: "0",
    Equality.INTERVAL: "00:00:00",
    Equality.JSONB: "null",
    Equality.NUMBERS: "empty",
    Equality.FLOAT_ARRAY: "{NULL}",
    Equality.BPCHAR_ARRAY: "{}",
    Equality.INTERVAL_ARRAY: "{NULL}",
    Equality.JSONB_ARRAY: "{null}",
}


@pytest.mark.parametrize("equality", KNOWN)
def test_null_is_no_other_key(equality: Equality) -> None:
    """A NULL in an old row is one key, and no value's: an update of it must not be merged with one of ''."""
    plan = _plan(("text", equality))
    assert _key(plan, None) == _key(plan, None)
    assert _key(plan, None) != _key(plan, KNOWN[equality])
    if equality in (Equality.BYTES, Equality.BPCHAR):
        assert _key(plan, None) != _key(plan, "")
        assert _key(plan, None) != _key(plan, " ")


def test_keys_are_in_the_order_of_the_targets_index() -> None:
    """The publisher's order of columns does not matter: another order is the same key and the same form."""
    names = ("x", "y", "z")
    facts = plans.table([plans.column(name, "text") for name in names], names)
    for count in (2, 3):
        key = replace(facts, key_columns=names[:count])
        forms = set()
        for order in itertools.permutations(names):
            plan = match(plans.relation(*[plans.sent(name, "text", is_key=True) for name in order]), key)
            assert key_reader(plan)([_value(name) for name in order]) == tuple(map(_value, names[:count]))
            forms.add(key_form(plan))
        assert len(forms) == 1


def test_keys_of_another_form_are_known_as_such() -> None:
    """A key in other columns, or compared in another way, cannot be looked for among these."""
    plan = _plan(("numeric", Equality.NUMERIC))
    other_way = _plan(("text", Equality.BYTES))
    other_columns = replace(plan, facts=replace(plan.facts, key_columns=("a",)))
    assert len({key_form(plan), key_form(other_way), key_form(other_columns)}) == 3


def test_every_class_but_the_unknown_one_has_a_form() -> None:
    """A class that a table can be keyed by is one that a key can be made of."""
    assert set(KNOWN) == set(Equality) - {Equality.UNKNOWN}


def test_a_key_that_cannot_be_compared_is_refused() -> None:
    """A plan whose key compares in an unknown way, or that has none, never gets a reader."""
    with pytest.raises(KeyError):
        key_reader(_plan(("jsonb", Equality.UNKNOWN)))
    with pytest.raises(KeyError):
        key_reader(_plan())


@given(texts=st.tuples(DECIMALS, TEXTS | st.none(), TEXTS | st.none()), is_nulls_distinct=st.booleans())
@pytest.mark.parametrize("n_columns", [1, 2, 3])
def test_values_are_what_keys_are(
    texts: tuple[str, str | None, str | None], n_columns: int, *, is_nulls_distinct: bool
) -> None:
    """A value of a unique or foreign key is the key of its columns, but nothing if a NULL is distinct."""
    types = (("numeric", Equality.NUMERIC), ("bpchar", Equality.BPCHAR), ("text", Equality.BYTES))[:n_columns]
    of = value_reader(
        tuple(range(1, n_columns + 1)), tuple(equality for _, equality in types), is_nulls_distinct=is_nulls_distinct
    )
    value = of([NULL, *map(_value, texts)])
    claims_nothing = is_nulls_distinct and None in texts[:n_columns]
    assert value == (None if claims_nothing else _key(_plan(*types), *texts[:n_columns]))


@pytest.mark.parametrize("is_nulls_distinct", [True, False])
@pytest.mark.parametrize("at", [0, 1])
def test_what_was_not_sent_claims_nothing(at: int, *, is_nulls_distinct: bool) -> None:
    """An UNCHANGED value is not known, so neither is a value it is part of."""
    row = [UNCHANGED if position == at else _value("1") for position in range(2)]
    both = (Equality.BYTES, Equality.BYTES)
    assert value_reader((0, 1), both, is_nulls_distinct=is_nulls_distinct)(row) is None
    alone = value_reader((0,), both[:1], is_nulls_distinct=is_nulls_distinct)(row)
    assert alone == (None if at == 0 else _value("1"))


def test_nulls_that_are_not_distinct_are_one_value() -> None:
    """Under NULLS NOT DISTINCT a NULL claims its place, which is no text's."""
    for equality, text in KNOWN.items():
        of = value_reader((0,), (equality,), is_nulls_distinct=False)
        assert of([NULL]) is not None
        assert of([NULL]) == of([NULL])
        assert of([NULL]) != of([_value(text)])
        assert value_reader((0,), (equality,), is_nulls_distinct=True)([NULL]) is None


@given(number=st.integers(), scale=st.integers(0, 5))
def test_values_of_two_tables_do_not_depend_on_the_wires_type(number: int, scale: int) -> None:
    """A child's integer is its parent's numeric, alone and beside others."""
    integer, numeric = str(number), f"{number}.{'0' * scale}".rstrip(".")
    child = value_reader((0,), (Equality.NUMERIC,), is_nulls_distinct=True)
    parent = value_reader((1,), (Equality.NUMERIC,), is_nulls_distinct=True)
    assert child([_value(integer)]) == parent([NULL, _value(numeric)])
    both = (Equality.NUMERIC, Equality.BYTES)
    of = value_reader((0, 1), both, is_nulls_distinct=True)
    assert of([_value(integer), _value("a")]) == of([_value(numeric), _value("a")])
    assert of([_value(integer), _value("a")]) != of([_value(numeric), _value("b")])


def test_values_that_cannot_be_compared_are_refused() -> None:
    """Nothing reads a value of no column, of an unknown class, or of columns and classes that do not pair."""
    for positions, equalities in [((), ()), ((0,), (Equality.UNKNOWN,)), ((0, 1), (Equality.BYTES, Equality.UNKNOWN))]:
        with pytest.raises(KeyError):
            value_reader(positions, equalities, is_nulls_distinct=True)
    with pytest.raises(ValueError):
        value_reader((0, 1), (Equality.BYTES,), is_nulls_distinct=True)

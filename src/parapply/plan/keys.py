"""Key values as the target's index compares them, not as bytes (trap T-21). Pure.

A key is the value of a single column, or a tuple with one value per key column, which keeps ('ab','c') and ('a','bc')
apart (trap T-33). A value is its slice of the wire, length included, or where equal values differ in their text its
canonical text. A value without one never gets here, because ``target/catalogue/match.py`` widens its table. The
forms of rare types are in ``plan/canonical.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from parapply.plan import canonical
from parapply.plan.table import Equality
from parapply.wire.rows import NULL, UNCHANGED, KeptRow, Row, value_at

if TYPE_CHECKING:
    from parapply.plan.table import TablePlan

#: A key: one value, or one value per key column.
Key = bytes | tuple[bytes, ...]
KeyOf = Callable[[Row], Key]


def key_reader(plan: TablePlan) -> KeyOf:
    """Return the function that takes a row to its key under the target's replica identity or primary key.

    No key column of the row may be UNCHANGED: callers fill it from the old row. NULL is a value like others here,
    equal to itself only; no row of the target has it in its key.

    Raises:
        KeyError: the plan has no key, or one that compares in an unknown way; such a plan's lane is never SET.
    """
    positions = plan.key_positions
    forms = [_FORMS[plan.columns[position].equality] for position in positions]
    if not positions:
        raise KeyError(plan.relation.qualified_name)
    if len(positions) == 1:
        position, form = positions[0], forms[0]
        if form is None:
            return lambda row: row[position]  # type: ignore[return-value]
        return lambda row: form(row[position])  # type: ignore[arg-type]
    if not any(forms):
        if len(positions) == 2:
            first, second = positions
            return lambda row: (row[first], row[second])  # type: ignore[return-value]
        return lambda row: tuple([row[position] for position in positions])  # type: ignore[misc]
    pairs = [(position, form or _same) for position, form in zip(positions, forms, strict=True)]
    return lambda row: tuple([form(row[position]) for position, form in pairs])  # type: ignore[arg-type]


def value_reader(
    positions: tuple[int, ...], equalities: tuple[Equality, ...], *, is_nulls_distinct: bool
) -> Callable[[KeptRow], Key | None]:
    """Return the function that takes a row to its value in a unique index or foreign key.

    The function returns what `key_reader` would make of these columns, or None if the row claims nothing there: a
    column is UNCHANGED, or one is NULL and NULLs are distinct. No form depends on the type on the wire, so values of
    two tables under the same equalities can be compared: integer 1 is 1.00 under NUMERIC.

    Args:
        positions: wire positions of the columns; at least one.
        equalities: how each compares; as many.
        is_nulls_distinct: a NULL equals nothing, as in foreign keys and in unique indexes but NULLS NOT DISTINCT.

    Raises:
        KeyError: there is no column, or one compares in an unknown way.
        ValueError: there are more columns than equalities, or fewer.
    """
    if not positions:
        raise KeyError(positions)
    pairs = [(position, _FORMS[equality] or _same) for position, equality in zip(positions, equalities, strict=True)]
    nothing = (UNCHANGED, NULL) if is_nulls_distinct else (UNCHANGED,)
    if len(pairs) == 1:
        ((position, form),) = pairs

        def value_of(row: KeptRow) -> Key | None:
            value = value_at(row, position)
            return None if value in nothing else form(value)  # type: ignore[arg-type]  # UNCHANGED is nothing

        return value_of

    def values_of(row: KeptRow) -> Key | None:
        values = []
        for position, form in pairs:
            value = value_at(row, position)
            if value in nothing:
                return None
            values.append(form(value))  # type: ignore[arg-type]  # as above
        return tuple(values)

    return values_of


def plain_positions(plan: TablePlan) -> tuple[int, ...]:
    """Return the positions of the values that make the key as they are; () if one must be made by `key_reader`."""
    positions = plan.key_positions
    is_plain = all(plan.columns[position].equality is Equality.BYTES for position in positions)
    return positions if is_plain else ()


class Order(Enum):
    """How keys are put in order before a set is sent: neighbours in the target's index lie on the same pages.

    That is for speed only, so what the index does (a collation, a descending column) need not be met exactly.
    """

    NONE = 0  # as they came
    NUMBERS = 1  # by the length of the text first
    TEXTS = 2

    def place(self, key: Key) -> tuple[bytes, ...]:
        """Return what to sort a key of plain values by."""
        values = (key,) if isinstance(key, bytes) else key
        return values if self is Order.NUMBERS else tuple([value[4:] for value in values])


#: int8, int2, int4, oid.
NUMBERS = (20, 21, 23, 26)


def key_order(plan: TablePlan) -> Order:
    """Return the order for the rows of a plan's sets.

    None where another unique index may hold a value that one row frees and a later one takes: in source order the set
    succeeds if it can, in any other it may fail, and the batch is repeated row by row.
    """
    if plan.facts.unique or not plain_positions(plan):
        return Order.NONE
    is_number = [plan.columns[position].base_type_oid in NUMBERS for position in plan.key_positions]
    return Order.NUMBERS if all(is_number) else Order.TEXTS


def key_form(plan: TablePlan) -> tuple[object, ...]:
    """Return what the keys of a plan are made of: keys of two plans of one table can be compared only if this is equal.

    It changes when the target's key does, or when a column comes in another type of the publisher.
    """
    return plan.facts.key_columns, tuple([plan.columns[position].equality for position in plan.key_positions])


def _same(value: bytes) -> bytes:
    return value


def _numeric(value: bytes) -> bytes:
    """Strip the scale: 1.0 and 1.00 are one key. -0 does not exist in numeric."""
    digits = value[4:]
    if b"." in digits:
        digits = digits.rstrip(b"0").rstrip(b".")
    return digits


def _float(value: bytes) -> bytes:
    """-0 and 0 are one key; NaN equals itself; every other value has one shortest text."""
    return b"0" if value[4:] == b"-0" else value[4:]


def _bpchar(value: bytes) -> bytes:
    """Trailing blanks do not count in char(n); NULL keeps its length, or it would be the empty string."""
    return value if value == NULL else value[4:].rstrip(b" ")


def _of_text(form: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """Return the form of a slice of the wire, made from the form of its text; NULL is no text and stays (trap T-33)."""
    return lambda value: value if value == NULL else form(value[4:])


_FORMS: dict[Equality, Callable[[bytes], bytes] | None] = {
    Equality.BYTES: None,
    Equality.NUMERIC: _numeric,
    Equality.FLOAT: _float,
    Equality.BPCHAR: _bpchar,
    Equality.INTERVAL: _of_text(canonical.interval),
    Equality.JSONB: _of_text(canonical.jsonb),
    Equality.NUMBERS: _of_text(canonical.numbers),
    Equality.FLOAT_ARRAY: _of_text(canonical.array_of(canonical.floating)),
    Equality.BPCHAR_ARRAY: _of_text(canonical.array_of(canonical.unpadded)),
    Equality.INTERVAL_ARRAY: _of_text(canonical.array_of(canonical.interval)),
    Equality.JSONB_ARRAY: _of_text(canonical.array_of(canonical.jsonb)),
}

"""Key values as the target's index compares them, not as bytes (trap T-21). Pure.

A key is the length-prefixed value of a single column, or a tuple of those: prefixes keep ('ab','c') and ('a','bc')
apart (trap T-33). What cannot be canonicalised never gets here: ``target/match.py`` widens such a table.
"""

from __future__ import annotations

from collections.abc import Callable

from parapply.plan.table import Equality, TablePlan
from parapply.wire.rows import Row

#: A key: one value, or one value per key column.
Key = bytes | tuple[bytes, ...]
KeyOf = Callable[[Row], Key]


def key_reader(plan: TablePlan) -> KeyOf:
    """Return the function that takes a row to its key under the target's replica identity or primary key.

    The function raises TypeError or AttributeError when a key column is UNCHANGED: callers fill that from the old row.
    """
    positions = plan.key_positions
    forms = [_FORMS[plan.columns[position].equality] for position in positions]
    if len(positions) == 1:
        position, form = positions[0], forms[0]
        if form is None:
            return lambda row: row[position]  # type: ignore[return-value]
        return lambda row: form(row[position])  # type: ignore[arg-type]
    if not any(forms):
        if len(positions) == 2:  # noqa: PLR2004
            first, second = positions
            return lambda row: (row[first], row[second])  # type: ignore[return-value]
        return lambda row: tuple([row[position] for position in positions])  # type: ignore[return-value, misc]
    pairs = [(position, form or _same) for position, form in zip(positions, forms, strict=True)]
    return lambda row: tuple([form(row[position]) for position, form in pairs])  # type: ignore[arg-type]


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
    """Trailing blanks do not count in char(n)."""
    return value[4:].rstrip(b" ")


_FORMS: dict[Equality, Callable[[bytes], bytes] | None] = {
    Equality.BYTES: None,
    Equality.NUMERIC: _numeric,
    Equality.FLOAT: _float,
    Equality.BPCHAR: _bpchar,
}

"""How the target's index compares a column's values, by their text on the wire. Pure.

In: type OIDs, type modifiers and what the catalogue says of collations. Out: an `Equality`. Doubt is always
UNKNOWN, which widens the dependency to the whole table: hashing the text of equal but byte-different keys loses rows
(trap T-21).

A text is the wire's canonical one because the publisher's session pins DateStyle, IntervalStyle, TimeZone,
extra_float_digits and bytea_output (trap T-44).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.plan.table import Equality

if TYPE_CHECKING:
    from parapply.model import Column
    from parapply.plan.table import ColumnFacts

# OIDs of pg_type.dat; PostgreSQL never changes the OID of a built-in type.
_BYTEA, _CHAR, _NAME, _TEXT, _BPCHAR, _VARCHAR = 17, 18, 19, 25, 1042, 1043
_INTEGERS = frozenset({20, 21, 23})
_OID = 26
_FLOATS = frozenset({700, 701})
_NUMERIC, _INTERVAL, _JSONB = 1700, 1186, 3802
#: Types whose equality depends on the column's collation.
_COLLATED = frozenset({_NAME, _TEXT, _BPCHAR, _VARCHAR})
#: Equal exactly when the output text is. timetz is one: it compares the instant, then the zone, and prints both.
_BYTES = (
    _INTEGERS
    | frozenset({16, _BYTEA, _CHAR, _NAME, _TEXT, _OID, _VARCHAR, 2950})  # bool, uuid
    | frozenset({1082, 1083, 1114, 1184, 1266})  # date, time, timestamp, timestamptz, timetz
    | frozenset({650, 774, 829, 869})  # cidr, macaddr8, macaddr, inet
    | frozenset({27, 28, 29, 1560, 1562, 3220, 5069})  # tid, xid, cid, bit, varbit, pg_lsn, xid8
)
#: Types whose text never ends in a blank, so that varchar(n) never cuts one off.
_NO_TRAILING_BLANK = _BYTES - {_CHAR, _NAME, _TEXT, _VARCHAR} | {_NUMERIC} | _FLOATS

#: Ranges and multiranges over integers, dates and timestamps. Over integers and dates a range is stored in the one form
#: '[,)'; over timestamps every bound and bracket counts, infinity is not "no bound", and both are printed.
_PLAIN_RANGES = frozenset({3904, 3926, 3912, 3908, 3910}) | frozenset({4451, 4536, 4535, 4533, 4534})
#: numrange and nummultirange.
_NUMERIC_RANGES = frozenset({3906, 4532})

#: How each built-in type compares. Not here, so UNKNOWN: money, reg*, tsvector, oidvector, composites, whatever a user
#: or an extension made (citext, hstore, ranges, arrays of enums and domains), and what no btree compares.
_CLASSES: dict[int, Equality] = {
    **dict.fromkeys(_BYTES | _PLAIN_RANGES, Equality.BYTES),
    **dict.fromkeys(_FLOATS, Equality.FLOAT),
    **dict.fromkeys(_NUMERIC_RANGES, Equality.NUMBERS),
    _NUMERIC: Equality.NUMERIC,
    _BPCHAR: Equality.BPCHAR,
    _INTERVAL: Equality.INTERVAL,
    _JSONB: Equality.JSONB,
}

#: The element type of each built-in array (pg_type.typelem). array_out prints bounds, nesting and elements in one way,
#: and array_cmp compares all three.
_ELEMENTS: dict[int, int] = {
    1000: 16,
    1001: _BYTEA,
    1002: _CHAR,
    1003: _NAME,
    1009: _TEXT,
    1014: _BPCHAR,
    1015: _VARCHAR,
    2951: 2950,
    1005: 21,
    1007: 23,
    1016: 20,
    1021: 700,
    1022: 701,
    1028: _OID,
    1231: _NUMERIC,
    1182: 1082,
    1183: 1083,
    1115: 1114,
    1185: 1184,
    1270: 1266,
    1187: _INTERVAL,
    651: 650,
    775: 774,
    1040: 829,
    1041: 869,
    1010: 27,
    1011: 28,
    1012: 29,
    1561: 1560,
    1563: 1562,
    3221: 3220,
    271: 5069,
    3807: _JSONB,
    3905: 3904,
    3927: 3926,
    3913: 3912,
    3909: 3908,
    3911: 3910,
    3907: 3906,
    6150: 4451,
    6157: 4536,
    6155: 4535,
    6152: 4533,
    6153: 4534,
    6151: 4532,
}
#: How an array compares, by its elements.
_ARRAY_CLASSES = {
    Equality.BYTES: Equality.BYTES,
    Equality.NUMERIC: Equality.NUMBERS,
    Equality.NUMBERS: Equality.NUMBERS,
    Equality.FLOAT: Equality.FLOAT_ARRAY,
    Equality.BPCHAR: Equality.BPCHAR_ARRAY,
    Equality.INTERVAL: Equality.INTERVAL_ARRAY,
    Equality.JSONB: Equality.JSONB_ARRAY,
}


def equality_of(base_type_oid: int, *, is_enum: bool, is_deterministic: bool) -> Equality:
    """Return how a column of this type compares under the default operator class of its type.

    Args:
        base_type_oid: the target's type, domains resolved.
        is_enum: the type is an enum; its labels are unique and printed as they are.
        is_deterministic: the collation is; a nondeterministic one holds different bytes equal.
    """
    element = _ELEMENTS.get(base_type_oid)
    if (element or base_type_oid) in _COLLATED and not is_deterministic:
        return Equality.UNKNOWN
    if is_enum:
        return Equality.BYTES
    if element is not None:
        return _ARRAY_CLASSES[_CLASSES[element]]
    return _CLASSES.get(base_type_oid, Equality.UNKNOWN)


def equality_across(wire: Column, target: ColumnFacts) -> Equality:
    """Return how the target compares values that arrive as the text of the publisher's type.

    The target's input function may read two different texts of another type as one value (a timestamp into a date,
    '1.004' into numeric(10,2), blanks beyond varchar(n)), so only pairs known to be safe keep the target's class.
    """
    if target.equality is Equality.UNKNOWN:
        return Equality.UNKNOWN
    base, modifier = target.base_type_oid, target.type_modifier
    is_safe = target.is_enum or _is_safe(wire.type_oid, wire.type_modifier, base, modifier)  # an enum takes labels only
    if not is_safe and wire.type_oid in _ELEMENTS and base in _ELEMENTS:
        is_safe = _is_safe(_ELEMENTS[wire.type_oid], wire.type_modifier, _ELEMENTS[base], modifier)
    return target.equality if is_safe else Equality.UNKNOWN


def _is_safe(wire: int, wire_modifier: int, base: int, modifier: int) -> bool:
    """Return whether a type's texts stay different values, or the same text, in a type of the target.

    Modifiers of arrays apply to their elements.
    """
    has_length = modifier != -1
    if wire == base and (not has_length or wire_modifier == modifier):
        return True
    if base in _INTEGERS:
        return wire in _INTEGERS | {_OID}
    if base == _NUMERIC:
        return wire in _INTEGERS and not has_length
    if base == _VARCHAR and has_length:
        return wire in _NO_TRAILING_BLANK or (wire == _VARCHAR and 0 <= wire_modifier <= modifier)
    # Text is kept as it is; char(n) loses nothing but trailing blanks, which do not count.
    return base in {_TEXT, _VARCHAR, _BPCHAR}


def prints_alike(child_type_oid: int, parent_type_oid: int) -> bool:
    """Return whether equal values of two types that a foreign key compares have one canonical text.

    Types of one operator family may print one value in two ways: date and timestamp, float4 and float8, cidr and inet,
    integer and oid.

    Args:
        child_type_oid: of the referring column of the target, domains resolved.
        parent_type_oid: of the referenced one.
    """
    types = {child_type_oid, parent_type_oid}
    return len(types) == 1 or types <= _INTEGERS | {_NUMERIC} or types <= {_NAME, _TEXT, _VARCHAR}

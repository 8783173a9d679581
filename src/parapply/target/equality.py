"""How the target's index compares a column's values, told from their text on the wire. Pure.

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

# OIDs of pg_type.dat; PostgreSQL never changes those of a built-in type.
_BYTEA, _CHAR, _NAME, _TEXT, _BPCHAR, _VARCHAR = 17, 18, 19, 25, 1042, 1043
_INTEGERS = frozenset({20, 21, 23})
_OID = 26
_FLOATS = frozenset({700, 701})
_NUMERIC = 1700
#: Types whose equality depends on the column's collation.
_COLLATED = frozenset({_NAME, _TEXT, _BPCHAR, _VARCHAR})
#: Equal exactly when the output text is. Not here, each for a case where equal values print differently:
#: interval ('1 mon' = '30 days'), money (lc_monetary), reg* (names depend on search_path), jsonb, arrays, ranges,
#: composites (of any of those), citext. timetz is here: it compares the instant, then the zone, and prints both.
_BYTES = (
    _INTEGERS
    | frozenset({16, _BYTEA, _CHAR, _NAME, _TEXT, _OID, _VARCHAR, 2950})  # bool, uuid
    | frozenset({1082, 1083, 1114, 1184, 1266})  # date, time, timestamp, timestamptz, timetz
    | frozenset({650, 774, 829, 869})  # cidr, macaddr8, macaddr, inet
    | frozenset({27, 28, 29, 1560, 1562, 3220, 5069})  # tid, xid, cid, bit, varbit, pg_lsn, xid8
)
#: Types whose text never ends in a blank, so that varchar(n) never cuts one off.
_NO_TRAILING_BLANK = _BYTES - {_CHAR, _NAME, _TEXT, _VARCHAR} | {_NUMERIC} | _FLOATS


def equality_of(base_type_oid: int, *, is_enum: bool, is_deterministic: bool) -> Equality:
    """Return how a column of this type compares under the default operator class of its type.

    Args:
        base_type_oid: the target's type, domains resolved.
        is_enum: the type is an enum; its labels are unique and printed as they are.
        is_deterministic: the collation is; a nondeterministic one holds different bytes equal.
    """
    if base_type_oid in _COLLATED and not is_deterministic:
        return Equality.UNKNOWN
    if is_enum or base_type_oid in _BYTES:
        return Equality.BYTES
    if base_type_oid == _NUMERIC:
        return Equality.NUMERIC
    if base_type_oid in _FLOATS:
        return Equality.FLOAT
    return Equality.BPCHAR if base_type_oid == _BPCHAR else Equality.UNKNOWN


def equality_across(wire: Column, target: ColumnFacts) -> Equality:
    """Return how the target compares values that arrive as the text of the publisher's type.

    The target's input function may read two different texts of another type as one value (a timestamp into a date,
    '1.004' into numeric(10,2), blanks beyond varchar(n)), so only pairs known to be safe keep the target's class.
    """
    equality, base = target.equality, target.base_type_oid
    has_length = target.type_modifier != -1
    # Enum input takes exactly a label; char(n) loses nothing but trailing blanks, which do not count; text is kept.
    takes_any_text = target.is_enum or equality is Equality.BPCHAR or (base in {_TEXT, _VARCHAR} and not has_length)
    is_same_type = wire.type_oid == base and (not has_length or wire.type_modifier == target.type_modifier)
    if equality is Equality.UNKNOWN or takes_any_text or is_same_type or _keeps_texts_apart(wire, target):
        return equality
    return Equality.UNKNOWN


def _keeps_texts_apart(wire: Column, target: ColumnFacts) -> bool:
    """Tell whether another built-in type's texts stay different values, or the same text, in the target's type."""
    base = target.base_type_oid
    if base in _INTEGERS:
        return wire.type_oid in _INTEGERS | {_OID}
    if base == _NUMERIC:
        return wire.type_oid in _INTEGERS and target.type_modifier == -1
    if base == _VARCHAR:
        fits = wire.type_oid == _VARCHAR and 0 <= wire.type_modifier <= target.type_modifier
        return fits or wire.type_oid in _NO_TRAILING_BLANK
    return False

"""Classes of equality, told from types."""

from __future__ import annotations

import pytest

from parapply.model import Column
from parapply.plan.table import Equality
from parapply.target.catalogue.equality import equality_across, equality_of, prints_alike
from tests.unit import plans

_INT4, _INT8, _OID, _TEXT, _VARCHAR, _BPCHAR, _NUMERIC, _INTERVAL, _JSON = 23, 20, 26, 25, 1043, 1042, 1700, 1186, 114
_INT4S, _INT8S, _TEXTS, _VARCHARS, _BPCHARS, _NUMERICS, _NUMRANGE = 1007, 1016, 1009, 1015, 1014, 1231, 3906
_DATE, _TIMESTAMP, _CIDR, _INET, _FLOAT4, _FLOAT8, _NAME, _USERS = 1082, 1114, 650, 869, 700, 701, 19, 20000


@pytest.mark.parametrize("oid", [_TEXT, _VARCHAR, _BPCHAR, _NAME, _TEXTS, _VARCHARS, _BPCHARS, 1003])
def test_a_nondeterministic_collation_counts_in_arrays_too(oid: int) -> None:
    """Under such a collation different elements may be equal (trap T-21)."""
    assert equality_of(oid, is_enum=False, is_deterministic=False) is Equality.UNKNOWN
    assert equality_of(oid, is_enum=False, is_deterministic=True) is not Equality.UNKNOWN


@pytest.mark.parametrize(
    ("wire", "modifier", "target", "target_modifier", "is_known"),
    [
        (_INTERVAL, -1, _INTERVAL, -1, True),
        (_INTERVAL, -1, _INTERVAL, 2, False),  # rounds
        (_INTERVAL, 2, _INTERVAL, 2, True),
        (_TEXT, -1, _INTERVAL, -1, False),
        (_JSON, -1, 3802, -1, False),  # keeps order, blanks and duplicates
        (_INT4S, -1, _INT8S, -1, True),
        (_INT4S, -1, _NUMERICS, -1, True),
        (_NUMERICS, 9, _NUMERICS, -1, True),
        (_NUMERICS, -1, _NUMERICS, 9, False),
        (_TEXTS, -1, _VARCHARS, -1, True),
        (_TEXTS, -1, _VARCHARS, 7, False),  # blanks beyond are cut
        (_VARCHARS, 6, _VARCHARS, 7, True),
        (_INT4S, -1, _VARCHARS, 7, True),
        (_TEXTS, -1, _BPCHARS, 9, True),
        (_TEXT, -1, _TEXTS, -1, False),  # '{a}' and '{"a"}'
        (_TEXTS, -1, _TEXT, -1, True),
        (_USERS, -1, _TEXTS, -1, False),
        (_INT4S, -1, _INT4, -1, False),
        (_NUMRANGE, -1, _NUMRANGE, -1, True),
        (3904, -1, _NUMRANGE, -1, False),
        (_USERS, -1, _NUMRANGE, -1, False),  # a domain, or anything else
    ],
)
def test_arrays_and_others_across_types(
    wire: int, modifier: int, target: int, target_modifier: int, *, is_known: bool
) -> None:
    """The elements' types decide between two arrays; whatever an input function reads in several texts is unknown."""
    equality = equality_of(target, is_enum=False, is_deterministic=True)
    column = plans.column("k", base_type_oid=target, type_modifier=target_modifier, equality=equality)
    sent = Column(name="k", type_oid=wire, type_modifier=modifier, is_key=True)
    assert equality is not Equality.UNKNOWN
    assert equality_across(sent, column) is (equality if is_known else Equality.UNKNOWN)


@pytest.mark.parametrize(
    ("child", "parent", "is_alike"),
    [
        (_INT4, _INT8, True),
        (_INT4, _NUMERIC, True),
        (_VARCHAR, _TEXT, True),
        (_NAME, _TEXT, True),
        (_BPCHAR, _BPCHAR, True),
        (_USERS, _USERS, True),
        (_BPCHAR, _TEXT, False),
        (_INT4, _OID, False),  # -1 is 4294967295
        (_DATE, _TIMESTAMP, False),
        (_CIDR, _INET, False),  # one prints /32, the other does not
        (_FLOAT4, _FLOAT8, False),  # 0.1 and 0.10000000149011612
    ],
)
def test_references_between_types(child: int, parent: int, *, is_alike: bool) -> None:
    """PostgreSQL has foreign keys between types that print one value differently: those values are not compared."""
    assert prints_alike(child, parent) is is_alike

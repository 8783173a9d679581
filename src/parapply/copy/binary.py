"""Tables that are copied in binary, because both ends read and write the same bytes for every column. Pure.

A value's binary form costs both servers less than its text, and for the types below it has not changed since PostgreSQL
14 at least. A table with any other type is copied as text: types of users and extensions may differ under one name,
arrays and composites name the types of their elements by number, and an infinite interval is a number of months to
servers before 17. Length and precision are checked on the way in as they are for text.

Source: PostgreSQL manual, "COPY" (binary format); the send and receive functions of each type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parapply.copy.published import PublishedTable

#: OIDs of built-in types, the same on every server. (pg_type.dat)
BINARY_TYPES = frozenset(
    {
        16,  # bool
        17,  # bytea
        20,  # int8
        21,  # int2
        23,  # int4
        25,  # text
        114,  # json
        700,  # float4
        701,  # float8
        1042,  # bpchar
        1043,  # varchar
        1082,  # date
        1083,  # time
        1114,  # timestamp
        1184,  # timestamptz
        1266,  # timetz
        1700,  # numeric
        2950,  # uuid
        3802,  # jsonb
    }
)

#: Names of the types of constants, by OID; any other constant comes as text.
CONSTANT_TYPES = {16: "bool", 20: "int8", 21: "int2", 23: "int4", 25: "text", 1043: "varchar", 2950: "uuid"}


def is_binary(table: PublishedTable, target_types: Mapping[str, int]) -> bool:
    """Return whether a table's rows can go in binary."""
    return all(target_types.get(column) in CONSTANT_TYPES for column in table.constants) and all(
        type_oid in BINARY_TYPES and target_types.get(column) == type_oid
        for column, type_oid in zip(table.columns, table.types, strict=True)
    )

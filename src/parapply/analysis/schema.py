"""The apply log's records as the engines see them, derived from the structs that the daemon writes.

In go the structs of `parapply.applylog_schema`; out comes one wide schema for the lines of all kinds, and for each kind
its columns, which of them must be there, and what replaces those that an older daemon did not write. Types are texts
of the engine's SQL.

Times are texts in the log and timestamps here; LSNs stay texts, each with a number next to it that sorts (`views`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import inspect

from parapply.applylog_schema import RECORDS

if TYPE_CHECKING:
    from collections.abc import Callable

#: Kind of a record in a line, and in the Parquet files the kind of a row; `BAD` are lines that are no record.
KIND: Final = "record"
BAD: Final = "bad"
#: A line that is not JSON of this schema, as it is; null in every other row.
TORN: Final = "_torn"
#: Columns that no record has: why a line is no record, its file, the day in UTC, the load that it came with.
REASON: Final = "reason"
FILE: Final = "file"
DAY: Final = "day"
LOAD: Final = "load"


class TypeWords(NamedTuple):
    """How an engine's SQL calls types."""

    text: str
    whole: str
    fraction: str
    truth: str
    time: str
    day: str
    array_of: Callable[[str], str]
    map_of: Callable[[str], str]  # texts to it
    struct_of: Callable[[dict[str, str]], str]  # fields


SPARK: Final = TypeWords(
    "string", "bigint", "double", "boolean", "timestamp", "date",
    "array<{}>".format,
    "map<string,{}>".format,
    lambda fields: f"struct<{','.join(f'`{name}`:{type_}' for name, type_ in fields.items())}>",
)  # fmt: skip
DUCK: Final = TypeWords(
    "VARCHAR", "BIGINT", "DOUBLE", "BOOLEAN", "TIMESTAMPTZ", "DATE",
    "{}[]".format,
    "MAP(VARCHAR, {})".format,
    lambda fields: f"STRUCT({', '.join(f'{chr(34)}{name}{chr(34)} {type_}' for name, type_ in fields.items())})",
)  # fmt: skip


def wide_columns(words: TypeWords) -> dict[str, str]:
    """Return the type of each column of a line of any kind: every field of every record, all nullable, and `TORN`.

    Raises:
        TypeError: two records have a field of one name and different types; they cannot be in one file then.
    """
    columns = {KIND: words.text}
    for struct in RECORDS.values():
        for name, type_ in columns_of(struct, words).items():
            if columns.setdefault(name, type_) != type_:
                raise TypeError(f"the field {name} has two types: {columns[name]} and {type_}")
    columns[TORN] = words.text
    return columns


def stored_columns(words: TypeWords) -> dict[str, str]:
    """Return the type of each column of the Parquet files, also of the partitions, so that nothing is guessed."""
    wide = wide_columns(words)
    kind = wide.pop(KIND)
    return {**wide, FILE: words.text, REASON: words.text, KIND: kind, DAY: words.day, LOAD: words.text}


def columns_of(struct: type[msgspec.Struct], words: TypeWords) -> dict[str, str]:
    """Return the type of each field of a record."""
    return {
        field.name: _from_info(inspect.type_info(field.type), field.name, words)
        for field in msgspec.structs.fields(struct)
    }


def required_of(struct: type[msgspec.Struct]) -> list[str]:
    """Return the fields that have no default, and so are in every line of this kind."""
    return [field.name for field in msgspec.structs.fields(struct) if field.required]


def with_defaults(struct: type[msgspec.Struct], words: TypeWords) -> list[str]:
    """Return the expression of each field, with the default where an older daemon wrote no such field.

    Files keep what was written.
    """
    types = columns_of(struct, words)
    columns = []
    for field in msgspec.structs.fields(struct):
        default: Any = field.default
        if default is msgspec.NODEFAULT and not field.required:
            default = field.default_factory()
        if field.required or default is None:
            columns.append(field.name)
        else:
            columns.append(f"coalesce({field.name}, {_literal(default, types[field.name])}) AS {field.name}")
    return columns


def _literal(default: object, type_: str) -> str:
    if isinstance(default, (tuple, list)):
        return f"CAST(array() AS {type_})"
    # Texts, numbers and truths of our own.
    return f"CAST({str(default).lower() if isinstance(default, bool) else repr(default)} AS {type_})"


def _from_info(info: inspect.Type, name: str, words: TypeWords) -> str:
    if isinstance(info, inspect.UnionType):
        (info,) = [one for one in info.types if not isinstance(one, inspect.NoneType)]
    plain = {
        inspect.BoolType: words.truth,
        inspect.IntType: words.whole,
        inspect.FloatType: words.fraction,
        inspect.StrType: words.time if is_time(name) else words.text,
    }
    if isinstance(info, (inspect.VarTupleType, inspect.ListType)):
        return words.array_of(_from_info(info.item_type, "", words))
    if isinstance(info, inspect.DictType):
        return words.map_of(_from_info(info.value_type, "", words))
    if isinstance(info, inspect.StructType):
        return words.struct_of({field.name: _from_info(field.type, field.name, words) for field in info.fields})
    if type(info) in plain:
        return plain[type(info)]
    raise TypeError(f"the field {name} of the apply log has a type that no engine can have: {info}")


def is_time(name: str) -> bool:
    """Return whether a field of this name is a time."""
    return name.endswith("_at") or name.startswith("commit_time")

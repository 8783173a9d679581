"""The apply log's records as Spark sees them, derived from the structs that the daemon writes.

In go the structs of `parapply.applylog_schema`; out comes one wide schema for the lines of all kinds, and for each kind
its columns, which of them must be there, and what replaces those that an older daemon did not write.

Times are texts in the log and timestamps here; LSNs stay texts, each with a number next to it that sorts (`lines`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import inspect
from pyspark.sql import functions as F  # noqa: N812  as everyone imports it
from pyspark.sql import types as T  # noqa: N812  as everyone imports it

from parapply.applylog_schema import RECORDS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: Kind of a record in a line, and in the Parquet files the kind of a row; `BAD` are lines that are no record.
KIND: Final = "record"
BAD: Final = "bad"
#: A line that is not JSON of this schema, as it is; null in every other row.
TORN: Final = "_torn"

_PLAIN: Final[dict[type[inspect.Type], T.DataType]] = {
    inspect.BoolType: T.BooleanType(),
    inspect.IntType: T.LongType(),
    inspect.FloatType: T.DoubleType(),
}


def wide_schema() -> T.StructType:
    """Return the schema of a line of any kind: every field of every record, all nullable, and `TORN`.

    Raises:
        TypeError: two records have a field of one name and different types; they cannot be in one file then.
    """
    fields: dict[str, T.DataType] = {KIND: T.StringType()}
    for struct in RECORDS.values():
        for name, data_type in columns_of(struct).items():
            if fields.setdefault(name, data_type) != data_type:
                raise TypeError(f"the field {name} has two types: {fields[name]} and {data_type}")
    fields[TORN] = T.StringType()
    return T.StructType([T.StructField(name, data_type) for name, data_type in fields.items()])


def columns_of(struct: type[msgspec.Struct]) -> dict[str, T.DataType]:
    """Return the Spark type of each field of a record."""
    return {field.name: _spark_type(field.type, field.name) for field in msgspec.structs.fields(struct)}


def required_of(struct: type[msgspec.Struct]) -> list[str]:
    """Return the fields that have no default, and so are in every line of this kind."""
    return [field.name for field in msgspec.structs.fields(struct) if field.required]


def with_defaults(rows: DataFrame, struct: type[msgspec.Struct]) -> DataFrame:
    """Put the struct's default where an older daemon wrote no such field; files keep what was written."""
    columns = []
    for field in msgspec.structs.fields(struct):
        column = F.col(field.name)
        if not field.required and field.default is not None:
            column = F.coalesce(column, _literal(field, rows.schema[field.name].dataType)).alias(field.name)
        columns.append(column)
    kept = {field.name for field in msgspec.structs.fields(struct)}
    return rows.select(*columns, *[F.col(name) for name in rows.columns if name not in kept])


def _literal(field: msgspec.structs.FieldInfo, data_type: T.DataType) -> Column:
    default: Any = field.default
    if default is msgspec.NODEFAULT:
        default = field.default_factory()
    return (F.array() if isinstance(default, (tuple, list)) else F.lit(default)).cast(data_type)


def _spark_type(annotation: Any, name: str) -> T.DataType:  # noqa: ANN401  whatever a field can be
    return _from_info(inspect.type_info(annotation), name)


def _from_info(info: inspect.Type, name: str) -> T.DataType:
    if isinstance(info, inspect.UnionType):
        (info,) = [one for one in info.types if not isinstance(one, inspect.NoneType)]
    data_type: T.DataType
    if isinstance(info, inspect.StrType):
        data_type = T.TimestampType() if _is_time(name) else T.StringType()
    elif isinstance(info, (inspect.VarTupleType, inspect.ListType)):
        data_type = T.ArrayType(_from_info(info.item_type, ""))
    elif isinstance(info, inspect.DictType):
        data_type = T.MapType(T.StringType(), _from_info(info.value_type, ""))
    elif isinstance(info, inspect.StructType):
        data_type = T.StructType(
            [T.StructField(field.name, _from_info(field.type, field.name)) for field in info.fields]
        )
    elif type(info) in _PLAIN:
        data_type = _PLAIN[type(info)]
    else:
        raise TypeError(f"the field {name} of the apply log has a type that Spark cannot have: {info}")
    return data_type


def _is_time(name: str) -> bool:
    return name.endswith("_at") or name.startswith("commit_time")

"""Differences between a table of the target and the publisher's, both ways. Pure.

In: shapes of both ends and the target's facts. Out: findings.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from psycopg import sql

from parapply.check.findings import Code, Finding
from parapply.quoting import shown

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from parapply.check.shapes import ColumnShape, TableShape, UserType
    from parapply.plan.copy_starts import Name
    from parapply.plan.table import TableFacts

_KINDS: Final = {"c": "check constraint", "x": "exclusion constraint", "f": "foreign key", "u": "unique index"}

_TYPE: Final = re.compile(r"(?P<base>[^(\[]+)(?:\((?P<modifier>[\d,-]+)\))?(?P<rest>[^(\[]*)(?P<array>(?:\[\])*)")
#: Types that take every text.
_ANY_TEXT: Final = frozenset({"text", "character varying"})
#: Types, each with the wider ones that take all its values if they have no length or precision.
_WIDER: Final = {
    "smallint": frozenset({"integer", "bigint", "numeric"}),
    "integer": frozenset({"bigint", "numeric"}),
    "bigint": frozenset({"numeric"}),
    "real": frozenset({"double precision"}),
    "cidr": frozenset({"inet"}),
}
#: Types whose larger modifier takes all values of a smaller one.
_SIZED: Final = frozenset({"character varying", "character", "bit varying"})


def findings_of_types(source: Mapping[str, UserType], target: Mapping[str, UserType]) -> Iterator[Finding]:
    """Yield findings of enums of the target that lack labels of the publisher's."""
    for name, each in sorted(source.items()):
        here = target.get(name)
        missing = [label for label in each.labels if here is not None and label not in here.labels]
        if missing:
            labels = ", ".join(sql.Literal(label).as_string(None) for label in missing)
            yield Finding(
                code=Code.ENUM_LABELS, object=name, found=f"enum {name} lacks {labels}",
                fix=" ".join(f"ALTER TYPE {name} ADD VALUE {sql.Literal(one).as_string(None)};" for one in missing),
            )  # fmt: skip


def findings_of_shape(
    name: Name, sent: Collection[str], source: TableShape, target: TableShape, facts: TableFacts
) -> Iterator[Finding]:
    """Compare one table."""
    table = shown(*name)
    for column in target.columns.values():
        there = source.columns.get(column.name)
        place = f"column {sql.Identifier(column.name).as_string(None)} of {table}"
        alter = f"ALTER TABLE {table} ALTER COLUMN {sql.Identifier(column.name).as_string(None)}"
        if column.name in sent and there is not None:
            yield from _of_column(table, place, alter, there, column)
            if column.is_not_null and not there.is_not_null and column.name not in facts.key_columns:
                yield Finding(
                    code=Code.NOT_NULL, object=table, found=f"{place} is NOT NULL on the target alone",
                    fix=f"{alter} DROP NOT NULL;",
                )  # fmt: skip
        elif column.is_not_null and not (column.is_filled or column.is_generated or column.name in sent):
            yield Finding(
                code=Code.COLUMN_UNFILLED, object=table, fix=f"{alter} SET DEFAULT ...;",
                found=f"{place} is NOT NULL, is not sent, and has no default",
            )  # fmt: skip
        elif there is not None and there.is_generated and not column.is_generated:
            yield Finding(
                code=Code.GENERATED_ON_SOURCE, object=table,
                found=f"{place} is generated on the publisher and an ordinary column here",
            )  # fmt: skip
    yield from _of_rules(table, source, target, facts, constants=set(sent) - source.columns.keys())


def _of_column(table: str, place: str, alter: str, source: ColumnShape, target: ColumnShape) -> Iterator[Finding]:
    if source.type != target.type:
        code = Code.TYPE_WIDER if takes_all(source.type, target.type) else Code.TYPE_DIFFERS
        yield Finding(
            code=code, object=table, found=f"{place} is {source.type} on the publisher and {target.type} here",
            fix=f"{alter} TYPE {source.type};",
        )  # fmt: skip
    if source.collation != target.collation and source.type == target.type:
        told = [each.collation or "the database's default" for each in (source, target)]
        yield Finding(
            code=Code.COLLATION_DIFFERS, object=table,
            found=f"{place} has the collation {told[0]} on the publisher and {told[1]} here",
        )  # fmt: skip
    if target.collation_version != target.actual_collation_version:
        yield Finding(
            code=Code.COLLATION_VERSION, object=table,
            found=f"{place}: collation {target.collation} was made with version {target.collation_version}, and"
            f" {target.actual_collation_version or 'none'} is in use",
            fix=f"REINDEX TABLE {table}; ALTER COLLATION {target.collation} REFRESH VERSION;",
        )  # fmt: skip


def _without(definition: str, constants: Collection[str]) -> str:
    """Return a definition as it is among the rows with constants, from the server's own text of it."""
    for name in constants:
        for printed in (name, sql.Identifier(name).as_string(None)):
            definition = definition.replace(f"({printed}, ", "(").replace(f", {printed},", ",")
            definition = definition.replace(f", {printed})", ")")
    return definition


def _of_rules(
    table: str, source: TableShape, target: TableShape, facts: TableFacts, *, constants: Collection[str]
) -> Iterator[Finding]:
    there = {(rule.kind, rule.definition) for rule in source.rules}
    enforced = {each.name for each in facts.foreign_keys if each.is_enforced}
    codes = {"c": Code.CONSTRAINT, "x": Code.CONSTRAINT, "u": Code.UNIQUE}
    for rule in target.rules:
        if (rule.kind, _without(rule.definition, constants)) in there:
            continue
        code = codes.get(rule.kind) or (Code.FOREIGN_KEY if rule.constraint in enforced else Code.FOREIGN_KEY_UNCHECKED)
        constraint = sql.Identifier(rule.constraint).as_string(None) if rule.constraint else ""
        name = constraint or rule.index
        drop = f"ALTER TABLE {table} DROP CONSTRAINT {constraint};" if constraint else f"DROP INDEX {rule.index};"
        yield Finding(
            code=code, object=table, fix=drop,
            found=f"{_KINDS[rule.kind]} {name} of {table} is on the target alone: {rule.definition}",
        )  # fmt: skip


def takes_all(source: str, target: str) -> bool:
    """Return whether the target's type reads and keeps every value of the publisher's; in doubt it does not."""
    here, there = _TYPE.fullmatch(source), _TYPE.fullmatch(target)
    if here is None or there is None:
        return False
    # A modifier may be inside of the name: timestamp(3) without time zone.
    from_, to = here["base"] + here["rest"], there["base"] + there["rest"]
    if to in _ANY_TEXT and not there["modifier"] and not there["array"]:
        return True
    if here["array"] != there["array"]:
        return False
    if not there["modifier"]:
        return from_ == to or to in _WIDER.get(from_, ())
    return bool(from_ == to in _SIZED and here["modifier"] and int(here["modifier"]) <= int(there["modifier"]))

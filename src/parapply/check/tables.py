"""How each published table would be applied, by the daemon's own planning, and what stands in the way.

In: what was read of the publisher, and a read-only session on the target. Out: `TablePlan` of every table that can be
applied, and findings. The number of queries does not depend on the number of tables, except for the question whether
tables hold rows, which asks a few dozen of them at a time.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from psycopg import sql

from parapply.check.kinds import Code, Finding
from parapply.check.shapes import read_shapes, read_types
from parapply.conflict.policies import Rules
from parapply.copy import tables as on_target
from parapply.errors import TargetRefused
from parapply.plan.table import Lane, TableFacts, TablePlan
from parapply.quoting import shown
from parapply.target.catalogue import expressions, facts, match
from parapply.target.session.settings import target_errors
from parapply.target.sql.own_rows import own_rows

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from parapply.check.shapes import ColumnShape, TableShape, UserType
    from parapply.check.source import CheckOptions, SourceSide
    from parapply.config import Config
    from parapply.copy.published import PublishedTable
    from parapply.model import Relation
    from parapply.plan.copy_starts import Name
    from parapply.plan.table import Replacement
    from parapply.target.session.settings import Connection

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


async def read_tables(
    conn: Connection, config: Config, source: SourceSide, options: CheckOptions, *, is_known: bool
) -> tuple[list[TablePlan], list[Finding]]:
    """Plan every published table; `is_known`: the target's state knows the slot, so rows exist that were applied."""
    places = [config.mapping.target_of(relation.full_name) for relation in source.relations]
    names = list(dict.fromkeys(places))
    role = config.target.session_replication_role
    found = await facts.load_many(conn, names, role=role)
    there = [each for each in found.values() if isinstance(each, TableFacts)]
    privileges = facts.privileges_for(source.operations, overwrites=Rules(config.conflict).overwrites)
    denied = await facts.access_problems(conn, there, privileges)
    with target_errors("checking the target's tables"):
        shapes = await read_shapes(conn, names)
        types = await read_types(conn, names)
    findings = list(findings_of_types(source.types, types))
    plans: list[TablePlan] = []
    changing = source.changing()
    for relation, name in zip(source.relations, places, strict=True):
        target = found.get(name)
        if target is None:
            if not options.brings_schema:
                missing = f"{shown(*name)} is published but missing here"
                findings.append(Finding(Code.TABLE_MISSING, missing, shown(*name)))
            continue
        if isinstance(target, TargetRefused):
            findings.append(Finding(Code.TABLE_REFUSED, str(target), shown(*name)))
            continue
        if name in denied:
            findings.append(_denied(name, denied[name], sql.Identifier(conn.info.user).as_string(None), privileges))
        constants = config.mapping.constants_of(relation.full_name)
        sent = {column.name for column in relation.columns} | constants.keys()
        findings += findings_of_shape(name, sent, source.shapes[relation.full_name], shapes[name], target)
        plan = await _plan(conn, relation, target, config)
        if isinstance(plan, Finding):
            findings.append(plan)
            continue
        plans.append(plan)
        findings += _of_plan(plan, can_change=relation.oid in changing, is_replica=role == "replica")
    if options.is_copy and not is_known:
        planned = {(plan.facts.schema, plan.facts.name) for plan in plans}
        readable = [
            here for here in [table.here() for table in source.tables]
            if here.full_name in planned and here.full_name not in denied
        ]  # fmt: skip
        findings += await _of_rows(conn, readable, config, truncates=options.truncates)
    return plans, findings


def _denied(name: Name, error: TargetRefused, role: str, privileges: Sequence[str]) -> Finding:
    table, schema = shown(*name), sql.Identifier(name[0]).as_string(None)
    fix = f"GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT {', '.join(privileges)}, TRUNCATE ON {table} TO {role};"
    if "row-level security" in str(error):
        fix = f"ALTER ROLE {role} BYPASSRLS;"
    return Finding(Code.TABLE_ACCESS, str(error), table, fix)


async def _plan(conn: Connection, relation: Relation, target: TableFacts, config: Config) -> TablePlan | Finding:
    setting = config.apply.tables.get(relation.qualified_name)
    table = shown(target.schema, target.name)
    constants = config.mapping.constants_of(relation.full_name)
    if config.target.apply_as == "owner":
        try:
            sent = {column.name for column in relation.columns} | constants.keys()
            facts.refuse_foreign_code(f"{target.schema}.{target.name}", target.foreign, sent)
        except TargetRefused as error:
            return Finding(Code.OWNER_CODE, str(error), table)

    def matched(replacements: Mapping[str, Replacement]) -> TablePlan:
        return match.match(
            relation, target, parallel=setting.parallel if setting else "auto",
            is_relaxed=config.apply.commit_order == "relaxed", apply_as=config.target.apply_as, constants=constants,
            omitted=config.mapping.omitted_of(relation.full_name), replacements=replacements,
        )  # fmt: skip

    try:
        plan = matched({})
    except TargetRefused as error:
        return Finding(Code.COLUMNS_REFUSED, str(error), table)
    texts = config.mapping.replaced_of(relation.full_name)
    try:
        judged = await expressions.judge(conn, relation, (target.schema, target.name), texts)
        return matched(judged) if judged else plan
    except TargetRefused as error:
        return Finding(Code.REPLACE_REFUSED, str(error), table)


def _of_plan(plan: TablePlan, *, can_change: bool, is_replica: bool) -> Iterator[Finding]:
    """Yield findings where a table could be applied better.

    How updates and deletes would be applied matters where it `can_change`. If the role `is_replica`, triggers and rules
    act only if they are enabled for it, or always.
    """
    table = shown(plan.facts.schema, plan.facts.name)
    for one in plan.replaced.values():
        reads = ", ".join([f'"{each.name}"' for each in one.inputs]) or "nothing"
        found = f'column "{one.name}" of {table} gets {one.sql}, which reads {reads} and is immutable'
        yield Finding(Code.COLUMN_REPLACED, found, table)
    if plan.refusal and can_change:
        yield Finding(Code.UPDATES_REFUSED, plan.refusal, table)
    if plan.lane is Lane.SERIAL and not plan.reason.startswith("serial: the configuration"):
        ways = [f'[apply.tables."{plan.relation.qualified_name}"] parallel = "{how}"' for how in ("ordered", "always")]
        ways += _disable(table, plan.facts) if is_replica else []
        yield Finding(Code.CODE_RUNS, f"{table}: {plan.reason}", table, "  -- or: ".join(ways))
    elif plan.is_full and can_change:
        yield Finding(Code.NO_KEY, f"{table}: {plan.reason}", table, f"ALTER TABLE {table} ADD PRIMARY KEY (...);")
    elif plan.lane is not Lane.SET or plan.is_table_exclusive:
        yield Finding(Code.NOT_SET_BASED, f"{table}: {plan.reason}", table)
    for column in plan.columns:
        if column.is_identity_always:
            quoted_column = sql.Identifier(column.name).as_string(None)
            yield Finding(
                Code.IDENTITY_ALWAYS,
                f"column {quoted_column} of {table} is GENERATED ALWAYS AS IDENTITY",
                table,
                f"ALTER TABLE {table} ALTER COLUMN {quoted_column} SET GENERATED BY DEFAULT;",
            )


def _disable(table: str, target: TableFacts) -> list[str]:
    """Return SQL that keeps the table's own triggers and rules from acting in sessions of the replica role."""
    words = [
        f"{kind.upper()} {sql.Identifier(name).as_string(None)}"
        for kind, _, name in (each.partition(" ") for each in (*target.triggers, *target.rules))
        if " on " not in name
    ]
    return ["; ".join(f"ALTER TABLE {table} ENABLE {word}" for word in words) + ";"] if words else []


def _empties(table: PublishedTable) -> str:
    relation = shown(*table.full_name)
    if not table.constants:
        return f"TRUNCATE {relation};"
    return f"DELETE FROM {relation}{own_rows(table.constants).as_string(None)};"  # noqa: S608  names are quoted


async def _of_rows(
    conn: Connection, tables: Sequence[PublishedTable], config: Config, *, truncates: bool
) -> list[Finding]:
    code = Code.ROWS_EMPTIED if truncates else Code.ROWS_THERE
    return [
        Finding(code, f"{shown(*table.full_name)} holds rows already", shown(*table.full_name), _empties(table))
        for table in await on_target.not_empty(conn, tables, config.target)
    ]


def findings_of_types(source: Mapping[str, UserType], target: Mapping[str, UserType]) -> Iterator[Finding]:
    """Yield findings of enums of the target that lack labels of the publisher's."""
    for name, each in sorted(source.items()):
        here = target.get(name)
        missing = [label for label in each.labels if here is not None and label not in here.labels]
        if missing:
            labels = ", ".join(sql.Literal(label).as_string(None) for label in missing)
            yield Finding(
                Code.ENUM_LABELS,
                f"enum {name} lacks {labels}",
                name,
                " ".join(f"ALTER TYPE {name} ADD VALUE {sql.Literal(one).as_string(None)};" for one in missing),
            )


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
                    Code.NOT_NULL, f"{place} is NOT NULL on the target alone", table, f"{alter} DROP NOT NULL;"
                )
        elif column.is_not_null and not (column.is_filled or column.is_generated or column.name in sent):
            yield Finding(
                Code.COLUMN_UNFILLED,
                f"{place} is NOT NULL, is not sent, and has no default",
                table,
                f"{alter} SET DEFAULT ...;",
            )
        elif there is not None and there.is_generated and not column.is_generated:
            yield Finding(
                Code.GENERATED_ON_SOURCE, f"{place} is generated on the publisher and an ordinary column here", table
            )
    yield from _of_rules(table, source, target, facts, constants=set(sent) - source.columns.keys())


def _of_column(table: str, place: str, alter: str, source: ColumnShape, target: ColumnShape) -> Iterator[Finding]:
    if source.type != target.type:
        code = Code.TYPE_WIDER if takes_all(source.type, target.type) else Code.TYPE_DIFFERS
        yield Finding(
            code,
            f"{place} is {source.type} on the publisher and {target.type} here",
            table,
            f"{alter} TYPE {source.type};",
        )
    if source.collation != target.collation and source.type == target.type:
        told = [each.collation or "the database's default" for each in (source, target)]
        yield Finding(
            Code.COLLATION_DIFFERS, f"{place} has the collation {told[0]} on the publisher and {told[1]} here", table
        )
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
            code, f"{_KINDS[rule.kind]} {name} of {table} is on the target alone: {rule.definition}", table, drop
        )


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

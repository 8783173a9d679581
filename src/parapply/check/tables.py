"""How each published table would be applied, by the daemon's own planning, and what stands in the way.

In: what was read of the publisher, and a read-only session on the target. Out: `TablePlan` of every table that can be
applied, and findings. The number of queries does not depend on the number of tables, except for the question whether
tables hold rows, which asks a few dozen of them at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg import sql

from parapply.check.compare import findings_of_shape, findings_of_types
from parapply.check.findings import Code, Finding
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
    from collections.abc import Iterator, Mapping, Sequence

    from parapply.check.source import CheckOptions, SourceSide
    from parapply.config import Config
    from parapply.copy.published import PublishedTable
    from parapply.model import Relation
    from parapply.plan.copy_starts import Name
    from parapply.plan.table import Replacement
    from parapply.target.session.settings import Connection


async def read_tables(
    conn: Connection, config: Config, source: SourceSide, options: CheckOptions, *, is_known: bool
) -> tuple[list[TablePlan], list[Finding]]:
    """Plan every published table; `is_known`: the target's state knows the slot, so rows exist that were applied.

    Raises:
        TargetLost: the connection broke.
    """
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
                findings.append(_missing(name))
            continue
        if isinstance(target, TargetRefused):
            findings.append(Finding(code=Code.TABLE_REFUSED, object=shown(*name), found=str(target)))
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


def _missing(name: Name) -> Finding:
    return Finding(code=Code.TABLE_MISSING, object=shown(*name), found=f"{shown(*name)} is published but missing here")


def _denied(name: Name, error: TargetRefused, role: str, privileges: Sequence[str]) -> Finding:
    table, schema = shown(*name), sql.Identifier(name[0]).as_string(None)
    fix = f"GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT {', '.join(privileges)}, TRUNCATE ON {table} TO {role};"
    if "row-level security" in str(error):
        fix = f"ALTER ROLE {role} BYPASSRLS;"
    return Finding(code=Code.TABLE_ACCESS, object=table, found=str(error), fix=fix)


async def _plan(conn: Connection, relation: Relation, target: TableFacts, config: Config) -> TablePlan | Finding:
    setting = config.apply.tables.get(relation.qualified_name)
    table = shown(target.schema, target.name)
    constants = config.mapping.constants_of(relation.full_name)
    if config.target.apply_as == "owner":
        try:
            sent = {column.name for column in relation.columns} | constants.keys()
            facts.refuse_foreign_code(f"{target.schema}.{target.name}", target.foreign, sent)
        except TargetRefused as error:
            return Finding(code=Code.OWNER_CODE, object=table, found=str(error))

    def matched(replacements: Mapping[str, Replacement]) -> TablePlan:
        return match.match(
            relation, target, parallel=setting.parallel if setting else "auto",
            is_relaxed=config.apply.commit_order == "relaxed", apply_as=config.target.apply_as, constants=constants,
            omitted=config.mapping.omitted_of(relation.full_name), replacements=replacements,
        )  # fmt: skip

    try:
        plan = matched({})
    except TargetRefused as error:
        return Finding(code=Code.COLUMNS_REFUSED, object=table, found=str(error))
    texts = config.mapping.replaced_of(relation.full_name)
    try:
        judged = await expressions.judge(conn, relation, (target.schema, target.name), texts)
        return matched(judged) if judged else plan
    except TargetRefused as error:
        return Finding(code=Code.REPLACE_REFUSED, object=table, found=str(error))


def _of_plan(plan: TablePlan, *, can_change: bool, is_replica: bool) -> Iterator[Finding]:
    """Yield findings where a table could be applied better.

    Args:
        plan: of the table.
        can_change: updates or deletes can come; else how they would be applied does not matter.
        is_replica: triggers and rules act only if they are enabled for the replica role, or always.
    """
    table = shown(plan.facts.schema, plan.facts.name)
    for one in plan.replaced.values():
        reads = ", ".join([f'"{each.name}"' for each in one.inputs]) or "nothing"
        found = f'column "{one.name}" of {table} gets {one.sql}, which reads {reads} and is immutable'
        yield Finding(code=Code.COLUMN_REPLACED, object=table, found=found)
    if plan.refusal and can_change:
        yield Finding(code=Code.UPDATES_REFUSED, object=table, found=plan.refusal)
    if plan.lane is Lane.SERIAL and not plan.reason.startswith("serial: the configuration"):
        ways = [f'[apply.tables."{plan.relation.qualified_name}"] parallel = "{how}"' for how in ("ordered", "always")]
        ways += _disable(table, plan.facts) if is_replica else []
        yield Finding(code=Code.CODE_RUNS, object=table, found=f"{table}: {plan.reason}", fix="  -- or: ".join(ways))
    elif plan.is_full and can_change:
        yield Finding(
            code=Code.NO_KEY, object=table, found=f"{table}: {plan.reason}",
            fix=f"ALTER TABLE {table} ADD PRIMARY KEY (...);",
        )  # fmt: skip
    elif plan.lane is not Lane.SET or plan.is_table_exclusive:
        yield Finding(code=Code.NOT_SET_BASED, object=table, found=f"{table}: {plan.reason}")
    for column in plan.columns:
        if column.is_identity_always:
            quoted_column = sql.Identifier(column.name).as_string(None)
            yield Finding(
                code=Code.IDENTITY_ALWAYS, object=table,
                found=f"column {quoted_column} of {table} is GENERATED ALWAYS AS IDENTITY",
                fix=f"ALTER TABLE {table} ALTER COLUMN {quoted_column} SET GENERATED BY DEFAULT;",
            )  # fmt: skip


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
        Finding(
            code=code,
            object=shown(*table.full_name),
            found=f"{shown(*table.full_name)} holds rows already",
            fix=_empties(table),
        )
        for table in await on_target.not_empty(conn, tables, config.target)
    ]

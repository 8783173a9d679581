"""The rows of one table that differ, made equal by key in one transaction under the slot's replication origin.

In: a `HealPlan`, a session on the publisher that sees the snapshot, a writer. Out: the rows that were copied.

The transaction locks the table against writers and checks that its ranges are what was compared. The publisher's rows
come to a temporary table with the target's own types. Rows that differ are deleted before any is inserted, so that no
unique value is in the way; where the target's table has columns that are not published, they are updated instead, and
keep those. At the end the ranges must have the publisher's rows and sums, or nothing is kept: a client that wrote, code
of the table that changed a row, or a key that the target compares in another way is found there.

Source: PostgreSQL manual, "COPY", "CREATE TABLE" (ON COMMIT DROP).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from psycopg import sql

from parapply import failpoints
from parapply.copy import tables as on_target
from parapply.copy.parts import column_list, with_constants
from parapply.copy.pump import pump
from parapply.copy.resume import KEY_TYPES, equal, listed
from parapply.errors import TargetRefused
from parapply.heal.compare import only
from parapply.target.catalogue.facts import check_foreign_code
from parapply.target.session.settings import rows, target_errors
from parapply.target.sql.own_rows import own_rows
from parapply.verify.postgres import VerifyEnd

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from parapply.copy.writer import Writer
    from parapply.heal.compare import HealPlan
    from parapply.source import slot
    from parapply.target.session import settings
    from parapply.verify.differences import Key, Summary

#: Keys looked up by one statement.
_KEYS_AT_ONCE: Final = 20_000
_ROWS: Final = sql.SQL("pg_temp.parapply_heal")
#: Types of keys, by OID, of which equal values may print apart: 1.0 and 1.00. Keys are compared by their texts.
_PRINT_APART: Final = frozenset({25, 1042, 1043, 1700})
_AGAIN: Final = "stop the clients that write to it, and run the same command again"


async def check_temporary(target: settings.Connection) -> None:
    """Raise TargetRefused if the role may not make temporary tables."""
    query = sql.SQL(
        "SELECT pg_catalog.has_database_privilege(pg_catalog.current_database(), 'TEMPORARY'),"
        " pg_catalog.quote_ident(pg_catalog.current_database()), pg_catalog.quote_ident(CURRENT_USER)"
    )
    with target_errors("looking what the role may do"):
        ((is_allowed, database, role),) = await rows(target, query)
    if not is_allowed:
        raise TargetRefused(
            "target: the role may not create temporary tables, through which rows are repaired",
            hint=f"GRANT TEMPORARY ON DATABASE {database} TO {role}",
        )


async def repair(source: slot.Connection, writer: Writer, plan: HealPlan, *, checks_code: bool) -> int:
    """Make the rows of a table equal, and return how many were copied.

    Raises:
        TargetRefused: the table is not as it was compared, or does not take the rows; it stays as it was.
        SourceRefused, SourceLost, TargetLost: an end failed; the same.
    """
    target, table = writer.conn, plan.table.here()
    async with writer.transaction():
        if checks_code:
            await check_foreign_code(target, *table.full_name, table.filled)
        if acting := await on_target.still_acting(target, [table.full_name]):
            raise TargetRefused(
                f"target: deleting rows of {table.text} would change rows of others by {acting[0]}",
                hint="GRANT SET ON PARAMETER session_replication_role TO the target's role",
            )
        relation = (await on_target.alone(target, [table.full_name]))[table.full_name]
        with target_errors(f"repairing {table.text}"):
            await target.execute(
                sql.SQL("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE").format(sql.Identifier(*table.full_name))
            )
        await _check(target, plan, plan.there, f"target: rows of {table.text} were changed since they were compared")
        n_copied = await _bring(source, target, plan)
        with target_errors(f"repairing {table.text}"):
            has_own = not set(plan.types) <= set(table.filled)
            for query in _statements(plan, relation, updates=has_own):
                await target.execute(query)
        await _check(target, plan, plan.here, f"target: {table.text} has other rows than were copied")
        failpoints.probe(failpoints.HEAL_TABLE)
    failpoints.probe(failpoints.HEAL_TABLE_DONE)
    return n_copied


async def _check(target: settings.Connection, plan: HealPlan, wanted: Summary, problem: str) -> None:
    """Refuse ranges that are not what they must be."""
    end = VerifyEnd([target], is_source=False)
    found = await end.summary(plan.compared, lambda *_: None, plan.ranges)
    if only(found, plan.ranges) != wanted:
        raise TargetRefused(problem, hint=f"{_AGAIN}; --whole {plan.table.text} copies all of its rows instead")


async def _bring(source: slot.Connection, target: settings.Connection, plan: HealPlan) -> int:
    """Copy the publisher's rows of the keys that differ to the temporary table, and return their number."""
    table = plan.table
    columns = column_list(table.filled)
    with target_errors(f"repairing {table.text}"):
        await target.execute(
            sql.SQL("CREATE TEMPORARY TABLE parapply_heal ON COMMIT DROP AS SELECT {} FROM {} WITH NO DATA").format(
                columns, sql.Identifier(*table.here().full_name)
            )
        )
    n_rows = 0
    into = sql.SQL("COPY {} ({}) FROM STDIN").format(_ROWS, columns)
    types = [KEY_TYPES[dict(zip(table.columns, table.types, strict=True))[column]] for column in table.key]
    for some in _portions(plan.keys("missing", "different")):
        for leaf in table.leaves:
            out = sql.SQL("COPY (SELECT {} FROM ONLY {} AS t JOIN {} ON {}) TO STDOUT").format(
                with_constants([sql.Identifier("t", column) for column in table.columns], table),
                sql.Identifier(leaf.schema, leaf.name),
                listed(some, types),
                equal(table.key),
            )
            n_copied, _ = await pump(source, target, out, into, relation=table.text, on_data=lambda *_: None)
            n_rows += n_copied
    return n_rows


def _statements(plan: HealPlan, relation: sql.Composed, *, updates: bool) -> Iterator[sql.Composed]:
    """Yield what makes the table equal, in order; with `updates` rows on both ends, by equal keys, are not deleted."""
    table = plan.table
    own = own_rows(table.constants, alias="t", word="AND")
    types = [KEY_TYPES[plan.types[column]] for column in table.key]
    same = sql.SQL(" AND ").join([sql.SQL("t.{0} = r.{0}").format(sql.Identifier(column)) for column in table.key])
    same = sql.Composed([same, own])
    there = sql.SQL(" AND NOT EXISTS (SELECT FROM {} AS r WHERE {})").format(_ROWS, same) if updates else sql.SQL("")
    gone = plan.keys("extra") if updates else plan.keys("extra", "different")
    for some in _portions(gone):
        yield sql.SQL("DELETE FROM {} AS t USING {} WHERE {}{}{}").format(
            relation, listed(some, types), equal(table.key), own, there
        )
    set_ = [column for column in table.columns if column not in table.key or plan.types[column] in _PRINT_APART]
    if updates and set_ and plan.keys("different", "missing"):
        values = sql.SQL(", ").join([sql.SQL("{0} = r.{0}").format(sql.Identifier(column)) for column in set_])
        yield sql.SQL("UPDATE {} AS t SET {} FROM {} AS r WHERE {}").format(relation, values, _ROWS, same)
    yield sql.SQL(
        "INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE SELECT {} FROM {} AS r"
        " WHERE NOT EXISTS (SELECT FROM {} AS t WHERE {})"
    ).format(
        sql.Identifier(*table.here().full_name),
        column_list(table.filled),
        sql.SQL(", ").join([sql.SQL("r.{}").format(sql.Identifier(column)) for column in table.filled]),
        _ROWS,
        relation,
        same,
    )


def _portions(keys: Sequence[Key]) -> Iterator[list[tuple[str, ...]]]:
    """Yield keys in portions; none of them has a NULL."""
    texts = [tuple([value or "" for value in key]) for key in keys]
    for first in range(0, len(texts), _KEYS_AT_ONCE):
        yield texts[first : first + _KEYS_AT_ONCE]

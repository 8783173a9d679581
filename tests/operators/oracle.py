"""Rows that the target must have: the rows that the publication publishes now, against the target's rows.

In go two databases and a publication; out come names of tables with what differs. Shares no code with the product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from psycopg import sql

from parapply.demo.errors import DemoError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.fixtures.databases import Database

_PUBLISHED = """
SELECT p.schemaname, p.tablename, p.attnames::text[], coalesce(p.rowfilter, 'true'), c.relkind = 'p', c.relpersistence
  FROM pg_publication_tables AS p
  JOIN pg_namespace AS n ON n.nspname = p.schemaname
  JOIN pg_class AS c ON c.relname = p.tablename AND c.relnamespace = n.oid
 WHERE p.pubname = {name} AND p.schemaname <> 'parapply'
   AND (SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate FROM pg_publication WHERE pubname = {name})
 ORDER BY 1, 2
"""
_SESSIONS = """
SELECT 'session ' || application_name FROM pg_stat_activity
 WHERE datname = current_database() AND application_name LIKE 'parapply%'
"""
_MOST_ROWS = 20


@dataclass(frozen=True)
class Published:
    """A table as the publication has it now.

    Attributes:
        schema: its schema.
        name: its name.
        columns: those that are published.
        row_filter: which rows.
        is_root: published with the rows of its partitions.
    """

    schema: str
    name: str
    columns: tuple[str, ...]
    row_filter: str
    is_root: bool

    def rows_sql(self, row_filter: str) -> sql.Composable:
        """Return the query of its rows, as texts."""
        columns = sql.SQL(", ").join(map(sql.Identifier, self.columns))
        only = sql.SQL("" if self.is_root else "ONLY ")
        query = sql.SQL("SELECT ROW({})::text AS r FROM {}{} WHERE {}")
        return query.format(columns, only, sql.Identifier(self.schema, self.name), sql.SQL(row_filter))


def published(source: Database, publication: str) -> list[Published]:
    """Return the tables of a publication whose every change is published."""
    rows = source.rows(sql.SQL(_PUBLISHED).format(name=sql.Literal(publication)))
    return [Published(one[0], one[1], tuple(one[2]), one[3], one[4]) for one in rows]


def _digests(database: Database, tables: list[Published], *, is_filtered: bool) -> list[tuple[int, str]]:
    parts = [
        sql.SQL("SELECT {}, count(*), coalesce(md5(string_agg(r, '|' ORDER BY r)), '') FROM ({}) AS x").format(
            sql.Literal(number), one.rows_sql(one.row_filter if is_filtered else "true")
        )
        for number, one in enumerate(tables)
    ]
    return [(count, text) for _, count, text in sorted(database.rows(sql.SQL(" UNION ALL ").join(parts)))]


def differences(source: Database, target: Database, publication: str) -> dict[str, str]:
    """Return the tables whose published rows are not the target's, with the rows."""
    tables = published(source, publication)
    if not tables:
        return {}
    expected = _digests(source, tables, is_filtered=True)
    try:
        found = _digests(target, tables, is_filtered=False)
    except DemoError:
        return {one.name: what for one in tables if (what := _difference(source, target, one))}
    pairs = zip(tables, expected, found, strict=True)
    return {one.name: _difference(source, target, one) for one, there, here in pairs if there != here}


def _difference(source: Database, target: Database, table: Published) -> str:
    there = sorted(row for (row,) in source.rows(table.rows_sql(table.row_filter)))
    try:
        here = sorted(row for (row,) in target.rows(table.rows_sql("true")))
    except DemoError as error:
        return f"cannot be read on the target: {str(error).splitlines()[0]}"
    if there == here:
        return ""
    return f"source {_short(there)}, target {_short(here)}"


def _short(rows: list[str]) -> str:
    more = f" and {len(rows) - _MOST_ROWS} more" if len(rows) > _MOST_ROWS else ""
    return f"{' '.join(rows[:_MOST_ROWS])}{more}"


def states(target: Database, slot: str) -> dict[str, str]:
    """Return the tables that are listed, with the state that `status` shows."""
    query = sql.SQL(
        "SELECT c.table_name, CASE WHEN c.reason ~ 'pause' THEN 'paused' ELSE c.state END FROM parapply.copies AS c"
        " JOIN parapply.slots AS s USING (slot_id) WHERE s.slot_name = {}"
    )
    try:
        return dict(target.rows(query.format(sql.Literal(slot))))
    except DemoError:
        return {}  # There is no slot here yet.


def below_roots(source: Database, publication: str) -> dict[str, str]:
    """Return the partitions of published roots, whose rows come under the root's name, with that."""
    return below(source, [one.name for one in published(source, publication) if one.is_root])


def below(source: Database, roots: Iterable[str]) -> dict[str, str]:
    """Return the partitions of those tables that are partitioned, with these."""
    query = sql.SQL("SELECT relid::regclass::text FROM pg_partition_tree(to_regclass({})) WHERE level > 0")
    return {leaf: root for root in roots for (leaf,) in source.rows(query.format(sql.Literal(root)))}


def left_behind(source: Database, target: Database) -> list[str]:
    """Return what a slot that was dropped has left on either side."""
    left = []
    looks = [
        (source, "SELECT 'slot ' || slot_name FROM pg_replication_slots WHERE database = current_database()"),
        (target, "SELECT 'slot ' || slot_name FROM pg_replication_slots WHERE database = current_database()"),
        (target, "SELECT 'prepared ' || gid FROM pg_prepared_xacts WHERE database = current_database()"),
        (target, _SESSIONS),
        (target, "SELECT 'schema ' || nspname FROM pg_namespace WHERE nspname = 'parapply'"),
    ]  # fmt: skip
    for database, query in looks:
        left += [name for (name,) in database.rows(query)]
    return left

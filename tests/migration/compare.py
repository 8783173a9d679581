"""Comparison of both sides: equal contents, and every acknowledged transaction once, by separate queries.

In go two databases that nothing is written to; out come findings, none when all is well. It shares no code with
`parapply verify`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from psycopg import sql

from tests.faults.oracles import Findings

if TYPE_CHECKING:
    from collections.abc import Collection

    from tests.fixtures.databases import Database

_ALIKE = "SET LOCAL TimeZone = 'UTC'; SET LOCAL DateStyle = 'ISO'; SET LOCAL extra_float_digits = 3"
_OWN = "n.nspname NOT IN ('parapply', 'information_schema') AND n.nspname !~ '^pg_' AND c.relpersistence = 'p'"
_TABLES = f"""
SELECT n.nspname, c.relname, array_agg(a.attname ORDER BY a.attname) FILTER (WHERE NOT a.attisdropped)
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
  LEFT JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0
 WHERE c.relkind IN ('r', 'p') AND {_OWN} GROUP BY 1, 2 ORDER BY 1, 2"""
#: Objects of a table besides rows. Names of NOT NULL are new in version 18.
_OBJECTS = {
    "columns": f"""SELECT n.nspname, c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
        a.attidentity, a.attgenerated, pg_get_expr(d.adbin, d.adrelid) FROM pg_attribute AS a
        JOIN pg_class AS c ON c.oid = a.attrelid JOIN pg_namespace AS n ON n.oid = c.relnamespace
        LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE a.attnum > 0 AND NOT a.attisdropped AND c.relkind IN ('r', 'p', 'v', 'm') AND {_OWN}""",
    "constraints": f"""SELECT n.nspname, c.relname, k.conname, pg_get_constraintdef(k.oid), k.convalidated
        FROM pg_constraint AS k JOIN pg_class AS c ON c.oid = k.conrelid JOIN pg_namespace AS n
        ON n.oid = c.relnamespace WHERE k.contype <> 'n' AND k.conparentid = 0 AND {_OWN}""",
    "indexes": f"""SELECT n.nspname, c.relname, pg_get_indexdef(i.indexrelid), i.indisvalid, i.indisreplident
        FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indrelid JOIN pg_namespace AS n
        ON n.oid = c.relnamespace WHERE {_OWN}""",
    "triggers": f"""SELECT n.nspname, c.relname, t.tgname, t.tgenabled FROM pg_trigger AS t
        JOIN pg_class AS c ON c.oid = t.tgrelid JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE NOT t.tgisinternal AND {_OWN}""",
    "owners": f"""SELECT n.nspname, c.relname, c.relkind, c.relreplident, pg_get_userbyid(c.relowner) FROM pg_class AS c
        JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE {_OWN}""",
    "comments": f"""SELECT n.nspname, c.relname, d.description FROM pg_description AS d JOIN pg_class AS c
        ON c.oid = d.objoid AND d.classoid = 'pg_class'::regclass JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE {_OWN}""",
}  # fmt: skip
LARGE_OBJECTS = "SELECT oid, md5(lo_get(oid)) FROM pg_largeobject_metadata"


def check(source: Database, target: Database, acknowledged: Collection[int], unknown: Collection[int]) -> Findings:
    """Compare tables, what belongs to them, and the transactions that clients know of."""
    found = check_tables(source, target)
    for name, database in (("source", source), ("target", target)):
        counts = Counter(dict(database.rows("SELECT n, count(*) FROM evt GROUP BY 1")))
        ended = {n for (n,) in database.rows("SELECT n FROM ended")}
        lost = set(acknowledged) - counts.keys()
        foreign = counts.keys() - {*acknowledged, *unknown}
        twice = [n for n, count in counts.items() if count > 1]
        torn = counts.keys() ^ ended
        found.add("lost", len(lost), f"{name}: acknowledged and not there: {sorted(lost)[:5]}")
        found.add("duplicated", len(twice), f"{name}: there twice: {sorted(twice)[:5]}")
        found.add("duplicated", len(foreign), f"{name}: there, though refused or rolled back: {sorted(foreign)[:5]}")
        found.add("torn", len(torn), f"{name}: there in part: {sorted(torn)[:5]}")
        ((money,),) = database.rows("SELECT sum(balance) % 1000 FROM account")
        found.add("torn", int(money != 0), f"{name}: money appeared or vanished")
    return found


def check_tables(source: Database, target: Database) -> Findings:
    """Compare the rows of all tables, and what belongs to them."""
    found = Findings()
    for name, query in _OBJECTS.items():
        _compare(found, name, source, target, query)
    one, other = _rows_of(source), _rows_of(target)
    for table in sorted(one.keys() | other.keys()):
        is_other = one.get(table) != other.get(table)
        found.add("other", is_other, f"{table}: source {one.get(table)}, target {other.get(table)}")
    return found


def _compare(found: Findings, name: str, source: Database, target: Database, query: str) -> None:
    one, other = (Counter(map(str, database.rows(query))) for database in (source, target))
    for text, more in (("the source only", one - other), ("the target only", other - one)):
        found.add("other", more.total(), f"{name}, on {text}: {list(more)[:3]}")


def check_large_objects(source: Database, target: Database) -> Findings:
    """Compare large objects, which are copied and do not follow."""
    found = Findings()
    _compare(found, "large objects", source, target, LARGE_OBJECTS)
    return found


def _rows_of(database: Database) -> dict[str, tuple[int, int]]:
    """Return for each table how many rows it has, and a sum over them that does not know their order."""
    sums = {}
    with database.connect() as session, session.transaction():
        session.execute(_ALIKE.encode())
        for schema, table, columns in session.execute(_TABLES.encode()).fetchall():
            row = sql.SQL(", ").join([sql.Identifier(name) for name in columns])
            query = sql.SQL("SELECT count(*), coalesce(sum(hashtextextended(ROW({})::text, 0)::numeric), 0) FROM {}")
            ((count, total),) = session.execute(query.format(row, sql.Identifier(schema, table))).fetchall()
            sums[f"{schema}.{table}"] = (count, int(total))
    return sums

"""Fingerprints of target tables: texts that change when the catalogue's description of a table does.

In: an open connection and OIDs. Out: one text for each table, to be compared with an earlier one; of what it says only
the privileges are read (`gives_access`).
Must be cheap: it is asked every few seconds for all tables, since DDL on the target is not in the stream (trap T-23).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from parapply.target.session.settings import target_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

# A row's OID and xmin represent its content: every change by DDL writes a new version. Sums do not depend on the order
# of rows, and a catalogue is read once for all tables. Of pg_class the columns themselves count: a TRUNCATE that we
# apply, a rewrite and REINDEX also write a new version, and are no changes. Statistics are updated in place. A tree is
# a partition tree from its root, or one table. Trees that foreign keys tie are compared together, because triggers of
# both sides decide what is enforced.
_FINGERPRINT_SQL: Final = """
WITH RECURSIVE asked(relid, root) AS (
  SELECT c.oid, coalesce(pg_catalog.pg_partition_root(c.oid), c.oid)::oid
  FROM pg_catalog.pg_class c WHERE c.oid = ANY ($1::oid[])
),
member(root, relid) AS (
  SELECT DISTINCT root, root FROM asked
  UNION ALL
  SELECT m.root, i.inhrelid FROM member m
  JOIN pg_catalog.pg_inherits i ON i.inhparent = m.relid
  JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relispartition
),
tied(root, other) AS (
  SELECT DISTINCT root, root FROM asked
  UNION
  SELECT m.root, coalesce(pg_catalog.pg_partition_root(k.confrelid), k.confrelid)::oid
  FROM member m JOIN pg_catalog.pg_constraint k ON k.conrelid = m.relid AND k.contype = 'f' AND k.conparentid = 0
),
tree(root, relid) AS (
  SELECT DISTINCT other, other FROM tied
  UNION ALL
  SELECT t.root, i.inhrelid FROM tree t
  JOIN pg_catalog.pg_inherits i ON i.inhparent = t.relid
  JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relispartition
),
item(root, content) AS (
  SELECT t.root, pg_catalog.concat_ws(' ', 'table', c.oid, c.relname, c.relnamespace, n.xmin, c.relkind, c.relowner,
    c.relpersistence, c.relreplident, c.relrowsecurity, c.relforcerowsecurity, c.relispartition, c.relacl)
  FROM tree t JOIN pg_catalog.pg_class c ON c.oid = t.relid
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  UNION ALL
  SELECT t.root, pg_catalog.concat_ws(' ', 'inherits', i.inhrelid, i.xmin)
  FROM tree t JOIN pg_catalog.pg_inherits i ON i.inhrelid = t.relid
  UNION ALL
  SELECT t.root, pg_catalog.concat_ws(' ', 'column', t.relid, a.attnum, a.xmin)
  FROM tree t JOIN pg_catalog.pg_attribute a ON a.attrelid = t.relid AND a.attnum > 0
  UNION ALL
  SELECT t.root, pg_catalog.concat_ws(' ', 'default', d.oid, d.xmin)
  FROM tree t JOIN pg_catalog.pg_attrdef d ON d.adrelid = t.relid
  UNION ALL
  SELECT t.root, pg_catalog.concat_ws(' ', 'index', i.indexrelid, i.xmin, c.relname, h.inhparent)
  FROM tree t JOIN pg_catalog.pg_index i ON i.indrelid = t.relid
  JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
  LEFT JOIN pg_catalog.pg_inherits h ON h.inhrelid = i.indexrelid
  UNION ALL
  SELECT t.root, pg_catalog.concat_ws(' ', 'constraint', k.oid, k.xmin)
  FROM tree t JOIN pg_catalog.pg_constraint k ON k.conrelid = t.relid
  UNION ALL
  SELECT t.root, pg_catalog.concat_ws(' ', 'trigger', g.oid, g.xmin)
  FROM tree t JOIN pg_catalog.pg_trigger g ON g.tgrelid = t.relid
  UNION ALL
  SELECT t.root, pg_catalog.concat_ws(' ', 'rule', r.oid, r.xmin)
  FROM tree t JOIN pg_catalog.pg_rewrite r ON r.ev_class = t.relid
  UNION ALL
  SELECT t.root, pg_catalog.concat_ws(' ', 'policy', p.oid, p.xmin)
  FROM tree t JOIN pg_catalog.pg_policy p ON p.polrelid = t.relid
),
tree_sum AS (
  SELECT root, pg_catalog.sum(pg_catalog.hashtextextended(content, 0)) AS items FROM item GROUP BY root
),
tied_sum AS (
  SELECT tied.root, pg_catalog.sum(s.items) AS items
  FROM tied JOIN tree_sum s ON s.root = tied.other GROUP BY tied.root
)
SELECT asked.relid::int8, pg_catalog.concat_ws(' ', s.items, asked.root, pg_catalog.row_security_active(asked.relid),
  pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE'),
  pg_catalog.has_table_privilege(c.oid, 'INSERT'), pg_catalog.has_table_privilege(c.oid, 'UPDATE'),
  pg_catalog.has_table_privilege(c.oid, 'DELETE'), pg_catalog.has_table_privilege(c.oid, 'SELECT'),
  pg_catalog.has_table_privilege(c.oid, 'TRUNCATE'))
FROM asked JOIN tied_sum s ON s.root = asked.root JOIN pg_catalog.pg_class c ON c.oid = asked.relid
"""

# Content of a fingerprint, by where its rows are counted. A backend reports its counts when it is idle, within ten
# seconds at most. TRUNCATE and temporary tables also count, and change no fingerprint.
_COUNTS_SQL: Final = """
SELECT pg_catalog.array_agg(pg_catalog.pg_stat_get_tuples_inserted(c.oid) + pg_catalog.pg_stat_get_tuples_updated(c.oid)
  + pg_catalog.pg_stat_get_tuples_deleted(c.oid) ORDER BY c.oid)::text
FROM unnest('{pg_class,pg_namespace,pg_attribute,pg_attrdef,pg_index,pg_inherits,pg_constraint,pg_trigger,pg_rewrite,
  pg_policy,pg_authid,pg_auth_members}'::text[]) AS one (name)
JOIN pg_catalog.pg_class AS c ON c.relname = one.name AND c.relnamespace = 'pg_catalog'::pg_catalog.regnamespace
WHERE pg_catalog.current_setting('track_counts') = 'on'
"""

#: How a fingerprint ends of a table without row security whose schema may be used, and rows inserted, updated, deleted
#: and read; with and without the privilege to truncate it.
_ACCESS: Final = (" f t t t t t t", " f t t t t t f")

#: For a query about some of many tables, which needs a few lookups in the catalogue's indexes for each of them. The
#: planner does not know how few rows its parts have, and would read whole catalogues.
LOOKUPS: Final = (
    "SET LOCAL enable_seqscan = off; SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off;"
    " SET LOCAL jit = off"
)


def gives_access(fingerprint: str) -> bool:
    """Return whether the role had all privileges on rows of a table, and saw all of them, when this was read."""
    return fingerprint.endswith(_ACCESS)


async def change_counts(conn: psycopg.AsyncConnection[Any]) -> str:
    """Return a text that changes some seconds after the catalogues of `fingerprints` have changed; empty if none does.

    It costs the same whatever the number of tables. A change by a session that does not count them is not seen.

    Args:
        conn: in autocommit mode.
    """
    with target_errors("looking for catalogue changes"):
        async with psycopg.AsyncRawCursor(conn, row_factory=tuple_row) as cursor:
            await cursor.execute(sql.SQL(_COUNTS_SQL), prepare=True)
            ((counts,),) = await cursor.fetchall()
    return counts or ""


async def fingerprints_of_few(conn: psycopg.AsyncConnection[Any], oids: Sequence[int]) -> dict[int, str]:
    """Return what `fingerprints` does by lookups for each table: cheaper for a few hundred of many, dearer for all."""
    if not oids:
        return {}
    with target_errors("looking for catalogue changes"):
        async with conn.transaction(), psycopg.AsyncRawCursor(conn, row_factory=tuple_row) as cursor:
            await cursor.execute(LOOKUPS)
            # Another text, so that its plan is made with these settings.
            await cursor.execute(sql.SQL(f"{_FINGERPRINT_SQL} -- of few"), (list(oids),), prepare=True)
            return dict(await cursor.fetchall())


async def fingerprints(conn: psycopg.AsyncConnection[Any], oids: Sequence[int]) -> dict[int, str]:
    """Return a text for each table that changes if the result of `load_facts` or `check_table_access` may have changed.

    One round trip whatever the number of tables. It covers the whole partition tree of a table, and the trees of the
    tables that its foreign keys refer to: columns, defaults, indexes, constraints, triggers, rules, policies, names,
    privileges of this role. It does not cover the objects that the tables use: types, domains, casts, functions,
    operator classes and collations. Data, statistics, VACUUM and TRUNCATE change nothing.

    Args:
        conn: a session of the role that applies, in autocommit mode.
        oids: of target tables, in any order.

    Returns:
        One text for each OID that exists; a table that was dropped is missing.
    """
    if not oids:
        return {}
    with target_errors("looking for catalogue changes"):
        async with psycopg.AsyncRawCursor(conn, row_factory=tuple_row) as cursor:
            await cursor.execute(sql.SQL(_FINGERPRINT_SQL), (list(oids),), prepare=True)
            return dict(await cursor.fetchall())

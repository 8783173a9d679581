"""The part of the catalogue query about keys: of a table its key, other unique indexes, foreign keys. Pure text.

The constants are put together in `target/catalogue/query.py`, whose `table_`, `tree` and `attribute` they refer to.

Source: PostgreSQL manual, "System Catalogs": pg_index, pg_opclass, pg_amop, pg_collation, pg_constraint, pg_trigger.
"""

from __future__ import annotations

from typing import Final

# As the built-in subscription: the replica identity index if one was named, else the primary key (relation.c,
# GetRelationIdentityOrPK). Only a btree's strategy 3 is equality; in GiST it is "overlaps" (WITHOUT OVERLAPS).
KEY: Final = """
key_ AS (
  SELECT i.* FROM table_ JOIN pg_catalog.pg_index i ON i.indrelid = table_.oid
  WHERE i.indisvalid AND i.indisready AND i.indislive
    AND (i.indisprimary OR (i.indisreplident AND table_.relreplident = 'i'))
  ORDER BY (i.indisreplident AND table_.relreplident = 'i') DESC
  LIMIT 1
),
key_column AS (
  SELECT a.attnum, a.attname, n.ord, oc.opcintype::oid AS class_type,
    m.oid IS NOT NULL AND oc.opcdefault AND key_.indcollation[n.ord] = a.attcollation AS is_default,
    'OPERATOR(' || pg_catalog.quote_ident(ns.nspname) || '.' || o.oprname || ')' AS operator,
    CASE WHEN key_.indcollation[n.ord] <> a.attcollation THEN
      ' COLLATE ' || pg_catalog.quote_ident(cn.nspname) || '.' || pg_catalog.quote_ident(co.collname)
    END AS collate_clause
  FROM key_
  CROSS JOIN LATERAL pg_catalog.generate_series(0, key_.indnkeyatts - 1) n(ord)
  JOIN attribute a ON a.attnum = key_.indkey[n.ord]
  CROSS JOIN LATERAL (  -- else the planner, which takes the key for one of a thousand columns, reads all classes
    SELECT c.* FROM pg_catalog.pg_opclass c WHERE c.oid = key_.indclass[n.ord] OFFSET 0) oc
  LEFT JOIN pg_catalog.pg_am m ON m.oid = oc.opcmethod AND m.amname = 'btree'
  LEFT JOIN pg_catalog.pg_amop s ON m.oid IS NOT NULL AND s.amopfamily = oc.opcfamily
    AND s.amoplefttype = oc.opcintype AND s.amoprighttype = oc.opcintype AND s.amopstrategy = 3
  LEFT JOIN pg_catalog.pg_operator o ON o.oid = s.amopopr
  LEFT JOIN pg_catalog.pg_namespace ns ON ns.oid = o.oprnamespace
  LEFT JOIN pg_catalog.pg_collation co ON co.oid = key_.indcollation[n.ord]
  LEFT JOIN pg_catalog.pg_namespace cn ON cn.oid = co.collnamespace
)"""

# A partitioned table has one constraint, each of its partitions a copy, and each partition of the referenced table
# another one of the same child; conparentid leads to the first, which alone is kept if it is of the tree. A foreign key
# is enforced if any trigger of any copy fires: they may have been enabled one by one.
FOREIGN_KEYS: Final = """
foreign_key AS (
  SELECT k.oid, k.conindid FROM tree JOIN pg_catalog.pg_constraint k ON k.conrelid = tree.relid AND k.contype = 'f'
  WHERE NOT EXISTS (
    SELECT FROM pg_catalog.pg_constraint u WHERE u.oid = k.conparentid AND u.conrelid IN (SELECT relid FROM tree))
),
ancestry(oid, ancestor) AS (
  SELECT oid, oid FROM foreign_key
  UNION ALL
  SELECT y.oid, k.conparentid FROM ancestry y JOIN pg_catalog.pg_constraint k ON k.oid = y.ancestor
  WHERE k.conparentid <> 0
),
copy_(oid, copied) AS (
  SELECT y.oid, y.ancestor FROM ancestry y JOIN pg_catalog.pg_constraint k ON k.oid = y.ancestor
  WHERE k.conparentid = 0
  UNION ALL
  SELECT c.oid, k.oid FROM copy_ c JOIN pg_catalog.pg_constraint k ON k.conparentid = c.copied
),
enforced AS (
  SELECT c.oid FROM copy_ c JOIN pg_catalog.pg_trigger t ON t.tgconstraint = c.copied
  WHERE t.tgenabled IN ('A', CASE WHEN $3 = 'replica' THEN 'R' ELSE 'O' END)
)"""

# An index not yet valid or ready counts: it will refuse rows before anyone reads the catalogue again. An index that a
# partition inherits is named once, by its ancestor, if that one belongs to a table of the tree. The key's own counts if
# it also refuses different keys.
INDEX_COLUMNS: Final = """
other_index AS (
  SELECT i.* FROM tree JOIN pg_catalog.pg_index i ON i.indrelid = tree.relid
  WHERE (i.indisunique OR i.indisexclusion) AND i.indislive
    AND (i.indisexclusion OR i.indexrelid NOT IN (SELECT indexrelid FROM key_))
    AND NOT EXISTS (
      SELECT FROM pg_catalog.pg_inherits h JOIN pg_catalog.pg_index u ON u.indexrelid = h.inhparent
      WHERE h.inhrelid = i.indexrelid AND u.indrelid IN (SELECT relid FROM tree))
),
indexed AS (  -- one row for each key column of those indexes and of the ones that foreign keys refer to
  SELECT i.indexrelid, n.ord, a.attnum, a.attname, a.atttypid, a.attcollation, oc.opcintype::oid AS class_type,
    oc.opcdefault AND i.indcollation[n.ord] = a.attcollation AND m.amname = 'btree' AS is_default
  FROM pg_catalog.pg_index i
  CROSS JOIN LATERAL pg_catalog.generate_series(0, i.indnkeyatts - 1) n(ord)
  JOIN pg_catalog.pg_opclass oc ON oc.oid = i.indclass[n.ord]
  JOIN pg_catalog.pg_am m ON m.oid = oc.opcmethod
  LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[n.ord] AND a.attnum > 0
  WHERE i.indexrelid IN (
    SELECT indexrelid FROM other_index UNION SELECT conindid FROM foreign_key)
),
indexed_base(typid, base) AS (
  SELECT DISTINCT atttypid, atttypid FROM indexed WHERE atttypid IS NOT NULL
  UNION ALL
  SELECT b.typid, t.typbasetype FROM indexed_base b
  JOIN pg_catalog.pg_type t ON t.oid = b.base AND t.typtype = 'd'
),
index_column AS (  -- expressions have no name
  SELECT x.indexrelid, x.attnum, x.ord, pg_catalog.json_build_object(
    'name', x.attname,
    'base_type_oid', t.oid::int8,
    'is_enum', t.typtype = 'e',
    'is_deterministic', coalesce(co.collisdeterministic, true),
    'class_type', x.class_type::int8,
    'is_index_default', x.is_default) AS described
  FROM indexed x
  LEFT JOIN (indexed_base b JOIN pg_catalog.pg_type t ON t.oid = b.base AND t.typtype <> 'd') ON b.typid = x.atttypid
  LEFT JOIN pg_catalog.pg_collation co ON co.oid = x.attcollation
)"""

# indnullsnotdistinct came with PostgreSQL 15.
UNIQUE_SELECT: Final = """
SELECT coalesce(pg_catalog.json_agg(pg_catalog.json_build_object(
  'name', c.relname
    || CASE WHEN i.indrelid <> table_.oid THEN ' on ' || i.indrelid::pg_catalog.regclass ELSE '' END,
  'columns', (
    SELECT pg_catalog.json_agg(x.described ORDER BY x.ord) FROM index_column x WHERE x.indexrelid = i.indexrelid),
  'is_nulls_distinct', NOT coalesce((pg_catalog.to_jsonb(i) ->> 'indnullsnotdistinct')::bool, false),
  'is_partial', i.indpred IS NOT NULL,
  'is_exclusion', i.indisexclusion,
  'is_immediate', i.indimmediate
) ORDER BY i.indrelid <> table_.oid, i.indrelid::pg_catalog.regclass::text, c.relname), '[]')
FROM other_index i JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid"""

# As the built-in subscription: a btree, or a hash, that is not partial and begins with a plain column (relation.c,
# IsIndexUsableForReplicaIdentityFull). Where a partition has none it would be read as a whole for each row.
INDEXED_SELECT: Final = """
SELECT coalesce(pg_catalog.json_agg(f.attname ORDER BY f.attname), '[]')
FROM (
  SELECT a.attname FROM tree
  JOIN pg_catalog.pg_index i ON i.indrelid = tree.relid
  JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid AND c.relkind = 'i'
  JOIN pg_catalog.pg_am m ON m.oid = c.relam AND m.amname IN ('btree', 'hash')
  JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
  WHERE i.indisvalid AND i.indisready AND i.indislive AND i.indpred IS NULL AND i.indcollation[0] = a.attcollation
  GROUP BY a.attname
  HAVING count(DISTINCT i.indrelid) = (
    SELECT count(*) FROM tree JOIN pg_catalog.pg_class p ON p.oid = tree.relid AND p.relkind <> 'p')
) f"""

FOREIGN_SELECT: Final = """
SELECT coalesce(pg_catalog.json_agg(pg_catalog.json_build_object(
  'name', k.conname
    || CASE WHEN k.conrelid <> table_.oid THEN ' on ' || k.conrelid::pg_catalog.regclass ELSE '' END,
  'columns', (
    SELECT pg_catalog.json_agg(a.attname ORDER BY u.ord)
    FROM pg_catalog.unnest(k.conkey) WITH ORDINALITY u(attnum, ord)
    JOIN pg_catalog.pg_attribute a ON a.attrelid = k.conrelid AND a.attnum = u.attnum),
  'parent_oid', pc.oid::int8,
  'parent', pn.nspname || '.' || pc.relname,
  'parent_columns', (
    SELECT pg_catalog.json_agg(x.described ORDER BY u.ord)
    FROM pg_catalog.unnest(k.confkey) WITH ORDINALITY u(attnum, ord)
    JOIN index_column x ON x.indexrelid = k.conindid AND x.attnum = u.attnum),
  'is_enforced', k.oid IN (SELECT oid FROM enforced),
  'is_cascading', k.confdeltype IN ('c', 'n', 'd')
) ORDER BY k.conrelid <> table_.oid, k.conrelid::pg_catalog.regclass::text, k.conname), '[]')
FROM foreign_key f
JOIN pg_catalog.pg_constraint k ON k.oid = f.oid
JOIN pg_catalog.pg_class pc ON pc.oid = coalesce(pg_catalog.pg_partition_root(k.confrelid), k.confrelid)
JOIN pg_catalog.pg_namespace pn ON pn.oid = pc.relnamespace"""

"""The catalogue query of `target/catalogue/facts.py`: one statement, so one round trip and one snapshot. Pure text.

Types, operators and collations are returned quoted and with their schema, whatever the session's search_path is.
Parameters: `$1` schema, `$2` table, `$3` session_replication_role.

The keys' part is in `target/catalogue/key_query.py`.

Source: PostgreSQL manual, "System Catalogs": pg_class, pg_attribute, pg_type, pg_opclass, pg_amop, pg_trigger,
pg_rewrite, pg_constraint, pg_attrdef, pg_depend, pg_cast.
"""

from __future__ import annotations

from typing import Final

from parapply.state_mark import STATE_SCHEMAS_SQL
from parapply.target.catalogue.key_query import (
    FOREIGN_KEYS,
    FOREIGN_SELECT,
    INDEX_COLUMNS,
    INDEXED_SELECT,
    KEY,
    UNIQUE_SELECT,
)
from parapply.target.catalogue.row_code import FUNCTIONS, OPERATORS

_TABLE: Final = """
table_ AS (  -- zero or one row
  SELECT c.oid, c.relkind, c.relispartition, c.relreplident, c.relrowsecurity
  FROM pg_catalog.pg_class c
  -- not joined: where each tenant has a schema, the planner would visit the tables of that name in all schemas
  WHERE c.relname = $2 AND c.relnamespace = (SELECT n.oid FROM pg_catalog.pg_namespace n WHERE n.nspname = $1)
),
tree(relid) AS (  -- the table and all partitions below it; children by plain inheritance are not replicated to
  SELECT oid FROM table_
  UNION ALL
  SELECT i.inhrelid FROM tree
  JOIN pg_catalog.pg_inherits i ON i.inhparent = tree.relid
  JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relispartition
),
attribute AS (
  SELECT a.* FROM table_ JOIN pg_catalog.pg_attribute a ON a.attrelid = table_.oid
  WHERE a.attnum > 0 AND NOT a.attisdropped
)"""

# Domains take their length from the innermost domain; the column's own modifier is -1 then (getBaseTypeAndTypmod).
_TYPES: Final = """
base(attnum, typid, typmod) AS (
  SELECT attnum, atttypid, atttypmod FROM attribute
  UNION ALL
  SELECT b.attnum, t.typbasetype, t.typtypmod FROM base b
  JOIN pg_catalog.pg_type t ON t.oid = b.typid AND t.typtype = 'd'
),
part(attnum, typid, is_compared) AS (  -- a column's type and every type inside it
  SELECT attnum, atttypid, true FROM attribute
  UNION
  SELECT p.attnum, x.typid, p.is_compared AND x.is_compared FROM part p
  -- the second condition spares four lookups for a type without any inside
  JOIN pg_catalog.pg_type t ON t.oid = p.typid AND (t.typtype IN ('d', 'c', 'r', 'm') OR t.typelem <> 0)
  CROSS JOIN LATERAL (
    SELECT t.typbasetype, true WHERE t.typtype = 'd'
    UNION ALL
    SELECT t.typelem, true
    WHERE t.typelem <> 0 AND t.typsubscript = 'pg_catalog.array_subscript_handler'::pg_catalog.regproc
    UNION ALL
    SELECT a.atttypid, true FROM pg_catalog.pg_attribute a
    WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
    UNION ALL  -- a range compares with its own operator class, so its subtype needs none
    SELECT r.rngsubtype, false FROM pg_catalog.pg_range r WHERE t.oid IN (r.rngtypid, r.rngmultitypid)
  ) x(typid, is_compared)
)"""

_EQUAL: Final = """
class_ AS MATERIALIZED (  -- default operator classes that decide equality, with their operator
  SELECT oc.opcintype, i.typispreferred, m.amname,
    'OPERATOR(' || pg_catalog.quote_ident(n.nspname) || '.' || o.oprname || ')' AS operator
  FROM pg_catalog.pg_opclass oc
  JOIN pg_catalog.pg_am m ON m.oid = oc.opcmethod AND m.amname IN ('btree', 'hash')
  JOIN pg_catalog.pg_amop s ON s.amopfamily = oc.opcfamily AND s.amoplefttype = oc.opcintype
    AND s.amoprighttype = oc.opcintype AND s.amopstrategy = CASE m.amname WHEN 'btree' THEN 3 ELSE 1 END
  JOIN pg_catalog.pg_operator o ON o.oid = s.amopopr
  JOIN pg_catalog.pg_namespace n ON n.oid = o.oprnamespace
  JOIN pg_catalog.pg_type i ON i.oid = oc.opcintype
  WHERE oc.opcdefault
),
first_ AS MATERIALIZED (  -- one for each type
  SELECT DISTINCT ON (opcintype) opcintype, operator FROM class_ ORDER BY opcintype, amname
),
met AS MATERIALIZED (  -- else the planner joins the classes with all types there are: two for each table
  SELECT t.oid, t.typtype, t.typsubscript
  FROM (SELECT DISTINCT typid FROM part) p JOIN pg_catalog.pg_type t ON t.oid = p.typid
),
own_(typid, typtype, typsubscript, operator) AS MATERIALIZED (  -- nearly every type has its own class
  SELECT t.oid, t.typtype, t.typsubscript,
    (SELECT f.operator FROM first_ f WHERE f.opcintype = t.oid)
  FROM met t
),
other_(typid, operator) AS (
  SELECT DISTINCT ON (t.typid) t.typid, c.operator
  FROM own_ t
  JOIN class_ c ON
    c.opcintype = CASE
      WHEN t.typtype = 'e' THEN 'pg_catalog.anyenum'::pg_catalog.regtype
      WHEN t.typtype = 'r' THEN 'pg_catalog.anyrange'::pg_catalog.regtype
      WHEN t.typtype = 'm' THEN 'pg_catalog.anymultirange'::pg_catalog.regtype
      WHEN t.typtype = 'c' THEN 'pg_catalog.record'::pg_catalog.regtype
      WHEN t.typsubscript = 'pg_catalog.array_subscript_handler'::pg_catalog.regproc
        THEN 'pg_catalog.anyarray'::pg_catalog.regtype
    END
    OR EXISTS (
      SELECT FROM pg_catalog.pg_cast k
      WHERE k.castsource = t.typid AND k.casttarget = c.opcintype AND k.castmethod = 'b' AND k.castcontext = 'i')
  WHERE t.operator IS NULL
  ORDER BY t.typid, c.typispreferred DESC, c.amname
),
equal_(typid, operator) AS (  -- the default equality operator of every type met (GetDefaultOpClass)
  SELECT typid, operator FROM own_ WHERE operator IS NOT NULL
  UNION ALL
  SELECT typid, operator FROM other_
)"""

# Built-in functions leave no trace in pg_depend, so what is found belongs to a user or an extension. An operator in an
# expression is recorded as the operator, not as its function.
_CODE: Final = """
code_ AS MATERIALIZED (
  SELECT p.oid, p.oid::pg_catalog.regprocedure::text AS function FROM pg_catalog.pg_proc p
  WHERE p.provolatile <> 'i' AND p.pronamespace <> 'pg_catalog'::pg_catalog.regnamespace
),
named(refclassid, refobjid, function) AS MATERIALIZED (
  SELECT 'pg_catalog.pg_proc'::pg_catalog.regclass, oid, function FROM code_
  UNION ALL
  SELECT 'pg_catalog.pg_operator'::pg_catalog.regclass, o.oid, c.function
  FROM pg_catalog.pg_operator o JOIN code_ c ON c.oid = o.oprcode
),
called(classid, objid, function) AS MATERIALIZED (  -- from the functions, since most of pg_depend is about others
  SELECT d.classid, d.objid, f.function
  FROM named f JOIN pg_catalog.pg_depend d ON d.refclassid = f.refclassid AND d.refobjid = f.refobjid
  WHERE d.classid IN ('pg_catalog.pg_constraint'::pg_catalog.regclass, 'pg_catalog.pg_attrdef'::pg_catalog.regclass,
    'pg_catalog.pg_type'::pg_catalog.regclass, 'pg_catalog.pg_class'::pg_catalog.regclass)
),
holder(classid, objid, what) AS (
  SELECT 'pg_catalog.pg_constraint'::pg_catalog.regclass, c.oid, 'check constraint ' || c.conname
  FROM pg_catalog.pg_constraint c WHERE c.contype = 'c' AND c.conrelid IN (SELECT relid FROM tree)
  UNION ALL
  SELECT 'pg_catalog.pg_constraint'::pg_catalog.regclass, c.oid,
    'check constraint ' || c.conname || ' of domain ' || c.contypid::pg_catalog.regtype
  FROM pg_catalog.pg_constraint c WHERE c.contypid IN (SELECT typid FROM part)
  UNION ALL
  SELECT 'pg_catalog.pg_class'::pg_catalog.regclass, i.indexrelid, 'index ' || i.indexrelid::pg_catalog.regclass
  FROM pg_catalog.pg_index i WHERE i.indrelid IN (SELECT relid FROM tree)
  UNION ALL
  SELECT 'pg_catalog.pg_class'::pg_catalog.regclass, relid, 'partition key of ' || relid::pg_catalog.regclass FROM tree
)"""

# A user-made cast from text takes the place of the input function in `value::type`. A binary-coercible one is harmless
# where the input function is text's own (citext). Of the built-in ones only that to regclass reads other texts than the
# input function, which takes numbers.
_COLUMNS: Final = """
SELECT coalesce(pg_catalog.json_agg(pg_catalog.json_build_object(
  'name', a.attname,
  'type_sql', pg_catalog.quote_ident(tn.nspname) || '.' || pg_catalog.quote_ident(t.typname),
  'type_oid', a.atttypid::int8,
  'base_type_oid', t.oid::int8,
  'type_modifier', b.typmod,
  'array_type_sql', coalesce((
    SELECT pg_catalog.quote_ident(yn.nspname) || '.' || pg_catalog.quote_ident(y.typname)
    FROM pg_catalog.pg_type own JOIN pg_catalog.pg_type y ON y.oid = CASE
      WHEN own.typarray <> 0 THEN own.typarray WHEN own.typcategory = 'A' THEN own.oid END
    JOIN pg_catalog.pg_namespace yn ON yn.oid = y.typnamespace WHERE own.oid = a.atttypid), ''),
  'is_enum', t.typtype = 'e',
  'is_generated', a.attgenerated <> '',
  'is_identity_always', a.attidentity = 'a',
  'is_required', a.attnotnull AND NOT a.atthasdef AND a.attidentity = '',
  'is_deterministic', coalesce(co.collisdeterministic, true),
  'has_equality', NOT EXISTS (
    SELECT FROM part p JOIN pg_catalog.pg_type pt ON pt.oid = p.typid
    WHERE p.attnum = a.attnum AND p.is_compared AND pt.typtype <> 'd'
      AND p.typid NOT IN (SELECT typid FROM equal_)),
  'operator', coalesce(kc.operator, e.operator),
  'is_index_default', coalesce(kc.is_default, true),
  'class_type', kc.class_type::int8,
  'collate', kc.collate_clause,
  'default_code', (
    SELECT coalesce(pg_catalog.json_agg(DISTINCT x.code), '[]') FROM (
      SELECT f.function FROM called f
      WHERE (f.classid, f.objid) IN (
        SELECT 'pg_catalog.pg_attrdef'::pg_catalog.regclass, d.oid FROM pg_catalog.pg_attrdef d
        WHERE d.adrelid = a.attrelid AND d.adnum = a.attnum
        UNION ALL
        SELECT 'pg_catalog.pg_type'::pg_catalog.regclass, p.typid FROM part p
        JOIN pg_catalog.pg_type pt ON pt.oid = p.typid AND pt.typtype = 'd' WHERE p.attnum = a.attnum)
      UNION ALL  -- nextval is built in, but the numbers it gives show the order (trap T-29)
      SELECT 'sequence ' || s.oid::pg_catalog.regclass FROM pg_catalog.pg_attrdef d
      JOIN pg_catalog.pg_depend n ON n.classid = 'pg_catalog.pg_attrdef'::pg_catalog.regclass AND n.objid = d.oid
        AND n.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass
      JOIN pg_catalog.pg_class s ON s.oid = n.refobjid AND s.relkind = 'S'
      WHERE d.adrelid = a.attrelid AND d.adnum = a.attnum
      UNION ALL
      SELECT 'its identity sequence' WHERE a.attidentity <> '') x(code)),
  'has_text_cast', EXISTS (
    SELECT FROM pg_catalog.pg_cast k
    WHERE k.castsource = 'pg_catalog.text'::pg_catalog.regtype AND k.casttarget = t.oid
      AND (k.oid >= 16384 OR t.oid = 'pg_catalog.regclass'::pg_catalog.regtype)
      AND (k.castmethod = 'f' OR (k.castmethod = 'b' AND (
        SELECT p.prosrc <> 'textin' FROM pg_catalog.pg_proc p WHERE p.oid = t.typinput))))
) ORDER BY a.attnum), '[]')
FROM attribute a
JOIN base b ON b.attnum = a.attnum
JOIN pg_catalog.pg_type t ON t.oid = b.typid AND t.typtype <> 'd'
JOIN pg_catalog.pg_namespace tn ON tn.oid = t.typnamespace
LEFT JOIN pg_catalog.pg_collation co ON co.oid = a.attcollation
LEFT JOIN equal_ e ON e.typid = t.oid
LEFT JOIN key_column kc ON kc.attnum = a.attnum"""

# tgenabled: O fires in origin and local, R in replica, A always, D never. Internal triggers keep constraints: foreign
# keys are described separately. Before PostgreSQL 15 a row trigger cloned to a partition is marked internal too.
# Statement triggers of a partition do not fire for statements that name the root, but for TRUNCATE. tgtype: 1 is a row
# trigger, 32 one for TRUNCATE.
_TRIGGERS: Final = """
SELECT coalesce(pg_catalog.json_agg(DISTINCT
  'trigger ' || t.tgname
    || CASE WHEN t.tgparentid = 0 AND t.tgrelid <> table_.oid
         THEN ' on ' || t.tgrelid::pg_catalog.regclass ELSE '' END), '[]')
FROM tree JOIN pg_catalog.pg_trigger t ON t.tgrelid = tree.relid
LEFT JOIN pg_catalog.pg_constraint k ON k.oid = t.tgconstraint
WHERE t.tgenabled IN ('A', CASE WHEN $3 = 'replica' THEN 'R' ELSE 'O' END)
  AND (NOT t.tgisinternal OR (t.tgparentid <> 0 AND coalesce(k.contype, 't') = 't'))
  AND (t.tgrelid = table_.oid OR t.tgtype & 33 <> 0)"""

#: Version of a trigger `t` as text: its own and its function's. The lock of a change keeps ALTER and DROP TRIGGER away,
#: but not CREATE OR REPLACE FUNCTION.
TRIGGER_VERSION: Final = """pg_catalog.concat_ws(' ', t.oid, t.xmin,
  (SELECT pg_catalog.concat_ws(' ', f.oid, f.xmin) FROM pg_catalog.pg_proc f WHERE f.oid = t.tgfoid))"""

# Triggers of which `row_code.py` may say that they see nothing but their row: BEFORE, FOR EACH ROW, on INSERT and
# UPDATE only, without a condition or columns, of a table that is not in a partition tree. tgtype: 1 row, 2 BEFORE,
# 4 INSERT, 16 UPDATE; the other bits are DELETE, TRUNCATE and INSTEAD OF. An object that a user has put into pg_catalog
# under a name that bodies may use, or a cast between built-in types, could do anything.
_ROW_CODE: Final = f"""
SELECT coalesce(pg_catalog.json_agg(pg_catalog.json_build_object(
  'name', 'trigger ' || t.tgname,
  'version', {TRIGGER_VERSION},
  'body', p.prosrc,
  'fires_on_all', t.tgtype & 20 = 20) ORDER BY t.tgname), '[]')
FROM pg_catalog.pg_trigger t
JOIN pg_catalog.pg_proc p ON p.oid = t.tgfoid AND p.proconfig IS NULL
JOIN pg_catalog.pg_language l ON l.oid = p.prolang AND l.lanname = 'plpgsql'
JOIN pg_catalog.pg_class c ON c.oid = t.tgrelid AND c.relkind = 'r' AND NOT c.relispartition
WHERE t.tgrelid = table_.oid AND NOT t.tgisinternal AND t.tgparentid = 0
  AND t.tgenabled IN ('A', CASE WHEN $3 = 'replica' THEN 'R' ELSE 'O' END)
  AND t.tgtype & 3 = 3 AND t.tgtype & ~23 = 0 AND t.tgattr::text = '' AND t.tgqual IS NULL
  AND NOT EXISTS (
    SELECT FROM pg_catalog.pg_proc own
    WHERE own.proname = ANY ('{{{",".join(sorted(FUNCTIONS))}}}') AND own.oid >= 16384
      AND own.pronamespace = 'pg_catalog'::pg_catalog.regnamespace)
  AND NOT EXISTS (
    SELECT FROM pg_catalog.pg_operator own
    WHERE own.oprname = ANY ('{{{",".join(sorted(OPERATORS))}}}') AND own.oid >= 16384
      AND own.oprnamespace = 'pg_catalog'::pg_catalog.regnamespace)
  AND NOT EXISTS (
    SELECT FROM pg_catalog.pg_cast k
    WHERE k.oid >= 16384 AND k.castsource < 16384 AND k.casttarget < 16384)"""  # noqa: S608

# Only rules of the relation that a statement names act, so rules of partitions do not count.
_RULES: Final = """
SELECT coalesce(pg_catalog.json_agg('rule ' || r.rulename ORDER BY r.rulename), '[]')
FROM pg_catalog.pg_rewrite r
WHERE r.ev_class = table_.oid AND r.rulename <> '_RETURN'
  AND r.ev_enabled IN ('A', CASE WHEN $3 = 'replica' THEN 'R' ELSE 'O' END)"""

# An owner who may become this role anyway gains nothing by code that runs as it: itself, a superuser, its members.
MAY = "CASE WHEN pg_catalog.current_setting('server_version_num')::int >= 160000 THEN 'SET' ELSE 'MEMBER' END"
_TRUSTED: Final = f"pg_catalog.pg_has_role({{}}, CURRENT_USER, {MAY})"

#: Version of a trigger `t` that keeps a foreign key of one column: its own, the key's and both columns'.
REFERENCE_VERSION: Final = """pg_catalog.concat_ws(' ', t.oid, t.xmin,
  (SELECT pg_catalog.concat_ws(' ', v.xmin, vc.xmin, vp.xmin) FROM pg_catalog.pg_constraint v
   JOIN pg_catalog.pg_attribute vc ON vc.attrelid = v.conrelid AND vc.attnum = v.conkey[1]
   JOIN pg_catalog.pg_attribute vp ON vp.attrelid = v.confrelid AND vp.attnum = v.confkey[1]
   WHERE v.oid = t.tgconstraint))"""

#: Condition for a trigger `t` that an insert fires, or anything does under the role `replica`. tgtype: 4 is INSERT.
INSERTING: Final = "t.tgenabled <> 'D' AND (t.tgtype & 4 = 4 OR t.tgenabled <> 'O')"

# NULL, or the foreign keys of the table, if their triggers are all that an insert fires under the role `origin`, and
# nothing does under `replica`, and if one query by this role can see and lock what each of them refers to. That query
# runs with the rights of this role, not the parent's owner, who must therefore be trusted. Both columns have one type,
# with one equality: int8, int2, int4, text, varchar, date, timestamp, timestamptz or uuid.
_REFERENCES: Final = f"""
SELECT CASE WHEN pg_catalog.count(*) = pg_catalog.count(f.described)
  THEN coalesce(pg_catalog.json_agg(f.described ORDER BY f.tgname), '[]') END
FROM (
  SELECT t.tgname, (
    SELECT pg_catalog.json_build_object(
      'column', c.attname, 'type_sql', pg_catalog.format_type(c.atttypid, c.atttypmod),
      'parent_oid', pc.oid::int8, 'parent_schema', pn.nspname, 'parent_name', pc.relname, 'parent_column', p.attname,
      'version', {REFERENCE_VERSION})
    FROM pg_catalog.pg_constraint k
    JOIN pg_catalog.pg_class pc ON pc.oid = k.confrelid AND pc.relkind = 'r' AND NOT pc.relispartition
      AND {_TRUSTED.format("pc.relowner")} AND NOT pg_catalog.row_security_active(pc.oid)
      AND pg_catalog.has_table_privilege(pc.oid, 'SELECT') AND pg_catalog.has_table_privilege(pc.oid, 'UPDATE')
    JOIN pg_catalog.pg_namespace pn ON pn.oid = pc.relnamespace AND pg_catalog.has_schema_privilege(pn.oid, 'USAGE')
    JOIN pg_catalog.pg_attribute c ON c.attrelid = k.conrelid AND c.attnum = k.conkey[1]
      AND c.atttypid IN (20, 21, 23, 25, 1043, 1082, 1114, 1184, 2950)
    JOIN pg_catalog.pg_attribute p ON p.attrelid = k.confrelid AND p.attnum = k.confkey[1] AND p.atttypid = c.atttypid
    JOIN pg_catalog.pg_operator o ON o.oid = k.conpfeqop[1] AND o.oid < 16384 AND o.oprname = '='
    WHERE k.oid = t.tgconstraint AND k.contype = 'f' AND k.conparentid = 0 AND NOT k.condeferrable
      AND pg_catalog.cardinality(k.conkey) = 1
      AND t.tgisinternal AND t.tgenabled = 'O' AND t.tgfoid = 'pg_catalog."RI_FKey_check_ins"'::pg_catalog.regproc
      AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_collation n
        WHERE n.oid IN (c.attcollation, p.attcollation) AND NOT n.collisdeterministic)) AS described
  FROM pg_catalog.pg_trigger t WHERE $3 = 'origin' AND t.tgrelid = table_.oid AND {INSERTING}) f
HAVING $3 = 'origin' AND table_.relkind = 'r' AND NOT table_.relispartition
  AND NOT EXISTS (SELECT FROM pg_catalog.pg_rewrite r WHERE r.ev_class = table_.oid)"""  # noqa: S608

#: Built-in functions that are not immutable and run no code of a user. Others may: query_to_xml takes SQL as text,
#: domain_in and json_populate_record run the checks of a domain, to_json and its kind casts to json.
_HARMLESS: Final = (
    "age", "clock_timestamp", "concat", "concat_ws", "currval", "current_database", "current_schema",
    "current_setting", "date", "date_part", "date_trunc", "extract", "format", "gen_random_uuid", "lastval", "nextval",
    "now", "pg_current_xact_id", "random", "statement_timestamp", "text", "time", "timeofday", "timestamp",
    "timestamptz", "timetz", "timezone", "to_char", "to_date", "to_number", "to_timestamp", "transaction_timestamp",
    "txid_current", "uuidv4", "uuidv7",
)  # fmt: skip

# Code that PostgreSQL runs for a change of a row, made by the owner of the table or of a type. Expressions are searched
# by the numbers in their stored trees, because calls of built-in functions leave no trace in pg_depend.
# A constant cannot hide one: its bytes are printed as numbers, so at most something harmless is found.
_FOREIGN_CODE: Final = f"""
SELECT pg_catalog.json_array_elements_text(({_TRIGGERS})) AS what, NULL::text AS column_name
UNION ALL
SELECT pg_catalog.json_array_elements_text(({_RULES})), NULL
UNION ALL
SELECT 'cast from text to ' || k.casttarget::pg_catalog.regtype, NULL
FROM part JOIN pg_catalog.pg_cast k ON k.casttarget = part.typid
  AND k.castsource = 'pg_catalog.text'::pg_catalog.regtype
JOIN pg_catalog.pg_proc p ON p.oid = k.castfunc AND NOT {_TRUSTED.format("p.proowner")}
UNION ALL
SELECT 'range ' || r.rngtypid::pg_catalog.regtype, NULL
FROM part JOIN pg_catalog.pg_range r ON r.rngtypid = part.typid
JOIN pg_catalog.pg_proc p ON p.oid IN (r.rngsubdiff, r.rngcanonical) AND NOT {_TRUSTED.format("p.proowner")}
UNION ALL
SELECT e.what, e.column_name FROM (
  SELECT 'check constraint ' || c.conname, NULL::text, c.conbin::text
  FROM pg_catalog.pg_constraint c WHERE c.contype = 'c' AND c.conrelid IN (SELECT relid FROM tree)
  UNION ALL
  SELECT CASE WHEN a.attgenerated = '' THEN 'default' ELSE 'expression' END || ' of column ' || a.attname,
    CASE WHEN a.attgenerated = '' THEN a.attname::text END, d.adbin::text
  FROM pg_catalog.pg_attrdef d JOIN pg_catalog.pg_attribute a ON a.attrelid = d.adrelid AND a.attnum = d.adnum
  WHERE d.adrelid IN (SELECT relid FROM tree)
  UNION ALL
  SELECT 'index ' || i.indexrelid::pg_catalog.regclass, NULL, pg_catalog.concat(i.indexprs::text, i.indpred::text)
  FROM pg_catalog.pg_index i WHERE i.indrelid IN (SELECT relid FROM tree)
  UNION ALL
  SELECT 'partition key of ' || k.partrelid::pg_catalog.regclass, NULL, k.partexprs::text
  FROM pg_catalog.pg_partitioned_table k WHERE k.partrelid IN (SELECT relid FROM tree)
  UNION ALL
  SELECT 'domain ' || t.oid::pg_catalog.regtype, NULL, c.conbin::text
  FROM part JOIN pg_catalog.pg_type t ON t.oid = part.typid AND NOT {_TRUSTED.format("t.typowner")}
  JOIN pg_catalog.pg_constraint c ON c.contypid = t.oid AND c.contype = 'c'
  UNION ALL
  SELECT 'domain ' || t.oid::pg_catalog.regtype, NULL, t.typdefaultbin::text
  FROM part JOIN pg_catalog.pg_type t ON t.oid = part.typid AND t.typtype = 'd' AND NOT {_TRUSTED.format("t.typowner")}
  UNION ALL  -- not run for a change, but when a statement is planned, as far as it is constant
  SELECT 'statistics ' || x.stxname, NULL, x.stxexprs::text
  FROM pg_catalog.pg_statistic_ext x WHERE x.stxrelid IN (SELECT relid FROM tree)
) e(what, column_name, node)
WHERE EXISTS (
  SELECT FROM pg_catalog.pg_proc p
  WHERE p.oid IN (
    SELECT m[1]::oid FROM pg_catalog.regexp_matches(e.node, ':funcid ([0-9]+)', 'g') AS m
    UNION ALL
    SELECT o.oprcode FROM pg_catalog.regexp_matches(e.node, ':opno ([0-9]+)', 'g') AS m
    JOIN pg_catalog.pg_operator o ON o.oid = m[1]::oid)
  AND NOT ((p.provolatile = 'i' AND {_TRUSTED.format("p.proowner")})
    OR (p.pronamespace = 'pg_catalog'::pg_catalog.regnamespace AND p.proname = ANY ('{{{",".join(_HARMLESS)}}}'))
    OR (p.pronamespace = 'pg_catalog'::pg_catalog.regnamespace AND EXISTS (
      SELECT FROM pg_catalog.pg_operator o WHERE o.oprcode = p.oid AND o.oid < 16384))))
OR e.node ~ '\\{{JSONCONSTRUCTOREXPR'
OR EXISTS (  -- to convert text to a type converts it to each type inside, and runs the checks of domains; the checks
             -- of the columns are looked at above
  SELECT FROM pg_catalog.regexp_matches(e.node, ':[a-z]*typ(?:e|eid|id)? ([0-9]+)', 'g') AS m
  JOIN pg_catalog.pg_type t ON t.oid = m[1]::oid AND NOT {_TRUSTED.format("t.typowner")}
  LEFT JOIN pg_catalog.pg_type i ON i.oid = t.typelem
  WHERE (t.typtype IN ('d', 'c', 'r', 'm') OR i.typtype IN ('d', 'c', 'r', 'm'))
    AND t.oid NOT IN (SELECT typid FROM part))"""  # noqa: S608

# A policy runs as well. Where it applies the table is refused before (`ACCESS_SQL`); this is for what comes later.
_FOREIGN_CODE_NOW: Final = f"""{_FOREIGN_CODE}
UNION ALL
SELECT 'row-level security', NULL FROM table_ WHERE pg_catalog.row_security_active(table_.oid)"""  # noqa: S608

_FOREIGN: Final = f"""
SELECT pg_catalog.json_build_object('role', CURRENT_USER,
  'owners', pg_catalog.json_agg(DISTINCT pg_catalog.pg_get_userbyid(c.relowner)),
  'code', (SELECT coalesce(pg_catalog.json_agg(pg_catalog.json_build_array(f.what, f.column_name)), '[]')
    FROM ({_FOREIGN_CODE}) f))
FROM tree JOIN pg_catalog.pg_class c ON c.oid = tree.relid AND NOT {_TRUSTED.format("c.relowner")}
HAVING pg_catalog.count(*) > 0"""  # noqa: S608

#: The last column but one of `FACTS_SQL` alone. Parameters as there.
FOREIGN_SQL: Final = f"WITH RECURSIVE {_TABLE}, {_TYPES} SELECT ({_FOREIGN}) FROM table_"  # noqa: S608

#: Fails with 42P01 if a table with other owners has code. Parameters: `$1` schema, `$2` table, `$3` columns that are
#: sent as text[], whose defaults do not act.
GUARD_SQL: Final = f"""WITH RECURSIVE {_TABLE}, {_TYPES}
SELECT (SELECT (CASE WHEN EXISTS (
    SELECT FROM ({_FOREIGN_CODE_NOW.replace("$3", "pg_catalog.current_setting('session_replication_role')")}) f
    WHERE f.column_name IS NULL OR f.column_name <> ALL ($3::text[])) THEN 'parapply_code_of_another_owner' END
  )::pg_catalog.regclass FROM table_)"""  # noqa: S608

#: Columns: oid, OID of the partition tree's root, relkind, key is immediate (NULL without a key), then JSON: columns,
#: key column names, other unique indexes, foreign keys, triggers, rules, code, foreign partitions, UNLOGGED
#: tables; then whether it is in a schema of parapply's own progress, the columns that come first in an index, the
#: triggers of `_ROW_CODE`, the code of other owners (NULL: it has no other owner), and `_REFERENCES`. No row: no such
#: relation.
FACTS_SQL: Final = f"""
WITH RECURSIVE {_TABLE}, {_TYPES}, {_EQUAL}, {KEY}, {FOREIGN_KEYS}, {INDEX_COLUMNS}, {_CODE}
SELECT table_.oid::int8, coalesce(pg_catalog.pg_partition_root(table_.oid), table_.oid)::oid::int8,
  table_.relkind::text,
  (SELECT indimmediate FROM key_),
  ({_COLUMNS}),
  (SELECT coalesce(pg_catalog.json_agg(attname ORDER BY ord), '[]') FROM key_column),
  ({UNIQUE_SELECT}),
  ({FOREIGN_SELECT}),
  ({_TRIGGERS}),
  ({_RULES}),
  (SELECT coalesce(pg_catalog.json_agg(DISTINCT h.what || ' calls ' || c.function), '[]')
   FROM holder h JOIN called c ON c.classid = h.classid AND c.objid = h.objid),
  (SELECT coalesce(pg_catalog.json_agg(c.oid::pg_catalog.regclass::text ORDER BY c.relname), '[]')
   FROM tree JOIN pg_catalog.pg_class c ON c.oid = tree.relid WHERE c.relkind = 'f'),
  (SELECT coalesce(pg_catalog.json_agg(c.oid::pg_catalog.regclass::text ORDER BY c.relname), '[]')
   FROM tree JOIN pg_catalog.pg_class c ON c.oid = tree.relid WHERE c.relkind = 'r' AND c.relpersistence = 'u'),
  EXISTS (SELECT FROM {STATE_SCHEMAS_SQL} AS own WHERE own.schema_name = $1),
  ({INDEXED_SELECT}),
  ({_ROW_CODE}),
  ({_FOREIGN}),
  ({_REFERENCES})
FROM table_
"""  # noqa: S608 - only the constants above are put together

#: The same of many tables, in one statement: what does not depend on the table is read once. Parameters: `$1` schemas,
#: `$2` names, `$3` as above. A row begins with the position in these lists, from 1; tables that are missing have none.
MANY_FACTS_SQL: Final = f"""
SELECT w.n, found.*
FROM unnest($1::name[], $2::name[]) WITH ORDINALITY AS w(schema_name, table_name, n)
CROSS JOIN LATERAL ({FACTS_SQL.replace("$1", "w.schema_name").replace("$2", "w.table_name")}) AS found
"""  # noqa: S608 - only the constant above is put in

#: The same for the role `replica`, under which `_REFERENCES` is NULL: to plan it takes an eighth of a daemon's first
#: question, for which its first row waits.
MANY_REPLICA_FACTS_SQL: Final = MANY_FACTS_SQL.replace(_REFERENCES, "NULL::json")

#: Parameters: `$1` schemas, `$2` names. A row for each existing relation: schema, name, OID. A lookup for each.
OIDS_SQL: Final = """
SELECT w.schema_name::text, w.table_name::text, found.oid::int8
FROM unnest($1::name[], $2::name[]) AS w(schema_name, table_name)
CROSS JOIN LATERAL (
  SELECT c.oid FROM pg_catalog.pg_class c
  WHERE c.relname = w.table_name
    AND c.relnamespace = (SELECT n.oid FROM pg_catalog.pg_namespace n WHERE n.nspname = w.schema_name)
  OFFSET 0) AS found
"""

#: Parameters: `$1` OIDs of tables, `$2` privileges as text[]. A row for each existing table: its OID, whether
#: row-level security applies to this role, whether the schema may be used, the privileges missing in the order asked
#: for, and the role.
ACCESS_SQL: Final = """
SELECT c.oid::int8, pg_catalog.row_security_active(c.oid),
  pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE'),
  ARRAY(SELECT p.name FROM pg_catalog.unnest($2::text[]) WITH ORDINALITY p(name, ord)
        WHERE NOT pg_catalog.has_table_privilege(c.oid, p.name) ORDER BY p.ord),
  CURRENT_USER::text
FROM pg_catalog.pg_class c WHERE c.oid = ANY ($1::oid[])
"""

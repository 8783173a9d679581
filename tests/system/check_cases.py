"""A pair of databases in which everything is wrong that one pair can have wrong, and what is to be found there."""

from __future__ import annotations

from typing import Final, NamedTuple

from parapply.check.kinds import Code

#: The tables of one pair; each is named after what is wrong with it.
SOURCE: Final = """
CREATE SCHEMA "Odd %s"; CREATE SCHEMA parapply;
CREATE TYPE mood AS ENUM ('good', 'bad');
CREATE TABLE parapply.slots (i int PRIMARY KEY); CREATE TABLE parapply.applied (i int PRIMARY KEY);
CREATE TABLE parapply.schema_version (i int PRIMARY KEY);
CREATE UNIQUE INDEX schema_version_one_row ON parapply.schema_version ((true));
CREATE TABLE no_identity (i int);
CREATE TABLE indexed_identity (i int NOT NULL); CREATE UNIQUE INDEX usable ON indexed_identity (i);
CREATE TABLE keyless (i int); ALTER TABLE keyless REPLICA IDENTITY FULL;
CREATE TABLE filtered (i int PRIMARY KEY, v int);
CREATE TABLE listed (i int PRIMARY KEY, v int);
CREATE TABLE "Odd %s"."mis""sing" (i int PRIMARY KEY);
CREATE TABLE viewed (i int PRIMARY KEY);
CREATE TABLE columnless (i int PRIMARY KEY, v int);
CREATE TABLE other_key (i int PRIMARY KEY, v int);
CREATE TABLE denied (i int PRIMARY KEY);
CREATE TABLE unfilled (i int PRIMARY KEY);
CREATE TABLE holds_rows (i int PRIMARY KEY);
CREATE TABLE typed (i int PRIMARY KEY, narrow int, wide int, feeling mood, collated text COLLATE "C");
CREATE TABLE generating (i int PRIMARY KEY, g int GENERATED ALWAYS AS (i + 1) STORED);
CREATE TABLE constrained (i int PRIMARY KEY, v int, w int, p int, r int4range);
CREATE TABLE parent (i int PRIMARY KEY);
CREATE TABLE acting (i int PRIMARY KEY);
CREATE TABLE identified (i int PRIMARY KEY);
CREATE TABLE fleeting (i int PRIMARY KEY);
CREATE TABLE amounts (a money PRIMARY KEY);
CREATE TABLE parted (i int) PARTITION BY LIST (i); CREATE TABLE parted_1 PARTITION OF parted FOR VALUES IN (1);
CREATE UNLOGGED TABLE unlogged (i int PRIMARY KEY);
CREATE TABLE unpublished (i int PRIMARY KEY);
CREATE MATERIALIZED VIEW seen AS SELECT 1 AS one; CREATE SEQUENCE counted; SELECT lo_create(0);
CREATE PUBLICATION pub FOR TABLE no_identity, indexed_identity, keyless, filtered WHERE (v > 0), listed (v),
  "Odd %s"."mis""sing", viewed, columnless, other_key, denied, unfilled, holds_rows, typed, generating, constrained,
  parent, acting, identified, fleeting, amounts, parted, parapply.slots, parapply.applied, parapply.schema_version
  WITH (publish = 'insert, update, delete');
"""

TARGET: Final = """
CREATE TYPE mood AS ENUM ('good');
CREATE TABLE no_identity (i int); CREATE TABLE indexed_identity (i int PRIMARY KEY); CREATE TABLE keyless (i int);
CREATE TABLE filtered (i int PRIMARY KEY, v int); CREATE TABLE listed (i int, v int);
CREATE VIEW viewed AS SELECT 1 AS i;
CREATE TABLE columnless (i int PRIMARY KEY);
CREATE TABLE other_key (i int, v int PRIMARY KEY);
CREATE TABLE denied (i int PRIMARY KEY); REVOKE ALL ON denied FROM {role};
CREATE TABLE unfilled (i int PRIMARY KEY, extra int NOT NULL);
CREATE TABLE holds_rows (i int PRIMARY KEY); INSERT INTO holds_rows VALUES (1);
CREATE TABLE typed (i int PRIMARY KEY, narrow smallint, wide bigint, feeling mood, collated text);
CREATE TABLE generating (i int PRIMARY KEY, g int);
CREATE TABLE constrained (i int PRIMARY KEY, v int NOT NULL CHECK (v > 0), w int UNIQUE, p int, r int4range,
  EXCLUDE USING gist (r WITH &&));
CREATE TABLE parent (i int PRIMARY KEY);
ALTER TABLE constrained ADD CONSTRAINT checked FOREIGN KEY (p) REFERENCES parent,
  ADD CONSTRAINT unchecked FOREIGN KEY (v) REFERENCES parent;
CREATE FUNCTION enable_checked() RETURNS void LANGUAGE plpgsql AS $$ DECLARE name text; BEGIN
  FOR name IN SELECT tgname FROM pg_trigger t JOIN pg_constraint c ON c.oid = t.tgconstraint
    WHERE c.conname = 'checked' AND t.tgrelid = 'constrained'::regclass
  LOOP EXECUTE format('ALTER TABLE constrained ENABLE ALWAYS TRIGGER %I', name); END LOOP; END $$;
SELECT enable_checked();
CREATE FUNCTION act() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM clock_timestamp(); RETURN NEW; END $$;
CREATE TABLE acting (i int PRIMARY KEY); CREATE TRIGGER act BEFORE INSERT ON acting FOR EACH ROW EXECUTE FUNCTION act();
ALTER TABLE acting ENABLE ALWAYS TRIGGER act;
CREATE TABLE identified (i int GENERATED ALWAYS AS IDENTITY PRIMARY KEY);
CREATE UNLOGGED TABLE fleeting (i int PRIMARY KEY);
CREATE TABLE amounts (a money PRIMARY KEY);
CREATE TABLE parted_1 (i int PRIMARY KEY);
"""


class Expected(NamedTuple):
    """A finding that the report must have: its code, the object, and the words that it must say or have done."""

    code: Code
    object: str
    words: str


FOUND: Final = (
    Expected(
        Code.REPLICA_IDENTITY, '"public"."no_identity"', 'ALTER TABLE "public"."no_identity" REPLICA IDENTITY FULL;'
    ),
    Expected(
        Code.REPLICA_IDENTITY, '"public"."indexed_identity"',
        'ALTER TABLE "public"."indexed_identity" REPLICA IDENTITY USING INDEX "usable";',
    ),
    Expected(Code.REPLICA_IDENTITY, '"public"."parted_1"', "UPDATE and DELETE"),
    Expected(Code.FILTER_OUTSIDE_IDENTITY, '"public"."filtered"', '"v"'),
    Expected(Code.COLUMNS_OUTSIDE_IDENTITY, '"public"."listed"', '"i"'),
    Expected(Code.STATE_PUBLISHED, '"parapply"', "progress"),
    Expected(Code.DDL_QUEUE, "parapply.ddl_queue", "ddl.apply is on"),
    Expected(Code.PUBLICATION_OPERATIONS, '"pub"', "truncate"),
    Expected(Code.NOT_REPLICATED, "", "unlogged"),
    Expected(Code.NOT_REPLICATED, "", "materialized view"),
    Expected(Code.TABLE_UNPUBLISHED, "", '"unpublished"'),
    Expected(Code.SEQUENCES, "", '"counted"'),
    Expected(Code.LARGE_OBJECTS, "", "1 large object"),
    Expected(Code.WAL_RETENTION, "", "max_slot_wal_keep_size"),
    Expected(Code.TABLE_MISSING, '"Odd %s"."mis""sing"', "missing"),
    Expected(Code.TABLE_REFUSED, '"public"."viewed"', "a view"),
    Expected(Code.SETTING_WITHOUT_TABLE, 'conflict.tables."public.type"', "did you mean public.typed?"),
    Expected(Code.SETTING_WITHOUT_TABLE, 'apply.tables."nosuch.table"', "nosuch.table is no published table"),
    Expected(Code.COLUMNS_REFUSED, '"public"."columnless"', '"v"'),
    Expected(Code.UPDATES_REFUSED, '"public"."other_key"', '"v"'),
    Expected(Code.UPDATES_REFUSED, '"public"."listed"', "neither a replica identity index nor a primary key"),
    Expected(Code.TABLE_ACCESS, '"public"."denied"', "GRANT INSERT, UPDATE, DELETE, SELECT"),
    Expected(Code.COLUMN_UNFILLED, '"public"."unfilled"', '"extra"'),
    Expected(Code.ROWS_THERE, '"public"."holds_rows"', "TRUNCATE"),
    Expected(Code.TYPE_DIFFERS, '"public"."typed"', "smallint"),
    Expected(Code.TYPE_WIDER, '"public"."typed"', "bigint"),
    Expected(Code.ENUM_LABELS, "public.mood", "ALTER TYPE public.mood ADD VALUE 'bad';"),
    Expected(Code.COLLATION_DIFFERS, '"public"."typed"', '"C"'),
    Expected(Code.GENERATED_ON_SOURCE, '"public"."generating"', '"g"'),
    Expected(Code.NOT_NULL, '"public"."constrained"', "DROP NOT NULL"),
    Expected(Code.CONSTRAINT, '"public"."constrained"', "CHECK"),
    Expected(Code.CONSTRAINT, '"public"."constrained"', "EXCLUDE"),
    Expected(Code.UNIQUE, '"public"."constrained"', "(w)"),
    Expected(Code.UNIQUE, '"public"."other_key"', "(v)"),
    Expected(Code.UNIQUE, '"public"."parted_1"', "(i)"),
    Expected(Code.FOREIGN_KEY, '"public"."constrained"', '"checked"'),
    Expected(Code.FOREIGN_KEY_UNCHECKED, '"public"."constrained"', '"unchecked"'),
    Expected(Code.CODE_RUNS, '"public"."acting"', "ENABLE TRIGGER"),
    Expected(Code.NO_KEY, '"public"."keyless"', "ADD PRIMARY KEY"),
    Expected(Code.IDENTITY_ALWAYS, '"public"."identified"', "SET GENERATED BY DEFAULT"),
    Expected(Code.TABLE_REFUSED, '"public"."fleeting"', "UNLOGGED"),
    Expected(Code.NOT_SET_BASED, '"public"."constrained"', "one batch at a time"),
    Expected(Code.NOT_SET_BASED, '"public"."amounts"', "equal keys may differ"),
)  # fmt: skip

"""The queue of commands on the publisher: a table of the publications, and the function that puts a command into it.

A row of the queue is proof that its command has run on the publisher, under the role that inserted the row: a trigger
runs it, and no row comes to be without. So a role that may write to the queue can have nothing run on the target that
it could not run on the publisher itself, and nothing needs a superuser or a SECURITY DEFINER function.

In: an open plain session, or none for the text. Out: the objects, in one transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from psycopg import sql

from parapply.source import ddl_automatic
from parapply.source.slot import source_errors
from parapply.wire.ddl_queue import DIGEST_SQL, QUEUE, CommandName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.source.ddl_automatic import Automatic
    from parapply.source.slot import Connection

_NAME: Final = r'(?:"(?:[^"]|"")+"|[[:alpha:]_][[:alnum:]_$]*)'

#: Forms in which the index, and the table, can be told of a command that cannot run in a transaction; in groups. Others
#: are refused. `later.py` has the same.
CREATE_LATER: Final = (
    r"^\s*create\s+(unique\s+)?index\s+concurrently\s+(if\s+not\s+exists\s+)?(NAME)\s+on\s+(?:only\s+)?"
    r"(NAME(?:\s*\.\s*NAME)?)(.*)$"
).replace("NAME", _NAME)
DROP_LATER: Final = (
    r"^\s*drop\s+index\s+concurrently\s+(if\s+exists\s+)?(NAME(?:\s*\.\s*NAME)?)\s*(?:restrict\s*)?;?\s*$"
).replace("NAME", _NAME)

#: New columns of `widths`' tables whose value each server would compute separately.
_COLUMNS: Final = r"""SELECT a.attrelid::regclass, a.attname
          FROM jsonb_each_text(@widths@) AS width(relid, natts)
          JOIN pg_attribute AS a ON a.attrelid = width.relid::oid AND a.attnum > width.natts::int
          JOIN pg_type AS t ON t.oid = a.atttypid
          LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
         CROSS JOIN LATERAL (SELECT COALESCE(d.adbin::text, t.typdefaultbin::text)) AS value(expression)
         WHERE NOT a.attisdropped AND a.attgenerated = ''
           AND (a.attidentity <> '' OR value.expression ~ '\{(SQLVALUEFUNCTION|NEXTVALUEEXPR)\M'
                OR EXISTS (SELECT FROM regexp_matches(value.expression, ':(?:op)?funcid (\d+)', 'g') AS hit(groups)
                             JOIN pg_proc AS p ON p.oid = hit.groups[1]::oid WHERE p.provolatile <> 'i'))"""

#: Facts about types by which values in rows are printed, or are checked on the target. A change of them locks no table.
_SHAPES: Final = """
        SELECT e.enumtypid, 'label ' || e.oid, e.enumlabel::text FROM pg_enum AS e
         UNION ALL
        SELECT c.reltype, 'fields ' || c.oid, string_agg(concat(a.attnum, a.attisdropped), ' ' ORDER BY a.attnum)
          FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid WHERE c.relkind = 'c' GROUP BY 1, 2
         UNION ALL
        SELECT t.oid, 'checks ' || t.oid, COALESCE(string_agg(k.oid::text, ' ' ORDER BY k.oid), '')
          FROM pg_type AS t LEFT JOIN pg_constraint AS k ON k.contypid = t.oid WHERE t.typtype = 'd' GROUP BY 1, 2"""
_ALL_SHAPES: Final = f"""
        SELECT jsonb_object_agg(one.part, one.shape) FROM ({_SHAPES}) AS one(type, part, shape)"""  # noqa: S608  constant

#: Tables with values of types whose shape is another one now, also within arrays, ranges, domains and composite types.
#: A transaction that has written such a value and is not over would send it as it was, after the command.
_HOLDERS: Final = f"""
        WITH RECURSIVE now(type, part, shape) AS ({_SHAPES}),
          within(type) AS (
            SELECT now.type FROM now WHERE @shapes@ ->> now.part <> now.shape
             UNION
            SELECT next.type FROM within AS w CROSS JOIN LATERAL (
                SELECT t.oid FROM pg_type AS t WHERE t.typelem = w.type OR t.typbasetype = w.type
                 UNION ALL
                SELECT unnest(ARRAY[r.rngtypid, r.rngmultitypid]) FROM pg_range AS r WHERE r.rngsubtype = w.type
                 UNION ALL
                SELECT c.reltype FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid
                 WHERE a.atttypid = w.type AND NOT a.attisdropped AND c.reltype <> 0) AS next(type))
        SELECT c.oid::regclass FROM pg_class AS c
         WHERE c.relkind = 'r' AND c.relpersistence = 'p'
           AND EXISTS (SELECT FROM pg_attribute AS a JOIN within AS w ON w.type = a.atttypid
                        WHERE a.attrelid = c.oid AND NOT a.attisdropped) ORDER BY c.oid"""  # noqa: S608  a constant

#: Run again, it brings an older queue up to date. It uses the names of `QUEUE`.
_OBJECTS: Final = r"""
-- Nothing of this is for the targets, and no operator of another schema may take the place of one of the catalogue.
SET parapply.record_ddl = 'off';
SET search_path = pg_catalog, pg_temp;
CREATE SCHEMA IF NOT EXISTS parapply;
CREATE TABLE IF NOT EXISTS parapply.ddl_queue (
    id bigint GENERATED ALWAYS AS IDENTITY,
    command text NOT NULL,
    tag text NOT NULL,
    role_name text NOT NULL,
    first_schema text NOT NULL,
    settings jsonb NOT NULL,
    made jsonb NOT NULL,
    ran_at timestamptz NOT NULL DEFAULT pg_catalog.now(),
    CONSTRAINT ddl_queue_id PRIMARY KEY (id));
DO $own$ DECLARE
    owner text;
BEGIN
    SELECT pg_catalog.pg_get_userbyid(relowner) INTO owner FROM pg_catalog.pg_class
     WHERE oid = 'parapply.ddl_queue'::pg_catalog.regclass;
    -- An older table: its owner can disable the trigger, and write commands that never ran here.
    IF owner <> CURRENT_USER THEN
        RAISE 'the table parapply.ddl_queue belongs to the role %, which could have any command run on targets', owner
            USING HINT = 'run this as that role, or drop the table';
    END IF;
END $own$;
ALTER TABLE parapply.ddl_queue ADD COLUMN IF NOT EXISTS later boolean NOT NULL DEFAULT false;
COMMENT ON TABLE parapply.ddl_queue IS
    'Commands that ran here, for parapply to run on its targets. An INSERT runs the command; old rows may be deleted.';

CREATE OR REPLACE FUNCTION parapply.run_queued_ddl() RETURNS trigger LANGUAGE plpgsql AS $run$
-- Types by their whole names: this is compiled under the caller's search_path, where one of his could be another.
DECLARE
    path pg_catalog.text := pg_catalog.current_setting('search_path');
    schemas pg_catalog.text[] := pg_catalog.current_schemas(false);
    into_schema pg_catalog.text := pg_catalog.current_schema();
    recording pg_catalog.text := pg_catalog.current_setting('parapply.record_ddl', true);
    form pg_catalog.text[];
    nsp pg_catalog.name;
    probe pg_catalog.refcursor;
    several pg_catalog.text;
    plain pg_catalog.text;
    said pg_catalog.text;
    widths pg_catalog.jsonb;
    shapes pg_catalog.jsonb;
    place pg_catalog.regclass;
    column_name pg_catalog.name;
    tables pg_catalog.oid[];
BEGIN
    -- No object of the caller's may take the place of one of the catalogue in what follows.
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    IF NEW.tag IS NOT NULL AND current_user = (SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = TG_RELID) THEN
        -- A row of the event trigger's, which is the owner's: its command has run.
        NEW.ran_at := now();
        PERFORM pg_notify('parapply_ddl', '');
        PERFORM set_config('search_path', path, true);
        RETURN NEW;
    END IF;
    PERFORM set_config('parapply.record_ddl', 'off', true);
    NEW.later := false;
    NEW.role_name := current_user;
    NEW.first_schema := COALESCE(into_schema, '');
    NEW.ran_at := now();
    NEW.settings := jsonb_build_object(
        'search_path', (SELECT COALESCE(string_agg(quote_ident(each), ', ' ORDER BY at), '')
                          FROM unnest(schemas) WITH ORDINALITY AS one(each, at) WHERE each !~ '^pg_temp'),
        'DateStyle', current_setting('DateStyle'), 'IntervalStyle', current_setting('IntervalStyle'),
        'TimeZone', current_setting('TimeZone'), 'xmloption', current_setting('xmloption'),
        'standard_conforming_strings', current_setting('standard_conforming_strings'),
        'check_function_bodies', current_setting('check_function_bodies'));

    -- The parser's own answer to what the command is, without running it: only a query can be opened, and the error of
    -- any other command names it. Two known errors show what is around the name, whatever the server's language is.
    BEGIN
        OPEN probe FOR EXECUTE 'LISTEN a; LISTEN a';
    EXCEPTION WHEN invalid_cursor_definition THEN several := SQLERRM;
    END;
    BEGIN
        OPEN probe FOR EXECUTE 'LISTEN a';
    EXCEPTION WHEN invalid_cursor_definition THEN plain := SQLERRM;
    END;
    PERFORM set_config('search_path', path, true);
    BEGIN
        OPEN probe FOR EXECUTE NEW.command;
        CLOSE probe;
    EXCEPTION WHEN invalid_cursor_definition THEN said := SQLERRM;
    END;
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    IF said = several THEN
        RAISE EXCEPTION 'parapply: one command at a time, and here are several or none' USING ERRCODE = '0A000';
    END IF;
    NEW.tag := COALESCE(substr(said, position('LISTEN' IN plain), length(said) - length(plain) + 6), 'SELECT');
    IF NEW.tag !~ '^(ALTER|COMMENT|CREATE|DROP|GRANT|REVOKE|SECURITY LABEL)\M'
       OR NEW.tag ~ '\m(DATABASE|PUBLICATION|ROLE|SUBSCRIPTION|SYSTEM|TABLESPACE)\M|TABLE AS' THEN
        RAISE EXCEPTION 'parapply: % cannot be replicated as a command', NEW.tag USING ERRCODE = '0A000',
            HINT = 'Changes of rows are replicated as rows: run CREATE TABLE first, then INSERT ... SELECT. '
                'Run a command that concerns a server as a whole on each server.';
    END IF;
    -- The same name must mean the same table on the target, which has none of this session's.
    IF EXISTS (SELECT FROM pg_class WHERE relnamespace = pg_my_temp_schema())
       OR EXISTS (SELECT FROM pg_type WHERE typnamespace = pg_my_temp_schema())
       OR EXISTS (SELECT FROM pg_proc WHERE pronamespace = pg_my_temp_schema()) THEN
        RAISE EXCEPTION 'parapply: this session has temporary objects, which the target has not'
            USING ERRCODE = '0A000', HINT = 'Use another session.';
    END IF;
    IF NEW.tag IN ('ALTER TABLE', 'CREATE INDEX', 'DROP INDEX') AND NEW.command ~* '\mconcurrently\M' THEN
        IF NEW.tag = 'ALTER TABLE' THEN
            RAISE EXCEPTION 'parapply: % CONCURRENTLY cannot run inside a transaction', NEW.tag USING ERRCODE = '25001',
                HINT = 'Without CONCURRENTLY it can.';
        ELSIF EXISTS (SELECT FROM pg_event_trigger WHERE evtname = 'parapply_ddl_4_end' AND evtenabled <> 'D') THEN
            RAISE EXCEPTION 'parapply: % CONCURRENTLY cannot run inside a transaction', NEW.tag USING ERRCODE = '25001',
                HINT = 'Run it by itself: the event trigger records it.';
        END IF;
        form := regexp_match(NEW.command, CASE NEW.tag WHEN 'CREATE INDEX' THEN @create@ ELSE @drop@ END, 'i');
        IF form IS NULL THEN
            RAISE EXCEPTION 'parapply: what this command is about cannot be told' USING ERRCODE = '0A000',
                HINT = 'Write CREATE [UNIQUE] INDEX CONCURRENTLY name ON table ..., or DROP INDEX CONCURRENTLY name.';
        END IF;
        said := form[CASE NEW.tag WHEN 'CREATE INDEX' THEN 4 ELSE 2 END];
        PERFORM set_config('search_path', path, true);
        place := pg_catalog.to_regclass(said);
        PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
        -- It does not run here, so what the server would check is checked: the owner, and what the index consists of.
        SELECT n.nspname INTO nsp FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
         WHERE c.oid = place AND pg_has_role(c.relowner, 'USAGE')
           AND CASE NEW.tag WHEN 'CREATE INDEX' THEN c.relkind IN ('r', 'm') AND has_schema_privilege(n.oid, 'CREATE')
                            ELSE c.relkind = 'i' END;
        IF nsp IS NULL THEN
            RAISE EXCEPTION 'parapply: must be owner of %', COALESCE(place::text, 'what it names, which is not here')
                USING ERRCODE = '42501', HINT = 'DROP INDEX CONCURRENTLY is recorded before it is run here.';
        END IF;
        IF NEW.tag = 'CREATE INDEX' THEN
            BEGIN
                EXECUTE format('CREATE TABLE %I.parapply_probe (LIKE %s)', nsp, place);
                PERFORM set_config('search_path', path, true);
                EXECUTE pg_catalog.format('CREATE %sINDEX ON %I.parapply_probe%s', form[1], nsp,
                                          pg_catalog.rtrim(form[5], E'; \t\r\n'));
                RAISE EXCEPTION USING ERRCODE = 'PARAP';
            EXCEPTION WHEN SQLSTATE 'PARAP' THEN
                NULL;
            END;
        END IF;
        NEW.later := true;
        NEW.made := '[]';
        RAISE WARNING 'parapply: % CONCURRENTLY has not run here: it cannot run inside a transaction', NEW.tag
            USING HINT = 'It is recorded, and targets run it after this transaction. Run it here separately.';
        PERFORM pg_notify('parapply_ddl', '');
        PERFORM set_config('parapply.record_ddl', COALESCE(recording, ''), true);
        PERFORM set_config('search_path', path, true);
        RETURN NEW;
    END IF;

    IF NEW.tag = 'ALTER TABLE' THEN
        SELECT jsonb_object_agg(oid, relnatts) INTO widths FROM pg_class WHERE relkind = 'r' AND relpersistence = 'p';
    END IF;
    IF NEW.tag IN ('ALTER TYPE', 'ALTER DOMAIN') THEN
        shapes := (@shapes@);
    END IF;
    IF NEW.tag IN ('CREATE TABLE', 'CREATE SCHEMA') THEN
        SELECT array_agg(oid) INTO tables FROM pg_class WHERE relkind IN ('r', 'p');
    END IF;
    PERFORM set_config('search_path', path, true);
    EXECUTE NEW.command;
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

    IF EXISTS (SELECT FROM pg_class WHERE relnamespace = pg_my_temp_schema())
       OR EXISTS (SELECT FROM pg_type WHERE typnamespace = pg_my_temp_schema())
       OR EXISTS (SELECT FROM pg_proc WHERE pronamespace = pg_my_temp_schema()) THEN
        RAISE EXCEPTION 'parapply: temporary objects are not replicated' USING ERRCODE = '0A000';
    END IF;
    SELECT c.oid::regclass INTO place FROM pg_class AS c
     WHERE widths ? c.oid::text AND c.relpersistence = 'u' LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'parapply: while % is UNLOGGED its changes are not published', place USING ERRCODE = '0A000',
            HINT = 'Run it on each server separately; once the table is LOGGED again, `parapply refresh --table` with '
                '--truncate brings its rows.';
    END IF;
    -- New tables, and which publications have them from the first: then the stream has all of their rows, whatever
    -- becomes of them before it is read.
    SELECT COALESCE(jsonb_agg(jsonb_build_object('oid', c.oid::bigint, 'schema', n.nspname, 'name', c.relname,
                                                 'publications', has.names)), '[]') INTO NEW.made
      FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
     CROSS JOIN LATERAL (SELECT COALESCE(jsonb_agg(p.pubname), '[]') AS names FROM pg_publication AS p
                          WHERE EXISTS (SELECT FROM pg_get_publication_tables(p.pubname) AS one
                                         WHERE one.relid = c.oid)) AS has
     WHERE NEW.tag IN ('CREATE TABLE', 'CREATE SCHEMA') AND c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
       AND c.oid <> ALL (tables);
    -- A new column's value in existing rows is not sent, because each server computes its own. A policy or an older
    -- snapshot may hide rows from the caller, so the size of the table is asked for.
    FOR place, column_name IN
        @columns@
    LOOP
        IF pg_relation_size(place) > 0 THEN
            RAISE EXCEPTION 'parapply: the rows of % would get other values of % on the target', place,
                quote_ident(column_name) USING ERRCODE = '0A000',
                HINT = 'Add the column without a default, then set the default, then UPDATE the rows. Rows that were '
                    'deleted count until VACUUM.';
        END IF;
    END LOOP;
    FOR place IN
        @holders@
    LOOP
        BEGIN
            EXECUTE format('LOCK TABLE ONLY %s IN SHARE MODE', place);
        EXCEPTION WHEN insufficient_privilege THEN
            RAISE EXCEPTION 'parapply: % has values of this type, and this role may not wait for its writers', place
                USING ERRCODE = '42501', HINT = 'GRANT UPDATE on the table to the role.';
        END;
    END LOOP;
    -- Keeps the transaction from being prepared: the target could not see what its commands do before its outcome.
    PERFORM pg_notify('parapply_ddl', '');
    PERFORM set_config('parapply.record_ddl', COALESCE(recording, ''), true);
    PERFORM set_config('search_path', path, true);
    RETURN NEW;
END $run$;

CREATE OR REPLACE TRIGGER run BEFORE INSERT ON parapply.ddl_queue
    FOR EACH ROW EXECUTE FUNCTION parapply.run_queued_ddl();
ALTER TABLE parapply.ddl_queue ENABLE ALWAYS TRIGGER run;

CREATE OR REPLACE FUNCTION parapply.replicate_ddl(command text) RETURNS void LANGUAGE plpgsql AS $queue$
BEGIN
    INSERT INTO parapply.ddl_queue (command) VALUES ($1);
END $queue$;
COMMENT ON FUNCTION parapply.replicate_ddl IS
    'Run one DDL command here, and on the targets of parapply in the same place among the changes of rows.';
REVOKE ALL ON parapply.ddl_queue FROM PUBLIC;
REVOKE ALL ON FUNCTION parapply.replicate_ddl, parapply.run_queued_ddl FROM PUBLIC;
"""

_PUBLISH: Final = """
DO $publish$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_publication_tables
                    WHERE pubname = ANY ({names}) AND schemaname = 'parapply' AND tablename = 'ddl_queue') THEN
        ALTER PUBLICATION {first} ADD TABLE parapply.ddl_queue;
    END IF;
END $publish$;
"""


def install_sql(publications: Sequence[str], automatic: Automatic | None = None) -> str:
    """Return all of it as one text, to be run in one transaction by a role that may make it.

    The first of the target's publications gets the queue unless one of them has it. Without `automatic` no event
    trigger is made, and existing ones stay.
    """
    publish = sql.SQL(_PUBLISH).format(
        names=sql.SQL("ARRAY[{}]").format(sql.SQL(", ").join([sql.Literal(name) for name in publications])),
        first=sql.Identifier(publications[0]),
    )
    forms = [("@create@", sql.Literal(CREATE_LATER)), ("@drop@", sql.Literal(DROP_LATER))]
    literals = [(mark, literal.as_string(None)) for mark, literal in forms]
    objects = _OBJECTS.replace("@columns@", _COLUMNS.replace("@widths@", "widths"))
    objects = objects.replace("@holders@", _HOLDERS.replace("@shapes@", "shapes")).replace("@shapes@", _ALL_SHAPES)
    for mark, literal in literals:
        objects = objects.replace(mark, literal)
    parts = [objects, publish.as_string(None)]
    if automatic is not None:
        queries = [
            ("@columns@", _COLUMNS.replace("@widths@", "state -> 'widths'")),
            ("@holders@", _HOLDERS.replace("@shapes@", "(state -> 'shapes')")),
            ("@shapes@", _ALL_SHAPES),
        ]
        parts.append(ddl_automatic.install_sql(automatic, [*queries, *literals]))
    return "".join([*parts, "RESET search_path;\nRESET parapply.record_ddl;\n"])


async def install(conn: Connection, publications: Sequence[str], automatic: Automatic | None = None) -> None:
    """Make the queue and publish it, the arguments as for `install_sql`; all of it, or nothing."""
    with source_errors(f"making {'.'.join(QUEUE)}"):
        async with conn.transaction():
            await conn.execute(install_sql(publications, automatic).encode())


async def is_published(conn: Connection, publications: Sequence[str]) -> bool:
    """Return whether the queue is among the published tables; raise SourceLost if the connection broke."""
    query = (
        "SELECT EXISTS (SELECT FROM pg_catalog.pg_publication_tables"
        " WHERE pubname = ANY (%s) AND schemaname = %s AND tablename = %s)"
    )
    with source_errors("looking for the queue of commands"):
        cursor = await conn.execute(query, [list(publications), *QUEUE])
        found = await cursor.fetchone()
    return bool(found and found[0])


async def names(conn: Connection) -> frozenset[CommandName]:
    """Return the names of all commands in the queue, as the session sees it.

    Raises:
        SourceRefused: the role may not read it.
    """
    with source_errors("reading the queue of commands"):
        cursor = await conn.execute(f"SELECT id, {DIGEST_SQL} FROM parapply.ddl_queue".encode())  # noqa: S608  a constant
        return frozenset([CommandName(*row) for row in await cursor.fetchall()])

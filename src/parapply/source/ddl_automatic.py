"""Event triggers on the publisher that put into the queue what people type, after it has run.

A row is written by the queue's owner, and only from within an event trigger: no role can call such a function, and
nothing in it comes from the caller but the command's own text, which has run. The facts that decide the meaning of that
text (role, search_path, settings) are read before it runs, by the caller's rights because only they show them, and
handed on at once to a table that the caller cannot write: code of the caller's may run within the command, and may
change all of them.

Only a string with one command is recorded. A command within a function, one of several in a string, one that a target
would understand otherwise, and one of a role that may not write to the queue are refused, or only warned of.

In: which tags, and what to do about the rest. Out: text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec
from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Sequence


class Automatic(msgspec.Struct, frozen=True, kw_only=True):
    """The commands that event triggers record."""

    tags: tuple[str, ...]  # of commands
    inexact: Literal["refuse", "warn"] = "refuse"  # what is done about those that cannot be recorded


#: Event triggers of one event are run in the order of their names.
TRIGGERS: Final = {
    "parapply_ddl_1_begin": ("ddl_command_start", "ddl_begins"),
    "parapply_ddl_2_keep": ("ddl_command_start", "ddl_is_kept"),
    "parapply_ddl_3_drop": ("sql_drop", "ddl_drops"),
    "parapply_ddl_4_end": ("ddl_command_end", "ddl_ends"),
}

_OBJECTS: Final = r"""
-- Unlogged, so no publication has it. A row lives as long as its command.
CREATE UNLOGGED TABLE IF NOT EXISTS parapply.ddl_running (
    pid int NOT NULL,
    id bigint GENERATED ALWAYS AS IDENTITY,
    began_at timestamptz NOT NULL,
    state jsonb NOT NULL,
    has_dropped boolean NOT NULL DEFAULT false,
    PRIMARY KEY (pid, id));
DO $own$ BEGIN
    -- It could put another table in the place of one of these, with triggers that then run as this role.
    IF EXISTS (SELECT FROM pg_catalog.pg_namespace AS n JOIN pg_catalog.pg_roles AS r ON r.oid = n.nspowner
                WHERE n.nspname = 'parapply' AND r.rolname <> CURRENT_USER AND NOT r.rolsuper) THEN
        RAISE 'the schema parapply belongs to a role that is no superuser, and event triggers run in it as this one'
            USING HINT = 'a daemon that applies to this database needs another target.state_schema';
    END IF;
    IF CURRENT_USER <> (SELECT pg_catalog.pg_get_userbyid(relowner) FROM pg_catalog.pg_class
                         WHERE oid = 'parapply.ddl_running'::pg_catalog.regclass) THEN
        RAISE 'the table parapply.ddl_running belongs to another role, which could have any command run on targets'
            USING HINT = 'run this as that role, or drop the table';
    END IF;
END $own$;
REVOKE ALL ON parapply.ddl_running FROM PUBLIC;
COMMENT ON TABLE parapply.ddl_running IS 'Commands that run at this moment, for the event triggers of parapply.';

CREATE OR REPLACE FUNCTION parapply.ddl_begins() RETURNS event_trigger LANGUAGE plpgsql AS $begin$
-- Types by their whole names, as in parapply.run_queued_ddl.
DECLARE
    path pg_catalog.text := pg_catalog.current_setting('search_path');
    schemas pg_catalog.text[] := pg_catalog.current_schemas(false);
    into_schema pg_catalog.text := pg_catalog.current_schema();
    query pg_catalog.text := pg_catalog.current_query();
    state pg_catalog.jsonb;
    problem pg_catalog.text := '';
    probe pg_catalog.refcursor;
    several pg_catalog.text;
    plain pg_catalog.text;
    said pg_catalog.text;
    stack pg_catalog.text;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    PERFORM set_config('parapply.ddl_state', '', true);
    IF COALESCE(current_setting('parapply.record_ddl', true), '') = 'off' OR TG_TAG <> ALL (@tags@)
       OR query ~* '^\s*create\s+((global|local)\s+)?temp(orary)?\s' THEN
        PERFORM set_config('search_path', path, true);
        RETURN;
    END IF;
    GET DIAGNOSTICS stack = PG_CONTEXT;
    IF position(E'\n' IN stack) > 0 THEN
        problem := 'it runs inside a function, a DO block or another command';
    ELSIF query IS NULL THEN
        problem := 'its text is not known';
    ELSE
        -- As in parapply.run_queued_ddl, only that the first word is known: nothing here is planned.
        BEGIN
            OPEN probe FOR EXECUTE 'LISTEN a; LISTEN a';
        EXCEPTION WHEN invalid_cursor_definition THEN several := SQLERRM;
        END;
        BEGIN
            OPEN probe FOR EXECUTE 'LISTEN a';
        EXCEPTION WHEN invalid_cursor_definition THEN plain := SQLERRM;
        END;
        IF query !~* '^(\s|--[^\n]*\n|/\*.*?\*/)*(alter|comment|create|drop|grant|revoke|security)\M' THEN
            problem := 'it is one of several in a string, or within another command';
        ELSE
            PERFORM set_config('search_path', path, true);
            BEGIN
                OPEN probe FOR EXECUTE query;
            EXCEPTION WHEN invalid_cursor_definition THEN said := SQLERRM;
            END;
            PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
            IF said IS NULL OR said = several THEN
                problem := 'it is one of several in a string';
            ELSIF said <> replace(plain, 'LISTEN', TG_TAG) THEN
                problem := 'it is part of another command';
                IF said = replace(plain, 'LISTEN', 'CREATE EXTENSION')
                   OR said = replace(plain, 'LISTEN', 'ALTER EXTENSION') THEN
                    -- The extension is one object, and made by its own command.
                    PERFORM set_config('search_path', path, true);
                    RETURN;
                END IF;
            END IF;
        END IF;
    END IF;
    IF problem = '' AND (EXISTS (SELECT FROM pg_class WHERE relnamespace = pg_my_temp_schema()
                                    AND position(lower(relname) IN lower(query)) > 0)
       OR EXISTS (SELECT FROM pg_type WHERE typnamespace = pg_my_temp_schema()
                     AND position(lower(typname) IN lower(query)) > 0)
       OR pg_my_temp_schema() <> 0 AND query ~* 'pg_temp|u&') THEN
        problem := 'it names a temporary object of this session';
    END IF;
    state := jsonb_build_object(
        'tag', TG_TAG, 'problem', problem, 'command', query, 'role', current_user,
        'schema', COALESCE(into_schema, ''),
        'settings', jsonb_build_object(
            'search_path', (SELECT COALESCE(string_agg(quote_ident(each), ', ' ORDER BY at), '')
                              FROM unnest(schemas) WITH ORDINALITY AS one(each, at) WHERE each !~ '^pg_temp'),
            'DateStyle', current_setting('DateStyle'), 'IntervalStyle', current_setting('IntervalStyle'),
            'TimeZone', current_setting('TimeZone'), 'xmloption', current_setting('xmloption'),
            'standard_conforming_strings', current_setting('standard_conforming_strings'),
            'check_function_bodies', current_setting('check_function_bodies')));
    IF TG_TAG = 'ALTER TABLE' THEN
        state := state || jsonb_build_object('widths', (SELECT jsonb_object_agg(oid, relnatts) FROM pg_class
                                                         WHERE relkind = 'r' AND relpersistence = 'p'));
    END IF;
    IF TG_TAG IN ('ALTER TYPE', 'ALTER DOMAIN') THEN
        state := state || jsonb_build_object('shapes', (@shapes@));
    END IF;
    PERFORM set_config('parapply.ddl_state', state::text, true);
    PERFORM set_config('search_path', path, true);
END $begin$;

CREATE OR REPLACE FUNCTION parapply.ddl_is_kept() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $keep$
DECLARE
    state jsonb;
    problem text;
BEGIN
    -- Nothing of the caller's has run since parapply.ddl_begins wrote it.
    IF COALESCE(current_setting('parapply.ddl_state', true), '') = '' THEN
        RETURN;
    END IF;
    state := current_setting('parapply.ddl_state')::jsonb;
    PERFORM set_config('parapply.ddl_state', '', true);
    IF state ->> 'problem' = ''
       AND NOT has_column_privilege((state ->> 'role')::name, 'parapply.ddl_queue', 'command', 'INSERT') THEN
        problem := format('the role %I may not have commands run on targets', state ->> 'role');
        state := jsonb_set(state, '{problem}', to_jsonb(problem));
    END IF;
    state := state || jsonb_build_object('later', state ->> 'tag' IN ('CREATE INDEX', 'DROP INDEX')
                                                  AND state ->> 'command' ~* '\mconcurrently\M');
    IF state ->> 'tag' = 'ALTER TABLE' AND state ->> 'command' ~* '\mdetach\M.*\mconcurrently\M' THEN
        state := jsonb_set(state, '{problem}', '"DETACH PARTITION CONCURRENTLY cannot run inside a transaction"');
    END IF;
    IF (state ->> 'later')::boolean AND state ->> 'problem' = ''
       AND state ->> 'command' !~* (CASE state ->> 'tag' WHEN 'CREATE INDEX' THEN @create@ ELSE @drop@ END) THEN
        state := jsonb_set(state, '{problem}', '"CONCURRENTLY has to stand right before the name of one index"');
    END IF;
    IF state ->> 'command' ~* '\mconcurrently\M' AND state ->> 'problem' <> '' THEN
        -- Once it has run it cannot be undone.
        problem := state ->> 'problem';
        @say@
        RETURN;
    END IF;
    DELETE FROM parapply.ddl_running WHERE pid = pg_backend_pid() AND began_at <> statement_timestamp();
    INSERT INTO parapply.ddl_running (pid, began_at, state) VALUES (pg_backend_pid(), statement_timestamp(), state);
END $keep$;

CREATE OR REPLACE FUNCTION parapply.ddl_drops() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $drop$
BEGIN
    IF EXISTS (SELECT FROM pg_event_trigger_dropped_objects() WHERE NOT is_temporary) THEN
        UPDATE parapply.ddl_running SET has_dropped = true
         WHERE pid = pg_backend_pid() AND began_at = statement_timestamp()
           AND id = (SELECT max(id) FROM parapply.ddl_running WHERE pid = pg_backend_pid());
    END IF;
END $drop$;

CREATE OR REPLACE FUNCTION parapply.ddl_ends() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $end$
DECLARE
    began parapply.ddl_running;
    state jsonb;
    n_objects int;
    has_lasting boolean;
    problem text;
    made jsonb;
    place regclass;
    column_name name;
BEGIN
    SELECT count(*), COALESCE(bool_or(schema_name IS DISTINCT FROM 'pg_temp' AND NOT in_extension), false)
      INTO n_objects, has_lasting FROM pg_event_trigger_ddl_commands();
    IF TG_TAG = ANY (@tags@) THEN
        DELETE FROM parapply.ddl_running WHERE pid = pg_backend_pid() AND began_at = statement_timestamp()
           AND id = (SELECT max(id) FROM parapply.ddl_running WHERE pid = pg_backend_pid())
        RETURNING * INTO began;
    END IF;
    IF COALESCE(current_setting('parapply.record_ddl', true), '') = 'off' THEN
        RETURN;
    END IF;
    state := began.state;
    IF TG_TAG IN ('CREATE TABLE AS', 'SELECT INTO') AND 'CREATE TABLE' = ANY (@tags@) AND has_lasting THEN
        problem := 'it makes a table and fills it: CREATE TABLE first, then INSERT';
    ELSIF TG_TAG <> ALL (@tags@) THEN
        IF has_lasting AND TG_TAG !~ '\m(PUBLICATION|SUBSCRIPTION|EVENT TRIGGER)\M|^(REFRESH|REINDEX)\M' THEN
            RAISE NOTICE 'parapply: % is not recorded for the targets', TG_TAG
                USING HINT = 'Run it there by hand where needed, or add it to ddl.tags before init --ddl=automatic.';
        END IF;
        RETURN;
    ELSIF state IS NULL THEN
        -- It made temporary objects, or is part of an extension; or was told of before it ran.
        IF NOT has_lasting OR current_query() ~* '\mconcurrently\M' THEN
            RETURN;
        END IF;
        problem := 'what it began with is not known';
    ELSIF NOT (has_lasting OR began.has_dropped)
          AND (n_objects > 0 OR TG_TAG ~ '^DROP' OR state ->> 'command' ~* '\mif\s+(not\s+)?exists\M') THEN
        -- Temporary objects, or nothing, because of IF EXISTS.
        RETURN;
    ELSE
        problem := state ->> 'problem';
        IF state ->> 'tag' <> TG_TAG THEN
            problem := 'it is part of another command';
        END IF;
    END IF;

    IF problem = '' THEN
        SELECT COALESCE(jsonb_agg(jsonb_build_object('oid', c.oid::bigint, 'schema', n.nspname, 'name', c.relname,
                                                     'publications', has.names)), '[]') INTO made
          FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
         CROSS JOIN LATERAL (SELECT COALESCE(jsonb_agg(p.pubname), '[]') AS names FROM pg_publication AS p
                              WHERE EXISTS (SELECT FROM pg_get_publication_tables(p.pubname) AS one
                                             WHERE one.relid = c.oid)) AS has
         WHERE TG_TAG IN ('CREATE TABLE', 'CREATE SCHEMA') AND c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
           AND c.oid IN (SELECT objid FROM pg_event_trigger_ddl_commands()
                          WHERE command_tag = 'CREATE TABLE' AND classid = 'pg_class'::regclass);
        SELECT c.oid::regclass INTO place FROM pg_class AS c
         WHERE state -> 'widths' ? c.oid::text AND c.relpersistence = 'u' LIMIT 1;
        IF FOUND THEN
            problem := format('while %s is UNLOGGED its changes are not published', place);
        END IF;
        FOR place, column_name IN
            @columns@
        LOOP
            IF pg_relation_size(place) > 0 THEN
                problem := format('the rows of %s would get other values of %I there: add the column without a '
                                  'default, then set the default, then UPDATE the rows', place, column_name);
            END IF;
        END LOOP;
        FOR place IN
            @holders@
        LOOP
            EXECUTE format('LOCK TABLE ONLY %s IN SHARE MODE', place);
        END LOOP;
    END IF;
    IF problem <> '' THEN
        @say@
        RETURN;
    END IF;
    INSERT INTO parapply.ddl_queue (command, tag, role_name, first_schema, settings, made, later)
    VALUES (state ->> 'command', TG_TAG, state ->> 'role', state ->> 'schema', state -> 'settings', made,
            (state ->> 'later')::boolean);
END $end$;
REVOKE ALL ON FUNCTION parapply.ddl_begins, parapply.ddl_is_kept, parapply.ddl_drops, parapply.ddl_ends FROM PUBLIC;
"""

_SAY: Final = {
    "refuse": "RAISE EXCEPTION 'parapply: this cannot be recorded for the targets: %', problem USING ERRCODE = '0A000',"
    " HINT = 'One command a string, by a role with INSERT (command) on parapply.ddl_queue. SET parapply.record_ddl ="
    " ''off'' runs it here only.';",
    "warn": "RAISE WARNING 'parapply: not recorded for the targets: %', problem"
    " USING HINT = 'Run there by hand what it does.';",
}


def install_sql(automatic: Automatic, forms: Sequence[tuple[str, str]]) -> str:
    """Return the SQL that makes the event triggers, besides the queue.

    Args:
        automatic: what is recorded.
        forms: marks in the text, and the queries and literals of the queue's own trigger that they stand for.
    """
    tags = sql.SQL("ARRAY[{}]::text[]").format(sql.SQL(", ").join([sql.Literal(tag) for tag in automatic.tags]))
    say = _SAY[automatic.inexact]
    text = _OBJECTS
    for mark, what in (*forms, ("@tags@", tags.as_string(None)), ("@say@", say)):
        text = text.replace(mark, what)
    about = f"parapply init --ddl=automatic; what cannot be recorded: {automatic.inexact}; recorded: "
    about += ", ".join(automatic.tags)
    for name, (event, function) in TRIGGERS.items():
        text += f"DROP EVENT TRIGGER IF EXISTS {name};\n"
        text += f"CREATE EVENT TRIGGER {name} ON {event} EXECUTE FUNCTION parapply.{function}();\n"
        comment = sql.SQL("COMMENT ON EVENT TRIGGER {} IS {};\n")
        text += comment.format(sql.Identifier(name), sql.Literal(about)).as_string(None)
    return text

-- The role that parapply uses on the target, with what it needs and nothing else: no superuser. PostgreSQL 15 and later.
-- For psql, run by a superuser in the target database; again at any time, for tables that have been made since.
-- docs/PRIVILEGES.md says what each is for.
--
--   psql -d app -f config/roles/subscriber.sql -v role=parapply_target
--   psql -d app -c '\password parapply_target'
--
-- Variables (-v name=value):
--   role     made if it does not exist
--   origins  on (default): may write under replication origins, for two-way set-ups and policies that check which origin wrote
--            a row; off: may not
--   replica  on (default): may set session_replication_role; off: for target.session_replication_role = "origin"
--   schemas  separated by commas; left out: all
--   owner    whose later tables may also be written; left out: the role that runs this
--   state    state schema of another role, made by this script with replica on, in which this one also has slots; left
--            out: it may write none but its own
--
-- Progress of daemons of other roles, and the queue of commands, are left out, and grants on them are taken back: they
-- may come from an older script, or where the owner has made them since. Rights to read the queue, as publisher.sql gives
-- them, stay. For a state schema of another role -v state is needed each time.

\set ON_ERROR_STOP on
\set QUIET on
-- A superuser runs this: no operator or function of another schema may take the place of one of the catalogue.
SET search_path = pg_catalog, pg_temp;
\if :{?role}
\else
    \warn 'name the role: -v role=parapply_target'
    DO $$ BEGIN RAISE EXCEPTION 'no role'; END $$;
\endif
\if :{?origins}
\else
    \set origins on
\endif
\if :{?replica}
\else
    \set replica on
\endif
\if :{?schemas}
\else
    \set schemas ''
\endif
\if :{?owner}
\else
    SELECT current_user AS owner \gset
\endif
\if :{?state}
\else
    \set state ''
\endif

SELECT format('CREATE ROLE %I LOGIN', :'role') WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = :'role') \gexec
ALTER ROLE :"role" LOGIN;
-- CREATE is for the state schema, which `parapply init` makes and the role then owns.
SELECT format('GRANT CONNECT, CREATE ON DATABASE %I TO %I', current_database(), :'role') \gexec
\if :replica
    GRANT SET ON PARAMETER session_replication_role TO :"role";
\endif
\if :origins
    -- Without their parameters, in which versions differ.
    GRANT EXECUTE ON FUNCTION pg_catalog.pg_replication_origin_create, pg_catalog.pg_replication_origin_drop,
        pg_catalog.pg_replication_origin_session_setup, pg_catalog.pg_replication_origin_xact_setup TO :"role";
\endif

-- Schemas of parapply that are not the role's: a role that writes there moves progress, or has commands run.
SELECT coalesce(array_agg(oid), '{}') AS others FROM (
    SELECT n.oid FROM pg_namespace n
      JOIN pg_class c ON c.relnamespace = n.oid
       AND CASE c.relname WHEN 'schema_version_one_row' THEN c.relowner = n.nspowner
               OR obj_description(n.oid, 'pg_namespace') = 'Progress of parapply, which applies logical replication here.'
           WHEN 'ddl_queue' THEN n.nspname = 'parapply' END
     WHERE n.nspname <> :'state'
     GROUP BY n.oid
    HAVING NOT bool_or(:'role'::name IN (pg_get_userbyid(n.nspowner), pg_get_userbyid(c.relowner)))) marked
\gset
-- Only where it has a right, because the role that runs this need not own all.
SELECT format('REVOKE %s ON %s FROM %I', rights, place, :'role') FROM (
    SELECT CASE WHEN has_queue THEN 'CREATE' ELSE 'ALL' END AS rights, format('SCHEMA %I', nspname) AS place
      FROM pg_namespace n, LATERAL (
          SELECT nspname = 'parapply' AND EXISTS (
              SELECT FROM pg_class WHERE relnamespace = n.oid AND relname = 'ddl_queue') AS has_queue) looked
     WHERE oid = ANY (:'others')
       AND has_schema_privilege(:'role', oid, CASE WHEN has_queue THEN 'CREATE' ELSE 'USAGE, CREATE' END)
    UNION ALL
    SELECT CASE WHEN nspname = 'parapply' AND relname = 'ddl_queue'
                THEN 'INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER' ELSE 'ALL' END,
           format('%s %I.%I', CASE relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, nspname, relname)
      FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
     WHERE n.oid = ANY (:'others')
       AND CASE WHEN relkind = 'S' THEN has_sequence_privilege(:'role', c.oid, 'USAGE, SELECT, UPDATE')
           WHEN relkind IN ('r', 'p', 'v', 'm', 'f')
           THEN has_any_column_privilege(:'role', c.oid, 'SELECT, INSERT, UPDATE, REFERENCES')
             OR has_table_privilege(:'role', c.oid, 'DELETE, TRUNCATE, TRIGGER') END) given
\gexec

-- UPDATE on sequences is for `parapply sequences`, USAGE for defaults that call nextval.
SELECT format('GRANT USAGE ON SCHEMA %1$I TO %2$I;'
              ' GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON ALL TABLES IN SCHEMA %1$I TO %2$I;'
              ' GRANT USAGE, SELECT, UPDATE ON ALL SEQUENCES IN SCHEMA %1$I TO %2$I', nspname, :'role')
  FROM pg_namespace
 WHERE nspowner <> (SELECT oid FROM pg_roles WHERE rolname = :'role') AND oid <> ALL (:'others')
   AND CASE :'schemas' WHEN '' THEN nspname !~ '^pg_' AND nspname <> 'information_schema'
       ELSE nspname = ANY (string_to_array(:'schemas', ',')) END
\gexec
-- Tables and sequences made later, in every schema or in those named.
SELECT format('ALTER DEFAULT PRIVILEGES FOR ROLE %I %s GRANT %s TO %I', :'owner', place, rights, :'role')
  FROM unnest(CASE :'schemas' WHEN '' THEN '{""}'::text[]
              ELSE ARRAY(SELECT format('IN SCHEMA %I', one) FROM unnest(string_to_array(:'schemas', ',')) AS one) END)
       AS place,
       unnest('{"SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON TABLES","USAGE, SELECT, UPDATE ON SEQUENCES"}'::text[])
       AS rights
\gexec
SELECT format('ALTER DEFAULT PRIVILEGES FOR ROLE %I GRANT USAGE ON SCHEMAS TO %I', :'owner', :'role')
 WHERE :'schemas' = ''
\gexec
RESET search_path;

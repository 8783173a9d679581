-- The role that parapply uses on the publisher, with what it needs and nothing else. For psql, run by a superuser in the
-- published database; again at any time, for tables that have been made since. docs/PRIVILEGES.md says what each is for.
--
--   psql -d app -f config/roles/publisher.sql -v role=parapply_source
--   psql -d app -c '\password parapply_source'
--
-- Variables (-v name=value):
--   role     made if it does not exist
--   copy     on (default): may read the tables, for init --copy, refresh, verify and sequences; off: streaming reads none
--   schemas  separated by commas, for copy; left out: all
--   owner    whose later tables may also be read; left out: the role that runs this

\set ON_ERROR_STOP on
\set QUIET on
-- A superuser runs this: no operator or function of another schema may take the place of one of the catalogue.
SET search_path = pg_catalog, pg_temp;
\if :{?role}
\else
    \warn 'name the role: -v role=parapply_source'
    DO $$ BEGIN RAISE EXCEPTION 'no role'; END $$;
\endif
\if :{?copy}
\else
    \set copy on
\endif
\if :{?schemas}
\else
    \set schemas ''
\endif
\if :{?owner}
\else
    SELECT current_user AS owner \gset
\endif

SELECT format('CREATE ROLE %I LOGIN', :'role') WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = :'role') \gexec
ALTER ROLE :"role" LOGIN REPLICATION;
SELECT format('GRANT CONNECT ON DATABASE %I TO %I', current_database(), :'role') \gexec

\if :copy
    -- Rows of daemons that apply here are for no copy. A role that may write them applies here itself.
    SELECT coalesce(array_agg(n.oid), '{}') AS others FROM pg_namespace n
      JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = 'schema_version_one_row'
       AND (c.relowner = n.nspowner
            OR obj_description(n.oid, 'pg_namespace') = 'Progress of parapply, which applies logical replication here.')
      JOIN pg_index i ON i.indexrelid = c.oid
     WHERE NOT has_table_privilege(:'role', i.indrelid, 'INSERT')
    \gset
    SELECT format('REVOKE ALL ON ALL TABLES IN SCHEMA %1$I FROM %2$I;'
                  ' REVOKE ALL ON ALL SEQUENCES IN SCHEMA %1$I FROM %2$I', nspname, :'role')
      FROM pg_namespace WHERE oid = ANY (:'others')
    \gexec
    SELECT format('GRANT USAGE ON SCHEMA %1$I TO %2$I; GRANT SELECT ON ALL TABLES IN SCHEMA %1$I TO %2$I;'
                  ' GRANT SELECT ON ALL SEQUENCES IN SCHEMA %1$I TO %2$I', nspname, :'role')
      FROM pg_namespace
     WHERE oid <> ALL (:'others')
       AND CASE :'schemas' WHEN '' THEN nspname !~ '^pg_' AND nspname <> 'information_schema'
           ELSE nspname = ANY (string_to_array(:'schemas', ',')) END
    \gexec
    -- The numbers of its commands are read, also where a state schema has its name.
    SELECT format('GRANT USAGE ON SCHEMA parapply TO %1$I; GRANT SELECT ON parapply.ddl_queue TO %1$I', :'role')
     WHERE to_regclass('parapply.ddl_queue') IS NOT NULL
       AND (:'schemas' = '' OR 'parapply' = ANY (string_to_array(:'schemas', ',')))
    \gexec
    -- Tables and sequences made later, in every schema or in those named.
    SELECT format('ALTER DEFAULT PRIVILEGES FOR ROLE %I %s GRANT SELECT ON %s TO %I', :'owner', place, kind, :'role')
      FROM unnest(CASE :'schemas' WHEN '' THEN '{""}'::text[]
                  ELSE ARRAY(SELECT format('IN SCHEMA %I', one) FROM unnest(string_to_array(:'schemas', ',')) AS one) END)
           AS place, unnest('{TABLES,SEQUENCES}'::text[]) AS kind
    \gexec
    SELECT format('ALTER DEFAULT PRIVILEGES FOR ROLE %I GRANT USAGE ON SCHEMAS TO %I', :'owner', :'role')
     WHERE :'schemas' = ''
    \gexec
\endif
RESET search_path;

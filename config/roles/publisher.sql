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
    SELECT format('GRANT USAGE ON SCHEMA %1$I TO %2$I; GRANT SELECT ON ALL TABLES IN SCHEMA %1$I TO %2$I;'
                  ' GRANT SELECT ON ALL SEQUENCES IN SCHEMA %1$I TO %2$I', nspname, :'role')
      FROM pg_namespace
     WHERE CASE :'schemas' WHEN '' THEN nspname !~ '^pg_' AND nspname <> 'information_schema'
           ELSE nspname = ANY (string_to_array(:'schemas', ',')) END
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

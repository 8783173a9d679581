-- Files of 1.5 kB, as bytea. psql variable: scale.
CREATE TABLE files (
    id bigint PRIMARY KEY,
    content bytea NOT NULL
);
INSERT INTO files
SELECT id, (SELECT string_agg(decode(md5((id + n)::text), 'hex'), '') FROM generate_series(1, 96) AS n)
FROM generate_series(1, 1000 * :scale) AS id;
VACUUM ANALYZE files;

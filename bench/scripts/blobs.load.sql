-- One transaction a run: a file comes. pgbench variables: scale, clients, and the client's own serial.
\set serial :serial + 1
\set id 1000 * :scale + :serial * :clients + :client_id + 1
INSERT INTO files
SELECT :id, string_agg(decode(md5((:id::bigint + n)::text), 'hex'), '') FROM generate_series(1, 96) AS n;

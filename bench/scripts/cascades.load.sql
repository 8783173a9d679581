-- One transaction a run: a parent goes, and three children with it. pgbench variables: clients, and the client's own serial,
-- which lasts from run to run.
\set id :serial * :clients + :client_id
\set serial :serial + 1
DELETE FROM parents WHERE id = :id;

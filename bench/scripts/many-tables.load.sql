-- One transaction a run: an update and an insert in one of a thousand tables. pgbench variables: scale, clients, and the
-- client's own serial, which lasts from run to run.
\set serial :serial + 1
\set number random(1, 1000)
\set old_id random(1, 10 * :scale)
\set new_id 10 * :scale + :serial * :clients + :client_id
SELECT hit(:number, :old_id, :new_id);

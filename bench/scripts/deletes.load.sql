-- One transaction a run: a client's oldest row goes. pgbench variables: clients, and the client's own serial, which lasts
-- from run to run.
\set id :serial * :clients + :client_id
\set serial :serial + 1
DELETE FROM events WHERE id = :id;

-- One transaction a run. pgbench variables: scale, clients, and the client's own serial, which lasts from run to run.
\set serial :serial + 1
\set id 10000 * :scale + :serial * :clients + :client_id
\set kind random(0, 9)
INSERT INTO events VALUES (:id, now(), :kind, 'Event ' || :id);

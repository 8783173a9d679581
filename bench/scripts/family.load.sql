-- One transaction a run. pgbench variables: scale, clients, and the client's own serial, which lasts from run to run.
\set serial :serial + 1
\set id 10000 * :scale + :serial * :clients + :client_id
BEGIN;
INSERT INTO parents VALUES (:id, 'Parent ' || :id);
INSERT INTO children VALUES (2 * :id, :id, 'Child 0');
INSERT INTO children VALUES (2 * :id + 1, :id, 'Child 1');
END;

-- One transaction a run. pgbench variables: scale, clients, and the client's own serial, which lasts from run to run.
\set serial :serial + 1
\set id 1000 * :scale + :serial * :clients + :client_id
INSERT INTO bookings VALUES (:id, int8range(10 * :id, 10 * :id + 8));

-- One transaction a run: a new row and an old one, in any of a hundred partitions. pgbench variables: scale, clients, and
-- the client's own serial, which lasts from run to run.
\set serial :serial + 1
\set id 10000 * :scale + :serial * :clients + :client_id
\set day random(0, 99)
\set old_id random(0, 10000 * :scale - 1)
\set old_day :old_id % 100
BEGIN;
INSERT INTO readings VALUES (:id, :day, 0);
UPDATE readings SET amount = amount + 1 WHERE id = :old_id AND day = :old_day;
END;

-- One transaction a run: a row comes, and another one changes. pgbench variables: scale, clients, and the client's own
-- serial, which lasts from run to run.
\set serial :serial + 1
\set id 10000 * :scale + :serial * :clients + :client_id + 1
\set old random(1, 10000 * :scale)
BEGIN;
INSERT INTO stock VALUES ('region ' || (:id % 20), 'code ' || :id, 0);
UPDATE stock SET amount = amount + 1 WHERE region = 'region ' || (:old % 20) AND code = 'code ' || :old;
END;

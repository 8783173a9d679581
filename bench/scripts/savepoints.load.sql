-- One transaction a run: one of three subtransactions is rolled back. It has written a message, because rows that were rolled
-- back count as changes in the server's statistics. pgbench variables: scale, clients, and the client's own serial, which
-- lasts from run to run.
\set serial :serial + 1
\set id :serial * :clients + :client_id
\set account random(1, 10000 * :scale)
BEGIN;
INSERT INTO orders VALUES (:id, 'Order ' || :id);
SAVEPOINT s;
\if :serial % 3 = 0
    SELECT pg_logical_emit_message(true, 'bench', 'rolled back');
    ROLLBACK TO SAVEPOINT s;
\else
    UPDATE accounts SET balance = balance + 1 WHERE id = :account;
    RELEASE SAVEPOINT s;
\endif
END;

-- One transaction a run: one in a hundred changes 3,000 rows, all others one. pgbench variables: scale, clients, and the
-- client's own serial, which lasts from run to run.
\set serial :serial + 1
\set rows 20000 * :scale / :clients
\set id :client_id * :rows + random(0, :rows - 3000)
\if :serial % 100 = 50
    UPDATE accounts SET balance = balance + 1 WHERE id BETWEEN :id AND :id + 2999;
\else
    UPDATE accounts SET balance = balance + 1 WHERE id = :id;
\endif

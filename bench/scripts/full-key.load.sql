-- One transaction a run. pgbench variable: scale.
\set id random(1, 20000 * :scale)
UPDATE accounts SET balance = balance + 1 WHERE id = :id;

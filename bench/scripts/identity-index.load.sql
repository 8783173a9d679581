-- One transaction a run. pgbench variable: scale.
\set id random(1, 10000 * :scale)
UPDATE accounts SET balance = balance + 1 WHERE name = 'account ' || :id;

-- One transaction a run. pgbench variable: scale.
\set id random(1, 10000 * :scale)
UPDATE articles SET price = price + 1 WHERE id = :id;

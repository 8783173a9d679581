-- One transaction a run: two columns of one row. pgbench variable: scale.
\set id random(1, 2000 * :scale)
UPDATE records SET number_7 = number_7 + 1, changed_at = clock_timestamp() WHERE id = :id;

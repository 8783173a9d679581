-- One transaction a run: a document is read; its text stays. pgbench variable: scale.
\set id random(1, 2000 * :scale)
UPDATE documents SET reads = reads + 1, read_at = clock_timestamp() WHERE id = :id;

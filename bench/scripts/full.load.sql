-- One transaction a run. pgbench variables: scale, and rows for each scale.
\set article random(1, :rows * :scale)
UPDATE stock SET amount = amount + 1 WHERE article = :article;

-- One transaction a run: all of a row changes. pgbench variable: scale.
\set id random(1, 200 * :scale)
UPDATE pages SET revision = revision + 1, body = repeat(md5(body), 256) WHERE id = :id;

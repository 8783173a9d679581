\set id random(1, 2000)
\set words random(50, 1500)
UPDATE documents SET version = version + 1, body = repeat('words ', :words) WHERE id = :id;

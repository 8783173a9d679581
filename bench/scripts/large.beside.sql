-- The huge transaction. psql variable: rows.
BEGIN;
INSERT INTO items SELECT id, 0, 'Item ' || id FROM generate_series(1, :rows) AS id;
COMMIT;

-- Items for statements that change many rows. psql variable: scale.
CREATE TABLE items (
    id bigint PRIMARY KEY,
    amount bigint NOT NULL,
    name text NOT NULL
);
INSERT INTO items SELECT id, 0, 'Item ' || id FROM generate_series(1, 100000 * :scale) AS id;
VACUUM ANALYZE items;

-- Rows that move to other keys. psql variable: scale.
CREATE TABLE places (
    id bigint PRIMARY KEY,
    name text NOT NULL
);
INSERT INTO places SELECT id, 'Place ' || id FROM generate_series(0, 10000 * :scale - 1) AS id;
VACUUM ANALYZE places;

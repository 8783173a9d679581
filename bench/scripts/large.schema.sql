-- A table for one huge transaction and one for small ones. psql variable: scale.
CREATE TABLE items (
    id bigint PRIMARY KEY,
    amount bigint NOT NULL,
    name text NOT NULL
);
CREATE TABLE accounts (
    id bigint PRIMARY KEY,
    balance bigint NOT NULL,
    filler text NOT NULL
);
INSERT INTO accounts SELECT id, 0, repeat('x', 80) FROM generate_series(1, 100000 * :scale) AS id;
VACUUM ANALYZE items, accounts;

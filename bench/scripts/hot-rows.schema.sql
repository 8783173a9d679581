-- Ten counters that everybody updates, and accounts that hardly anybody shares. psql variable: scale.
CREATE TABLE counters (
    id int PRIMARY KEY,
    hits bigint NOT NULL
);
CREATE TABLE accounts (
    id bigint PRIMARY KEY,
    balance bigint NOT NULL,
    filler text NOT NULL
);
INSERT INTO counters SELECT id, 0 FROM generate_series(1, 10) AS id;
INSERT INTO accounts SELECT id, 0, repeat('x', 80) FROM generate_series(1, 100000 * :scale) AS id;
VACUUM ANALYZE counters, accounts;

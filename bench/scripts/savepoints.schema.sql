-- Two tables that are written in a transaction and its subtransaction. psql variable: scale.
CREATE TABLE orders (
    id bigint PRIMARY KEY,
    note text NOT NULL
);
CREATE TABLE accounts (
    id bigint PRIMARY KEY,
    balance int NOT NULL
);
INSERT INTO accounts SELECT id, 0 FROM generate_series(1, 10000 * :scale) AS id;
VACUUM ANALYZE accounts;

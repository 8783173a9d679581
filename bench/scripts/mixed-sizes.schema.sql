-- Accounts, a block of them for each client. psql variable: scale.
CREATE TABLE accounts (
    id bigint PRIMARY KEY,
    balance int NOT NULL
);
INSERT INTO accounts SELECT id, 0 FROM generate_series(0, 20000 * :scale - 1) AS id;
VACUUM ANALYZE accounts;

-- Accounts without a primary key, known by a unique text. psql variable: scale.
CREATE TABLE accounts (
    name text NOT NULL,
    balance int NOT NULL
);
CREATE UNIQUE INDEX accounts_name ON accounts (name);
ALTER TABLE accounts REPLICA IDENTITY USING INDEX accounts_name;
INSERT INTO accounts SELECT 'account ' || id, 0 FROM generate_series(1, 10000 * :scale) AS id;
VACUUM ANALYZE accounts;

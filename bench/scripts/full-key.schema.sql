-- Accounts with a key whose old rows are sent whole. psql variable: scale.
CREATE TABLE accounts (
    id bigint PRIMARY KEY,
    balance bigint NOT NULL,
    filler text NOT NULL
);
ALTER TABLE accounts REPLICA IDENTITY FULL;
INSERT INTO accounts SELECT id, 0, repeat('x', 80) FROM generate_series(1, 20000 * :scale) AS id;
VACUUM ANALYZE accounts;

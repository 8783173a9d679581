-- Accounts with two unique indexes beside the primary key. psql variable: scale.
CREATE TABLE accounts (
    id bigint PRIMARY KEY,
    tenant int NOT NULL,
    number bigint NOT NULL,
    email text NOT NULL UNIQUE,
    balance bigint NOT NULL,
    UNIQUE (tenant, number)
);
INSERT INTO accounts
SELECT id, id % 100, id / 100, 'user' || id || '@example.org', 0
FROM generate_series(1, 100000 * :scale) AS id;
VACUUM ANALYZE accounts;

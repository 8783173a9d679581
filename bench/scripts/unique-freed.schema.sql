-- Badges: each row has a code that no other has. psql variable: scale.
CREATE TABLE badges (
    id bigint PRIMARY KEY,
    code bigint NOT NULL UNIQUE
);
INSERT INTO badges SELECT id, id FROM generate_series(0, 20000 * :scale - 1) AS id;
VACUUM ANALYZE badges;

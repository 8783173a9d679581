-- Parents and their children. psql variable: scale.
CREATE TABLE parents (
    id bigint PRIMARY KEY,
    name text NOT NULL
);
CREATE TABLE children (
    id bigint PRIMARY KEY,
    parent_id bigint NOT NULL REFERENCES parents,
    name text NOT NULL
);
CREATE INDEX ON children (parent_id);
INSERT INTO parents SELECT id, 'Parent ' || id FROM generate_series(1, 10000 * :scale) AS id;
INSERT INTO children
SELECT 2 * id + child, id, 'Child ' || child FROM generate_series(1, 10000 * :scale) AS id, generate_series(0, 1) AS child;
VACUUM ANALYZE parents, children;

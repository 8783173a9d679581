-- Parents whose children go with them. psql variable: scale.
CREATE TABLE parents (
    id bigint PRIMARY KEY,
    name text NOT NULL
);
CREATE TABLE children (
    id bigint PRIMARY KEY,
    parent_id bigint NOT NULL REFERENCES parents ON DELETE CASCADE
);
CREATE INDEX ON children (parent_id);
INSERT INTO parents SELECT id, 'Parent ' || id FROM generate_series(0, 10000 * :scale - 1) AS id;
INSERT INTO children SELECT id, id / 3 FROM generate_series(0, 30000 * :scale - 1) AS id;
VACUUM ANALYZE parents, children;

-- Small documents with an index on what is in them. psql variable: scale.
CREATE TABLE documents (
    id bigint PRIMARY KEY,
    body jsonb NOT NULL
);
CREATE INDEX ON documents USING gin (body);
INSERT INTO documents
SELECT id, jsonb_build_object('name', 'Document ' || id, 'tags', jsonb_build_array(id % 7, id % 11), 'state', 'new')
FROM generate_series(1, 1000 * :scale) AS id;
VACUUM ANALYZE documents;

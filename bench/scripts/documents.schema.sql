-- Documents of 2 kB as jsonb, larger than most rows and smaller than what is kept out of line. psql variable: scale.
CREATE TABLE documents (
    id bigint PRIMARY KEY,
    revision int NOT NULL,
    body jsonb NOT NULL
);
INSERT INTO documents
SELECT id, 0, (SELECT jsonb_object_agg('field_' || n, md5((id + n)::text)) FROM generate_series(1, 40) AS n)
FROM generate_series(1, 1000 * :scale) AS id;
VACUUM ANALYZE documents;

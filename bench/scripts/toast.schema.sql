-- Documents whose text is kept out of line, so that an update of other columns does not send it. psql variable: scale.
CREATE TABLE documents (
    id bigint PRIMARY KEY,
    reads int NOT NULL,
    read_at timestamptz NOT NULL,
    body text NOT NULL
);
ALTER TABLE documents ALTER body SET STORAGE EXTERNAL;
INSERT INTO documents
SELECT id, 0, timestamptz '2026-01-01 00:00:00+00', repeat(md5(id::text), 80) FROM generate_series(1, 2000 * :scale) AS id;
VACUUM ANALYZE documents;

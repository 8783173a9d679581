-- Stock without a key, so that old rows are sent whole. psql variables: scale, rows for each scale, and indexed: whether
-- there is an index, which is not unique.
CREATE TABLE stock (
    article int NOT NULL,
    shelf int NOT NULL,
    amount bigint NOT NULL,
    note text
);
ALTER TABLE stock REPLICA IDENTITY FULL;
INSERT INTO stock SELECT id, id % 100, 0, 'Note ' || id FROM generate_series(1, :rows * :scale) AS id;
\if :indexed
    CREATE INDEX ON stock (article);
\endif
VACUUM ANALYZE stock;

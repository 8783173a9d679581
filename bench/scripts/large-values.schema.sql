-- Texts of 8 kB that are kept out of line and not compressed. psql variable: scale.
CREATE TABLE pages (
    id bigint PRIMARY KEY,
    revision int NOT NULL,
    body text NOT NULL
);
ALTER TABLE pages ALTER body SET STORAGE EXTERNAL;
INSERT INTO pages SELECT id, 0, repeat(md5(id::text), 256) FROM generate_series(1, 200 * :scale) AS id;
VACUUM ANALYZE pages;

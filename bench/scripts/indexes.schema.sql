-- Articles with five indexes beside the primary key, none of them unique. psql variable: scale.
CREATE TABLE articles (
    id bigint PRIMARY KEY,
    shelf int NOT NULL,
    price int NOT NULL,
    weight int NOT NULL,
    name text NOT NULL,
    added_at timestamptz NOT NULL
);
INSERT INTO articles
SELECT id, id % 1000, id % 777, id % 555, md5(id::text), timestamptz '2026-01-01 00:00:00+00' + id * interval '1 s'
FROM generate_series(1, 10000 * :scale) AS id;
CREATE INDEX ON articles (shelf);
CREATE INDEX ON articles (price);
CREATE INDEX ON articles (weight, shelf);
CREATE INDEX ON articles (name);
CREATE INDEX ON articles (added_at);
VACUUM ANALYZE articles;

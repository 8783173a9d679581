-- Readings in a hundred partitions. psql variable: scale.
CREATE TABLE readings (
    id bigint NOT NULL,
    day int NOT NULL,
    amount bigint NOT NULL,
    PRIMARY KEY (id, day)
) PARTITION BY LIST (day);
SELECT format('CREATE TABLE readings_%s PARTITION OF readings FOR VALUES IN (%1$s)', day)
FROM generate_series(0, 99) AS day \gexec
INSERT INTO readings SELECT id, id % 100, 0 FROM generate_series(0, 10000 * :scale - 1) AS id;
VACUUM ANALYZE readings;

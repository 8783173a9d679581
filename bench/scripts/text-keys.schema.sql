-- Rows whose key is two texts. psql variable: scale.
CREATE TABLE stock (
    region text,
    code text,
    amount int NOT NULL,
    PRIMARY KEY (region, code)
);
INSERT INTO stock SELECT 'region ' || id % 20, 'code ' || id, 0 FROM generate_series(1, 10000 * :scale) AS id;
VACUUM ANALYZE stock;

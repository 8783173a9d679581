-- A thousand tables, a tenth of them with partitions, and a function that changes the one of a number. psql variable: scale.
SELECT CASE WHEN n % 10 = 0
    THEN format('CREATE TABLE many_%s (id bigint PRIMARY KEY, hits int NOT NULL) PARTITION BY HASH (id)', n)
    ELSE format('CREATE TABLE many_%s (id bigint PRIMARY KEY, hits int NOT NULL)', n) END
FROM generate_series(1, 1000) AS n \gexec
SELECT format('CREATE TABLE many_%s_%s PARTITION OF many_%1$s FOR VALUES WITH (MODULUS 2, REMAINDER %2$s)', n, part)
FROM generate_series(10, 1000, 10) AS n, generate_series(0, 1) AS part \gexec
SELECT format('INSERT INTO many_%s SELECT id, 0 FROM generate_series(1, 10 * %s) AS id', n, :scale)
FROM generate_series(1, 1000) AS n \gexec
CREATE FUNCTION hit(number int, old_id bigint, new_id bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('UPDATE many_%s SET hits = hits + 1 WHERE id = $1', number) USING old_id;
    EXECUTE format('INSERT INTO many_%s VALUES ($1, 0)', number) USING new_id;
END
$$;

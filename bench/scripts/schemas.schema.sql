-- Two hundred schemas of twenty tables, one for each tenant, and a function that fills two tables of a schema. psql
-- variable: scale.
SELECT format('CREATE SCHEMA tenant_%s', n) FROM generate_series(1, 200) AS n \gexec
SELECT format('CREATE TABLE tenant_%s.item_%s (id bigint PRIMARY KEY, number int NOT NULL, note text)', n, t)
FROM generate_series(1, 200) AS n, generate_series(1, 20) AS t \gexec
CREATE FUNCTION add(tenant int, first int, second int, new_id bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('INSERT INTO tenant_%s.item_%s VALUES ($1, $2, $3)', tenant, first)
        USING new_id, first, 'a note of tenant ' || tenant;
    EXECUTE format('INSERT INTO tenant_%s.item_%s VALUES ($1, $2, $3)', tenant, second)
        USING new_id, second, 'a note of tenant ' || tenant;
END
$$;

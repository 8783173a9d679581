-- The tables of sysbench's OLTP tests (oltp_common.lua), eight of them. psql variable: scale.
SELECT format(
    'CREATE TABLE sbtest%1$s (id int PRIMARY KEY, k int NOT NULL, c char(120) NOT NULL, pad char(60) NOT NULL);'
    'INSERT INTO sbtest%1$s SELECT id, id %% 1000, md5(id::text), md5(id::text) FROM generate_series(1, %2$s) AS id;'
    'CREATE INDEX ON sbtest%1$s (k);',
    n, 1000 * :scale)
FROM generate_series(1, 8) AS n
\gexec
CREATE FUNCTION write_only(n int, index_id int, other_id int, replaced_id int) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('UPDATE sbtest%s SET k = k + 1 WHERE id = $1', n) USING index_id;
    EXECUTE format('UPDATE sbtest%s SET c = md5($1::text || c) WHERE id = $1', n) USING other_id;
    EXECUTE format('DELETE FROM sbtest%s WHERE id = $1', n) USING replaced_id;
    EXECUTE format('INSERT INTO sbtest%s VALUES ($1, $1 %% 1000, md5($1::text), md5($1::text))', n) USING replaced_id;
END $$;
VACUUM ANALYZE;

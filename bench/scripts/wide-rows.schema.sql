-- Rows of 45 columns: the key, 20 numbers, 20 texts, and four others. psql variable: scale.
SELECT format(
    'CREATE TABLE records (id bigint PRIMARY KEY, %s, %s, is_open boolean NOT NULL, price numeric(12, 2) NOT NULL,'
    ' changed_at timestamptz NOT NULL, details jsonb NOT NULL)',
    string_agg(format('number_%s int NOT NULL', n), ', '), string_agg(format('text_%s text NOT NULL', n), ', '))
FROM generate_series(1, 20) AS n \gexec
SELECT format(
    'INSERT INTO records SELECT id, %s, %s, true, 12.50, timestamptz ''2026-01-01 00:00:00+00'','
    ' jsonb_build_object(''id'', id, ''tags'', jsonb_build_array(''a'', ''b'')) FROM generate_series(1, 2000 * %s) AS id',
    string_agg(format('id + %s', n), ', '), string_agg(format('''Text %s of '' || id', n), ', '), :scale)
FROM generate_series(1, 20) AS n \gexec
VACUUM ANALYZE records;

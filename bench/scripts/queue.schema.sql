-- Jobs that wait to be done. psql variable: scale.
CREATE TABLE jobs (
    id bigint PRIMARY KEY,
    state text NOT NULL,
    queued_at timestamptz NOT NULL,
    payload text NOT NULL
);
CREATE INDEX ON jobs (state, queued_at);
INSERT INTO jobs
SELECT id, 'waits', timestamptz '2026-01-01 00:00:00+00' + id * interval '1 ms', 'Job ' || id
FROM generate_series(0, 100 * :scale - 1) AS id;
VACUUM ANALYZE jobs;

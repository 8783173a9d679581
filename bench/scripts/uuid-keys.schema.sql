-- Events whose keys fall anywhere in their index, with an index on time. psql variable: scale.
CREATE TABLE events (
    id uuid PRIMARY KEY,
    at timestamptz NOT NULL,
    payload text NOT NULL
);
CREATE INDEX ON events (at);
INSERT INTO events
SELECT md5(id::text)::uuid, timestamptz '2026-01-01 00:00:00+00' + id * interval '1 ms', 'Event ' || id
FROM generate_series(1, 10000 * :scale) AS id;
VACUUM ANALYZE events;

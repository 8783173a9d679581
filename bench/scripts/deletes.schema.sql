-- Events that will go, one primary key. psql variable: scale.
CREATE TABLE events (
    id bigint PRIMARY KEY,
    at timestamptz NOT NULL,
    kind int NOT NULL,
    payload text NOT NULL
);
INSERT INTO events
SELECT id, timestamptz '2026-01-01 00:00:00+00', id % 10, 'Event ' || id FROM generate_series(0, 50000 * :scale - 1) AS id;
VACUUM ANALYZE events;

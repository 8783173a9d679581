-- Bookings that may not overlap. psql variable: scale.
CREATE TABLE bookings (
    id bigint PRIMARY KEY,
    during int8range NOT NULL,
    EXCLUDE USING gist (during WITH &&)
);
INSERT INTO bookings SELECT id, int8range(10 * id, 10 * id + 8) FROM generate_series(1, 1000 * :scale) AS id;
VACUUM ANALYZE bookings;

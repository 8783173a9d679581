-- Customers, their orders, and the lines of these. psql variable: scale.
CREATE TABLE customers (
    id bigint PRIMARY KEY,
    name text NOT NULL,
    balance bigint NOT NULL
);
CREATE TABLE orders (
    id bigint PRIMARY KEY,
    customer_id bigint NOT NULL REFERENCES customers,
    placed_at timestamptz NOT NULL
);
CREATE INDEX ON orders (customer_id);
CREATE TABLE order_lines (
    order_id bigint NOT NULL REFERENCES orders,
    line int NOT NULL,
    article int NOT NULL,
    quantity int NOT NULL,
    PRIMARY KEY (order_id, line)
);
INSERT INTO customers SELECT id, 'Customer ' || id, 0 FROM generate_series(1, 50000 * :scale) AS id;
INSERT INTO orders
SELECT id, id, timestamptz '2026-01-01 00:00:00+00' FROM generate_series(1, 10000 * :scale) AS id;
INSERT INTO order_lines
SELECT order_id, line, line, 1
FROM generate_series(1, 10000 * :scale) AS order_id, generate_series(1, 3) AS line;
VACUUM ANALYZE customers, orders, order_lines;

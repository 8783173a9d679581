-- A shop: customers, items, orders and their lines. psql variable: scale.
CREATE TABLE customers (
    id bigint PRIMARY KEY,
    spent numeric NOT NULL
);
CREATE TABLE items (
    id bigint PRIMARY KEY,
    stock int NOT NULL
);
CREATE TABLE orders (
    id bigint PRIMARY KEY,
    customer_id bigint NOT NULL REFERENCES customers,
    placed_at timestamptz NOT NULL,
    status text NOT NULL
);
CREATE INDEX ON orders (customer_id) WHERE status = 'open';
CREATE TABLE lines (
    order_id bigint REFERENCES orders,
    number int,
    item_id bigint NOT NULL REFERENCES items,
    amount int NOT NULL,
    PRIMARY KEY (order_id, number)
);
INSERT INTO customers SELECT id, 0 FROM generate_series(1, 1000 * :scale) AS id;
INSERT INTO items SELECT id, 1000000 FROM generate_series(1, 1000 * :scale) AS id;
INSERT INTO orders SELECT id, id % 1000 + 1, timestamptz '2026-01-01', 'shipped' FROM generate_series(1, 10000 * :scale) AS id;
VACUUM ANALYZE customers, items, orders, lines;

\set customer random_zipfian(1, 20000, 1.1)
\set article random(1, 5000)
BEGIN;
INSERT INTO orders (customer, total) VALUES (:customer, :article * 3.5) RETURNING id \gset
INSERT INTO order_lines SELECT :id, n, :article + n, n FROM generate_series(1, 3) AS n;
INSERT INTO events (kind, content) VALUES ('order', jsonb_build_object('order', :id, 'customer', :customer));
COMMIT;

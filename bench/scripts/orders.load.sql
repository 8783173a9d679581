-- One transaction a run: an order with four lines, of which the first takes from the stock of an item that few or many want;
-- the client's order before is shipped. pgbench variables: scale, clients, and the client's own serial, which lasts from run
-- to run.
\set before 10000 * :scale + :serial * :clients + :client_id + 1
\set serial :serial + 1
\set id 10000 * :scale + :serial * :clients + :client_id + 1
\set customer random(1, 1000 * :scale)
\set hot random_zipfian(1, 1000 * :scale, 1.3)
\set item random(1, 1000 * :scale - 3)
BEGIN;
INSERT INTO orders VALUES (:id, :customer, now(), 'open');
INSERT INTO lines VALUES (:id, 1, :hot, 1), (:id, 2, :item, 2), (:id, 3, :item + 1, 3), (:id, 4, :item + 2, 4);
UPDATE customers SET spent = spent + 9.90 WHERE id = :customer;
UPDATE items SET stock = stock - 1 WHERE id = :hot;
UPDATE orders SET status = 'shipped' WHERE id = :before;
END;

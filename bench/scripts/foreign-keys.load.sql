-- One transaction a run. pgbench variables: scale, clients, and the client's own state, which lasts from run to run:
-- serial (orders and customers it has made), newcomer (a customer whose first order is due; 0: none), newcomer_before
-- (the one who has placed it, as first_order), latest_order (0: none, or cancelled), archived (old orders it has deleted).
--
-- Clients share no row that they insert or delete, so nothing here can fail.
\set customers 50000 * :scale
\set old_orders 10000 * :scale
\set dice random(1, 100)
\set lines random(1, 5)
\set amount random(1, 1000)
\if :newcomer > 0
    \set serial :serial + 1
    \set first_order :old_orders + :serial * :clients + :client_id
    BEGIN;
    INSERT INTO orders VALUES (:first_order, :newcomer, now());
    INSERT INTO order_lines SELECT :first_order, line, line, 1 FROM generate_series(1, :lines) AS line;
    UPDATE customers SET balance = balance + :amount WHERE id = :newcomer;
    END;
    \set newcomer_before :newcomer
    \set newcomer 0
\elif :dice <= 5
    \set serial :serial + 1
    \set newcomer :customers + :serial * :clients + :client_id
    INSERT INTO customers VALUES (:newcomer, 'Customer ' || :newcomer, 0);
\elif :dice = 6 and :newcomer_before > 0
    BEGIN;
    DELETE FROM order_lines WHERE order_id = :first_order;
    DELETE FROM orders WHERE id = :first_order;
    DELETE FROM customers WHERE id = :newcomer_before;
    END;
    \set newcomer_before 0
\elif :dice <= 9 and :latest_order > 0
    BEGIN;
    DELETE FROM order_lines WHERE order_id = :latest_order;
    DELETE FROM orders WHERE id = :latest_order;
    END;
    \set latest_order 0
\elif :dice <= 12 and (:archived + 1) * :clients <= :old_orders
    \set id :archived * :clients + :client_id + 1
    BEGIN;
    DELETE FROM order_lines WHERE order_id = :id;
    DELETE FROM orders WHERE id = :id;
    END;
    \set archived :archived + 1
\else
    \set serial :serial + 1
    \set latest_order :old_orders + :serial * :clients + :client_id
    \set customer random(1, :customers)
    BEGIN;
    INSERT INTO orders VALUES (:latest_order, :customer, now());
    INSERT INTO order_lines SELECT :latest_order, line, line, 1 FROM generate_series(1, :lines) AS line;
    UPDATE customers SET balance = balance + :amount WHERE id = :customer;
    END;
\endif

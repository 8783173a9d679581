\set back random(1, 500)
UPDATE orders SET state = 'sent' WHERE id = (SELECT max(id) - :back FROM orders) AND state = 'new';

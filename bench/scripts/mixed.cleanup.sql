DELETE FROM orders WHERE id IN (SELECT id FROM orders WHERE state = 'sent' ORDER BY id LIMIT 50);

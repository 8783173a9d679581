UPDATE pgbench_accounts SET abalance = abalance + 1 WHERE aid <= 30000;
INSERT INTO events (kind, content) SELECT 'night', jsonb_build_object('n', n) FROM generate_series(1, 50000) AS n;

-- One transaction a run: a counter or an account. pgbench variable: scale.
\set dice random(1, 2)
\if :dice = 1
    \set id random(1, 10)
    UPDATE counters SET hits = hits + 1 WHERE id = :id;
\else
    \set id random(1, 100000 * :scale)
    UPDATE accounts SET balance = balance + 1 WHERE id = :id;
\endif

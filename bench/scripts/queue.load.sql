-- One transaction a run: a job comes, the oldest one is begun, it goes. pgbench variables: scale, clients, and the client's
-- own state, which lasts from run to run: turn, and serial (jobs it has made, and as many it has done).
--
-- Each client has every so manieth row to itself, so nothing here can fail.
\set step :turn % 3
\set turn :turn + 1
\set oldest :serial * :clients + :client_id
\if :step = 0
    \set newest (:serial + (100 * :scale - :client_id + :clients - 1) / :clients) * :clients + :client_id
    INSERT INTO jobs VALUES (:newest, 'waits', now(), 'Job ' || :newest);
\elif :step = 1
    UPDATE jobs SET state = 'runs' WHERE id = :oldest;
\else
    DELETE FROM jobs WHERE id = :oldest;
    \set serial :serial + 1
\endif

-- One transaction a run. pgbench variables: scale, clients, and the client's own turn, which lasts from run to run.
--
-- Each client has a block of rows and fifty codes that wander through it: fifty transactions free one code each, the
-- next fifty give each to the row after the one that had it. In the first lap nobody has a code yet.
\set rows 20000 * :scale / :clients
\set code :turn % 50
\set lap :turn / 100
\set is_taken :turn / 50 % 2
\set id :client_id * :rows + (:code * (:rows / 50) + :lap + :is_taken) % :rows
\set turn :turn + 1
\if :is_taken = 1
    UPDATE badges SET code = 'code ' || :client_id || '.' || :code WHERE id = :id;
\else
    UPDATE badges SET code = 'idle ' || :id WHERE id = :id;
\endif

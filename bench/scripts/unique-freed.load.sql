-- One transaction a run: a row is deleted by its key and comes again with the code that the row before it had. What is
-- deleted is sent by its primary key alone, so the code that becomes free is not on the wire. pgbench variables: scale,
-- clients, and the client's own state, which lasts from run to run: turn, and freed (the code in its hand; 0 at the begin).
\set rows 20000 * :scale / :clients
\set id :client_id * :rows + random(0, :rows - 1)
\if :turn = 0
    \set freed -1 - :client_id
\endif
\set turn :turn + 1
\set code :freed
BEGIN;
DELETE FROM badges WHERE id = :id RETURNING code AS freed \gset
INSERT INTO badges VALUES (:id, :code);
END;

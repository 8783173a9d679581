-- One transaction a run: a document comes, and one that was there changes. pgbench variables: scale, clients, and the
-- client's own serial, which lasts from run to run.
\set serial :serial + 1
\set id 1000 * :scale + :serial * :clients + :client_id
\set old random(1, 1000 * :scale)
BEGIN;
INSERT INTO documents
VALUES (:id, jsonb_build_object('name', 'Document ' || :id, 'tags', jsonb_build_array(:old % 7, :old % 11)));
UPDATE documents SET body = body || jsonb_build_object('state', 'read by ' || :id) WHERE id = :old;
END;

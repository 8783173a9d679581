-- One transaction a run: a document comes, or one field of one that was there changes. pgbench variables: scale, clients,
-- and the client's own serial, which lasts from run to run.
\set id 1000 * :scale + :serial * :clients + :client_id + 1
\set old random(1, 1000 * :scale)
\if :serial % 2 = 0
    INSERT INTO documents
    SELECT :id, 0, jsonb_object_agg('field_' || n, md5((:id::bigint + n)::text)) FROM generate_series(1, 40) AS n;
\else
    UPDATE documents
    SET revision = revision + 1, body = jsonb_set(body, '{field_7}', to_jsonb('revision ' || revision))
    WHERE id = :old;
\endif
\set serial :serial + 1

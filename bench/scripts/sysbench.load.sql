-- One transaction a run, as oltp_write_only.lua has it: an update of an indexed column, one of another, a row deleted and
-- inserted. Each client has rows of its own, so that none waits for another. pgbench variables: scale, clients.
\set n random(1, 8)
\set rows 1000 * :scale / :clients - 1
\set index_id random(0, :rows) * :clients + :client_id + 1
\set other_id random(0, :rows) * :clients + :client_id + 1
\set replaced_id random(0, :rows) * :clients + :client_id + 1
SELECT write_only(:n, :index_id, :other_id, :replaced_id);

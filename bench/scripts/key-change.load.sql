-- One transaction a run: the row with a client's lowest key gets a key above its highest. pgbench variables: scale, clients,
-- and the client's own turn, which lasts from run to run.
\set rows 10000 * :scale / :clients
\set id :turn * :clients + :client_id
\set new_id :id + :rows * :clients
\set turn :turn + 1
UPDATE places SET id = :new_id WHERE id = :id;

-- One transaction a run. pgbench variables: scale, clients, and the client's own serial, which lasts from run to run.
\set serial :serial + 1
\set id 10000 * :scale + :serial * :clients + :client_id
\set shelf random(0, 999)
\set price random(0, 776)
\set weight random(0, 554)
INSERT INTO articles VALUES (:id, :shelf, :price, :weight, md5(:id::text), now());

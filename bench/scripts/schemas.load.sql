-- One transaction a run: an insert into two tables of one of two hundred schemas. pgbench variables: clients, and the
-- client's own serial, which lasts from run to run.
\set serial :serial + 1
\set tenant random(1, 200)
\set first random(1, 10)
\set second random(11, 20)
\set new_id :serial * :clients + :client_id
SELECT add(:tenant, :first, :second, :new_id);

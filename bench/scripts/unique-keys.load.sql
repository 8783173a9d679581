-- One transaction a run. pgbench variables: scale, clients, and the client's own state, which lasts from run to run:
-- serial (rows and addresses it has made), freed and taken (addresses it has freed and given to another row).
--
-- Clients share no row that they insert or delete, so nothing here can fail. The first tenth of the accounts is deleted
-- one after the other and never updated.
\set accounts 100000 * :scale
\set leavers :accounts / 10
\set dice random(1, 100)
\if :dice = 1 and (:freed + 1) * :clients <= :leavers
    -- An account leaves; its address is free. The publisher sends its primary key only.
    \set id :freed * :clients + :client_id + 1
    DELETE FROM accounts WHERE id = :id;
    \set freed :freed + 1
\elif :dice = 2 and :taken < :freed
    -- A new account takes the address that was freed first: some transactions ago, or some thousand.
    \set left_id :taken * :clients + :client_id + 1
    \set taken :taken + 1
    \set serial :serial + 1
    \set id :accounts + :serial * :clients + :client_id
    \set tenant :id % 100
    \set number :id / 100
    INSERT INTO accounts VALUES (:id, :tenant, :number, 'user' || :left_id || '@example.org', 0);
\elif :dice <= 12
    \set serial :serial + 1
    \set id random(:leavers + 1, :accounts)
    UPDATE accounts SET email = 'user' || :client_id || '.' || :serial || '@example.org' WHERE id = :id;
\elif :dice <= 32
    \set serial :serial + 1
    \set id :accounts + :serial * :clients + :client_id
    \set tenant :id % 100
    \set number :id / 100
    INSERT INTO accounts VALUES (:id, :tenant, :number, 'user' || :id || '@example.org', 0);
\else
    -- A transfer. In the order of the keys: two clients must not lock each other out.
    \set one random(:leavers + 1, :accounts)
    \set other random(:leavers + 1, :accounts)
    \set first least(:one, :other)
    \set second greatest(:one, :other)
    \set amount random(1, 1000)
    BEGIN;
    UPDATE accounts SET balance = balance - :amount WHERE id = :first;
    UPDATE accounts SET balance = balance + :amount WHERE id = :second;
    END;
\endif

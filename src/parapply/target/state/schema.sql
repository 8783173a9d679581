-- The whole state schema, version 24. schema.py fills in its name, and makes COMMENT ON of the comments behind tables,
-- views and columns.
CREATE SCHEMA IF NOT EXISTS {s};
CREATE TABLE {s}.schema_version (  -- One row: the layout version of this schema, written by parapply.
    version int NOT NULL,  -- Layout version; a parapply that knows only older ones refuses to start.
    created_at timestamptz NOT NULL DEFAULT pg_catalog.now()  -- When.
);
CREATE UNIQUE INDEX schema_version_one_row ON {s}.schema_version ((true));
-- It has no key, and a publication FOR ALL TABLES of a database that was a source until now also has it.
ALTER TABLE {s}.schema_version REPLICA IDENTITY FULL;

CREATE TABLE {s}.slots (
        -- One row for each replication slot applied here. Read the view progress instead. LSNs are commit end LSNs.
    slot_id int GENERATED ALWAYS AS IDENTITY (START WITH {start}) PRIMARY KEY,
        -- Names the locks and prepared transactions of this slot.
    slot_name text NOT NULL,  -- Replication slot on the publisher.
    system_identifier text NOT NULL,  -- Cluster the slot belongs to; unsigned 64 bits, hence text.
    timeline int NOT NULL,  -- Timeline of the publisher when last connected.
    database_name text NOT NULL,  -- Database of the slot on the publisher.
    publications text[] NOT NULL,  -- Publications the slot is read with.
    begin_lsn pg_lsn NOT NULL,  -- Where the slot was begun: transactions that end here or before are not applied by it.
    lowest_lsn pg_lsn NOT NULL,
        -- Permanent watermark: every source transaction that ends here or before is committed here.
    highest_lsn pg_lsn NOT NULL,  -- End of the newest source transaction known to be committed here.
    confirmed_flush_lsn pg_lsn,  -- LSN last reported to the publisher as durable here.
    source_lsn pg_lsn,  -- End of the publisher's WAL as last heard.
    last_commit_time timestamptz,  -- When the newest applied transaction committed on the publisher, by its clock.
    lag_s double precision,
        -- Age of the oldest source transaction or WAL position not applied here yet; 0 when all is.
    commit_order text NOT NULL,  -- preserve: commits come in source order. relaxed: independent ones in any order.
    workers int NOT NULL,  -- Number of worker connections.
    state text NOT NULL,
        -- State of the daemon: starting, running, retrying (a failed transaction), healing, stopped ...
    reason text NOT NULL DEFAULT '',  -- Why it is in that state, if it is not plain.
    host text NOT NULL DEFAULT '',  -- Machine of the daemon.
    pid int,  -- Process id of the daemon on its machine.
    version text NOT NULL DEFAULT '',  -- Version of the daemon.
    started_at timestamptz,  -- When the daemon last connected to both ends.
    updated_at timestamptz NOT NULL DEFAULT pg_catalog.now(),
        -- When this row was last written; old: no daemon runs, or it is reconnecting or retrying, as state says.
    shown_every_s double precision NOT NULL DEFAULT 1,
        -- Seconds until a daemon that lives writes it again; more while nothing comes.
    two_phase text NOT NULL DEFAULT 'disabled',
        -- disabled, pending (wanted, not begun yet) or enabled: whether PREPARE is applied as such.
    copies_only bool NOT NULL DEFAULT false,
        -- Tables that are not in copies are not applied: parapply refresh copies them first.
    reading text NOT NULL DEFAULT '',
        -- How the slot is read, and why so: stream, or ranges (of WAL, with much to catch up).
    limits jsonb,  -- The present limits, with number, evidence and advice, as JSON (docs/REPORT.md, The verdict).
    source_started_at timestamptz,  -- Start of the publisher that was last known to have all that is committed here.
    heal_lsn pg_lsn,  -- Where the publisher was when the last heal began.
    healed_at timestamptz,  -- When the daemon last healed the slot, or failed to; it tries again an hour later.
    constants_in jsonb NOT NULL DEFAULT '{{}}',
        -- Constants (`set`) of its rows, by the table of the target, as schema.table.
    lacks_origins bool NOT NULL DEFAULT false,
        -- Rows that were replicated to the publisher were once left out (source.origin = none).
    n_forgotten bigint NOT NULL DEFAULT 0,
        -- Changes that were left out since the last heal, and that conflicts no longer holds.
    UNIQUE (slot_name, system_identifier)
) WITH (fillfactor = 50);
CREATE TABLE {s}.applied (
        -- One row for each target transaction above the watermark, written inside it; pruned when that has passed it.
    slot_id int NOT NULL REFERENCES {s}.slots,  -- Slot.
    end_lsn pg_lsn NOT NULL,  -- End of the last source transaction in it.
    first_lsn pg_lsn NOT NULL,  -- End of the first source transaction in it.
    members pg_lsn[],  -- Ends of the source transactions in it; null: all that end from first_lsn to end_lsn.
    low_lsn pg_lsn NOT NULL,  -- Every source transaction that ends here or before is committed once this row is.
    commit_time timestamptz NOT NULL,  -- When the last of them committed on the publisher.
    n_transactions int NOT NULL,  -- Number of source transactions in it.
    PRIMARY KEY (slot_id, end_lsn));
CREATE TABLE {s}.workers (
        -- Work and waits of each worker; written about once a second. Empty while no daemon is connected.
    slot_id int NOT NULL REFERENCES {s}.slots,  -- Slot.
    worker int NOT NULL,  -- Number, from 1.
    pid int,  -- Its server process here, as in pg_stat_activity.
    state text NOT NULL,  -- Its present work.
    batch_seq bigint,  -- Number of its batch since slots.started_at.
    end_lsn pg_lsn,  -- End of the last source transaction in its batch.
    waits_for text,  -- The object it waits for, and why; null: nothing.
    since timestamptz,  -- Since when.
    transactions bigint NOT NULL,  -- Source transactions applied since slots.started_at.
    changes bigint NOT NULL,  -- Row changes applied since slots.started_at.
    PRIMARY KEY (slot_id, worker)
) WITH (fillfactor = 50);
CREATE TABLE {s}.tables (  -- How each table is applied, and why.
    slot_id int NOT NULL REFERENCES {s}.slots,  -- Slot.
    schema_name text NOT NULL,  -- Schema of the table.
    table_name text NOT NULL,  -- Table.
    lane text NOT NULL,
        -- set-based, row by row, or serial; waiting: its changes are left out until parapply refresh; schema only:
        -- they are left out.
    is_table_exclusive bool NOT NULL,  -- Batches that touch the table never run at the same time.
    reason text NOT NULL,  -- Index, trigger or rule that made it so.
    key_columns text[] NOT NULL,  -- Columns rows are found by; empty: the whole row.
    retries bigint NOT NULL,  -- Batches retried because of this table since slots.started_at.
    updated_at timestamptz NOT NULL DEFAULT pg_catalog.now(),  -- When this row was last written.
    transactions bigint NOT NULL DEFAULT 0,
        -- Target transactions that changed it since the process of the daemon started.
    inserts bigint NOT NULL DEFAULT 0,  -- Rows inserted since then, as the publisher sent them.
    updates bigint NOT NULL DEFAULT 0,  -- Rows updated.
    deletes bigint NOT NULL DEFAULT 0,  -- Rows deleted.
    truncates bigint NOT NULL DEFAULT 0,  -- TRUNCATE statements.
    waits bigint NOT NULL DEFAULT 0,
        -- Target transactions that waited for an earlier one because of this table, whole or in part.
    wait_s double precision NOT NULL DEFAULT 0,  -- Seconds they waited before they could start.
    waits_mostly_for text NOT NULL DEFAULT '',  -- Most frequent cause of the waits: key, unique, foreign key or table.
    counted_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
        -- As of when transactions and what follows it are; an idle table's stay as they are.
    PRIMARY KEY (slot_id, schema_name, table_name));

-- A row of committed_prepared is written inside the prepared transaction, so that its visibility proves the commit
-- (T-57); it stays until the commit is recorded. A row of undecided is written once the transaction is prepared: a
-- transaction that has one is prepared or was lost, while a COMMIT PREPARED of an unknown transaction belongs to one
-- without changes (T-58).
CREATE TABLE {s}.committed_prepared (
        -- One row for each transaction prepared here, written inside it: visible once that was committed.
    slot_id int NOT NULL REFERENCES {s}.slots,  -- Slot.
    gid text NOT NULL,  -- Name of the prepared transaction here, as in the view prepared.
    PRIMARY KEY (slot_id, gid));
CREATE TABLE {s}.undecided (
        -- One row for each transaction prepared here whose outcome has not come; written once it is prepared.
    slot_id int NOT NULL REFERENCES {s}.slots,  -- Slot.
    gid text NOT NULL,  -- Name of the prepared transaction here, as in the view prepared.
    PRIMARY KEY (slot_id, gid));
-- Transactions that PostgreSQL itself holds prepared; our names give their slot and their end (T-56), and any role may
-- use such a name.
CREATE VIEW {s}.prepared AS  -- Transactions of the publisher that are prepared here and wait for their outcome.
SELECT slot.slot_name,  -- Replication slot on the publisher.
       held.gid,  -- Name here; pg_prepared_xacts of the publisher has it under its own name and source_xid.
       pg_catalog.split_part(held.gid, '_', 3)::bigint AS source_xid,  -- Transaction id on the publisher.
       pg_catalog.split_part(held.gid, '_', 4)::pg_lsn AS end_lsn,  -- End of its PREPARE on the publisher.
       held.owner,  -- Role that prepared it here.
       held.prepared AS prepared_at,  -- When it was prepared here.
       pg_catalog.clock_timestamp() - held.prepared AS age
        -- How long ago; old ones hold locks and keep vacuum from its work.
  FROM {s}.slots AS slot
  JOIN pg_catalog.pg_prepared_xacts AS held
    ON held.database = pg_catalog.current_database()
   AND held.gid ~ ('^parapply_' || slot.slot_id || '_[0-9]{{1,10}}_[0-9A-F]{{1,8}}/[0-9A-F]{{1,8}}$')
   AND pg_catalog.has_table_privilege(held.owner, (SELECT proof.oid FROM pg_catalog.pg_class AS proof
         WHERE proof.relname = 'committed_prepared' AND proof.relnamespace =
               (SELECT own.relnamespace FROM pg_catalog.pg_class AS own WHERE own.oid = slot.tableoid)), 'INSERT');

CREATE TABLE {s}.copies (
        -- Tables whose rows are copied by parapply init --copy and parapply refresh, and those published since.
    slot_id int NOT NULL REFERENCES {s}.slots,  -- Slot.
    schema_name text NOT NULL,  -- Schema of the table.
    table_name text NOT NULL,  -- Table.
    state text NOT NULL CHECK (state IN ('waiting', 'copying', 'copied')),
        -- waiting: its changes are skipped. copying: now, or interrupted. copied: its changes are applied.
    start_lsn pg_lsn CHECK (start_lsn IS NOT NULL OR state = 'waiting'),
        -- The copy holds what committed on the publisher before this LSN; the stream adds the rest.
    rows bigint,  -- Rows copied; so far while it is copied, some of them not committed.
    size_bytes bigint,  -- Bytes copied, as COPY sends them; so far as rows.
    indexes text[] NOT NULL DEFAULT '{{}}',  -- Statements that make the indexes again that were dropped for the copy.
    is_seen bool NOT NULL DEFAULT false,  -- The daemon knows of the copy that is under way.
    started_at timestamptz,  -- When the copy began.
    finished_at timestamptz,  -- When it was complete.
    source_oid bigint,  -- The publisher's OID of the table, by which it is known after a rename.
    reason text NOT NULL DEFAULT '',
        -- Why a table waits that was published later, or not all the time; empty for all others.
    published_by text,  -- Marks of its publication at the last look: entries, partitioned tables, publications.
    PRIMARY KEY (slot_id, schema_name, table_name));
CREATE UNIQUE INDEX copies_source_oid ON {s}.copies (slot_id, source_oid);
CREATE TABLE {s}.copy_parts (
        -- Parts of large tables that are copied while the rest is on its way; gone when the table is complete.
    slot_id int NOT NULL REFERENCES {s}.slots,  -- Slot.
    source_oid bigint NOT NULL,  -- The publisher's OID of the table.
    leaf_schema text NOT NULL,
        -- Schema of the relation that holds the rows on the publisher: the table, or a partition.
    leaf_name text NOT NULL,  -- Its name.
    first_page bigint NOT NULL,  -- First page of the part.
    end_page bigint,  -- Page after its last; null: to the end, however long the relation becomes.
    lsn pg_lsn NOT NULL,  -- The rows are those that had committed on the publisher before this LSN.
    rows bigint NOT NULL,  -- Rows; of a table whose parts were brought forward only the sum counts.
    size_bytes bigint NOT NULL,  -- Bytes, as COPY sent them.
    fingerprint text NOT NULL,
        -- Fingerprint of the publisher's catalogue: if another, the table is copied from its start.
    PRIMARY KEY (slot_id, source_oid, leaf_schema, leaf_name, first_page));
-- Marks: what the publisher's catalogue held at some time, as source/late_tables.py says.
CREATE TABLE {s}.marks (
        -- The publisher's catalogue at some time after the slot was made: tables without a mark came later.
    slot_id int PRIMARY KEY REFERENCES {s}.slots,  -- Slot.
    marks text[] NOT NULL,  -- t: tables. a, r, n: entries of publications. e: partitioned tables below others.
    taken_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()  -- When.
);
CREATE TABLE {s}.snapshots (
        -- Requests for a snapshot that equals the publisher at one LSN; made by parapply snapshot, removed with it.
    request_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,  -- Number of the request.
    slot_id int NOT NULL REFERENCES {s}.slots,  -- Slot.
    client_pid int NOT NULL,  -- Server process here of the command that asks; the request ends with it.
    state text NOT NULL DEFAULT 'asked',
        -- asked, standing (all up to at_lsn is committed and nothing later), go, ready, taken, refused.
    lsn pg_lsn,  -- LSN of the publisher that is wanted; null: the earliest one.
    stands bool NOT NULL DEFAULT false,  -- Stand still and wait for the LSN, then go there.
    at_lsn pg_lsn,  -- LSN that the snapshot equals.
    snapshot_name text,  -- For SET TRANSACTION SNAPSHOT.
    pause_s double precision,  -- Seconds for which nothing later was applied.
    reason text NOT NULL DEFAULT '',  -- Why it was refused.
    requested_at timestamptz NOT NULL DEFAULT pg_catalog.now()  -- When.
);

-- One row for each conflict, however often it is met: (slot, transaction, change, type) names it.
CREATE TABLE {s}.conflicts (
        -- Changes that met other rows here than on the publisher, and what was done. The one table with row values.
    conflict_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,  -- Names it in `parapply conflicts`.
    slot_id int NOT NULL REFERENCES {s}.slots,  -- Slot.
    conflict_type text NOT NULL,  -- As PostgreSQL 18 names it, or skipped: a change of a transaction skipped by hand.
    schema_name text NOT NULL,  -- Schema of the table.
    table_name text NOT NULL,  -- Table.
    operation text NOT NULL,  -- Kind of the change: insert, update, delete or truncate.
    key jsonb,  -- Columns the row is found by, with their values as text; of a truncate the names of its tables.
    local_row jsonb,  -- Row of the target, as text by column; a list if there are several; null: none.
    remote_row jsonb,  -- Row of the publisher as far as it was sent, as text by column; of a delete the old row.
    is_complete bool NOT NULL,  -- remote_row has every published column; false: unchanged TOAST columns were not sent.
    constraints text[] NOT NULL,  -- Unique indexes in which local_row is in the way; all, not only the first.
    remote_lsn pg_lsn NOT NULL,  -- End LSN of the source transaction; of a large one still on its way its commit LSN.
    remote_xid bigint NOT NULL,  -- Source transaction.
    remote_commit_time timestamptz NOT NULL,  -- When it committed, by the publisher's clock.
    change_no int NOT NULL,  -- Number of the change in its transaction, from 1.
    local_commit_time timestamptz,  -- When local_row was last written; null: not known.
    local_origin text,  -- Replication origin that wrote local_row; empty: a session here; null: not known.
    policy text NOT NULL,  -- Policy in force.
    outcome text NOT NULL,  -- stopped, repaired (stopped once, applied since), skipped, kept_local or applied_remote.
    attempts int NOT NULL DEFAULT 1,  -- How often it was met.
    recorded_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),  -- When it was first met.
    replayed_at timestamptz,  -- When an operator applied remote_row by hand.
    UNIQUE (slot_id, remote_lsn, change_no, conflict_type));
CREATE TABLE {s}.skips (  -- Source transactions to skip, asked for with `parapply skip`.
    slot_id int NOT NULL REFERENCES {s}.slots,  -- Slot.
    lsn pg_lsn NOT NULL,  -- End LSN of the transaction.
    commit_lsn pg_lsn,  -- LSN of its commit record, where known: a large one is recognised by it.
    outcome text NOT NULL DEFAULT 'requested',
        -- requested, accepted by a daemon, skipped, or passed (it was applied, or none exists).
    remote_xid bigint,  -- The transaction, once skipped.
    requested_by text NOT NULL DEFAULT SESSION_USER,  -- Role that asked.
    requested_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),  -- When.
    resolved_at timestamptz,  -- When it was skipped or found to have passed.
    PRIMARY KEY (slot_id, lsn));
CREATE TABLE {s}.ddl (
        -- One row for each command of the publisher that came in the stream, written by the transaction that ran it.
    slot_id int NOT NULL REFERENCES {s}.slots,  -- Slot.
    commit_lsn pg_lsn NOT NULL,  -- Commit record of its transaction on the publisher.
    number bigint NOT NULL,  -- Number of its row in parapply.ddl_queue on the publisher; ddl.skip takes it.
    tag text NOT NULL,  -- Kind of the command.
    command text NOT NULL,  -- Its text, which may hold values; pg_monitor may not read it.
    source_role text NOT NULL,  -- Role that ran it on the publisher.
    outcome text NOT NULL CHECK (outcome IN ('applied', 'left_out', 'pending')),
        -- applied: it has run here. left_out: it has not. pending: it will, outside of a transaction.
    reason text NOT NULL DEFAULT '',  -- Why it was left out, or has not run yet.
    recorded_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),  -- When.
    settings jsonb NOT NULL DEFAULT '{{}}',
        -- Settings of the session that ran it on the publisher, as JSON: it runs with them.
    first_schema text NOT NULL DEFAULT '',  -- Where names without a schema went on the publisher.
    begun_at timestamptz,  -- When one that was pending began to run.
    PRIMARY KEY (slot_id, commit_lsn, number));

-- By the slot's name, because a migration's first steps come before there is a slot.
CREATE TABLE {s}.migrations (  -- Steps of parapply migrate, as far as they were begun.
    slot_name text NOT NULL,  -- Replication slot on the publisher; it may not be there yet.
    system_identifier text NOT NULL,  -- Cluster the slot belongs to.
    step text NOT NULL,  -- Name of the step, as parapply migrate shows it.
    state text NOT NULL CHECK (state IN ('running', 'failed', 'done')),
        -- running (now, or interrupted), failed, or done.
    done bigint NOT NULL DEFAULT 0,  -- Number of units that are done.
    total bigint NOT NULL DEFAULT 0,  -- Number of all units; 0: not known.
    unit text NOT NULL DEFAULT '',  -- Unit that is counted.
    detail text NOT NULL DEFAULT '',  -- The work done, or why it failed.
    options text NOT NULL DEFAULT '',  -- Options of the first step, which all later steps keep to, as JSON.
    started_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),  -- When the step was last begun.
    finished_at timestamptz,  -- When it was done or had failed.
    size_bytes bigint NOT NULL DEFAULT 0,  -- Bytes of it that are done, where bytes are counted besides.
    left_s double precision,  -- Seconds that it will still take, about; NULL: not known.
    PRIMARY KEY (slot_name, system_identifier, step));
CREATE TABLE {s}.migration_items (
        -- Statements that parapply migrate has run after the rows, each written in its transaction.
    slot_name text NOT NULL,  -- Replication slot on the publisher.
    system_identifier text NOT NULL,  -- Cluster the slot belongs to.
    item text NOT NULL,  -- Names the statement: a digest of its text.
    finished_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),  -- When it was done.
    PRIMARY KEY (slot_name, system_identifier, item));
CREATE TABLE {s}.cutovers (
        -- One row for each slot whose target takes over, or has taken over; written by parapply cutover.
    slot_id int PRIMARY KEY REFERENCES {s}.slots,  -- Slot.
    step text NOT NULL,
        -- Under way: preparing, fencing, draining, comparing, sequences, stopping, turning, opening, ending; or done,
        -- or undoing. From stopping on no daemon applies the slot.
    reverse_slot text NOT NULL,  -- Replication slot on this server, for the way back.
    made_slot bool NOT NULL,  -- Made by the cut-over; one that existed before stays when it is undone.
    made_publication bool NOT NULL,  -- The same for its publication.
    fence text NOT NULL,
        -- Way of keeping writers from the source: database (its default_transaction_read_only) or command.
    opens text NOT NULL,  -- Way of keeping writers from this database until it opens: the same, or empty.
    fence_lsn pg_lsn,  -- LSN of the source, after the end of its last writer.
    takeover_lsn pg_lsn,  -- LSN of this server: transactions that commit after it are sent the way back.
    begun_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),  -- When.
    poolers jsonb NOT NULL DEFAULT '[]',
        -- Poolers that are paused, as JSON: console without password, database, file, and where it led.
    commands text[] NOT NULL DEFAULT '{{}}',
        -- Commands of the operator's that have run, in their order, and were not taken back.
    command text NOT NULL DEFAULT '',  -- The one that runs, or was interrupted; or empty.
    paused_at timestamptz,  -- When the poolers were paused; NULL without any.
    fenced_at timestamptz,
        -- When writers were kept from the source; NULL before, and once they are let in again there.
    opened_at timestamptz,  -- When writers could be let in here.
    step_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()  -- When that step began.
);

CREATE VIEW {s}.progress AS  -- How far each slot is applied here. Start reading here.
SELECT slot.slot_name,  -- Replication slot on the publisher.
       low.lowest_lsn AS lowest_remote_lsn,
        -- Every source transaction that ends here or before is committed and visible here.
       GREATEST(slot.highest_lsn, done.highest_lsn) AS highest_remote_lsn,
        -- End of the newest source transaction committed here.
       ARRAY(SELECT DISTINCT member.end_lsn
               FROM {s}.applied AS batch,
                    pg_catalog.unnest(COALESCE(batch.members, ARRAY[batch.first_lsn, batch.end_lsn])) AS member(end_lsn)
              WHERE batch.slot_id = slot.slot_id AND member.end_lsn > low.lowest_lsn
              ORDER BY 1) AS list_remote_lsn,
        -- Ends of source transactions committed above the lowest; of an unbroken run just two.
       (SELECT pg_catalog.count(*) FROM {s}.committed_prepared AS proof
         WHERE proof.slot_id = slot.slot_id)::int AS in_doubt,
        -- Prepared transactions that are committed here, and whose COMMIT PREPARED is not recorded yet.
       slot.confirmed_flush_lsn,  -- LSN last reported to the publisher as durable here.
       GREATEST(slot.source_lsn - low.lowest_lsn, 0)::bigint AS lag_bytes,
        -- WAL the publisher has written beyond lowest_remote_lsn, as last heard.
       slot.lag_s,  -- Age of the oldest source transaction or WAL position not applied here yet; 0 when all is.
       slot.commit_order,  -- preserve or relaxed.
       slot.workers,  -- Number of worker connections.
       slot.state,  -- State of the daemon.
       slot.reason,  -- Why it is in that state, if it is not plain.
       slot.updated_at,  -- When the daemon last wrote; old: none runs, or it is reconnecting or retrying, as state says.
       slot.two_phase,  -- disabled, pending or enabled: whether PREPARE is applied as such.
       slot.reading,  -- How the slot is read, and why so: stream, or ranges (of WAL, with much to catch up).
       slot.shown_every_s  -- Seconds until a daemon that lives writes again; more while nothing comes.
  FROM {s}.slots AS slot
 CROSS JOIN LATERAL (SELECT pg_catalog.max(a.low_lsn) AS low_lsn, pg_catalog.max(a.end_lsn) AS highest_lsn
                       FROM {s}.applied AS a WHERE a.slot_id = slot.slot_id) AS done
 CROSS JOIN LATERAL (SELECT GREATEST(slot.lowest_lsn, done.low_lsn) AS lowest_lsn) AS low;

-- Each statement of a volatile function sees what has committed since, under READ COMMITTED.
CREATE FUNCTION {s}.wait_for(lsn pg_lsn, timeout_s double precision DEFAULT 30, slot text DEFAULT NULL)
RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, {s}, pg_temp AS $body$
DECLARE
    deadline timestamptz := clock_timestamp() + timeout_s * interval '1 second';
    called timestamptz := clock_timestamp() + interval '1 second';
    reached pg_lsn;
    n_slots bigint;
BEGIN
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE EXCEPTION 'wait_for sees no progress under %', current_setting('transaction_isolation')
            USING ERRCODE = 'invalid_transaction_state', HINT = 'call it before the transaction that reads';
    END IF;
    LOOP
        SELECT count(*), min(p.lowest_remote_lsn) INTO n_slots, reached
          FROM progress AS p WHERE slot IS NULL OR p.slot_name = slot;
        IF n_slots <> 1 THEN
            RAISE EXCEPTION 'wait_for needs one slot, there are %', n_slots
                USING ERRCODE = 'undefined_object', HINT = 'name it: wait_for(lsn, timeout_s, slot)';
        END IF;
        -- As plan/watermark.py: nothing ends within the header of a page that is not written yet.
        IF lsn - reached <= (CASE (reached - '0/0') % 1048576 WHEN 0 THEN 40 ELSE 24 END) THEN
            RETURN true;
        END IF;
        -- Heard only when this transaction ends: who waits again soon does not find the daemon at rest.
        IF clock_timestamp() >= called AND NOT pg_is_in_recovery() AND has_table_privilege('slots', 'SELECT') THEN
            PERFORM pg_notify('parapply_' || s.slot_id, '') FROM slots AS s WHERE slot IS NULL OR s.slot_name = slot;
            called := 'infinity';
        END IF;
        IF clock_timestamp() >= deadline THEN
            RETURN false;
        END IF;
        PERFORM pg_sleep(0.02);
    END LOOP;
END$body$;
COMMENT ON FUNCTION {s}.wait_for IS 'Read your writes: true as soon as the target has everything up to an LSN of the '
    'publisher, false after timeout_s. The slot may be left out if there is only one.';

GRANT USAGE ON SCHEMA {s} TO pg_monitor;
-- By name, because a queue of commands may be in the schema. Commands, and rows, hold values, which are readable only by
-- roles that are granted them.
GRANT SELECT ON {s}.schema_version, {s}.slots, {s}.applied, {s}.workers, {s}.tables, {s}.committed_prepared,
                {s}.undecided, {s}.prepared, {s}.copies, {s}.copy_parts, {s}.marks, {s}.snapshots, {s}.skips,
                {s}.migrations, {s}.migration_items, {s}.cutovers, {s}.progress TO pg_monitor;
GRANT SELECT (conflict_id, slot_id, conflict_type, schema_name, table_name, operation, is_complete, constraints,
              remote_lsn, remote_xid, remote_commit_time, change_no, local_commit_time, local_origin, policy, outcome,
              attempts, recorded_at, replayed_at) ON {s}.conflicts TO pg_monitor;
GRANT SELECT (slot_id, commit_lsn, number, tag, source_role, outcome, reason, recorded_at, begun_at)
    ON {s}.ddl TO pg_monitor;

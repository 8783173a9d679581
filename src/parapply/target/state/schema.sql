-- The whole state schema, version 24. schema.py fills in its name, and comments.py has the comments on its objects.
CREATE SCHEMA IF NOT EXISTS {s};
CREATE TABLE {s}.schema_version (
    version int NOT NULL,
    created_at timestamptz NOT NULL DEFAULT pg_catalog.now());
CREATE UNIQUE INDEX schema_version_one_row ON {s}.schema_version ((true));
-- It has no key, and a publication FOR ALL TABLES of a database that was a source until now also has it.
ALTER TABLE {s}.schema_version REPLICA IDENTITY FULL;

CREATE TABLE {s}.slots (
    slot_id int GENERATED ALWAYS AS IDENTITY (START WITH {start}) PRIMARY KEY,
    slot_name text NOT NULL,
    system_identifier text NOT NULL,
    timeline int NOT NULL,
    database_name text NOT NULL,
    publications text[] NOT NULL,
    begin_lsn pg_lsn NOT NULL,
    lowest_lsn pg_lsn NOT NULL,
    highest_lsn pg_lsn NOT NULL,
    confirmed_flush_lsn pg_lsn,
    source_lsn pg_lsn,
    last_commit_time timestamptz,
    lag_s double precision,
    commit_order text NOT NULL,
    workers int NOT NULL,
    state text NOT NULL,
    reason text NOT NULL DEFAULT '',
    host text NOT NULL DEFAULT '',
    pid int,
    version text NOT NULL DEFAULT '',
    started_at timestamptz,
    updated_at timestamptz NOT NULL DEFAULT pg_catalog.now(),
    shown_every_s double precision NOT NULL DEFAULT 1,
    two_phase text NOT NULL DEFAULT 'disabled',
    copies_only bool NOT NULL DEFAULT false,
    reading text NOT NULL DEFAULT '',
    limits jsonb,  -- as the daemon sees them, for people
    source_started_at timestamptz,
    heal_lsn pg_lsn,
    healed_at timestamptz,
    constants_in jsonb NOT NULL DEFAULT '{{}}',
    lacks_origins bool NOT NULL DEFAULT false,
    n_forgotten bigint NOT NULL DEFAULT 0,
    UNIQUE (slot_name, system_identifier)
) WITH (fillfactor = 50);
CREATE TABLE {s}.applied (
    slot_id int NOT NULL REFERENCES {s}.slots,
    end_lsn pg_lsn NOT NULL,
    first_lsn pg_lsn NOT NULL,
    members pg_lsn[],
    low_lsn pg_lsn NOT NULL,
    commit_time timestamptz NOT NULL,
    n_transactions int NOT NULL,
    PRIMARY KEY (slot_id, end_lsn));
CREATE TABLE {s}.workers (
    slot_id int NOT NULL REFERENCES {s}.slots,
    worker int NOT NULL,
    pid int,
    state text NOT NULL,
    batch_seq bigint,
    end_lsn pg_lsn,
    waits_for text,
    since timestamptz,
    transactions bigint NOT NULL,
    changes bigint NOT NULL,
    PRIMARY KEY (slot_id, worker)
) WITH (fillfactor = 50);
CREATE TABLE {s}.tables (
    slot_id int NOT NULL REFERENCES {s}.slots,
    schema_name text NOT NULL,
    table_name text NOT NULL,
    lane text NOT NULL,
    is_table_exclusive bool NOT NULL,
    reason text NOT NULL,
    key_columns text[] NOT NULL,
    retries bigint NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT pg_catalog.now(),
    transactions bigint NOT NULL DEFAULT 0,
    inserts bigint NOT NULL DEFAULT 0,
    updates bigint NOT NULL DEFAULT 0,
    deletes bigint NOT NULL DEFAULT 0,
    truncates bigint NOT NULL DEFAULT 0,
    waits bigint NOT NULL DEFAULT 0,
    wait_s double precision NOT NULL DEFAULT 0,
    waits_mostly_for text NOT NULL DEFAULT '',
    counted_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    PRIMARY KEY (slot_id, schema_name, table_name));

-- A row of committed_prepared is written inside the prepared transaction, so that its visibility proves the commit
-- (T-57); it stays until the commit is recorded. A row of undecided is written once the transaction is prepared: a
-- transaction that has one is prepared or was lost, while a COMMIT PREPARED of an unknown transaction belongs to one
-- without changes (T-58).
CREATE TABLE {s}.committed_prepared (
    slot_id int NOT NULL REFERENCES {s}.slots,
    gid text NOT NULL,
    PRIMARY KEY (slot_id, gid));
CREATE TABLE {s}.undecided (
    slot_id int NOT NULL REFERENCES {s}.slots,
    gid text NOT NULL,
    PRIMARY KEY (slot_id, gid));
-- Transactions that PostgreSQL itself holds prepared; our names give their slot and their end (T-56).
CREATE VIEW {s}.prepared AS
SELECT slot.slot_name,
       held.gid,
       pg_catalog.split_part(held.gid, '_', 3)::bigint AS source_xid,
       pg_catalog.split_part(held.gid, '_', 4)::pg_lsn AS end_lsn,
       held.owner,
       held.prepared AS prepared_at,
       pg_catalog.clock_timestamp() - held.prepared AS age
  FROM {s}.slots AS slot
  JOIN pg_catalog.pg_prepared_xacts AS held
    ON held.database = pg_catalog.current_database()
   AND held.gid ~ ('^parapply_' || slot.slot_id || '_[0-9]{{1,10}}_[0-9A-F]{{1,8}}/[0-9A-F]{{1,8}}$')
   -- Any role may prepare under any name.
   AND pg_catalog.has_table_privilege(held.owner, (SELECT proof.oid FROM pg_catalog.pg_class AS proof
         WHERE proof.relname = 'committed_prepared' AND proof.relnamespace =
               (SELECT own.relnamespace FROM pg_catalog.pg_class AS own WHERE own.oid = slot.tableoid)), 'INSERT');

CREATE TABLE {s}.copies (
    slot_id int NOT NULL REFERENCES {s}.slots,
    schema_name text NOT NULL,
    table_name text NOT NULL,
    state text NOT NULL CHECK (state IN ('waiting', 'copying', 'copied')),
    start_lsn pg_lsn CHECK (start_lsn IS NOT NULL OR state = 'waiting'),
    rows bigint,
    size_bytes bigint,
    indexes text[] NOT NULL DEFAULT '{{}}',
    is_seen bool NOT NULL DEFAULT false,
    started_at timestamptz,
    finished_at timestamptz,
    source_oid bigint,
    reason text NOT NULL DEFAULT '',
    published_by text,  -- marks of the last look, as source/publishing.py says
    PRIMARY KEY (slot_id, schema_name, table_name));
CREATE UNIQUE INDEX copies_source_oid ON {s}.copies (slot_id, source_oid);
CREATE TABLE {s}.copy_parts (
    slot_id int NOT NULL REFERENCES {s}.slots,
    source_oid bigint NOT NULL,
    leaf_schema text NOT NULL,
    leaf_name text NOT NULL,
    first_page bigint NOT NULL,
    end_page bigint,
    lsn pg_lsn NOT NULL,
    rows bigint NOT NULL,
    size_bytes bigint NOT NULL,
    fingerprint text NOT NULL,
    PRIMARY KEY (slot_id, source_oid, leaf_schema, leaf_name, first_page));
-- Marks: what the publisher's catalogue held at some time, as source/late_tables.py says.
CREATE TABLE {s}.marks (
    slot_id int PRIMARY KEY REFERENCES {s}.slots,
    marks text[] NOT NULL,
    taken_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp());
CREATE TABLE {s}.snapshots (
    request_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    slot_id int NOT NULL REFERENCES {s}.slots,
    client_pid int NOT NULL,
    state text NOT NULL DEFAULT 'asked',
    lsn pg_lsn,
    stands bool NOT NULL DEFAULT false,
    at_lsn pg_lsn,
    snapshot_name text,
    pause_s double precision,
    reason text NOT NULL DEFAULT '',
    requested_at timestamptz NOT NULL DEFAULT pg_catalog.now());

-- One row for each conflict, however often it is met: (slot, transaction, change, type) names it.
CREATE TABLE {s}.conflicts (
    conflict_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    slot_id int NOT NULL REFERENCES {s}.slots,
    conflict_type text NOT NULL,
    schema_name text NOT NULL,
    table_name text NOT NULL,
    operation text NOT NULL,
    key jsonb,
    local_row jsonb,
    remote_row jsonb,
    is_complete bool NOT NULL,
    constraints text[] NOT NULL,
    remote_lsn pg_lsn NOT NULL,
    remote_xid bigint NOT NULL,
    remote_commit_time timestamptz NOT NULL,
    change_no int NOT NULL,
    local_commit_time timestamptz,
    local_origin text,
    policy text NOT NULL,
    outcome text NOT NULL,
    attempts int NOT NULL DEFAULT 1,
    recorded_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    replayed_at timestamptz,
    UNIQUE (slot_id, remote_lsn, change_no, conflict_type));
CREATE TABLE {s}.skips (
    slot_id int NOT NULL REFERENCES {s}.slots,
    lsn pg_lsn NOT NULL,
    commit_lsn pg_lsn,
    outcome text NOT NULL DEFAULT 'requested',
    remote_xid bigint,
    requested_by text NOT NULL DEFAULT SESSION_USER,
    requested_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    resolved_at timestamptz,
    PRIMARY KEY (slot_id, lsn));
CREATE TABLE {s}.ddl (
    slot_id int NOT NULL REFERENCES {s}.slots,
    commit_lsn pg_lsn NOT NULL,
    number bigint NOT NULL,
    tag text NOT NULL,
    command text NOT NULL,
    source_role text NOT NULL,
    outcome text NOT NULL CHECK (outcome IN ('applied', 'left_out', 'pending')),
    reason text NOT NULL DEFAULT '',
    recorded_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    settings jsonb NOT NULL DEFAULT '{{}}',
    first_schema text NOT NULL DEFAULT '',
    begun_at timestamptz,
    PRIMARY KEY (slot_id, commit_lsn, number));

-- By the slot's name, because a migration's first steps come before there is a slot.
CREATE TABLE {s}.migrations (
    slot_name text NOT NULL,
    system_identifier text NOT NULL,
    step text NOT NULL,
    state text NOT NULL CHECK (state IN ('running', 'failed', 'done')),
    done bigint NOT NULL DEFAULT 0,
    total bigint NOT NULL DEFAULT 0,
    unit text NOT NULL DEFAULT '',
    detail text NOT NULL DEFAULT '',
    options text NOT NULL DEFAULT '',
    started_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    finished_at timestamptz,
    size_bytes bigint NOT NULL DEFAULT 0,
    left_s double precision,
    PRIMARY KEY (slot_name, system_identifier, step));
CREATE TABLE {s}.migration_items (
    slot_name text NOT NULL,
    system_identifier text NOT NULL,
    item text NOT NULL,
    finished_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    PRIMARY KEY (slot_name, system_identifier, item));
CREATE TABLE {s}.cutovers (
    slot_id int PRIMARY KEY REFERENCES {s}.slots,
    step text NOT NULL,
    reverse_slot text NOT NULL,
    made_slot bool NOT NULL,
    made_publication bool NOT NULL,
    fence text NOT NULL,
    opens text NOT NULL,
    fence_lsn pg_lsn,
    takeover_lsn pg_lsn,
    begun_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    poolers jsonb NOT NULL DEFAULT '[]',
    commands text[] NOT NULL DEFAULT '{{}}',
    command text NOT NULL DEFAULT '',
    paused_at timestamptz,
    fenced_at timestamptz,
    opened_at timestamptz,
    step_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp());

CREATE VIEW {s}.progress AS
SELECT slot.slot_name,
       low.lowest_lsn AS lowest_remote_lsn,
       GREATEST(slot.highest_lsn, done.highest_lsn) AS highest_remote_lsn,
       ARRAY(SELECT DISTINCT member.end_lsn
               FROM {s}.applied AS batch,
                    pg_catalog.unnest(COALESCE(batch.members, ARRAY[batch.first_lsn, batch.end_lsn])) AS member(end_lsn)
              WHERE batch.slot_id = slot.slot_id AND member.end_lsn > low.lowest_lsn
              ORDER BY 1) AS list_remote_lsn,
       (SELECT pg_catalog.count(*) FROM {s}.committed_prepared AS proof
         WHERE proof.slot_id = slot.slot_id)::int AS in_doubt,
       slot.confirmed_flush_lsn,
       GREATEST(slot.source_lsn - low.lowest_lsn, 0)::bigint AS lag_bytes,
       slot.lag_s,
       slot.commit_order,
       slot.workers,
       slot.state,
       slot.reason,
       slot.updated_at,
       slot.two_phase,
       slot.reading,
       slot.shown_every_s
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

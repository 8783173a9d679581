"""The state schema's versions after the first: what each one adds. Text, no logic.

A new schema is made as version 1 and then taken through all of them, as an old one is; so both are the same. A step is
never changed once it was released; what it made is changed by the next one.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from parapply.target.state.commands import COMMANDS, LATER_COMMANDS
from parapply.target.state.conflict_tables import CONFLICTS


class Upgrade(NamedTuple):
    """What one version adds, as SQL with the schema's name as {s}."""

    version: int
    text: str
    #: Statements that take it away again, before everything older goes.
    drop: str


#: What people read, without how many commits are in doubt.
_PROGRESS: Final = """
CREATE OR REPLACE VIEW {s}.progress AS
SELECT slot.slot_name,
       low.lowest_lsn AS lowest_remote_lsn,
       GREATEST(slot.highest_lsn, done.highest_lsn) AS highest_remote_lsn,
       ARRAY(SELECT DISTINCT member.end_lsn
               FROM {s}.applied AS batch,
                    pg_catalog.unnest(COALESCE(batch.members, ARRAY[batch.first_lsn, batch.end_lsn])) AS member(end_lsn)
              WHERE batch.slot_id = slot.slot_id AND member.end_lsn > low.lowest_lsn
              ORDER BY 1) AS list_remote_lsn,
       IN_DOUBT AS in_doubt,
       slot.confirmed_flush_lsn,
       GREATEST(slot.source_lsn - low.lowest_lsn, 0)::bigint AS lag_bytes,
       slot.lag_s,
       slot.commit_order,
       slot.workers,
       slot.state,
       slot.reason,
       slot.updated_at,
       slot.two_phase
  FROM {s}.slots AS slot
 CROSS JOIN LATERAL (SELECT pg_catalog.max(a.low_lsn) AS low_lsn, pg_catalog.max(a.end_lsn) AS highest_lsn
                       FROM {s}.applied AS a WHERE a.slot_id = slot.slot_id) AS done
 CROSS JOIN LATERAL (SELECT GREATEST(slot.lowest_lsn, done.low_lsn) AS lowest_lsn) AS low;
"""

_TWO_PHASE = Upgrade(
    2,
    # A row of committed_prepared is written inside the prepared transaction: that it is visible proves that this was
    # committed (T-57). One of undecided is written once it is prepared: what has one is here or was lost, while a
    # COMMIT PREPARED of an unknown transaction belongs to one without changes (T-58). The view is of what PostgreSQL
    # itself holds prepared; our names say whose it is, and where it ends (T-56).
    """
ALTER TABLE {s}.slots ADD COLUMN two_phase text NOT NULL DEFAULT 'disabled';
CREATE TABLE {s}.committed_prepared (
    slot_id int NOT NULL REFERENCES {s}.slots,
    gid text NOT NULL,
    PRIMARY KEY (slot_id, gid));
CREATE TABLE {s}.undecided (
    slot_id int NOT NULL REFERENCES {s}.slots,
    gid text NOT NULL,
    PRIMARY KEY (slot_id, gid));
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
   AND held.gid ~ ('^parapply_' || slot.slot_id || '_[0-9]+_[0-9A-F]+/[0-9A-F]+$');
"""
    + _PROGRESS.replace("IN_DOUBT", "0"),
    "DROP VIEW {s}.prepared; DROP TABLE {s}.undecided; DROP TABLE {s}.committed_prepared;",
)

_COPIES = Upgrade(
    3,
    """
ALTER TABLE {s}.slots ADD COLUMN copies_only bool NOT NULL DEFAULT false;
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
    PRIMARY KEY (slot_id, schema_name, table_name));
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
""",
    "DROP TABLE {s}.snapshots, {s}.copies;",
)

_CONFLICTS = Upgrade(4, CONFLICTS, "DROP TABLE {s}.conflicts, {s}.skips;")

_COUNTS = Upgrade(
    5,
    """
ALTER TABLE {s}.tables
    ADD COLUMN transactions bigint NOT NULL DEFAULT 0,
    ADD COLUMN inserts bigint NOT NULL DEFAULT 0,
    ADD COLUMN updates bigint NOT NULL DEFAULT 0,
    ADD COLUMN deletes bigint NOT NULL DEFAULT 0,
    ADD COLUMN truncates bigint NOT NULL DEFAULT 0,
    ADD COLUMN waits bigint NOT NULL DEFAULT 0,
    ADD COLUMN wait_s double precision NOT NULL DEFAULT 0,
    ADD COLUMN waits_mostly_for text NOT NULL DEFAULT '',
    ADD COLUMN counted_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp();
""",
    "",
)

_LATE_TABLES = Upgrade(
    6,
    # Marks: what the publisher's catalogue held at some time, as `source/late_tables.py` says.
    """
ALTER TABLE {s}.copies
    ADD COLUMN source_oid bigint,
    ADD COLUMN reason text NOT NULL DEFAULT '';
CREATE UNIQUE INDEX copies_source_oid ON {s}.copies (slot_id, source_oid);
CREATE TABLE {s}.marks (
    slot_id int PRIMARY KEY REFERENCES {s}.slots,
    marks text[] NOT NULL,
    taken_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp());
""",
    "DROP TABLE {s}.marks;",
)

#: Nothing new but the comments: those of each version are written with it.
_COMMENTS = Upgrade(7, "", "")

# The proof of a commit stays until the commit is recorded.
_COMMITS_IN_DOUBT: Final = (
    "(SELECT pg_catalog.count(*) FROM {s}.committed_prepared AS proof WHERE proof.slot_id = slot.slot_id)::int"
)
_IN_DOUBT = Upgrade(8, _PROGRESS.replace("IN_DOUBT", _COMMITS_IN_DOUBT), "DROP VIEW {s}.progress;")

_READING = Upgrade(
    9,
    "ALTER TABLE {s}.slots ADD COLUMN reading text NOT NULL DEFAULT '';"
    + _PROGRESS.replace("IN_DOUBT", _COMMITS_IN_DOUBT).replace(
        "slot.two_phase\n", "slot.two_phase,\n       slot.reading\n"
    ),
    "",
)

# By the slot's name, because a migration's first steps come before there is a slot.
_MIGRATIONS = Upgrade(
    10,
    """
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
    PRIMARY KEY (slot_name, system_identifier, step));
CREATE TABLE {s}.migration_items (
    slot_name text NOT NULL,
    system_identifier text NOT NULL,
    item text NOT NULL,
    finished_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    PRIMARY KEY (slot_name, system_identifier, item));
""",
    "DROP TABLE {s}.migration_items, {s}.migrations;",
)

#: What limits now, as the daemon sees it: JSON, for people.
_LIMITS = Upgrade(11, "ALTER TABLE {s}.slots ADD COLUMN limits jsonb;", "")

_COMMANDS = Upgrade(12, COMMANDS, "DROP TABLE {s}.ddl;")

_COPY_PARTS = Upgrade(
    13,
    """
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
""",
    "DROP TABLE {s}.copy_parts;",
)

_CUTOVERS = Upgrade(
    14,
    """
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
    fenced_at timestamptz,
    opened_at timestamptz);
""",
    "DROP TABLE {s}.cutovers;",
)

_LATER_COMMANDS = Upgrade(15, LATER_COMMANDS, "")

#: How far both are while they run.
_MOVES = Upgrade(
    16,
    """
ALTER TABLE {s}.migrations
    ADD COLUMN size_bytes bigint NOT NULL DEFAULT 0,
    ADD COLUMN left_s double precision;
ALTER TABLE {s}.cutovers
    ADD COLUMN step_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp();
""",
    "",
)

#: Marks of how each table was published at the last look, as `source/publishing.py` says.
_PUBLISHED = Upgrade(17, "ALTER TABLE {s}.copies ADD COLUMN published_by text;", "")

#: In the order of their versions, without gaps.
UPGRADES: Final = (
    _TWO_PHASE, _COPIES, _CONFLICTS, _COUNTS, _LATE_TABLES, _COMMENTS, _IN_DOUBT, _READING, _MIGRATIONS, _LIMITS,
    _COMMANDS, _COPY_PARTS, _CUTOVERS, _LATER_COMMANDS, _MOVES,
    _PUBLISHED,
)  # fmt: skip

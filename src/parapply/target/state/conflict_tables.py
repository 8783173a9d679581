"""The part of the state schema about conflicts: their history, and the transactions to skip. Text only.

What it makes is a step of `state_upgrades`.
"""

from __future__ import annotations

from typing import Final

#: One row for each conflict, however often it is met: (slot, transaction, change, type) names it.
CONFLICTS: Final = """
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
"""

#: What monitoring roles may read of the history.
CONFLICT_COLUMNS_WITHOUT_VALUES: Final = (
    "conflict_id",
    "slot_id",
    "conflict_type",
    "schema_name",
    "table_name",
    "operation",
    "is_complete",
    "constraints",
    "remote_lsn",
    "remote_xid",
    "remote_commit_time",
    "change_no",
    "local_commit_time",
    "local_origin",
    "policy",
    "outcome",
    "attempts",
    "recorded_at",
    "replayed_at",
)

"""One finding, and the closed list of their codes. Pure data.

A code names the kind of a finding; `parapply.check.kinds` has its severity, the reason why it matters and the advice.
A finding adds the object, the fact seen there, and the exact SQL or setting if one exists.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Severity(StrEnum):
    """The effect of a finding on `init`, the copy and the stream; worst first."""

    REFUSED = "refused"  # one of them would fail
    WARNING = "warning"  # one of them would hurt, or would fail with certain rows
    NOTE = "note"  # worth knowing


class End(StrEnum):
    """Where something was found."""

    SOURCE = "source"
    TARGET = "target"
    DAEMON = "daemon"  # on the machine that runs this command


class Code(StrEnum):
    """Code of a finding; `kinds` has the reason and the remedy of each."""

    # The publisher as a server.
    WAL_LEVEL = "wal_level"
    SOURCE_STANDBY = "source_standby"
    STANDBY_FEEDBACK = "standby_feedback"
    SOURCE_VERSION = "source_version"
    STREAM_OPTIONS = "stream_options"
    SOURCE_REPLICATION = "source_replication"
    SOURCE_SELECT = "source_select"
    SOURCE_CONNECTIONS = "source_connections"
    SLOTS_EXHAUSTED = "slots_exhausted"
    WAL_SENDERS_EXHAUSTED = "wal_senders_exhausted"
    SLOT_REFUSED = "slot_refused"
    SLOT_IN_USE = "slot_in_use"
    SLOT_ADOPTED = "slot_adopted"
    OPEN_TRANSACTION = "open_transaction"
    WAL_SENDER_TIMEOUT = "wal_sender_timeout"
    IDLE_SLOT_TIMEOUT = "idle_slot_timeout"
    WAL_RETENTION = "wal_retention"
    DECODING_SPILL = "decoding_spill"
    # The publications.
    PUBLICATION_MISSING = "publication_missing"
    PUBLICATION_REFUSED = "publication_refused"
    PUBLICATION_EMPTY = "publication_empty"
    PUBLICATION_OPERATIONS = "publication_operations"
    STATE_PUBLISHED = "state_published"
    DDL_QUEUE = "ddl_queue"
    REPLICA_IDENTITY = "replica_identity"
    FILTER_OUTSIDE_IDENTITY = "filter_outside_identity"
    COLUMNS_OUTSIDE_IDENTITY = "columns_outside_identity"
    NOT_REPLICATED = "not_replicated"
    TABLE_UNPUBLISHED = "table_unpublished"
    SEQUENCES = "sequences"
    SEQUENCES_PUBLISHED = "sequences_published"
    LARGE_OBJECTS = "large_objects"
    # The target as a server.
    TARGET_READ_ONLY = "target_read_only"
    TARGET_POOLER = "target_pooler"
    TARGET_VERSION = "target_version"
    REPLICATION_ROLE = "replication_role"
    STATE_SCHEMA = "state_schema"
    TWO_PHASE = "two_phase"
    TWO_PHASE_FEWER = "two_phase_fewer"
    HEAL_SELECT = "heal_select"
    HEAL_TEMPORARY = "heal_temporary"
    TARGET_CONNECTIONS = "target_connections"
    ORIGINS_NEEDED = "origins_needed"
    ORIGINS_MISSING = "origins_missing"
    ORIGINS_EXHAUSTED = "origins_exhausted"
    COMMIT_TIMESTAMPS = "commit_timestamps"
    ENCODING = "encoding"
    COLLATION_VERSION = "collation_version"
    LOCALE = "locale"
    EXTENSION_MISSING = "extension_missing"
    EXTENSION_VERSION = "extension_version"
    # Tables of the target.
    TABLE_MISSING = "table_missing"
    TABLE_REFUSED = "table_refused"
    COLUMNS_REFUSED = "columns_refused"
    OWNER_CODE = "owner_code"
    UPDATES_REFUSED = "updates_refused"
    TABLE_ACCESS = "table_access"
    COLUMN_UNFILLED = "column_unfilled"
    ROWS_THERE = "rows_there"
    ROWS_EMPTIED = "rows_emptied"
    TYPE_DIFFERS = "type_differs"
    TYPE_WIDER = "type_wider"
    ENUM_LABELS = "enum_labels"
    COLLATION_DIFFERS = "collation_differs"
    GENERATED_ON_SOURCE = "generated_on_source"
    NOT_NULL = "not_null"
    CONSTRAINT = "constraint"
    UNIQUE = "unique"
    FOREIGN_KEY = "foreign_key"
    FOREIGN_KEY_UNCHECKED = "foreign_key_unchecked"
    CODE_RUNS = "code_runs"
    NO_KEY = "no_key"
    NOT_SET_BASED = "not_set_based"
    IDENTITY_ALWAYS = "identity_always"
    # The configuration, and the machine of the daemon.
    SETTING_WITHOUT_TABLE = "setting_without_table"
    TABLE_SHARED = "table_shared"
    SCHEMA_ONLY = "schema_only"
    COLUMN_REPLACED = "column_replaced"
    REPLACED_UNKNOWN = "replaced_unknown"
    REPLACE_REFUSED = "replace_refused"
    SCHEMA_ONLY_UNKNOWN = "schema_only_unknown"
    SPILL_DIR = "spill_dir"
    SPILL_SPACE = "spill_space"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was found."""

    code: Code
    found: str  # the fact, in one sentence without its stop; names are quoted and have their schema
    object: str = ""  # quoted name of the table, type or role; empty if it is about the server
    fix: str = ""  # SQL or setting for exactly this one; empty where the kind's advice says all

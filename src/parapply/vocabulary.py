"""Words that state tables, metrics, apply log and screens share: each set is closed, and no word ever changes."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Self


class WorkerState(StrEnum):
    """The activity of a worker."""

    IDLE = "idle"
    EXECUTING = "executing"
    STREAMING = "streaming"  # waits for more of a transaction in progress
    WAITING = "waiting"  # for its turn
    COMMITTING = "committing"
    RETRYING = "retrying"  # at the head, in source order


class Mode(StrEnum):
    """How a batch was applied."""

    SET = "set"
    ROWS = "rows"  # repeated at the head, and a part of it row by row
    LARGE = "large"  # in pieces, as they came
    STREAMED = "streamed"  # in pieces, followed while it was in progress
    SPILLED = "spilled"  # in pieces, at its commit
    OUTCOME = "outcome"  # only what became of a prepared transaction, or nothing of a PREPARE that was rolled back


class Reading(StrEnum):
    """How changes are read from the slot."""

    STREAM = "stream"
    RANGES = "ranges"  # of WAL, by query, while there is much to catch up


class RetryReason(StrEnum):
    """Why a batch was repeated, where it was not for an error of the server, which is shown by its SQLSTATE."""

    ROW_COUNT = "row count"
    SUSPECT = "suspect"
    SKIP = "skip"
    REFUSED = "refused"
    CODE = "code"  # the target has code, or another table, that its plans did not know
    YIELD = "yield"  # it had to roll back for an earlier batch


class WaitKind(StrEnum):
    """The common object for which one of two transactions, or batches, waits for the other."""

    KEY = "key"
    UNIQUE = "unique"
    FOREIGN_KEY = "foreign key"
    TABLE = "table"
    BARRIER = "barrier"


class DaemonState(StrEnum):
    """The state of the daemon as a whole."""

    STARTING = "starting"
    RUNNING = "running"
    RETRYING = "retrying"  # the target refuses, or a batch fails again and again
    RECONNECTING = "reconnecting"
    HEALING = "healing"  # the slot is lost: the daemon makes another one and copies what differs
    DRAINING = "draining"  # it reads no more, and finishes what it has
    STOPPED = "stopped"  # in the state tables, and of a slot of several: a daemon alone is gone then
    LOST = "lost"  # the same, and the slot cannot give changes that the target lacks: `parapply heal`


class ConflictType(StrEnum):
    """The conflict that a change hit, as PostgreSQL 18 logs it (manual, "Logical Replication: Conflicts").

    `update_deleted` of PostgreSQL 19 is not among them, because before that version nothing on a server remembers a
    deleted row.
    """

    INSERT_EXISTS = "insert_exists"  # a row with the new row's value in one unique index
    UPDATE_EXISTS = "update_exists"  # another row with the new row's value in one unique index
    MULTIPLE_UNIQUE_CONFLICTS = "multiple_unique_conflicts"  # the same in several unique indexes
    UPDATE_MISSING = "update_missing"  # the row is not there
    DELETE_MISSING = "delete_missing"  # the row is not there
    UPDATE_ORIGIN_DIFFERS = "update_origin_differs"  # the row was last written by another writer than this daemon
    DELETE_ORIGIN_DIFFERS = "delete_origin_differs"  # the same
    SKIPPED = "skipped"  # no conflict by itself: a change of a transaction that the operator skipped


class ConflictOutcome(StrEnum):
    """The outcome of a change in conflict."""

    STOPPED = "stopped"  # rolled back with its transaction, which is tried again
    REPAIRED = "repaired"  # stopped once; its transaction has been applied since
    SKIPPED = "skipped"  # not applied
    KEPT_LOCAL = "kept_local"  # not applied: the target's row won
    APPLIED_REMOTE = "applied_remote"  # applied: the publisher's row won


class CommandOutcome(StrEnum):
    """The outcome of a command of the publisher."""

    APPLIED = "applied"  # it has run
    LEFT_OUT = "left_out"  # it has not, and its transaction went on
    PENDING = "pending"  # it cannot run in a transaction, and will run after its own


class CopyState(StrEnum):
    """The progress of a table's copy of the publisher's rows; `target/state/copies.py` defines each state."""

    WAITING = "waiting"
    COPYING = "copying"
    COPIED = "copied"


#: Why a table waits that the configuration leaves out, for as long as it does.
SCHEMA_ONLY: Final = "schema only: mapping.schema_only leaves its rows out"


class _Steps(StrEnum):
    """Steps of a command that is continued after it was interrupted, in their order."""

    def is_before(self, other: Self) -> bool:
        order = list(type(self))
        return order.index(self) < order.index(other)


class MigrationStep(_Steps):
    """A step of `parapply migrate`."""

    CHECK = "check"
    ROLES = "roles"
    SCHEMA = "schema"
    COPY = "copy"
    INDEXES = "indexes"
    CATCH_UP = "catch-up"
    CONSTRAINTS = "constraints"
    LARGE_OBJECTS = "large-objects"
    UNLOGGED = "unlogged"
    SEQUENCES = "sequences"
    ANALYZE = "analyze"
    VIEWS = "views"
    FOLLOW = "follow"


class CutoverStep(_Steps):
    """A step of `parapply cutover`. From `OPENING` on there is no way back but the other direction."""

    UNDOING = "undoing"  # it is being taken back: as if nothing were done yet
    PREPARING = "preparing"
    FENCING = "fencing"
    DRAINING = "draining"
    COMPARING = "comparing"
    SEQUENCES = "sequences"
    STOPPING = "stopping"
    TURNING = "turning"
    OPENING = "opening"
    ENDING = "ending"
    DONE = "done"

    @property
    def number(self) -> int:
        """Return the place among the steps, counted from 1."""
        return list(CutoverStep).index(self)


class Provider(StrEnum):
    """Services that run PostgreSQL for others, whose rules `parapply check` knows."""

    RDS = "rds"
    AURORA = "aurora"
    CLOUDSQL = "cloudsql"
    AZURE = "azure"
    SUPABASE = "supabase"
    NEON = "neon"

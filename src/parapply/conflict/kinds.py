"""The nouns of conflicts: policies, one conflict as it was found; types and outcomes: `vocabulary.py`. Pure data."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

from parapply.vocabulary import ConflictOutcome, ConflictType

if TYPE_CHECKING:
    from parapply.errors import StatementFailed
    from parapply.target.sql.commands import Command


class Policy(StrEnum):
    """The way of handling a conflict."""

    OFF = "off"  # not looked for; only where detection costs something: the types that end in _origin_differs
    ERROR = "error"
    SKIP = "skip"
    APPLY_REMOTE = "apply_remote"
    KEEP_LOCAL = "keep_local"
    LAST_UPDATE_WINS = "last_update_wins"


def provisional_lsn(commit_lsn: int) -> int:
    """Return an LSN at which no transaction ends, for one that ends somewhere behind its commit record.

    The record's own is where the transaction before it may end. Records begin at multiples of 8.
    """
    return commit_lsn + 1


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The source transaction of a conflict."""

    xid: int
    commit_lsn: int
    end_lsn: int  # 0 while it is not known: of a large one that has not come whole
    commit_time_us: int  # publisher's clock, microseconds since 2000-01-01 UTC

    @property
    def lsn(self) -> int:
        """Return its LSN in the history: of its end, or a provisional one while that is not known."""
        return self.end_lsn or provisional_lsn(self.commit_lsn)


class LocalRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the target that is in the way, or that a change is about."""

    table: str  # quoted schema.table that holds it: a leaf where the target is partitioned
    ctid: str
    values: dict[str, str | None]  # every column by name, as PostgreSQL prints it
    commit_time_us: int | None  # when it was last written, as `Source.commit_time_us`; None: no longer known
    origin: str | None  # replication origin that wrote it; "" is a session of this server; None: not known
    constraints: tuple[str, ...] = ()  # unique indexes in which it blocks the new row


class Conflict(msgspec.Struct, frozen=True, kw_only=True):
    """One conflict as it goes into the history. Holds values: it must never be logged."""

    type: ConflictType
    schema: str
    table: str
    operation: str  # insert, update, delete or truncate
    key: dict[str, str | None] | None  # what the row is found by; of a truncate the names of its tables
    remote_row: dict[str, str | None] | None  # new row as far as it was sent; old row of a delete; None for a truncate
    is_complete: bool  # the remote row has every published column: none is unchanged TOAST
    local_rows: tuple[LocalRow, ...]
    source: Source
    change_no: int  # of the change in its transaction, from 1
    policy: Policy
    outcome: ConflictOutcome

    @property
    def constraints(self) -> tuple[str, ...]:
        """Return every unique index in which a row is in the way: all of them, not only the first."""
        return tuple(dict.fromkeys(name for row in self.local_rows for name in row.constraints))


class ConflictStop(Exception):
    """A conflict whose policy stops the transaction; the target transaction must be rolled back."""

    def __init__(self, conflict: Conflict, failure: StatementFailed, command: Command, why: str = "") -> None:
        super().__init__(conflict.type.value)
        self.conflict = conflict
        self.failure = failure
        self.command = command
        self.why = why


#: Types that concern unique indexes.
EXISTS: Final = frozenset(
    {ConflictType.INSERT_EXISTS, ConflictType.UPDATE_EXISTS, ConflictType.MULTIPLE_UNIQUE_CONFLICTS}
)
#: Types that only a query of the row's last writer shows.
ORIGIN_DIFFERS: Final = frozenset({ConflictType.UPDATE_ORIGIN_DIFFERS, ConflictType.DELETE_ORIGIN_DIFFERS})

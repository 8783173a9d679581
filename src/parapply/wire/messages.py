"""The messages of pgoutput, protocol versions 1 to 4: one class each, fields in wire order.

Field names are the manual's words. LSNs and OIDs and xids are unsigned numbers; times are microseconds since
2000-01-01 UTC on the publisher's clock. Flags that the protocol fixes at 0 are checked by the decoder and not kept.
An `xid` that may be None is on the wire only inside a stream block, where it is the id of the *sub*transaction
if the change belongs to one.

Source: PostgreSQL manual, "Logical Replication Message Formats".
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, TypeAlias

import msgspec

from parapply.model import Relation


class ColumnKind(Enum):
    """The state of one column in a tuple; each value is the byte on the wire."""

    NULL = "n"
    UNCHANGED = "u"  # a TOASTed value that did not change and was not sent; never to be taken for NULL (trap T-41)
    TEXT = "t"
    BINARY = "b"


class TupleColumn(NamedTuple):
    """One column of a row; `value` is None exactly when the kind carries no bytes."""

    kind: ColumnKind
    value: bytes | None


#: One entry per column of the relation, in its order.
TupleData: TypeAlias = tuple[TupleColumn, ...]


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction begins ('B')."""

    final_lsn: int  # LSN of the commit record: equals Commit.commit_lsn, lies before Commit.end_lsn
    commit_time_us: int
    xid: int


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """The open transaction is complete ('C')."""

    commit_lsn: int
    end_lsn: int  # the one for progress and feedback (trap T-3)
    commit_time_us: int


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The transaction came to the publisher from elsewhere ('O')."""

    origin_commit_lsn: int  # of the origin server; 0 inside a stream
    name: str


class RelationMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A table is announced ('R')."""

    xid: int | None
    relation: Relation


class TypeMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A type that is not built in is announced ('Y').

    For a domain the OID is the domain's and the name is its base type's: the two must not be taken for a pair.
    """

    xid: int | None
    type_oid: int
    schema: str
    name: str


class Insert(msgspec.Struct, frozen=True, kw_only=True):
    """A row is new ('I')."""

    xid: int | None
    relation_oid: int
    new: TupleData


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """A row changed ('U'). At most one of `key` and `old` is present; without either, the key is in `new`."""

    xid: int | None
    relation_oid: int
    key: TupleData | None  # every column, but only columns of the replica identity hold values: the rest reads NULL
    old: TupleData | None  # the whole row, under REPLICA IDENTITY FULL
    new: TupleData


class Delete(msgspec.Struct, frozen=True, kw_only=True):
    """A row is gone ('D'). Exactly one of `key` and `old` is present, see Update."""

    xid: int | None
    relation_oid: int
    key: TupleData | None
    old: TupleData | None


class Truncate(msgspec.Struct, frozen=True, kw_only=True):
    """Tables were emptied together ('T')."""

    xid: int | None
    cascade: bool
    restart_identity: bool
    relation_oids: tuple[int, ...]


class LogicalMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that `pg_logical_emit_message` wrote ('M'). Outside any transaction if it is not transactional."""

    xid: int | None
    is_transactional: bool
    message_lsn: int
    prefix: str
    content: bytes


class StreamStart(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a transaction still in progress begins ('S'): the following messages have xids, until StreamStop."""

    xid: int  # of the top-level transaction
    is_first_segment: bool


class StreamStop(msgspec.Struct, frozen=True, kw_only=True):
    """The piece ends ('E'); other transactions may come before the next one."""


class StreamCommit(msgspec.Struct, frozen=True, kw_only=True):
    """A streamed transaction is complete ('c')."""

    xid: int
    commit_lsn: int
    end_lsn: int  # the one for progress and feedback (trap T-3)
    commit_time_us: int
    was_prepared: bool = False  # the end is of its COMMIT PREPARED, which is sent in any case


class StreamAbort(msgspec.Struct, frozen=True, kw_only=True):
    """A streamed transaction, or one subtransaction of it, was rolled back ('A')."""

    xid: int  # of the top-level transaction
    subxid: int  # equal to xid: the whole transaction
    abort_lsn: int | None  # None unless the session asked for `streaming 'parallel'`; protocol 4 alone does not do it
    abort_time_us: int | None


class BeginPrepare(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction that will be prepared begins ('b')."""

    prepare_lsn: int
    end_lsn: int
    prepare_time_us: int
    xid: int
    gid: str


class Prepare(msgspec.Struct, frozen=True, kw_only=True):
    """The open transaction is prepared ('P')."""

    prepare_lsn: int
    end_lsn: int
    prepare_time_us: int
    xid: int
    gid: str


class CommitPrepared(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared transaction is committed ('K')."""

    commit_lsn: int
    end_lsn: int
    commit_time_us: int
    xid: int
    gid: str


class RollbackPrepared(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared transaction is rolled back ('r')."""

    prepare_end_lsn: int
    rollback_end_lsn: int
    prepare_time_us: int
    rollback_time_us: int
    xid: int
    gid: str


class StreamPrepare(msgspec.Struct, frozen=True, kw_only=True):
    """A streamed transaction is complete and prepared ('p')."""

    prepare_lsn: int
    end_lsn: int
    prepare_time_us: int
    xid: int
    gid: str


Message: TypeAlias = (
    Begin
    | Commit
    | Origin
    | RelationMessage
    | TypeMessage
    | Insert
    | Update
    | Delete
    | Truncate
    | LogicalMessage
    | StreamStart
    | StreamStop
    | StreamCommit
    | StreamAbort
    | BeginPrepare
    | Prepare
    | CommitPrepared
    | RollbackPrepared
    | StreamPrepare
)


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a transaction that is still in progress on the publisher; its changes are in the form of `Transaction`.

    A change belongs to a subtransaction, or to the top-level one, and each can be rolled back separately. Changes of a
    subtransaction and of all that began inside it are consecutive, because subtransactions nest.
    """

    xid: int  # of the top-level transaction
    #: (index of the first change, xid it belongs to), in order; the first index is 0.
    runs: tuple[tuple[int, int], ...]
    #: It was prepared before the slot had two_phase, and comes at once. It announces only what was not in force.
    was_prepared: bool = False

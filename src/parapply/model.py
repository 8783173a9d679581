"""The nouns every stage shares: LSNs, relations and source transactions. No I/O, no clocks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import cython  # read by the compiler only
else:
    from parapply import uncompiled as cython

#: Bytes before the pgoutput payload in a CopyData frame of kind 'w': type byte, start, end, send time.
#: Frames keep their header from the socket to the parameter, so that a message is copied only once.
FRAME_HEADER_BYTES = 25

#: Microseconds between the Unix epoch and PostgreSQL's (2000-01-01), for timestamps on the wire.
POSTGRES_EPOCH_US = 946_684_800_000_000


def format_lsn(lsn: int) -> str:
    """Return an LSN as PostgreSQL prints it, for example ``16/B374D848``."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def lsn_text(lsn: int | None) -> str | None:
    """Return an LSN for SQL or JSON; None is NULL."""
    return None if lsn is None else format_lsn(lsn)


def parse_lsn(text: str) -> int:
    """Return the number of an LSN like ``16/B374D848``.

    LSNs are numbers everywhere in this program: their text does not sort (trap T-6).

    Raises:
        ValueError: the text is not an LSN; the caller names the option it came from.
    """
    high, slash, low = text.strip().partition("/")
    if not slash or not high or not low or len(high) > 8 or len(low) > 8:
        raise ValueError(f"{text!r} is not an LSN like 16/B374D848")
    return (int(high, 16) << 32) | int(low, 16)


#: Bytes before which nothing that commits can end, counted from the end of a record. A page's header takes that much, a
#: record's own header no less, and a commit has more than its header; at the start of a segment the page's takes more.
#: Source: PostgreSQL's `xlog_internal.h` (SizeOfXLogShortPHD, SizeOfXLogLongPHD), `xlogrecord.h` (SizeOfXLogRecord).
_SHORT_HEADER_BYTES = 24
_LONG_HEADER_BYTES = 40
#: A multiple of every size of a segment is one of this.
_SEGMENT_BYTES = 1024 * 1024


def covers(low_lsn: int, lsn: int) -> bool:
    """Return whether a watermark says that everything is committed that ends at any LSN of the publisher, or before.

    Where the last record ended with its page, `pg_current_wal_insert_lsn()` lies after the header of the next, which is
    not written yet: an idle publisher never gets there, and nothing ends in between.
    """
    header_bytes = _SHORT_HEADER_BYTES if low_lsn % _SEGMENT_BYTES else _LONG_HEADER_BYTES
    return lsn <= low_lsn + header_bytes


def format_time(time_us: int) -> str:
    """Return a time on the wire (microseconds since 2000-01-01 UTC) for people, for example 2026-11-23 01:02:03+00."""
    at = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=time_us + POSTGRES_EPOCH_US)
    return f"{at.replace(tzinfo=None).isoformat(' ')}+00"


def parse_time(text: str) -> int:
    """Return the time on the wire, in microseconds since 2000-01-01 UTC, of a text as ISO 8601 or PostgreSQL has it.

    Raises:
        ValueError: the text is no time, or has no offset from UTC: a time without one is not the same everywhere.
    """
    at = datetime.fromisoformat(text.strip())
    if at.tzinfo is None:
        raise ValueError(f"{text!r} has no offset from UTC, such as +00 or +02:00")
    return (at - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1) - POSTGRES_EPOCH_US


class Until(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run; at most one of the two, and without either it runs until it is stopped."""

    lsn: int | None = None  # once everything up to here is durable
    time_us: int | None = None  # since 2000-01-01 UTC: before the first transaction, in commit order, of a later time


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One column as the publisher announces it in a Relation message."""

    name: str
    type_oid: int  # unsigned; of the publisher, never usable as a type on the target
    type_modifier: int
    is_key: bool  # part of the publisher's replica identity


class Relation(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """A published table as last announced; a new announcement makes a new object (trap T-71)."""

    oid: int  # unsigned; of the publisher
    schema: str  # never empty: an empty namespace on the wire is pg_catalog
    name: str
    replica_identity: str  # 'd' default, 'n' nothing, 'f' full, 'i' index
    columns: tuple[Column, ...]
    lacks: tuple[str, ...] = ()  # columns that were to be left out of it and do not exist

    @property
    def full_name(self) -> tuple[str, str]:
        """Return schema and name, which identify a table whatever dots are in them."""
        return self.schema, self.name

    @property
    def qualified_name(self) -> str:
        """Return ``schema.name`` for people and logs; never for SQL, nor to identify a table."""
        return f"{self.schema}.{self.name}"


_NO_RELATIONS: Sequence[Relation] = []


class Transaction:
    """One whole source transaction, or one piece of a large one, as raw change messages.

    Not frozen: the assembler fills it message by message on the hot path, and nothing writes it afterwards.
    """

    __slots__ = (
        "changes",
        "commit_lsn",
        "commit_time_us",
        "end_lsn",
        "event",
        "has_ddl",
        "has_truncate",
        "is_first",
        "is_last",
        "relations",
        "send_time_us",
        "size_bytes",
        "xid",
    )

    def __init__(self, xid: int, commit_lsn: int, commit_time_us: int) -> None:
        self.xid = xid
        #: LSN of the commit record. Never used for progress: that is end_lsn (trap T-3).
        self.commit_lsn = commit_lsn
        #: First byte after the commit record; 0 until Commit arrives.
        self.end_lsn = 0
        #: Publisher's clock, microseconds since 2000-01-01 UTC.
        self.commit_time_us = commit_time_us
        #: Publisher's clock when the last message was sent; with commit_time_us it shows a backlog or live traffic.
        self.send_time_us = 0
        #: Whole CopyData frames of Insert, Update, Delete, Truncate in source order (payload at FRAME_HEADER_BYTES).
        #: A Relation object marks where the publisher announced it: later changes are decoded with it.
        self.changes: list[bytes | Relation] = []
        self.size_bytes = 0
        #: Relations announced inside this transaction; the leader resolves them before the plan reads the changes.
        #: Written by replacing it, because nearly all transactions share the empty one, which saves the collector a
        #: list each.
        self.relations: Sequence[Relation] = _NO_RELATIONS
        self.has_truncate = False
        #: Some of its changes are of the publisher's queue of commands (`wire/ddl_queue.py`).
        self.has_ddl = False
        #: None for a transaction that a Begin and a Commit enclose. Otherwise a chunk of a transaction that is streamed
        #: while it is in progress, or a message of `wire/messages.py` about a streamed or prepared one.
        self.event: object = None
        #: A large transaction travels in pieces: the first, any number between, the last (the one with end_lsn).
        self.is_first = True
        self.is_last = True
        if cython.compiled:
            untrack(self.changes)  # type: ignore[name-defined]  # noqa: F821  collector.pxd

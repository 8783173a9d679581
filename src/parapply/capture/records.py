"""Content of the blocks that are JSON: the capture's start, its files, shapes of tables, and its end. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias, TypeVar, get_args

import msgspec

if TYPE_CHECKING:
    from parapply.capture.blocks import CapturedBlock


Operation: TypeAlias = Literal["insert", "update", "delete", "truncate"]
OPERATIONS: Final[tuple[Operation, ...]] = get_args(Operation)


class FileHead(msgspec.Struct, frozen=True, kw_only=True):
    """First block of each file."""

    capture: str  # 32 hexadecimal digits, the same in all of its files
    file: int  # from 1


class Redaction(msgspec.Struct, frozen=True, kw_only=True):
    """How a capture is redacted; the key is nowhere."""

    check: str  # the same for the same key, and says nothing about it


class CaptureStart(msgspec.Struct, frozen=True, kw_only=True):
    """The publisher, the slot, and what was asked of it."""

    version: str  # of parapply
    server_version_num: int
    system_identifier: str
    timeline: int
    database: str
    slot: str
    is_kept: bool  # the slot outlives the capture
    publications: tuple[str, ...]
    operations: tuple[Operation, ...]
    options: dict[str, str]  # of pgoutput
    settings: dict[str, str]  # of the publisher
    redaction: Redaction | None = None


class CapturedType(msgspec.Struct, frozen=True, kw_only=True):
    """A type of the publisher."""

    oid: int
    schema: str
    name: str
    kind: str  # as pg_type.typtype: b, c, d, e, p, r, m
    base: int = 0  # of a domain
    base_modifier: int = -1
    element: int = 0  # of an array
    labels: tuple[str, ...] = ()  # of an enum, in order
    extension: str = ""  # that it belongs to


class CapturedColumn(msgspec.Struct, frozen=True, kw_only=True):
    """A column."""

    name: str
    type_oid: int
    modifier: int
    is_not_null: bool = False
    missing: str | None = None  # value of the rows from before it was added


class CapturedIndex(msgspec.Struct, frozen=True, kw_only=True):
    """An index on plain columns, without a condition."""

    name: str
    columns: tuple[str, ...]
    n_keys: int  # the columns after these are only included
    method: str
    is_unique: bool
    is_primary: bool
    is_identity: bool
    nulls_not_distinct: bool = False


class CapturedTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table as the stream names it: a partition may be one, or its root."""

    oid: int
    schema: str
    name: str
    identity: str  # as pg_class.relreplident
    columns: tuple[CapturedColumn, ...]
    indexes: tuple[CapturedIndex, ...] = ()
    left_out: tuple[str, ...] = ()  # names of indexes on expressions, or with a condition


class Shapes(msgspec.Struct, frozen=True, kw_only=True):
    """Tables, and every type that they need."""

    tables: tuple[CapturedTable, ...]
    types: tuple[CapturedType, ...]


class CaptureEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The capture ended in order."""

    reason: str


_Record = TypeVar("_Record", FileHead, CaptureStart, Shapes, CaptureEnd)


def encode(record: FileHead | CaptureStart | Shapes | CaptureEnd) -> bytes:
    """Return the body of a block."""
    return msgspec.json.encode(record)


def decode(place: CapturedBlock, body: bytes, kind: type[_Record]) -> _Record:
    """Return the record in a block's body; raise CaptureRefused if it is none."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise place.refused(f"it is no {kind.__name__}") from error

"""The queue table of the publisher, and one command in it as the stream brings it. No I/O.

An INSERT into the queue stands in the stream where its transaction has run the command; `source/ddl_queue.py` says how
a row comes to be there, and that there is no other way. Its frames are never applied to a table of the target.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from parapply.errors import ProtocolError
from parapply.model import FRAME_HEADER_BYTES
from parapply.wire.decode import decode
from parapply.wire.messages import Insert
from parapply.wire.rows import INSERT, KIND_AT, RELATION_AT

if TYPE_CHECKING:
    from parapply.model import Relation

#: Schema and table, on every publisher that has one.
QUEUE: Final = ("parapply", "ddl_queue")

_COLUMNS: Final = ("id", "tag", "command", "role_name", "first_schema", "settings", "made")

_relation_at = struct.Struct(">I").unpack_from
_read_settings = msgspec.json.Decoder(dict[str, str]).decode


class CommandName(NamedTuple):
    """A command of the queue: a publisher that was put back gives its numbers once more, to other commands."""

    number: int
    digest: str  # of its text, which may hold values


#: The digest of a column `command`, on the publisher and on the target: a text may be large, and is asked for often.
DIGEST_SQL: Final = (
    "pg_catalog.left(pg_catalog.encode(pg_catalog.sha256(pg_catalog.convert_to(command, 'UTF8')), 'hex'), 16)"
)


class MadeTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table that a command has made."""

    oid: int  # of the publisher
    schema: str
    name: str
    publications: tuple[str, ...]  # that had it from the first


_read_made = msgspec.json.Decoder(tuple[MadeTable, ...]).decode


class QueuedCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command that ran on the publisher."""

    number: int  # of the row in the queue
    tag: str  # as the publisher's parser has it, for example ALTER TABLE
    command: str
    role_name: str  # that ran it there
    schema: str  # where new objects without a schema went; empty: nowhere
    made: tuple[MadeTable, ...]
    settings: dict[str, str]  # of the session that ran it, as far as they decide the command's meaning
    is_later: bool = False  # cannot run in a transaction, and is run after the one that it is in


#: As `source/ddl_queue.py` has them for the publisher, which refuses others.
_NAME: Final = r'(?:"(?:[^"]|"")+"|[^\W\d][\w$]*)'
_CREATE: Final = (
    rf"(?i)\s*create\s+(?:unique\s+)?index\s+concurrently\s+(?:if\s+not\s+exists\s+)?({_NAME})\s+on\s+(?:only\s+)?"
    rf"({_NAME}(?:\s*\.\s*{_NAME})?)"
)
_DROP: Final = rf"(?i)\s*drop\s+index\s+concurrently\s+(?:if\s+exists\s+)?({_NAME}(?:\s*\.\s*{_NAME})?)"


def is_create_index(command: str) -> bool:
    """Return whether a command that is run later makes an index; else it drops one."""
    return re.match(_CREATE, command) is not None


def later_index(command: str) -> tuple[str, str]:
    """Return the names in a command that is run later, as they stand there: of its index, and of the table.

    The table's is empty where an index is dropped; both are where the command is none that the publisher records.
    """
    if found := re.match(_CREATE, command):
        return found[1], found[2]
    found = re.match(_DROP, command)
    return (found[1] if found else ""), ""


def names_queue(frame: bytes, queue: Relation) -> bool:
    """Return whether a row change, outside a stream block, is one of the queue."""
    return frame[KIND_AT] in b"IUD" and bool(_relation_at(frame, RELATION_AT)[0] == queue.oid)


def read_command(frame: bytes, queue: Relation) -> QueuedCommand | None:
    """Return the command that a change of the queue brings; None if it brings none: a row was changed or removed.

    Raises:
        ProtocolError: the row is not as the queue's own trigger writes it.
    """
    if frame[KIND_AT] != INSERT:
        return None
    message = decode(frame[FRAME_HEADER_BYTES:])
    assert isinstance(message, Insert), "the first byte says so"
    values = dict(zip([column.name for column in queue.columns], message.new, strict=False))
    try:
        texts = {name: (values[name].value or b"").decode() for name in _COLUMNS}
        return QueuedCommand(
            number=int(texts["id"]),
            tag=texts["tag"],
            command=texts["command"],
            role_name=texts["role_name"],
            schema=texts["first_schema"],
            settings=_read_settings(texts["settings"]),
            made=_read_made(texts["made"]),
            # A queue of an older version does not have it.
            is_later="later" in values and values["later"].value == b"t",
        )
    except (KeyError, ValueError, msgspec.DecodeError) as error:
        raise ProtocolError("I", 1, f"a row of {'.'.join(QUEUE)} cannot be read: {type(error).__name__}") from error

"""Frames in, source transactions out. Owns the open transaction; does no I/O.

Row changes are not decoded here: the frame is kept whole and read once, by the planner, which finds what is malformed
in it. Every other message is looked into. One assembler serves one stream: after a reconnect a new one starts empty,
because the publisher announces its relations again (PROTOCOL.md 5.3, 7).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.errors import ProtocolError
from parapply.model import FRAME_HEADER_BYTES, Relation, Transaction
from parapply.wire.decode import decode
from parapply.wire.messages import Begin, Commit, LogicalMessage, Origin, RelationMessage, TypeMessage

if TYPE_CHECKING:
    from collections.abc import Iterable

    import cython  # read by the compiler only
else:
    from parapply import uncompiled as cython

#: Counted per change beside its bytes: what the interpreter needs for the frame, the row and its values.
OVERHEAD_BYTES = 400

_OVERHEAD_BYTES = OVERHEAD_BYTES  # C numbers in the compiled twin, like all that follow
_KIND_AT = FRAME_HEADER_BYTES
_ROW_CHANGES = b"IUD"
_BEGIN, _COMMIT, _TRUNCATE = b"BCT"
#: Offsets in a CopyData frame, and its length. (PostgreSQL manual, "Logical Replication Message Formats".)
_SEND_TIME_AT = 17
_BEGIN_LSN_AT = FRAME_HEADER_BYTES + 1
_BEGIN_TIME_AT = FRAME_HEADER_BYTES + 9
_BEGIN_XID_AT = FRAME_HEADER_BYTES + 17
_BEGIN_BYTES = FRAME_HEADER_BYTES + 21
_COMMIT_FLAGS_AT = FRAME_HEADER_BYTES + 1
_COMMIT_LSN_AT = FRAME_HEADER_BYTES + 2
_COMMIT_END_AT = FRAME_HEADER_BYTES + 10
_COMMIT_BYTES = FRAME_HEADER_BYTES + 26


class Assembler:
    """Collects the frames of one stream into transactions, large ones in pieces.

    With streaming off the publisher sends a transaction only after its commit, whole, and in commit order: so a piece
    of a large one may be applied (not committed) before its Commit message has come.
    """

    def __init__(self, piece_bytes: int) -> None:
        """Start outside any transaction.

        Args:
            piece_bytes: a transaction larger than this leaves in pieces of about this size (as counted in
                ``Transaction.size_bytes``, interpreter overhead included).
        """
        self._piece_bytes = piece_bytes
        self._open: Transaction | None = None
        self._loose_relations: list[Relation] = []

    @property
    def is_open(self) -> bool:
        """Tell whether a transaction has begun and not ended; then a keep-alive's LSN proves nothing."""
        return self._open is not None

    def push(self, frames: Iterable[bytes]) -> list[Transaction]:
        """Take frames of kind 'w' in arrival order and return the transactions and pieces that are complete.

        Raises:
            ProtocolError: bytes out of place; the stream cannot go on.
        """
        done: list[Transaction] = []
        current = self._open
        piece_bytes = self._piece_bytes
        for frame in frames:
            kind = frame[_KIND_AT] if len(frame) > _KIND_AT else 0
            if kind in _ROW_CHANGES:
                if current is None:
                    raise ProtocolError(chr(kind), 0, "a change outside a transaction")
                current.changes.append(frame)
                size_bytes = current.size_bytes = current.size_bytes + len(frame) + _OVERHEAD_BYTES
                if size_bytes >= piece_bytes:
                    current = self._cut(current, done)
            elif kind == _BEGIN:
                current = self._begin(frame, current)
            elif kind == _COMMIT:
                done.append(self._commit(frame, current))
                current = None
            elif kind == _TRUNCATE:
                if current is None:
                    raise ProtocolError("T", 0, "a change outside a transaction")
                decode(frame[_KIND_AT:])
                current.changes.append(frame)
                current.size_bytes += len(frame) + _OVERHEAD_BYTES
                current.has_truncate = True
            else:
                self._other(frame, current)
        self._open = current
        return done

    def _begin(self, frame: bytes, current: Transaction | None) -> Transaction:
        if current is not None:
            raise ProtocolError("B", 0, "a transaction begins inside another")
        if len(frame) != _BEGIN_BYTES:
            decode(frame[FRAME_HEADER_BYTES:])
        begun = Transaction(
            _unsigned(frame, _BEGIN_XID_AT, 4), _unsigned(frame, _BEGIN_LSN_AT, 8), _signed(frame, _BEGIN_TIME_AT)
        )
        for relation in self._loose_relations:
            _announce(begun, relation)
        self._loose_relations = []
        return begun

    def _commit(self, frame: bytes, current: Transaction | None) -> Transaction:
        if current is None:
            raise ProtocolError("C", 0, "a commit without a begin")
        if len(frame) != _COMMIT_BYTES:
            decode(frame[FRAME_HEADER_BYTES:])
        commit_lsn, end_lsn = _unsigned(frame, _COMMIT_LSN_AT, 8), _unsigned(frame, _COMMIT_END_AT, 8)
        if frame[_COMMIT_FLAGS_AT] or commit_lsn != current.commit_lsn or end_lsn < commit_lsn:
            raise ProtocolError("C", 1, "the commit does not match its begin")
        current.end_lsn = end_lsn
        current.send_time_us = _signed(frame, _SEND_TIME_AT)
        return current

    def _cut(self, current: Transaction, done: list[Transaction]) -> Transaction:
        current.is_last = False
        done.append(current)
        rest = Transaction(current.xid, current.commit_lsn, current.commit_time_us)
        rest.is_first = False
        return rest

    def _other(self, frame: bytes, current: Transaction | None) -> None:
        message = decode(frame[FRAME_HEADER_BYTES:])
        if isinstance(message, RelationMessage):
            if current is None:
                self._loose_relations.append(message.relation)
            else:
                _announce(current, message.relation)
        elif isinstance(message, Origin):
            if current is None:
                raise ProtocolError("O", 0, "an origin outside a transaction")
        elif not isinstance(message, TypeMessage | LogicalMessage):
            assert not isinstance(message, Begin | Commit)
            raise ProtocolError(chr(frame[FRAME_HEADER_BYTES]), 0, "this message was not asked for")


def _unsigned(frame: bytes, at: int, n_bytes: int) -> int:
    """Return an unsigned number: an LSN or a transaction id."""
    value = 0
    if cython.compiled:
        for index in range(at, at + n_bytes):
            value = value << 8 | frame[index]
    else:
        value = int.from_bytes(frame[at : at + n_bytes])
    return value


def _signed(frame: bytes, at: int) -> int:
    """Return a time: microseconds since 2000, which may lie before."""
    return _unsigned(frame, at, 8) if cython.compiled else int.from_bytes(frame[at : at + 8], signed=True)


def _announce(transaction: Transaction, relation: Relation) -> None:
    transaction.relations = [*transaction.relations, relation]
    transaction.changes.append(relation)

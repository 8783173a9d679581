"""Frames in, source transactions out. Owns the open transaction; does no I/O.

Row changes are not decoded here: the frame is kept whole and read once, by the planner, which finds what is malformed
in it. Every other message is looked into. One assembler serves one stream: after a reconnect a new one starts empty,
because the publisher announces its relations again (PROTOCOL.md 5.3, 7).

A transaction streamed while it is in progress leaves in chunks. Their frames lose the xid that they carry there: behind
this all frames are alike. Other messages of streamed and prepared transactions leave as events at their place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.errors import ProtocolError
from parapply.model import FRAME_HEADER_BYTES, Relation, Transaction
from parapply.wire.ddl_queue import QUEUE
from parapply.wire.decode import decode
from parapply.wire.messages import (
    Begin,
    BeginPrepare,
    Chunk,
    Commit,
    CommitPrepared,
    LogicalMessage,
    Origin,
    Prepare,
    RelationMessage,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    TypeMessage,
)
from parapply.wire.partitions import Partitions

if TYPE_CHECKING:
    from collections.abc import Iterable

    import cython  # read by the compiler only
else:
    from parapply import uncompiled as cython

#: Counted per change beside its bytes: memory that the interpreter needs for the frame, the row and its values.
OVERHEAD_BYTES = 400

_OVERHEAD_BYTES = OVERHEAD_BYTES  # C numbers in the compiled twin, like all that follow
_KIND_AT = FRAME_HEADER_BYTES
_RELATION_AT = FRAME_HEADER_BYTES + 1
_BEHIND_OID = FRAME_HEADER_BYTES + 5
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
#: Inside a stream the xid follows the type byte.
_XID_AT = FRAME_HEADER_BYTES + 1
_BEHIND_XID = FRAME_HEADER_BYTES + 5


class Assembler:
    """Collects the frames of one stream into transactions, large ones in pieces.

    Changes between Begin and Commit are sent only after the commit, whole, and in commit order. A piece of a large
    transaction may therefore be applied (not committed) before its Commit message has come.
    """

    def __init__(
        self,
        piece_bytes: int,
        *,
        streaming_parallel: bool = False,
        start_lsn: int = 0,
        prepared_lsns: frozenset[int] = frozenset(),
    ) -> None:
        """Start outside any transaction.

        Args:
            piece_bytes: a transaction larger than this leaves in pieces of about this size (as counted in
                ``Transaction.size_bytes``, interpreter overhead included), and so does a chunk of a streamed one.
            streaming_parallel: the session asked for ``streaming 'parallel'``.
            start_lsn: where the stream was started. A transaction prepared before is sent whole with its COMMIT
                PREPARED, if the slot got two_phase later (trap T-58), and is then like any other.
            prepared_lsns: end LSNs of what is prepared on the target, or was and its end is not recorded: whatever the
                slot was told in between, that one ends there as it began.
        """
        self._piece_bytes = piece_bytes
        self._streaming_parallel = streaming_parallel
        self._start_lsn = start_lsn
        self._prepared_lsns = prepared_lsns
        self._open: Transaction | None = None
        self._loose_relations: list[Relation] = []
        self._partitions = Partitions()
        #: It has met one and not settled that.
        self._has_met = False
        #: Between a Stream Start and its Stop: the changes that have come, and the runs of `Chunk`.
        self._chunk: Transaction | None = None
        self._runs: list[tuple[int, int]] = []
        #: Of the open transaction, if it will be prepared.
        self._begin_prepare: BeginPrepare | None = None
        #: The open transaction was prepared before the start and its COMMIT PREPARED comes next.
        self._is_late = False
        #: The same of a streamed one: its Stream Prepare.
        self._late_stream: StreamPrepare | None = None
        #: The publisher's queue of commands as last announced, which goes no further; and its OID, 0: none. Also read
        #: by workers.
        self.queue: Relation | None = None
        self._queue_oid = 0

    @property
    def is_open(self) -> bool:
        """Return whether a transaction has begun and not ended; then a keep-alive's LSN proves nothing."""
        return self._open is not None or self._chunk is not None

    def push(self, frames: Iterable[bytes]) -> list[Transaction]:
        """Take frames of kind 'w' in arrival order and return the transactions, pieces and events that are complete.

        Raises:
            ProtocolError: bytes out of place; the stream cannot go on.
        """
        done: list[Transaction] = []
        current = self._open
        piece_bytes = self._piece_bytes
        queue_oid = self._queue_oid
        for frame in frames:
            kind = frame[_KIND_AT] if len(frame) > _KIND_AT else 0
            if kind in b"IUD":  # a literal: the compiled twin makes no object of the kind
                if current is None:
                    self._streamed_change(frame, done)
                    continue
                current.changes.append(frame)
                if queue_oid and len(frame) >= _BEHIND_OID and _unsigned(frame, _RELATION_AT, 4) == queue_oid:
                    current.has_ddl = True
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
                    self._streamed_change(frame, done)
                    continue
                self._truncate(frame, current)
            else:
                current = self._other(frame, current, done)
                queue_oid = self._queue_oid
        self._open = current
        self._settle()
        return done

    def _settle(self) -> None:
        if self._has_met:
            self._has_met = self._partitions.settle()

    def _begin(self, frame: bytes, current: Transaction | None) -> Transaction:
        if current is not None or self._chunk is not None:
            raise ProtocolError("B", 0, "a transaction begins inside another")
        if len(frame) != _BEGIN_BYTES:
            decode(frame[FRAME_HEADER_BYTES:])
        return self._begun(
            Transaction(
                _unsigned(frame, _BEGIN_XID_AT, 4), _unsigned(frame, _BEGIN_LSN_AT, 8), _signed(frame, _BEGIN_TIME_AT)
            )
        )

    def _begun(self, begun: Transaction) -> Transaction:
        if self._loose_relations:
            begun.relations = self._loose_relations
            begun.changes += self._loose_relations
            self._loose_relations = []
        return begun

    def _commit(self, frame: bytes, current: Transaction | None) -> Transaction:
        if current is None or self._begin_prepare is not None:
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
        if self._is_late:
            return self._cut_late(current, done)
        current.is_last = False
        if self._begin_prepare is not None:
            current.event = self._begin_prepare
        done.append(current)
        rest = Transaction(current.xid, current.commit_lsn, current.commit_time_us)
        rest.is_first = False
        return rest

    def _cut_late(self, current: Transaction, done: list[Transaction]) -> Transaction:
        """Let what has come leave like a chunk: where it commits is known only at its end."""
        current.commit_lsn = current.commit_time_us = 0
        current.is_first = True
        current.event = Chunk(xid=current.xid, runs=((0, current.xid),), was_prepared=True)
        done.append(current)
        rest = Transaction(current.xid, 0, 0)
        rest.is_first = False
        return rest

    def _streamed_change(self, frame: bytes, done: list[Transaction]) -> None:
        """Take a change that is in no ordinary transaction: it must be in a chunk."""
        chunk = self._chunk
        if chunk is None:
            raise ProtocolError(chr(frame[_KIND_AT]), 0, "a change outside a transaction")
        if len(frame) < _BEHIND_XID:
            raise ProtocolError(chr(frame[_KIND_AT]), 1, "cut inside the xid")
        self._note_xid(chunk, _unsigned(frame, _XID_AT, 4))
        if cython.compiled:  # noqa: SIM108  the compiler must see only one of them
            bare = without(frame, _XID_AT, _BEHIND_XID)  # type: ignore[name-defined]  # noqa: F821  assembler.pxd
        else:
            bare = frame[:_XID_AT] + frame[_BEHIND_XID:]
        if bare[_KIND_AT] == _TRUNCATE:
            bare = self._truncated(bare)
            if not bare:
                return
            chunk.has_truncate = True
        elif self._queue_oid and len(bare) >= _BEHIND_OID and _unsigned(bare, _RELATION_AT, 4) == self._queue_oid:
            chunk.has_ddl = True
        chunk.changes.append(bare)
        chunk.size_bytes += len(bare) + _OVERHEAD_BYTES
        if chunk.size_bytes >= self._piece_bytes:
            self._chunk = self._cut_chunk(chunk, done)

    def _note_xid(self, chunk: Transaction, xid: int) -> None:
        if not self._runs or self._runs[-1][1] != xid:
            self._runs.append((len(chunk.changes), xid))

    def _cut_chunk(self, chunk: Transaction, done: list[Transaction]) -> Transaction:
        if chunk.changes:
            chunk.event = Chunk(xid=chunk.xid, runs=tuple(self._runs))
            done.append(chunk)
            self._runs = []
        return Transaction(chunk.xid, 0, 0)

    def _other(self, frame: bytes, current: Transaction | None, done: list[Transaction]) -> Transaction | None:
        """Take every other message; return the transaction that is open behind it."""
        message = decode(
            frame[FRAME_HEADER_BYTES:],
            in_stream=self._chunk is not None,
            streaming_parallel=self._streaming_parallel,
        )
        if isinstance(message, RelationMessage):
            self._relation(message, current)
        elif isinstance(message, Origin):
            if current is None and self._chunk is None:
                raise ProtocolError("O", 0, "an origin outside a transaction")
        elif isinstance(message, StreamStart | StreamStop | StreamCommit | StreamPrepare | StreamAbort):
            if current is not None:
                raise ProtocolError(chr(frame[_KIND_AT]), 0, "a stream inside a transaction")
            self._streamed(message, frame, done)
        elif isinstance(message, BeginPrepare | Prepare | CommitPrepared | RollbackPrepared):
            return self._two_phase(message, frame, current, done)
        elif not isinstance(message, TypeMessage | LogicalMessage):
            assert not isinstance(message, Begin | Commit)
            raise ProtocolError(chr(frame[FRAME_HEADER_BYTES]), 0, "this message was not asked for")
        return current

    def _truncate(self, frame: bytes, current: Transaction) -> None:
        bare = self._truncated(frame)
        if bare:
            current.changes.append(bare)
            current.size_bytes += len(bare) + _OVERHEAD_BYTES
            current.has_truncate = True

    def _truncated(self, frame: bytes) -> bytes:
        """Return a TRUNCATE without the queue of commands, which the target has not; empty if that was all.

        Raises:
            ProtocolError: it cannot be read.
        """
        message = decode(frame[_KIND_AT:])
        assert isinstance(message, Truncate), "the first byte says so"
        if self._queue_oid not in message.relation_oids:
            return frame
        left = [oid.to_bytes(4) for oid in message.relation_oids if oid != self._queue_oid]
        # Int32 number of relations, Int8 flags, Int32 each.
        flags = frame[_BEHIND_OID : _BEHIND_OID + 1]
        return frame[: _KIND_AT + 1] + len(left).to_bytes(4) + flags + b"".join(left) if left else b""

    def _relation(self, message: RelationMessage, current: Transaction | None) -> None:
        relation = message.relation
        if relation.full_name == QUEUE:
            self.queue, self._queue_oid = relation, relation.oid
            return
        if relation.oid == self._queue_oid:
            self.queue, self._queue_oid = None, 0
        self._settle()
        if current is None and self._chunk is None:
            before = self._loose_relations[-2:]
            if len(before) > 1 and before[0].oid == relation.oid:
                # By a capture (`FramedPartitions`), whose reader leaves out the change between them.
                self._partitions.note(before[0], before[1])
                self._loose_relations[-2:] = before[1:]
        relation = self._partitions.narrowed(relation)
        if self._chunk is not None:
            self._note_xid(self._chunk, message.xid or self._chunk.xid)
            self._announce(self._chunk, relation)
        elif current is None:
            self._loose_relations.append(relation)
        else:
            self._announce(current, relation)

    def _announce(self, transaction: Transaction, relation: Relation) -> None:
        if transaction.changes and isinstance(transaction.changes[-1], Relation):
            self._partitions.meet(transaction)
            self._has_met = True
        transaction.relations = [*transaction.relations, relation]
        transaction.changes.append(relation)

    def _streamed(
        self,
        message: StreamStart | StreamStop | StreamCommit | StreamPrepare | StreamAbort,
        frame: bytes,
        done: list[Transaction],
    ) -> None:
        kind = chr(frame[_KIND_AT])
        if isinstance(message, StreamStop):
            if self._chunk is None:
                raise ProtocolError(kind, 0, "the end of a stream that did not start")
            self._cut_chunk(self._chunk, done)
            self._chunk = None
            return
        if self._chunk is not None:
            raise ProtocolError(kind, 0, "a stream has not stopped")
        if isinstance(message, StreamStart):
            self._chunk = Transaction(message.xid, 0, 0)
        elif isinstance(message, StreamCommit):
            done.append(_event(message, frame, message.commit_lsn, message.end_lsn, message.commit_time_us))
        elif isinstance(message, StreamPrepare):
            if self._is_from_before(message.end_lsn):
                # Streamed after all, to make room in the publisher's memory (trap T-58).
                self._late_stream = message
                return
            done.append(_event(message, frame, message.prepare_lsn, message.end_lsn, message.prepare_time_us))
        else:
            done.append(_event(message, frame, 0, 0, 0))

    def _two_phase(
        self,
        message: BeginPrepare | Prepare | CommitPrepared | RollbackPrepared,
        frame: bytes,
        current: Transaction | None,
        done: list[Transaction],
    ) -> Transaction | None:
        kind = chr(frame[_KIND_AT])
        if self._chunk is not None:
            raise ProtocolError(kind, 0, "a stream has not stopped")
        if isinstance(message, BeginPrepare):
            if current is not None:
                raise ProtocolError(kind, 0, "a transaction begins inside another")
            self._begin_prepare = message
            self._is_late = self._is_from_before(message.end_lsn)
            return self._begun(Transaction(message.xid, message.prepare_lsn, message.prepare_time_us))
        if isinstance(message, Prepare):
            return self._prepared(message, frame, current, done)
        if isinstance(message, CommitPrepared) and self._is_late and current is not None:
            self._committed_late(message, frame, current, done)
            return None
        if current is not None:
            raise ProtocolError(kind, 0, "an outcome inside a transaction")
        if self._late_stream is not None:
            self._committed_late_stream(message, frame, done)
        elif isinstance(message, CommitPrepared):
            done.append(_event(message, frame, message.commit_lsn, message.end_lsn, message.commit_time_us))
        else:
            lsn = message.rollback_end_lsn
            done.append(_event(message, frame, lsn, lsn, message.rollback_time_us))
        return None

    def _is_from_before(self, prepare_end_lsn: int) -> bool:
        return prepare_end_lsn <= self._start_lsn and prepare_end_lsn not in self._prepared_lsns

    def _prepared(
        self, message: Prepare, frame: bytes, current: Transaction | None, done: list[Transaction]
    ) -> Transaction | None:
        begun, self._begin_prepare = self._begin_prepare, None
        if current is None:
            # Some minor releases of 15 send no Begin Prepare for an empty transaction (trap T-58).
            current = self._begun(Transaction(message.xid, message.prepare_lsn, message.prepare_time_us))
        elif begun is None or (begun.xid, begun.end_lsn, begun.gid) != (message.xid, message.end_lsn, message.gid):
            raise ProtocolError("P", 1, "the prepare does not match its begin")
        if self._is_late:
            return current
        current.end_lsn = message.end_lsn
        current.send_time_us = _signed(frame, _SEND_TIME_AT)
        current.event = message
        done.append(current)
        return None

    def _committed_late(
        self, message: CommitPrepared, frame: bytes, current: Transaction, done: list[Transaction]
    ) -> None:
        if message.xid != current.xid or self._begin_prepare is not None:
            raise ProtocolError("K", 1, "the commit does not match its begin")
        self._is_late = False
        if not current.is_first:
            if current.changes:
                self._cut_late(current, done)
            self._end_late(message, frame, done)
            return
        current.commit_lsn, current.end_lsn = message.commit_lsn, message.end_lsn
        current.commit_time_us = message.commit_time_us
        current.send_time_us = _signed(frame, _SEND_TIME_AT)
        done.append(current)

    def _committed_late_stream(
        self, message: CommitPrepared | RollbackPrepared, frame: bytes, done: list[Transaction]
    ) -> None:
        late, self._late_stream = self._late_stream, None
        if late is None or not isinstance(message, CommitPrepared) or message.xid != late.xid:
            raise ProtocolError("K", 1, "the commit does not match its stream")
        self._end_late(message, frame, done)

    def _end_late(self, message: CommitPrepared, frame: bytes, done: list[Transaction]) -> None:
        commit = StreamCommit(
            xid=message.xid,
            commit_lsn=message.commit_lsn,
            end_lsn=message.end_lsn,
            commit_time_us=message.commit_time_us,
            was_prepared=True,
        )
        done.append(_event(commit, frame, message.commit_lsn, message.end_lsn, message.commit_time_us))


def _event(message: object, frame: bytes, commit_lsn: int, end_lsn: int, time_us: int) -> Transaction:
    """Return a transaction without changes that stands for a message."""
    event = Transaction(message.xid, commit_lsn, time_us)  # type: ignore[attr-defined]  # all of these have one
    event.end_lsn = end_lsn
    event.send_time_us = _signed(frame, _SEND_TIME_AT)
    event.event = message
    return event


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

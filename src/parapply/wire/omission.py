"""Columns that the target's rows do not get, cut out of what the publisher sends, as if by a column list.

In: transactions as the assembler gives them. Out: the same, with announcements and rows without the columns. So nothing
behind this knows of them. A column of the replica identity stays, and its table is refused when it is planned, as is a
table without such a column: it may have another name now, and its values would come.

A transaction that is streamed in progress announces its relations for itself, and for all others once it has committed,
except those that were announced to others since.
"""

from __future__ import annotations

import struct
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from parapply.errors import ProtocolError
from parapply.model import Relation
from parapply.wire.messages import Chunk, StreamAbort, StreamCommit, StreamPrepare
from parapply.wire.rows import KIND_AT, RELATION_AT, TRUNCATE, malformed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from parapply.model import Transaction

_oid_at = struct.Struct(">I").unpack_from
_count = struct.Struct(">H")
_length_at = struct.Struct(">I").unpack_from
_TUPLES_AT: Final = RELATION_AT + 4
#: Kinds of values that have a length behind them.
_WITH_LENGTH: Final = b"tb"
_WITHOUT_LENGTH: Final = b"nu"


class _Places(NamedTuple):
    number: int  # of the announcement, as they came
    left_out: frozenset[int]  # positions of columns, perhaps none


_NONE: Final = _Places(0, frozenset())


class Omission:
    """Belongs to one assembler, and sees all that it gives."""

    def __init__(self, columns_of: Callable[[tuple[str, str]], Collection[str]]) -> None:
        """Know of no relation.

        Args:
            columns_of: names of the columns to leave out, by schema and table.
        """
        self._columns_of = columns_of
        #: In force, by the publisher's OID of the relation.
        self._places: dict[int, _Places] = {}
        #: The same of all relations that transactions in progress have announced, by their xid.
        self._streamed: dict[int, dict[int, _Places]] = {}
        self._n_announced = 0

    def cut(self, transactions: Sequence[Transaction]) -> None:
        """Leave the columns out of transactions, pieces and chunks that nothing else has seen yet.

        Raises:
            ProtocolError: a row cannot be read.
        """
        for transaction in transactions:
            event = transaction.event
            if isinstance(event, Chunk):
                own = self._streamed.setdefault(event.xid, {})
                self._cut(transaction, own, {**self._places, **own})
            elif isinstance(event, StreamCommit):
                for oid, places in self._streamed.pop(event.xid, {}).items():
                    # The publisher does not announce again what it has announced to others since.
                    self._places[oid] = max(places, self._places.get(oid, places), key=itemgetter(0))
            elif isinstance(event, StreamPrepare) or (isinstance(event, StreamAbort) and event.xid == event.subxid):
                self._streamed.pop(event.xid, None)
            else:
                self._cut(transaction, self._places, self._places)

    def _cut(self, transaction: Transaction, own: dict[int, _Places], places: dict[int, _Places]) -> None:
        """Leave columns out of one; `own` takes what it announces, and `places` is in force there."""
        if not (transaction.relations or places):
            return
        changes: list[bytes | Relation] = []
        for change in transaction.changes:
            if isinstance(change, Relation):
                names = self._columns_of(change.full_name)
                left_out = _left_out(change, names)
                self._n_announced += 1
                own[change.oid] = places[change.oid] = _Places(self._n_announced, left_out)
                changes.append(_without(change, left_out, names))
            elif change[KIND_AT] != TRUNCATE and (left_out := places.get(_oid(change), _NONE).left_out):
                changes.append(_cut_frame(change, left_out))
            else:
                changes.append(change)
        transaction.changes = changes
        if transaction.relations:
            transaction.relations = [change for change in changes if isinstance(change, Relation)]


def _left_out(relation: Relation, names: Collection[str]) -> frozenset[int]:
    is_full = relation.replica_identity == "f"
    return frozenset(
        [
            position
            for position, column in enumerate(relation.columns)
            if column.name in names and (is_full or not column.is_key)
        ]
    )


def _without(relation: Relation, positions: Collection[int], names: Collection[str]) -> Relation:
    if not names:
        return relation
    columns = [column for position, column in enumerate(relation.columns) if position not in positions]
    known = {column.name for column in relation.columns}
    lacks = tuple([name for name in names if name not in known])
    return msgspec.structs.replace(relation, columns=tuple(columns), lacks=lacks)


def _oid(frame: bytes) -> int:
    if len(frame) < _TUPLES_AT:
        raise malformed(frame, 0)
    return int(_oid_at(frame, RELATION_AT)[0])


def _cut_frame(frame: bytes, positions: Collection[int]) -> bytes:
    """Return a change without some of its values.

    A change has one or two rows, each a mark, the number of values, and the values.

    Raises:
        ProtocolError: it cannot be read.
    """
    parts = [frame[:_TUPLES_AT]]
    at = _TUPLES_AT
    try:
        while at < len(frame):
            mark = frame[at : at + 1]
            (count,) = _count.unpack_from(frame, at + 1)
            at += 1 + _count.size
            values = []
            for position in range(count):
                begin = at
                at = _behind(frame, at)
                if position not in positions:
                    values.append(frame[begin:at])
            parts += [mark, _count.pack(len(values)), *values]
    except (struct.error, IndexError) as error:
        raise malformed(frame, 0) from error
    if at != len(frame):
        raise malformed(frame, 0)
    return b"".join(parts)


def _behind(frame: bytes, at: int) -> int:
    """Return the place behind a value."""
    kind = frame[at]
    if kind in _WITH_LENGTH:
        return at + 5 + int(_length_at(frame, at + 1)[0])
    if kind not in _WITHOUT_LENGTH:
        raise ProtocolError(chr(frame[KIND_AT]), at - KIND_AT, f"value of unknown kind {kind}")
    return at + 1

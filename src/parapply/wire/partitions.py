"""Old rows of partitions that are published as their root, which hold what the partition's own identity has (T-28).

The publisher announces the root, then the partition, then sends the change with the root's OID, columns and mark. So a
partition that has a key marks its key as a whole row where the root has REPLICA IDENTITY FULL, which no partition takes
over from it. No change says of which partition it is: behind this the root has no more than each of them sends.

Source: maybe_send_schema in pgoutput.c, logicalrep_write_delete in proto.c, ExtractReplicaIdentity in heapam.c.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from msgspec.structs import replace

from parapply.model import Relation
from parapply.wire.rows import KIND_AT, MARK_AT, RELATION_AT, TRUNCATE

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from parapply.model import Transaction

_oid_at = struct.Struct(">I").unpack_from


class Partitions:
    """Belongs to one assembler, and sees all that is announced to it."""

    def __init__(self) -> None:
        """Know of no partition."""
        #: By the root's OID and what old rows hold: the OIDs of partitions that are without REPLICA IDENTITY FULL.
        self._known: dict[int, dict[frozenset[str], set[int]]] = {}
        #: The relations that came last.
        self._before: Relation | None = None
        self._last: Relation | None = None
        #: The transaction and the place in it of one of them that has another right behind it; and it as it came.
        self._met: tuple[Transaction, int, Relation] | None = None

    def narrowed(self, relation: Relation) -> Relation:
        """Return a relation just announced with what old rows of all its known partitions hold."""
        self._before, self._last = self._last, relation
        return self._narrowed(relation)

    def meet(self, transaction: Transaction) -> None:
        """Note that the relation that came last is about to be announced right behind another, perhaps its root."""
        assert self._before is not None
        self._met = transaction, len(transaction.changes) - 1, self._before

    def settle(self) -> bool:
        """Announce a root again whose partition was met; return whether the change that shows it has not come yet."""
        if self._met is None:
            return False
        transaction, at, root = self._met
        before, leaf, *behind = transaction.changes[at : at + 3]
        if not behind:
            return True
        self._met = None
        if isinstance(leaf, Relation) and _is_of(behind[0], root):
            self.note(root, leaf)
            found = self._narrowed(root)
            if found != before:
                transaction.changes[at] = found
                transaction.relations = [one for one in transaction.changes if isinstance(one, Relation)]
        return False

    def _narrowed(self, root: Relation) -> Relation:
        return narrowed(root, [keys for keys, oids in self._known.get(root.oid, {}).items() if oids])

    def note(self, root: Relation, leaf: Relation) -> None:
        """Take two relations that were announced for a change of the first."""
        if not _columns(root) <= _columns(leaf):
            return
        known = self._known.setdefault(root.oid, {})
        for oids in known.values():
            oids.discard(leaf.oid)
        keys = frozenset([column.name for column in leaf.columns if column.is_key])
        # Without any it has inserts alone.
        if keys and leaf.replica_identity != "f":
            known.setdefault(keys, set()).add(leaf.oid)


class FramedPartitions:
    """Finds announcements of a root and its partition in frames, for readers that miss the change behind them."""

    def __init__(self) -> None:
        """Know of no partition."""
        #: OIDs of roots by OIDs of their partitions, and those announced since the last change or transaction.
        self._roots: dict[int, int] = {}
        self.near: list[int] = []

    def meet(self, oid: int, *, is_change: bool) -> None:
        """Take a change, or an announcement: in `in_order` a root comes again behind its partition."""
        if self.near[-2:-1] == [oid]:
            self._roots[self.near[-1]] = oid
        self.near = [] if is_change else [*self.near[-1:], oid]

    def in_order(self, frames: Mapping[int, bytes]) -> list[bytes]:
        """Return announcements, by OID, in an order that shows partitions: before and behind each comes its root."""
        groups: dict[int, list[int]] = {}
        for oid in frames:
            root = self._roots.get(oid, oid)
            groups.setdefault(root if root in frames else oid, []).append(oid)
        found = []
        for root, oids in groups.items():
            found += [part for oid in oids if oid != root for part in (frames[root], frames[oid])] + [frames[root]]
        return found


def _is_of(change: bytes | Relation, root: Relation) -> bool:
    """Return whether two relations were announced for a change of the first; for a TRUNCATE there may be several."""
    if isinstance(change, Relation) or len(change) < MARK_AT or change[KIND_AT] == TRUNCATE:
        return False
    return bool(_oid_at(change, RELATION_AT)[0] == root.oid)


def _columns(relation: Relation) -> set[str]:
    return {column.name for column in relation.columns}


def narrowed(root: Relation, held: Collection[frozenset[str]]) -> Relation:
    """Return a relation whose identity is in all old rows of its partitions.

    Args:
        root: as it is announced, or would be.
        held: what old rows hold, of each partition that has updates or deletes and no REPLICA IDENTITY FULL.
    """
    lost = [column.name for column in root.columns if column.is_key and not all(column.name in keys for keys in held)]
    if not lost and (root.replica_identity != "f" or not held):
        return root
    columns = [replace(column, is_key=column.is_key and column.name not in lost) for column in root.columns]
    identity = "d" if root.replica_identity == "f" else root.replica_identity
    return replace(root, columns=tuple(columns), replica_identity=identity)

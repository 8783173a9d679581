"""Which earlier source transaction each one depends on, for the apply log at ``detail = "transaction"``. Pure.

The same rules as between batches (``overlap.py``), but for single transactions and over a longer past: the nearest
earlier one that holds the same key, unique value, parent or table. Batches merge transactions and know only those in
flight, so what would limit more workers is not to be seen there.

Memory is bounded: only hashes are kept, of the last keys; what lies further back is not reported, and has long
committed. A parent that came before the first row of its child's table was announced is not seen as such. The keys
themselves are never kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from parapply.applylog_schema import DEPENDS_ON_LIMIT, Dependency, RowCounts
from parapply.lineage.holders import ALL_CHANGES, DependencyCause, Holders
from parapply.lineage.tracks import Track
from parapply.model import Relation
from parapply.plan.steps import truncate_step
from parapply.vocabulary import BarrierReason, WaitKind
from parapply.wire.rows import KIND_AT, RELATION_AT, TRUNCATE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parapply.lineage.holders import Found
    from parapply.model import Transaction
    from parapply.plan.plans import Plans
    from parapply.plan.table import TablePlan

_RELATION_END: Final = RELATION_AT + 4


class Traced(NamedTuple):
    """What the apply log says of one source transaction."""

    seq: int  # from 1
    xid: int
    commit_lsn: int
    commit_time_us: int
    end_lsn: int  # 0 while it is not known: of a large one
    size_bytes: int
    n_changes: int
    rows: dict[str, RowCounts]
    depends_on: tuple[Dependency, ...]
    left_out: int


class TransactionGraph:
    """Takes the transactions of one stream in source order. Written by intake only."""

    def __init__(self, table_lock_threshold: int) -> None:
        """Start with nothing seen.

        Args:
            table_lock_threshold: a transaction of more changes takes its tables whole, as in a batch.
        """
        self._threshold = table_lock_threshold
        self._seq = 0
        #: The last transaction that nothing runs alongside.
        self._barrier = 0
        self._barrier_place = DependencyCause(WaitKind.BARRIER, "")
        self._past = Holders()
        self._tracks: dict[bytes, Track] = {}

    def add(self, transaction: Transaction, plans: Plans, *, alone: BarrierReason | None = None) -> Traced:
        """Take a whole transaction.

        Args:
            transaction: whose changes can be read.
            plans: in force before it; they move on with what is announced inside.
            alone: why nothing runs alongside it, if that is not because of its changes.

        Raises:
            ProtocolError, TargetRefused: a change cannot be read after all.
        """
        seq = self._seq = self._seq + 1
        rows: dict[str, RowCounts] = {}
        found: Found = {}
        touched: list[Track] = []
        truncated = ""
        has_relations = bool(transaction.relations)
        is_wide = len(transaction.changes) > self._threshold
        tracks = self._tracks
        for change in transaction.changes:
            if has_relations and isinstance(change, Relation):
                plans.announce(change)
                tracks.pop(change.oid.to_bytes(4), None)
                continue
            frame: bytes = change  # type: ignore[assignment]  # only Relations are announced
            kind = frame[KIND_AT]
            if kind == TRUNCATE:
                truncated = self._count_truncate(frame, rows, plans) or truncated
                continue
            track = tracks.get(frame[RELATION_AT:_RELATION_END])
            if track is None:
                track = self._track(frame, plans)
            if track.seq != seq:
                track.begin(seq, rows)
                touched.append(track)
            track.count(kind)
            if is_wide or track.look(frame, kind, found):
                track.is_taken = True
        self._touch(touched, truncated, found)
        if alone:
            self._become_barrier(DependencyCause(WaitKind.BARRIER, "", alone), found)
        return self._traced(transaction, rows, found)

    def add_alone(self, transaction: Transaction, why: BarrierReason) -> Traced:
        """Take a transaction that runs alone and whose rows are counted elsewhere, with the reason."""
        self._seq += 1
        found: Found = {}
        self._become_barrier(DependencyCause(WaitKind.BARRIER, "", why), found)
        return self._traced(transaction, {}, found)

    def use(self, plans: Mapping[int, TablePlan]) -> None:
        """Continue with other plans; what has changed is looked up again."""
        for oid, plan in plans.items():
            self._past.refer(plan)
            track = self._tracks.get(oid.to_bytes(4))
            if track is not None and track.plan is not plan:
                del self._tracks[oid.to_bytes(4)]

    def _track(self, frame: bytes, plans: Plans) -> Track:
        track = self._tracks[frame[RELATION_AT:_RELATION_END]] = Track(plans.of(frame), self._past)
        return track

    def _touch(self, touched: list[Track], truncated: str, found: Found) -> None:
        """Register what a transaction holds as a whole: tables, or everything."""
        serial = ""
        for track in touched:
            track.touch(found)
            if track.is_serial:
                serial = serial or track.table
        if self._barrier:
            found[self._barrier, self._barrier_place] = ALL_CHANGES
        if truncated:
            self._become_barrier(DependencyCause(WaitKind.BARRIER, truncated, BarrierReason.TRUNCATE), found)
        elif serial:
            self._become_barrier(DependencyCause(WaitKind.BARRIER, serial, BarrierReason.SERIAL), found)

    def _count_truncate(self, frame: bytes, rows: dict[str, RowCounts], plans: Plans) -> str:
        """Count a TRUNCATE and return the first of its tables."""
        names = [plan.relation.qualified_name for plan in truncate_step(frame, plans).plans]
        for name in names:
            rows.setdefault(name, RowCounts()).truncate += 1
        return names[0]

    def _become_barrier(self, place: DependencyCause, found: Found) -> None:
        """Depend on everything before, and let everything later depend on this."""
        found.clear()
        if self._seq > 1:
            found[self._seq - 1, place] = ALL_CHANGES
        self._barrier, self._barrier_place = self._seq, place
        # What later ones would meet comes after the barrier.
        self._past.forget()

    def _traced(self, transaction: Transaction, rows: dict[str, RowCounts], found: Found) -> Traced:
        return Traced(
            self._seq,
            transaction.xid,
            transaction.commit_lsn,
            transaction.commit_time_us,
            transaction.end_lsn,
            transaction.size_bytes,
            len(transaction.changes) - len(transaction.relations),
            rows,
            _dependencies(found) if found else (),
            max(0, len(found) - DEPENDS_ON_LIMIT) if found else 0,
        )


def _dependencies(found: Found) -> tuple[Dependency, ...]:
    latest = sorted(found.items(), key=lambda one: one[0][0], reverse=True)
    return tuple(
        [
            Dependency(
                seq=seq,
                kind=place.kind,
                table=place.table,
                name=place.name,
                changes=changes if changes < ALL_CHANGES else 0,
            )
            for (seq, place), changes in latest[:DEPENDS_ON_LIMIT]
        ]
    )

"""The stream of a publisher for the core: transactions that come whole, large, in progress or prepared."""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from parapply.plan.batch import Batch
from parapply.wire.messages import CommitPrepared, Prepare, RollbackPrepared
from tests.simulate.draws import Draws
from tests.unit.changes_stream import Op, Publisher, assembled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.model import Transaction
    from parapply.plan.table import Plans

#: Streams that so many schedules share, in turn: to draw one takes longer than to play a schedule.
_SOURCES: Final = 256
_SCHEDULES: Final = 50_000
#: Positions between the ends of two transactions that come one after the other: more than `covers` passes over.
_STEP: Final = 0x20
#: Events at most between two transactions that come whole.
_MOST_BETWEEN: Final = 3
_KINDS: Final = (*["put"] * 4, *["update"] * 3, "delete", "move")


class Event(NamedTuple):
    """One event of the stream, at its place."""

    kind: str  # whole, piece, last, chunk, abort, commit or prepare (of one in progress), outcome
    xid: int
    #: End of its commit, prepare or outcome; 0 where it has none.
    end_lsn: int
    transaction: Transaction | None = None  # whole
    is_prepared: bool = False  # whole or large: it ends with a PREPARE
    is_commit: bool = True  # outcome
    sub: int = 0  # chunk, sub (its rollback): number of the subtransaction; 0: none

    @property
    def whole(self) -> tuple[Transaction, ...]:
        """Return the piece; nothing if the contents do not matter."""
        return () if self.transaction is None else (self.transaction,)


class Batches:
    """A stream, and the batches that are made of it."""

    plans: Plans
    #: False if a table would be exclusive then.
    may_be_relaxed = True

    def __init__(self, draws: Draws) -> None:
        """Start empty."""
        self.draws = draws
        self.transactions: list[Transaction] = []
        self.events: list[Event] = []
        self.last_lsn = self.end_lsn = self.n_xids = 0
        #: Of all that end.
        self.ends: list[int] = []
        self._until: list[int] = []
        self._batches: dict[tuple[bool, tuple[int, ...]], Batch] = {}

    def next_lsn(self) -> int:
        """Return the end of the next transaction."""
        self.last_lsn += _STEP
        return self.last_lsn

    def finish(self) -> None:
        """Note where the stream ends, and each event's transaction; one that is rolled back has no end."""
        self.ends = [event.end_lsn for event in self.events if event.end_lsn]
        self.end_lsn = max(self.ends, default=0)
        after = {event.xid: event.end_lsn for event in self.events if event.end_lsn and event.kind != "outcome"}
        self._until = [event.end_lsn or after.get(event.xid, self.end_lsn + 1) for event in self.events]

    def events_after(self, low_lsn: int) -> deque[Event]:
        """Return the events that come again when all that ends up to a position is confirmed."""
        if not low_lsn:
            return deque(self.events)
        return deque([event for event, end in zip(self.events, self._until, strict=True) if end > low_lsn])

    def plans_of(self, *, is_relaxed: bool) -> Plans:
        """Return the plans of the tables in a commit order."""
        return self.plans

    def batch_of(self, ends: tuple[int, ...], seq: int, *, is_prepared: bool, is_relaxed: bool) -> Batch:
        """Return a closed batch of some transactions, by their ends; all schedules of the stream share it."""
        batch = self._batches.get((is_relaxed, ends))
        if batch is None:
            batch = self._batches[is_relaxed, ends] = Batch(seq)
            for transaction in self.transactions:
                if transaction.end_lsn in ends:
                    batch.add(transaction, self.plans_of(is_relaxed=is_relaxed))
            batch.close()
        batch.seq = seq
        for changes in batch.table_changes:
            changes.late_keys.clear()
            changes.contended = None
            changes.values.clear()
        if is_prepared:
            batch.is_barrier = True
        return batch


class Source(Batches):
    """Stream of one publisher for the core: the contents matter only where batches are compared."""

    has_two_phase = True

    def __init__(self, draws: Draws) -> None:
        """Draw few tables and keys, because changes that never meet prove nothing."""
        super().__init__(draws)
        publisher = Publisher()
        n_tables = 1 + draws.below(2)
        # The first tables are applied as sets by their key, so that they have late keys.
        n_specs = (3, len(publisher.specs))[draws.below(2)]
        tables = [draws.below(n_specs) for _ in range(n_tables)]
        n_keys, n_commits = 1 + draws.below(4), 1 + draws.below(10)
        kinds = [*_KINDS, *["commit"] * n_commits, *["truncate"] * draws.chance(0.3)]
        wishes = [
            Op(
                kinds[draws.below(len(kinds))],
                tables[draws.below(n_tables)],
                draws.below(n_keys),
                draws.below(n_keys + 1),
            )
            for _ in range(2 + draws.below(30))
        ]
        self.transactions = assembled(publisher.run(wishes))
        self.plans = publisher.plans
        #: Transactions in progress, and prepared ones without their outcome.
        self._open: list[int] = []
        self._prepared: list[int] = []
        p_special = (0.0, 0.0, 0.1, 0.3)[draws.below(4)]
        for transaction in self.transactions:
            for _ in range(_MOST_BETWEEN):
                if draws.chance(p_special):
                    self._special()
            self.last_lsn = transaction.end_lsn
            is_prepared = draws.chance(p_special / 4) and self.has_two_phase
            if is_prepared:
                self._prepared.append(transaction.end_lsn)
            self.events.append(
                Event("whole", transaction.end_lsn, transaction.end_lsn, transaction, is_prepared=is_prepared)
            )
        while self._open or self._prepared:
            self._end()
        self.finish()

    def _special(self) -> None:
        draws = self.draws
        what = draws.below(4)
        if what == 0 and len(self._open) < 3:
            xid = 1_000_000 + len(self.events)
            self._open.append(xid)
            self.events.append(Event("chunk", xid, 0))
        elif what == 1 and self._open:
            self.events.append(Event("chunk", self._open[draws.below(len(self._open))], 0))
        elif what == 2:
            xid, n_pieces = 1_000_000 + len(self.events), 1 + draws.below(4)
            is_prepared = draws.chance(0.2) and self.has_two_phase
            self.events += [Event("piece", xid, 0) for _ in range(n_pieces)]
            if is_prepared:
                self._prepared.append(xid)
            self.events.append(Event("last", xid, self.next_lsn(), is_prepared=is_prepared))
        elif self._open or self._prepared:
            self._end()

    def _end(self) -> None:
        draws = self.draws
        at = draws.below(len(self._open) + len(self._prepared))
        if at < len(self._open):
            xid = self._open.pop(at)
            kind = ("commit", "commit", "commit", "prepare", "abort")[draws.below(5)]
            kind = kind if self.has_two_phase or kind == "abort" else "commit"
            self.events.append(Event(kind, xid, 0 if kind == "abort" else self.next_lsn()))
            if kind == "prepare":
                self._prepared.append(xid)
        else:
            xid = self._prepared.pop(at - len(self._open))
            self.events.append(Event("outcome", xid, self.next_lsn(), is_commit=not draws.chance(0.3)))


def message_of(event: Event) -> CommitPrepared | RollbackPrepared | Prepare:
    """Return the message with which an event ends."""
    if event.kind != "outcome":
        return Prepare(prepare_lsn=event.end_lsn, end_lsn=event.end_lsn, prepare_time_us=1, xid=event.xid, gid="g")
    if event.is_commit:
        return CommitPrepared(commit_lsn=event.end_lsn, end_lsn=event.end_lsn, commit_time_us=1, xid=event.xid, gid="g")
    return RollbackPrepared(
        prepare_end_lsn=0,
        rollback_end_lsn=event.end_lsn,
        prepare_time_us=1,
        rollback_time_us=1,
        xid=event.xid,
        gid="g",
    )


def source_of(seed: int) -> Source:
    """Return the stream that the schedule of a seed applies."""
    return _source(seed // _SCHEDULES * _SOURCES + seed % _SOURCES)


@lru_cache(maxsize=_SOURCES)
def _source(seed: int) -> Source:
    return Source(Draws(seed))


def source_from(choices: Sequence[int]) -> Source:
    """Return the stream of some choices."""
    return Source(Draws(0, choices))

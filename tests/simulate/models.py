"""The engine between models of both servers: batches are what the planner made, and statements meet rows and locks.

Checked besides what `core.py` checks: each commit leaves the rows of a state of the source, in its order, or, relaxed,
rows that no constraint forbids; nothing is refused at the head; and at the end the rows are the source's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from parapply.plan.batch import Batch
from tests.simulate import core
from tests.simulate.apply import Applying
from tests.simulate.draws import Draws, Violation
from tests.simulate.publisher import RowSource
from tests.simulate.sessions import Failed, For, Holder, Work, Worker, chain
from tests.simulate.tables import Change, Refused, Tables, changes_in_order, changes_of
from tests.unit.foreign_key_model import CHILD, PARENT, refused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    from tests.simulate.commits import Entry
    from tests.simulate.sessions import Steps

_SOURCES = 128
_SCHEDULES = 10_000


class RowApplying(Applying):
    """The workers of one epoch, on tables."""

    source: RowSource
    tables: Tables

    def _statements(self, worker: Worker, work: Work | None = None) -> Steps:
        worker.is_open = worker.in_statement = True
        try:
            for change in self._changes(work) if work is not None else ():
                yield from self._locked(worker, change)
                self.tables.apply(worker, change)
        except Refused as error:
            worker.in_statement = False
            if work is not None and work.is_alone:
                raise Violation(f"{error} at the head") from error
            self.seen["a statement is refused"] += 1
            raise Failed(is_again=False) from error
        yield For.SERVER
        worker.in_statement = False
        self._check_cancelled(worker)
        if self.p_fail and self._draws.chance(self.p_fail):
            raise Failed(is_again=self._draws.chance(0.5))

    def _locked(self, worker: Worker, change: Change) -> Steps:
        while (other := self.tables.blocker(worker, change)) is not None:
            assert isinstance(other, Holder)
            if worker in chain(other):
                worker.in_statement = False
                self.seen["deadlock that the server sees"] += 1
                raise Failed(is_again=True)
            worker.held_by = other
            self.seen["foreign lock wait" if not isinstance(other, Worker) and not other.xid else "lock wait"] += 1
            yield For.SERVER
            self._check_cancelled(worker)
        if self._draws.chance(0.1):
            yield For.SERVER
            self._check_cancelled(worker)

    def _check_cancelled(self, worker: Worker) -> None:
        if worker.is_cancelled:
            worker.is_cancelled = worker.in_statement = False
            worker.held_by = None
            raise Failed(is_again=True)

    def _changes(self, work: Work) -> Iterator[Change]:
        if work.batch is not None:
            return changes_of(work.batch, is_late=work.is_late)
        if work.is_piece:
            batch = Batch(1)
            for transaction in work.transactions:
                batch.add(transaction, self.source.plans_of(is_relaxed=self.state.is_relaxed))
            batch.close()
            if not batch.is_suspect:
                return changes_of(batch, is_late=None)
        return changes_in_order([frame for one in work.transactions for frame in one.changes])

    def _savepoint(self, worker: Worker) -> object:
        return dict(worker.written), dict(worker.locks)

    def _go_back(self, worker: Worker, before: object) -> None:
        self.tables.go_back(worker, *before)  # type: ignore[misc]
        self.let_go(worker)

    def _rollback(self, worker: Worker) -> Steps:
        self.tables.release(worker)
        return super()._rollback(worker)

    def _send(self, worker: Worker, entry: Entry) -> Steps:
        if entry.kind in ("commit", "prepare"):
            entry = entry._replace(written=dict(worker.written), locks=dict(worker.locks))
        worker.in_doubt = entry
        yield For.SERVER
        worker.in_doubt = None
        self.write(entry, worker)
        worker.is_open = False
        self.let_go(worker)
        if self.is_late:
            yield For.SERVER
        if self.is_durable:
            self.commits.flush()

    def write(self, entry: Entry, worker: Worker | None = None) -> None:
        """Write a record, and make visible what it commits."""
        holder = self.prepared.get(entry.xid) if entry.kind == "decide" else None
        super().write(entry)
        if entry.kind == "commit":
            assert worker is not None
            self.tables.commit(worker)
        elif entry.kind == "prepare":
            assert worker is not None
            self.tables.hand_over(worker, self.prepared[entry.xid])
        elif holder is not None and entry.is_commit:
            self.tables.commit(holder)
        elif holder is not None:
            self.tables.release(holder)
        if entry.kind == "commit" or (entry.kind == "decide" and entry.is_commit):
            self._check_rows(entry.lsn)

    def _check_rows(self, lsn: int) -> None:
        rows = self.tables.rows
        if self.state.is_relaxed:
            if refused(rows):
                raise Violation("readers see what a constraint forbids")
        elif rows != self.source.states[lsn]:
            raise Violation("rows differ from the source's at that position")

    def foreign_comes(self) -> None:
        """Have a foreign session lock a row, and perhaps wait for one of ours."""
        draws = self._draws
        change = Change((PARENT, CHILD)[draws.below(2)], draws.below(4), None)
        holder = Holder()
        if self.tables.blocker(holder, change) is None:
            self.foreign.append(holder)
            found = [one for one in self.workers.values() if one.locks and one.held_by is None]
            if found and draws.chance(0.3):
                holder.held_by = found[draws.below(len(found))]


class RowSchedule(core.Schedule):
    """One seed's."""

    source: RowSource

    @classmethod
    def again(cls, parts: Sequence[Sequence[int]]) -> Self:
        """Return the schedule of other choices: of the publisher, and of the schedule."""
        return cls(0, RowSource(Draws(0, parts[0])), parts[1])

    @staticmethod
    def _source_of(seed: int) -> RowSource:
        return _source(seed // _SCHEDULES * _SOURCES + seed % _SOURCES)

    def _new_applying(self) -> RowApplying:
        """Start with the rows that the WAL says."""
        applying = RowApplying(self.flight, self.commits, self.draws, self.seen)
        applying.source, applying.tables = self.source, Tables()
        for entry in self.commits.wal:
            holder = Holder()
            if entry.kind == "commit":
                holder.written = dict(entry.written or {})
                applying.tables.commit(holder)
            elif entry.kind == "prepare":
                holder = applying.prepared.setdefault(entry.xid, Holder(entry.xid))
                holder.written = dict(entry.written or {})
                applying.tables.take(holder, entry.locks or {})
            elif entry.kind == "decide":
                holder = applying.prepared.pop(entry.xid)
                (applying.tables.commit if entry.is_commit else applying.tables.release)(holder)
        return applying

    def _foreign_leaves(self) -> bool:
        assert isinstance(self.applying, RowApplying)
        for holder in self.applying.free_foreign()[:1]:
            self.applying.tables.release(holder)
        return super()._foreign_leaves()

    def _disturb_foreign(self) -> None:
        assert isinstance(self.applying, RowApplying)
        if self.draws.chance(0.6):
            self.applying.foreign_comes()
        else:
            self._foreign_leaves()

    def _check_end(self) -> None:
        super()._check_end()
        assert isinstance(self.applying, RowApplying)
        if self.applying.tables.rows != self.source.tables.rows:
            raise Violation("rows differ at the end")


@lru_cache(maxsize=_SOURCES)
def _source(seed: int) -> RowSource:
    return RowSource(Draws(seed))

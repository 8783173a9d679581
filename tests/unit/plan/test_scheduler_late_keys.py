"""Batches whose changes of common keys are put off to their commit, against serial application.

The model is a database of dictionaries with transactions: what a batch does sees only what had committed when it
started and what it did itself, and becomes visible when it commits. Two of them writing one row is a failure.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from parapply.plan.scheduler import Scheduler
from tests.unit.changes_model import BLANK, KEYLESS, NUMERIC, PAIR, PLAIN, SPECS, UNIQUE, Side, Spec, Values
from tests.unit.changes_stream import Op, Publisher, assembled, batches, ops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.plan.batch import Batch

HOT = (PLAIN, PAIR, NUMERIC, BLANK, UNIQUE, KEYLESS)
KINDS = ("put", "update", "update", "delete", "commit", "commit", "commit", "move", "announce")


class _Open:
    """A target transaction: its own view of the rows, and what it has written."""

    def __init__(self, batch: Batch, committed: Side) -> None:
        self.batch = batch
        self._before = committed
        self.view = committed.snapshot()
        self.view.apply_batch(batch, with_late_keys=False)

    def do_late_keys(self, committed: Side) -> None:
        """Go on with everything committed since in sight, as the next statement under READ COMMITTED does."""
        if self.batch.is_barrier:
            return
        mine, self._before = self.written(), committed
        self.view = committed.snapshot()
        _write(self.view, mine)
        self.view.apply_late_keys(self.batch)

    def written(self) -> dict[tuple[int, int | None], Values | list[Values] | None]:
        """Return the row of each table and key that differs now, None if it is gone; for no key the rows added."""
        found: dict[tuple[int, int | None], Values | list[Values] | None] = {}
        for oid, rows in self.view.rows.items():
            before = self._before.rows[oid]
            found |= {(oid, key): rows.get(key) for key in before | rows if before.get(key) != rows.get(key)}
        for oid, heap in self.view.heaps.items():
            if added := heap[len(self._before.heaps[oid]) :]:
                found[oid, None] = added
        return found


def _write(side: Side, written: dict[tuple[int, int | None], Values | list[Values] | None]) -> None:
    for (oid, key), row in written.items():
        if isinstance(row, list):
            side.heaps[oid] += row
        elif key is not None and row is not None:
            side.rows[oid][key] = row
        elif key is not None:
            del side.rows[oid][key]


class _Target:
    """The scheduler's choices, taken by a random hand."""

    def __init__(self, random: Random, specs: Sequence[Spec]) -> None:
        self.committed = Side(specs)
        self.n_late = 0
        self._random = random
        self._scheduler = Scheduler()
        self._ready: list[Batch] = []
        self._open: dict[int, _Open] = {}
        self._yielded: set[int] = set()

    def run(self, coming: list[Batch]) -> None:
        """Let batches come, start in any order that is allowed, yield, and commit in source order."""
        while coming or len(self._scheduler):
            head = self._scheduler.head
            startable = [batch for batch in self._ready if batch.seq not in self._open and self._may_start(batch, head)]
            steps = [*(["come"] * 3 if coming else []), *(["start", "start"] if startable else [])]
            if head and head.seq in self._open:
                steps += ["commit"]
            if len(self._open) > 1:
                steps += ["yield"]
            step = self._random.choice(steps)
            if step == "come":
                self._come(coming.pop(0))
            elif step == "start":
                batch = self._random.choice(startable)
                self._scheduler.started(batch)
                self._open[batch.seq] = _Open(batch, self.committed.snapshot())
                self._check_no_lock_is_waited_for()
            elif step == "yield":
                seq = self._random.choice(sorted(self._open)[1:])
                del self._open[seq]
                self._yielded.add(seq)
            else:
                assert head
                self._commit(head)

    def _may_start(self, batch: Batch, head: Batch | None) -> bool:
        # After a rollback for the head it waits for its turn first.
        return batch is head or batch.seq not in self._yielded

    def _come(self, batch: Batch) -> None:
        if self._scheduler.add(batch):
            self._ready.append(batch)
        self.n_late += sum(len(changes.late_keys) for changes in batch.table_changes)

    def _commit(self, head: Batch) -> None:
        transaction = self._open[head.seq]
        transaction.do_late_keys(self.committed.snapshot())
        self._check_no_lock_is_waited_for()
        if head.is_barrier:
            # Alone, and perhaps a TRUNCATE: what it sees is all there is.
            assert len(self._open) == 1
            self.committed = transaction.view
        else:
            _write(self.committed, transaction.written())
        del self._open[head.seq]
        self._ready.remove(head)
        self._ready += self._scheduler.committed(head).to_start

    def _check_no_lock_is_waited_for(self) -> None:
        """Fail if two open transactions have written one row: the head could wait for a later one (trap T-30)."""
        seen: set[tuple[int, int | None]] = set()
        for transaction in self._open.values():
            keys = {(oid, key) for oid, key in transaction.written() if key is not None}
            assert not keys & seen
            seen |= keys


@pytest.mark.parametrize(("specs", "kinds"), [(HOT, KINDS), (SPECS, (*KINDS, "truncate"))], ids=["hot", "every kind"])
@given(data=st.data(), sizes=st.lists(st.integers(1, 3), max_size=12), seed=st.integers(0, 1 << 32))
@settings(max_examples=3 * settings().max_examples)
def test_late_keys_lead_to_the_rows_of_serial_application(
    *, data: st.DataObject, sizes: list[int], seed: int, specs: Sequence[Spec], kinds: Sequence[str]
) -> None:
    """In whatever order early parts run and yield, every count is right, no row is locked twice, all rows are equal."""
    wishes: list[Op] = data.draw(ops(specs, kinds), label="wishes")
    publisher = Publisher(specs)
    coming = batches(assembled(publisher.run(wishes)), publisher.plans, sizes)
    target = _Target(Random(seed), specs)
    target.run(coming)
    event(f"late keys: {min(target.n_late, 5)}")
    assert target.committed == publisher.side

"""One measurement of the planner: `python -m bench.micro.planning`, a process of its own, for one twin of the hot path.

In go sizes; out comes a line of JSON: for each stream and batch size the CPU seconds of each phase. No I/O is measured,
for there is none.
"""

from __future__ import annotations

import gc
import json
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from bench.micro.streams import NAMES, stream
from parapply import WHY_INTERPRETED
from parapply.plan.batch import Batch, Limits
from parapply.plan.scheduler import Scheduler
from parapply.wire.assembler import Assembler

if TYPE_CHECKING:
    from bench.micro.streams import Stream
    from parapply.model import Transaction

# As the daemon has it: four workers' batches, and two closed ahead of them.
_IN_FLIGHT = 6
# As the daemon reads it, about: 128 KiB.
_FRAMES_A_READ = 1000
# As the daemon sets it; with Python's own thresholds the collector would be a good part of what is measured.
_GC_ALLOCATIONS = 200_000
_NO_LIMIT = 1 << 40
_PIECE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Measured:
    """CPU seconds of one pass over one stream.

    Attributes:
        stream: its name.
        batch_transactions: source transactions in each batch.
        transactions: in the stream.
        changes: rows in the stream.
        assemble_s: frames to transactions.
        add_s: transactions into batches: decoding, keys, net changes.
        schedule_s: what is known of closed batches, whom each waits for, and its commit.
        batches: all of them.
        waiting_batches: those that had to wait for another one before they start.
        late_keys: keys put off because another batch in flight holds them. Few, as it is meant here, and not none.
    """

    stream: str
    batch_transactions: int
    transactions: int
    changes: int
    assemble_s: float
    add_s: float
    schedule_s: float
    batches: int
    waiting_batches: int
    late_keys: int


class _Pass:
    """One pass over one stream."""

    def __init__(self, source: Stream, batch_transactions: int) -> None:
        self._source = source
        self._limits = Limits(batch_transactions, _NO_LIMIT, _NO_LIMIT)
        self._assembler = Assembler(_PIECE_BYTES)
        self._scheduler = Scheduler()
        self._batch = Batch(1)
        self._in_flight: deque[Batch] = deque()
        self.batches = 0
        self.waiting_batches = 0
        self.late_keys = 0

    def run(self) -> tuple[float, float, float]:
        """Return the CPU seconds of assembling, adding and scheduling."""
        assemble_s = add_s = schedule_s = 0.0
        frames = self._source.frames
        clock = time.process_time
        for at in range(0, len(frames), _FRAMES_A_READ):
            # Phases of a whole read: a look at the clock for each transaction would also be measured.
            begun_s = clock()
            transactions = self._assembler.push(frames[at : at + _FRAMES_A_READ])
            assembled_s = clock()
            closed = self._add(transactions)
            added_s = clock()
            self._schedule(closed)
            assemble_s += assembled_s - begun_s
            add_s += added_s - assembled_s
            schedule_s += clock() - added_s
        return assemble_s, add_s, schedule_s

    def _add(self, transactions: list[Transaction]) -> list[Batch]:
        """Return the batches that are full, as `runtime/intake/batcher.py` fills them."""
        plans, limits = self._source.plans, self._limits
        closed = []
        at = 0
        while at < len(transactions):
            if transactions[at].relations:
                self._batch.add(transactions[at], plans)
                at += 1
            else:
                at = self._batch.add_run(transactions, at, plans, limits)
            if self._batch.is_full(limits):
                assert not self._batch.is_suspect, "these streams hold no contradiction"
                closed.append(self._batch)
                self._batch = Batch(self._batch.seq + 1)
        return closed

    def _schedule(self, closed: list[Batch]) -> None:
        """Take batches over, and commit the earliest while too many are in flight."""
        for batch in closed:
            batch.close()
            if not self._scheduler.add(batch):
                self.waiting_batches += 1
            self.batches += 1
            for changes in batch.table_changes:
                self.late_keys += len(changes.late_keys)
            self._in_flight.append(batch)
            if len(self._in_flight) >= _IN_FLIGHT:
                self._scheduler.committed(self._in_flight.popleft())


def measure(source: Stream, name: str, batch_transactions: int) -> Measured:
    """Pass over a stream once; its plans are as they were announced afterwards."""
    one = _Pass(source, batch_transactions)
    assemble_s, add_s, schedule_s = one.run()
    return Measured(
        stream=name,
        batch_transactions=batch_transactions,
        transactions=source.transactions,
        changes=source.changes,
        assemble_s=assemble_s,
        add_s=add_s,
        schedule_s=schedule_s,
        batches=one.batches,
        waiting_batches=one.waiting_batches,
        late_keys=one.late_keys,
    )


@click.command()
@click.option("--transactions", type=click.IntRange(min=1), required=True)
@click.option("--batch", "batches", type=click.IntRange(min=1), multiple=True, required=True)
def main(*, transactions: int, batches: tuple[int, ...]) -> None:
    """Pass once over every stream with every batch size and print the JSON."""
    found = []
    for name in NAMES:
        source = stream(name, transactions)
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_ALLOCATIONS)
        for size in batches:
            gc.collect()
            found.append(asdict(measure(source, name, size)))
        gc.unfreeze()
    print(json.dumps({"interpreted_because": WHY_INTERPRETED, "measured": found}))


if __name__ == "__main__":
    main()

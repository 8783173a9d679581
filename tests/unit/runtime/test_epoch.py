"""How an epoch counts, and how it ends."""

from __future__ import annotations

import asyncio
import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from parapply.applylog_schema import RowCounts
from parapply.config import ApplyConfig
from parapply.engine.job import SetJob
from parapply.errors import SourceLost, TargetLost
from parapply.metrics.figures import Figures, TableFigures
from parapply.metrics.table import OTHER_TABLES, TABLES_LIMIT
from parapply.plan.batch import Batch
from parapply.runtime.epoch import Epoch, _count, _piece_bytes
from parapply.runtime.signals import Signals
from parapply.target.state.slots import SlotState


@pytest.mark.parametrize("number", range(4))
def test_a_bound_belongs_to_its_bucket(number: int) -> None:
    """A value equal to a bound counts there (le: less or equal), one above all bounds in +Inf."""
    figures = Figures()
    histogram = figures.of_batches[number]
    bounds = histogram.metric.buckets
    values = [*bounds, math.nextafter(bounds[-1], math.inf)]
    for value in values:
        job = SetJob(Batch(1), {})
        job.counts.n_transactions, job.counts.n_changes, job.counts.size_bytes = [value] * 3  # type: ignore[assignment]
        job.times.committed_s = value
        _count(figures, job)
    assert histogram.counts == [1] * len(values)
    assert histogram.sum == sum(values)


def test_a_table_with_rows_has_changed_if_it_has_figures_of_its_own() -> None:
    """Those that came too late are not among the tables whose counts are written for people."""
    figures = Figures()
    figures.tables.update({f"s.t{number}": TableFigures() for number in range(TABLES_LIMIT - 1)})
    job = SetJob(Batch(1), {})
    job.counts.rows = {name: RowCounts(insert=2) for name in ("s.t7", "s.last", "s.late")}
    _count(figures, job)
    assert figures.take_changed(TABLES_LIMIT) == ["s.t7", "s.last"]
    assert figures.tables[OTHER_TABLES].rows.insert == 2


async def test_the_reader_ends_before_its_connection_is_closed() -> None:
    """It waits for the socket: closed under it, the number may be another descriptor's when the wait is given up."""
    reader = asyncio.create_task(asyncio.Event().wait(), name="reader")
    was_done: list[bool] = []

    async def close() -> None:
        was_done.append(reader.done())

    async def nothing(*_: object) -> None:
        """Do nothing."""

    epoch: Any = SimpleNamespace(
        _ends=SimpleNamespace(stream=SimpleNamespace(close=close)), _drain=nothing, _last_word=nothing
    )
    await Epoch._leave(epoch, SourceLost("gone"), {"reader": reader}, asyncio.Event())  # type: ignore[dict-item]
    assert was_done == [True]


async def test_the_loop_goes_on_while_a_disk_keeps_files_from_being_closed() -> None:
    """A thread that was given up in the middle of a write holds the lock of its file; other slots share the loop."""
    loop, goes_on = asyncio.get_running_loop(), threading.Event()
    seen: list[bool] = []

    def close() -> None:
        loop.call_soon_threadsafe(goes_on.set)
        seen.append(goes_on.wait(5))

    async def nothing(*_: object) -> None:
        """Do nothing."""

    async def lose() -> None:
        raise TargetLost("gone")

    epoch: Any = SimpleNamespace(
        _refuse_past=nothing, _conflict_handler=SimpleNamespace(begin=nothing, close=bool), low_lsn=0,
        _ends=SimpleNamespace(control=None), _parts={"sessions": lose}, _worker_tasks=SimpleNamespace(start=bool),
        _health=SimpleNamespace(detach=bool), _spill=SimpleNamespace(close=close),
    )  # fmt: skip
    with pytest.raises(TargetLost):
        await Epoch.serve(epoch, Signals())
    assert seen == [True]


@pytest.mark.parametrize("high_lsn", [7, 8])
def test_no_limit_makes_smaller_pieces_while_something_lies_above_the_watermark(high_lsn: int) -> None:
    """No run with other limits can have taken a larger transaction whole."""
    known = SlotState(
        slot_id=1, slot_name="s", system_identifier="1", timeline=1, begin_lsn=1, low_lsn=7, ranges=(),
        members=frozenset([high_lsn]),
    )  # fmt: skip
    largest = _piece_bytes(ApplyConfig(memory_limit_bytes=1 << 40), known)
    lower = [ApplyConfig(memory_limit_bytes=16 << 20), ApplyConfig(max_changes_per_s=1)]
    assert [_piece_bytes(config, known) == largest for config in lower] == [high_lsn > 7] * 2

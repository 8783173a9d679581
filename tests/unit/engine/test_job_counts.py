"""Rows are counted once, by table and kind, however they are applied."""

from __future__ import annotations

from parapply.engine.job import NOTHING_COUNTED, JobCounts
from tests.unit.changes_stream import Op, Publisher, assembled, batches


def test_a_batch_is_counted_by_table_and_kind() -> None:
    """Rows counted since a point are forgotten when it was rolled back."""
    publisher = Publisher()
    wishes = [Op("put", 0, 1), Op("put", 0, 2), Op("commit", 0), Op("delete", 0, 3), Op("update", 0, 1)]
    (batch,) = batches(assembled(publisher.run(wishes)), publisher.plans, [2])
    counts = JobCounts()
    counts.count_batch(batch)
    (rows,) = counts.rows.values()
    assert (counts.n_transactions, counts.n_changes) == (2, batch.n_changes)
    assert (rows.insert, rows.update, rows.delete, rows.truncate) == (2, 1, 0, 0)
    counted = counts.counted()
    counts.count_batch(batch)
    counts.go_back_to(counted)
    assert counts.counted() == counted
    counts.go_back_to(NOTHING_COUNTED)
    assert not counts.rows

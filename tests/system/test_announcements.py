"""An announcement that the publisher repeats without a change ends no batch and waits for no query."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.applylog_schema import BatchRecord, read_record
from tests.fixtures.pair import Pair, pair

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["pair"]

_N_PARTITIONS = 60
_TABLES = f"""
CREATE TABLE t (id int, day int, v int, PRIMARY KEY (id, day)) PARTITION BY LIST (day);
DO $$ BEGIN FOR day IN 1..{_N_PARTITIONS} LOOP
  EXECUTE format('CREATE TABLE t%s PARTITION OF t FOR VALUES IN (%1$s)', day);
END LOOP; END $$;
"""


def test_t28_a_root_announced_with_each_of_its_partitions_ends_no_batch(pair: Pair, tmp_path: Path) -> None:
    """Published by their root, partitions come with it again, each at its first change: a batch takes many (T-28)."""
    pair.create(_TABLES, published="TABLE t WITH (publish_via_partition_root = true)")
    pair.write(*(f"INSERT INTO t VALUES ({day}, {day}, 0)" for day in range(1, _N_PARTITIONS + 1)))
    pair.drain(settings={"applylog.directory": str(tmp_path)})
    pair.check_equal()
    lines = (line for path in tmp_path.glob("*.jsonl") for line in path.read_bytes().splitlines())
    batches = [record for line in lines if isinstance(record := read_record(line), BatchRecord)]
    assert sum(batch.n_transactions for batch in batches) == _N_PARTITIONS
    assert len(batches) < _N_PARTITIONS / 2

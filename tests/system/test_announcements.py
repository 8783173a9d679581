"""An announcement that the publisher repeats without a change ends no batch and waits for no query."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from parapply.applylog_schema import BatchRecord, read_record
from parapply.check.kinds import Code
from tests.fixtures.pair import Pair, pair

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.daemon import RunCommand

__all__ = ["pair"]

_N_PARTITIONS = 60
_N_ALTERED = 40
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
    batches = _batches(tmp_path)
    assert sum(batch.n_transactions for batch in batches) == _N_PARTITIONS
    assert len(batches) < _N_PARTITIONS / 2


def test_values_kept_of_one_table_end_no_batch_at_announcements(pair: Pair, tmp_path: Path) -> None:
    """An answer holds for all that was committed before it, of other tables and of withheld partitions."""
    tables = (
        "CREATE TABLE root (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);"
        "CREATE TABLE leaf PARTITION OF root FOR VALUES FROM (0) TO (99);"
        "CREATE TABLE plain (id int PRIMARY KEY, v int)"
    )
    pair.create(tables, published="ALL TABLES WITH (publish_via_partition_root = true)")
    pair.write(
        *(
            f"ALTER TABLE {altered} ALTER v SET STATISTICS {number}; INSERT INTO {table} VALUES ({number})"
            for number in range(_N_ALTERED)
            for altered, table in (("plain", "plain"), ("leaf", "root"))
        )
    )
    omit = 'mapping.tables."public.root".omit'
    daemon = pair.drain(settings={"applylog.directory": str(tmp_path), omit: "v"})
    pair.check_equal()
    batches = _batches(tmp_path)
    assert sum(batch.n_transactions for batch in batches) == 2 * _N_ALTERED
    assert len(batches) < _N_ALTERED / 2, daemon.log_tail()


def test_a_table_that_becomes_a_partition_of_one_with_kept_values_is_asked_about_again(pair: Pair) -> None:
    """Its first announcement was settled by an answer that does not hold for what commits later."""
    columns = "(id int PRIMARY KEY, v text)"
    pair.create(f"CREATE TABLE root {columns} PARTITION BY RANGE (id); CREATE TABLE plain {columns}")
    pair.write("INSERT INTO plain VALUES (1, 'a')")
    daemon = pair.start(settings={'mapping.tables."public.root".omit': "v"})
    daemon.wait_caught_up()
    pair.write(
        "ALTER TABLE root ATTACH PARTITION plain FOR VALUES FROM (0) TO (99)", "INSERT INTO plain VALUES (2, 'kept')"
    )
    pair.check_stopped(daemon, code=4, says="public.plain is sent by its own name")
    assert pair.target.rows("SELECT id FROM plain") == [(1,)]


def test_t28_a_root_in_full_whose_partitions_have_keys(pair: Pair, run_command: RunCommand) -> None:
    """The mark of the root says that an old row is whole, and it has the partition's key alone (T-28).

    Without a key of its own the target cannot find the row; a policy would leave out each delete. Rows of a target with
    the key are found by it. Both are known before the first change.
    """
    columns = "(part int NOT NULL, id int NOT NULL, v text)"
    made = (
        f"CREATE TABLE {{0}} {columns} PARTITION BY LIST (part); ALTER TABLE {{0}} REPLICA IDENTITY FULL;"
        "CREATE TABLE {0}_1 PARTITION OF {0} (PRIMARY KEY (id)) FOR VALUES IN (1);"
        "CREATE TABLE {0}_2 PARTITION OF {0} FOR VALUES IN (2); ALTER TABLE {0}_2 REPLICA IDENTITY FULL;"
    )
    pair.create(
        made.format("keyed") + made.format("keyless"),
        f"CREATE TABLE keyed {columns}; ALTER TABLE keyed ADD PRIMARY KEY (id); CREATE TABLE keyless {columns}",
        published="TABLE keyed, keyless WITH (publish_via_partition_root = true)",
    )
    rows = "(1, 1, 'a'), (1, 2, 'b'), (2, 3, 'c')"
    pair.write(f"INSERT INTO keyed VALUES {rows}", f"INSERT INTO keyless VALUES {rows}")
    pair.write("UPDATE keyed SET v = 'd' WHERE id <> 2", "DELETE FROM keyed WHERE id = 2")
    done = run_command(pair.route, "check", "--json")
    refused = [one for one in json.loads(done.stdout)["findings"] if one["code"] == Code.UPDATES_REFUSED.text]
    assert [one["object"] for one in refused] == ['"public"."keyless"']
    assert "or a partition of it" in refused[0]["found"]
    settings = {"conflict.delete_missing": "skip", "conflict.update_missing": "skip"}
    pair.drain(settings=settings)
    assert sorted(pair.target.rows("TABLE keyed")) == [(1, 1, "d"), (2, 3, "d")]
    pair.write("DELETE FROM keyless WHERE id = 1")
    daemon = pair.start(settings=settings)
    assert daemon.wait_for_event("batch_retried")["reason"] == "refused"
    daemon.kill()
    assert pair.target.rows("SELECT count(*) FROM keyless") == [(3,)]


def _batches(directory: Path) -> list[BatchRecord]:
    lines = (line for path in directory.glob("*.jsonl") for line in path.read_bytes().splitlines())
    return [record for line in lines if isinstance(record := read_record(line), BatchRecord)]

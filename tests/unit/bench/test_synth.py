"""Synthetic logs: of the shape that was asked for, consistent in themselves, and the same every time."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from bench.synth.__main__ import synth_log
from bench.synth.shape import LogShape
from bench.synth.write import write_logs
from parapply.applylog_schema import BatchRecord, Record, RowCounts, TransactionRecord, read_record
from parapply.errors import ConfigError
from parapply.model import parse_lsn

if TYPE_CHECKING:
    from pathlib import Path


def _read(directory: Path) -> list[Record]:
    paths = sorted(directory.iterdir(), key=lambda path: int(path.stem.rpartition("-")[2]))
    assert all(path.suffix == ".jsonl" for path in paths)
    return [read_record(line) for path in paths for line in path.read_bytes().splitlines()]


def _sum(rows: list[dict[str, RowCounts]]) -> dict[str, tuple[int, int, int]]:
    total: dict[str, tuple[int, int, int]] = {}
    for one in rows:
        for table, counts in one.items():
            insert, update, delete = total.get(table, (0, 0, 0))
            total[table] = (insert + counts.insert, update + counts.update, delete + counts.delete)
    return total


@pytest.mark.parametrize("detail", ["batch", "transaction"])
def test_a_log_is_consistent(tmp_path: Path, detail: str) -> None:
    """Numbers and LSNs go on over the files, times follow each other, parts and sums agree."""
    shape = LogShape(
        records=3000, detail=detail, conflict_rate=0.02, dependency_rate=0.3, retry_rate=0.1, file_records=700
    )
    told: list[int] = []
    total = write_logs(shape, tmp_path / "log", told.append, processes=1)
    records = _read(tmp_path / "log")
    assert total == sum(told) == len(records)
    assert abs(total - 3000) < 30
    assert len(told) == shape.n_files > 3
    batches = [one for one in records if isinstance(one, BatchRecord)]
    assert [one.seq for one in batches] == list(range(1, len(batches) + 1))
    assert sum(one.n_transactions for one in batches) == len(batches) * shape.batch_transactions
    for before, one in pairwise(batches):
        assert parse_lsn(before.end_lsn) < parse_lsn(one.first_end_lsn) <= parse_lsn(one.end_lsn)
        assert before.commit_time_last <= one.commit_time_first <= one.commit_time_last
    for one in batches:
        assert one.commit_time_last <= one.received_at <= one.started_at <= one.committed_at
        assert min(one.queued_s, one.wait_dependency_s, one.execute_s, one.wait_turn_s, one.commit_s) >= 0
        assert (one.wait_dependency_s > 0) == (one.waited_for is not None)
        assert (one.attempts > 1) == bool(one.retry_reason)
    assert {one.worker for one in batches} == {1, 2, 3, 4}
    assert 0.05 < sum(one.attempts > 1 for one in batches) / len(batches) < 0.2 or detail == "transaction"
    transactions = [one for one in records if isinstance(one, TransactionRecord)]
    if detail == "batch":
        assert not transactions
        assert any(one.conflicts for one in batches)
        return
    assert [one.seq for one in transactions] == list(range(1, len(transactions) + 1))
    assert _sum([one.rows for one in transactions]) == _sum([one.rows for one in batches])
    of_batches = [conflict for one in batches for conflict in one.conflicts]
    assert of_batches == [conflict for one in transactions for conflict in one.conflicts]
    assert 20 < len(of_batches) < 120
    assert all(one.commit_time <= one.received_at for one in transactions)


@pytest.mark.slow
def test_a_shape_makes_the_same_log_every_time(tmp_path: Path) -> None:
    """The seed decides, not the number of processes; another seed makes another log."""
    for name, seed, processes in (("one", 5, 1), ("two", 5, 2), ("other", 6, 1)):
        write_logs(LogShape(records=2000, seed=seed, file_records=700), tmp_path / name, lambda _: None, processes)
    files = {name: sorted((tmp_path / name).iterdir()) for name in ("one", "two", "other")}
    assert [path.name for path in files["one"]] == [path.name for path in files["two"]]
    assert [path.read_bytes() for path in files["one"]] == [path.read_bytes() for path in files["two"]]
    assert files["one"][0].read_bytes() != files["other"][0].read_bytes()


def test_the_command(tmp_path: Path) -> None:
    """It says what it wrote, and does not mix two logs."""
    arguments = ["--out", str(tmp_path / "log"), "--records", "50", "--tables", "2", "--slot", "app"]
    done = CliRunner().invoke(synth_log, arguments)
    assert (done.exit_code, done.stdout) == (0, f"50 records in 1 files: {tmp_path / 'log'}\n")
    (path,) = (tmp_path / "log").iterdir()
    assert path.name.startswith("apply-app-20261101T000000Z-")
    again = CliRunner().invoke(synth_log, arguments)
    assert isinstance(again.exception, ConfigError)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        write_logs(LogShape(records=1), tmp_path / "file" / "log", lambda _: None)

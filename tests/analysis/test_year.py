"""The report over many slots and days: kept sums are never wrong, and rows that are missing are named."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import pytest

from parapply.analysis.job import ReportRequest, make_report
from parapply.analysis.store import Store
from parapply.errors import ReportFailed, ReportRefused
from tests.analysis.hand_log import batch, comparable, write

if TYPE_CHECKING:
    from pathlib import Path

    from parapply.analysis.duck import DuckEngine
    from parapply.analysis.job import ReportOutcome
    from parapply.applylog_schema import Record

pytestmark = pytest.mark.timeout(900)

_DAY_S: Final = 86_400
#: Days of a file of the log that is not the newest.
_MONTH: Final = 30


class _Heard:
    """Steps of a report, kept."""

    def __init__(self) -> None:
        self.titles: list[str] = []

    def expect(self, steps: int) -> None:
        """Do nothing."""

    def begin(self, title: str) -> None:
        self.titles.append(title)

    def folded(self) -> list[str]:
        """Return and forget the titles of folding."""
        found = [title for title in self.titles if title.startswith("Folding")]
        self.titles.clear()
        return found


def _of_day(slot: str, day: int, hour: int = 18) -> Record:
    """Return a batch of a slot's day; slots and days differ in their figures."""
    at_s = day * _DAY_S + hour * 3600.0
    times = {"commit_time_first": at_s - 1 - day % 7, "commit_time_last": at_s - 1, "received_at": at_s - 0.5}
    return batch(
        1 + day * 24 + hour, slot=slot, **times, started_at=at_s - 0.4, committed_at=at_s,
        execute_s=0.1 + int(slot[-2:], 36) % 90 / 1000, size_bytes=100 + day,
    )  # fmt: skip


def _write_days(log: Path, slots: tuple[str, ...], days: range) -> None:
    for slot in slots:
        for first in days[::_MONTH]:
            records = [_of_day(slot, day) for day in range(first, min(first + _MONTH, days.stop))]
            write(log, f"apply-{slot}-{first:03}.jsonl", records)


def _tables(outcome: ReportOutcome) -> dict[str, Any]:
    return {name: comparable(rows) for name, rows in outcome.tables.items()}


def test_a_day_is_folded_again_where_batches_came(engine: DuckEngine, tmp_path: Path) -> None:
    """Late records of one slot's day fold that day again, sums that are gone or torn are made again, nothing else."""
    log, out, heard = tmp_path / "log", tmp_path / "out", _Heard()
    request = ReportRequest(log=str(log), out=str(out), what_if=None, window=timedelta(hours=12))
    _write_days(log, ("a", "b"), range(40))
    _write_days(log, ("c",), range(2))
    slots = make_report(engine, request, heard).tables["slots"]
    assert [(row["slot"], row["limit_words"]) for row in slots][2:] == [
        ("c", "no batch in this time, the last on 2026-11-22")
    ]
    assert heard.folded() == ["Folding days of slots: 82"]
    make_report(engine, request, heard)
    assert heard.folded() == []
    write(log, "apply-b-late.jsonl", [_of_day("b", 3, hour=20)])
    days = make_report(engine, request, heard).tables["days"]
    assert heard.folded() == ["Folding days of slots: 1"]
    assert [(row["slot"], row["day"]) for row in days if row["batches"] == 2] == [("b", "2026-11-24")]
    folded = out / "records" / "_folded"
    assert [path.name for path in sorted(folded.iterdir())] == ["2026-11.json", "2026-12.json"]
    torn = folded / "2026-11.json"
    torn.write_bytes(torn.read_bytes()[:-9])
    again = make_report(engine, request, heard).tables["days"]
    assert heard.folded() == ["Folding days of slots: 22, because 2026-11.json is torn"]
    (folded / "2026-12.json").unlink()
    assert make_report(engine, request, heard).tables["days"] == again == days
    assert heard.folded() == ["Folding days of slots: 60"]
    from_nothing = make_report(engine, replace(request, out=str(tmp_path / "again")), heard)
    assert comparable(from_nothing.tables["days"]) == comparable(days)


def test_rows_that_are_gone_or_torn_are_named(engine: DuckEngine, tmp_path: Path) -> None:
    """No figure is made of less than was converted: what is gone or torn is named; days that are not opened may be."""
    log, out, heard = tmp_path / "log", tmp_path / "out", _Heard()
    request = ReportRequest(log=str(log), out=str(out), what_if=None)
    _write_days(log, ("a",), range(3))
    make_report(engine, request, heard)
    ((load, _),) = {(path.parents[2], path.parents[1]) for path in (out / "records").rglob("*.parquet")}
    part = next((load / "record=batch" / "day=2026-11-21").glob("*.parquet"))
    content = part.read_bytes()
    part.write_bytes(content[:-9])
    with pytest.raises(ReportFailed, match=part.name) as torn:
        make_report(engine, request, heard)
    assert "bring it back from a backup" in str(torn.value.hint)
    part.unlink()
    with pytest.raises(ReportRefused, match=r"missing: .*/records: 1 rows of record=batch, day=2026-11-21\.") as gone:
        make_report(engine, request, heard)
    assert "bring it back from a backup" in str(gone.value.hint)
    with pytest.raises(ReportRefused, match="missing: 1 below"):
        Store(engine, request.out).compact(1)
    window = replace(request, window=timedelta(hours=12))
    assert len(make_report(engine, window, heard).tables["days"]) == 3
    part.write_bytes(content)
    load.rename(tmp_path / "load")
    with pytest.raises(ReportRefused, match=load.name):
        make_report(engine, window, heard)
    (tmp_path / "load").rename(load)
    (entry,) = (out / "records" / "_manifest").iterdir()
    entry.write_bytes(entry.read_bytes()[:-9])
    with pytest.raises(ReportRefused, match=r"000001\.json is torn"):
        make_report(engine, request, heard)


def test_rows_of_an_older_version_are_written_again_once(engine: DuckEngine, tmp_path: Path) -> None:
    """Folders by kind of record, day and load, and entries without counts, become one load; the log may be gone."""
    log, out, heard = tmp_path / "log", tmp_path / "out", _Heard()
    request = ReportRequest(log=str(log), out=str(out), what_if=None)
    _write_days(log, ("a", "b"), range(3))
    write(log, "apply-c.jsonl", ["torn"])
    before = make_report(engine, request, heard)
    records = out / "records"
    ((path,),) = [list((records / "_manifest").iterdir())]
    entry = json.loads(path.read_text())
    del entry["rows"], entry["batches"]
    path.write_text(json.dumps(entry | {"days": ["2026-11-21", "2026-11-22", "2026-11-23"]}))
    load = records / f"load={entry['load']}"
    for part in list(load.glob("record=*/day=*")):
        target = records / part.relative_to(load) / load.name
        target.parent.mkdir(parents=True)
        part.rename(target)
    shutil.rmtree(load)
    shutil.rmtree(log)
    log.mkdir()
    after = make_report(engine, request, heard)
    assert _tables(after) == _tables(before)
    assert not list(records.glob("record=*"))
    assert [path.name for path in (records / "_manifest").iterdir()] == ["000002.json"]

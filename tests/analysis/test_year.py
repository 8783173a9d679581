"""The report over many slots and days: kept sums are never wrong, and rows that are missing are named."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from parapply.analysis import sections_culprit
from parapply.analysis.duck import DuckEngine
from parapply.analysis.engine import StoredFile
from parapply.analysis.figures import FIGURES
from parapply.analysis.job import ReportRequest, convert, make_report
from parapply.analysis.local import LocalStorage
from parapply.analysis.progress import Silent
from parapply.analysis.store import Store, groups
from parapply.errors import ReportFailed, ReportRefused
from tests.analysis.hand_log import batch, comparable, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.analysis.job import ReportOutcome
    from parapply.applylog_schema import Record

pytestmark = pytest.mark.timeout(900)

_DAY_S: Final = 86_400
#: Days of a file of the log that is not the newest.
_MONTH: Final = 30


class _Counted(DuckEngine):
    """An engine that counts what it opens and writes, and what its storage lists and reads."""

    def __init__(self) -> None:
        super().__init__("1g", 2)
        self.lines = 0  # files of the log
        self.opened: Counter[str] = Counter()  # files of Parquet by kind and day, each once
        self.written: Counter[str] = Counter()
        self.small = Counter[str]()  # folders listed, and small files read, by name
        self.storage = _CountedStorage(self.small)
        self._seen: set[Path] = set()

    def forget(self) -> None:
        self.lines = 0
        for counts in (self.opened, self.written, self.small, self._seen):
            counts.clear()

    def read_lines(self, files: Sequence[StoredFile], log: str) -> None:
        self.lines += len(files)
        super().read_lines(files, log)

    def open_stored(self, root: str, folders: Sequence[str]) -> None:
        paths = {path for folder in folders for path in Path(folder).rglob("*.parquet")}
        self.opened.update("/".join(path.parts[-3:-1]) for path in paths - self._seen)
        self._seen |= paths
        super().open_stored(root, folders)

    def write(self, query: str, folder: str) -> None:
        super().write(query, folder)
        self.written.update("/".join(path.parts[-3:-1]) for path in Path(folder).rglob("*.parquet"))


class _CountedStorage(LocalStorage):
    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def files(self, folder: str, suffix: str | tuple[str, ...] = "") -> list[StoredFile]:
        self._counts[Path(folder).name] += 1
        return super().files(folder, suffix)

    def read_text(self, text: str) -> str:
        self._counts[Path(text).name] += 1
        return super().read_text(text)


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
        ("c", "no batch in this time, the last on 2024-11-22")
    ]
    assert heard.folded() == ["Folding days of slots: 82"]
    make_report(engine, request, heard)
    assert heard.folded() == []
    write(log, "apply-b-late.jsonl", [_of_day("b", 3, hour=20)])
    days = make_report(engine, request, heard).tables["days"]
    assert heard.folded() == ["Folding days of slots: 1"]
    assert [(row["slot"], row["day"]) for row in days if row["batches"] == 2] == [("b", "2024-11-24")]
    folded = out / "records" / "_folded"
    assert [path.name for path in sorted(folded.iterdir())] == ["2024-11.json", "2024-12.json"]
    torn = folded / "2024-11.json"
    torn.write_bytes(torn.read_bytes()[:-9])
    again = make_report(engine, request, heard).tables["days"]
    assert heard.folded() == ["Folding days of slots: 22, because 2024-11.json is torn"]
    (folded / "2024-12.json").unlink()
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
    part = next((load / "record=batch" / "day=2024-11-21").glob("*.parquet"))
    content = part.read_bytes()
    part.write_bytes(content[:-9])
    with pytest.raises(ReportFailed, match=part.name) as torn:
        make_report(engine, request, heard)
    assert "bring it back from a backup" in str(torn.value.hint)
    part.unlink()
    with pytest.raises(ReportRefused, match=r"missing: .*/records: 1 rows of record=batch, day=2024-11-21\.") as gone:
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


def test_an_entry_of_another_layout_is_refused_by_its_name(engine: DuckEngine, tmp_path: Path) -> None:
    """An entry without counts, as checkouts before the first release wrote it, is not read as one without rows."""
    log, out = tmp_path / "log", tmp_path / "out"
    request = ReportRequest(log=str(log), out=str(out), what_if=None)
    _write_days(log, ("a",), range(2))
    make_report(engine, request, Silent())
    ((path,),) = [list((out / "records" / "_manifest").iterdir())]
    entry = json.loads(path.read_text())
    del entry["rows"], entry["batches"]
    path.write_text(json.dumps(entry | {"days": ["2024-11-21", "2024-11-22"]}))
    with pytest.raises(ReportRefused, match=f"{path.name} is torn: it is no entry of a manifest"):
        make_report(engine, request, Silent())


def test_a_new_day_costs_the_same_after_many(tmp_path: Path) -> None:
    """A run reads the day's files of the log, and opens and writes its rows, once, after any number of days.

    The log is listed once, an entry of the manifest and a month's sums are read once. A late record opens its day.
    """
    costs = []
    slots = ("a", "b", "c")
    for n_days in (3, 60):
        log, out = tmp_path / f"log-{n_days}", tmp_path / f"out-{n_days}"
        request = ReportRequest(log=str(log), out=str(out), what_if=None, window=timedelta(hours=12))
        with closing(_Counted()) as engine:
            _write_days(log, slots, range(n_days))
            make_report(engine, request, Silent())
            engine.forget()
            _write_days(log, slots, range(n_days, n_days + 1))
            make_report(engine, request, Silent())
            (day,) = engine.written
            assert engine.opened == engine.written == {day: 1}
            costs.append(engine.lines)
            sums = [f"{month}.json" for month in ("2024-11", "2024-12", "2025-01")[: 1 if n_days == 3 else 3]]
            once = [log.name, "_manifest", "_folded", "000001.json", *sums]
            assert engine.small == Counter([*once, "_manifest"])
            engine.forget()
            write(log, "apply-b-late.jsonl", [_of_day("b", 1, hour=20)])
            make_report(engine, request, Silent())
            assert engine.opened == {"record=batch/day=2024-11-22": 2, day: 1}
            assert engine.written == {"record=batch/day=2024-11-22": 1}
    assert costs == [len(slots)] * 2


def test_rows_are_written_again_where_files_become_fewer(tmp_path: Path) -> None:
    """Loads of a day each, or of many days, stay as they are; many loads of one day become one."""
    log, many = tmp_path / "log", 8 * 2
    request = ReportRequest(log=str(log), out=str(tmp_path / "out"), what_if=None)
    with closing(_Counted()) as engine:
        store = Store(engine, request.out)
        for days in (range(100, 130), *(range(day, day + 1) for day in range(many))):
            _write_days(log, ("a",), days)
            assert convert(engine, request, Silent(), store) == 1
        engine.forget()
        store.compact(many)
        assert not engine.written
        for hour in range(many):
            write(log, f"apply-b-{hour}.jsonl", [_of_day("b", 120, hour)])
            assert convert(engine, request, Silent(), store) == 1
        engine.forget()
        store.compact(many)
        assert set(engine.written) == {"record=batch/day=2025-03-20", "record=batch/day=2025-03-21"}
        store.open()
        assert sum(store.batches().values()) == len(list(engine.stream("SELECT seq FROM all_batch"))) == 30 + 2 * many


def test_files_of_a_day_are_converted_together() -> None:
    """Files come by the time in their names, not by slot, so that a day has rows in few loads."""
    names = [f"apply-{slot}-2024112{day}T000000Z-1-{day}.jsonl" for slot in "ab" for day in range(3)]
    files = [StoredFile(name=name, path=name, size_bytes=1) for name in ["other.jsonl", *names]]
    assert [[file.name for file in group] for group in groups(files, 3)] == [
        ["other.jsonl", names[0], names[3]],
        [names[1], names[4], names[2]],
        [names[5]],
    ]


def test_the_page_has_the_latest_days_of_a_slot() -> None:
    """It says how many others there are, and where."""
    columns = next(figure.columns for figure in FIGURES if figure.name == "days")
    rows = [dict.fromkeys(columns, 0) | {"day": f"day {number}"} for number in range(100)]
    section = sections_culprit.days({"days": rows})
    assert [section.rows[number][0] for number in (0, -1)] == ["day 99", "day 8"]
    assert "8 earlier days are in tables/days.parquet" in section.lead
    assert "parquet" not in sections_culprit.days({"days": rows[:92]}).lead

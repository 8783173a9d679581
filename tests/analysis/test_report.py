"""The report over logs with known answers, and over the log of a real daemon; by DuckDB, which needs no Java.

That Spark says the same of the same logs: `test_spark`.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import threading
from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from pyarrow import parquet

from parapply.amounts import duration
from parapply.analysis import more_workers
from parapply.analysis.changes import read_change
from parapply.analysis.command import _print
from parapply.analysis.compute import QUERIES
from parapply.analysis.figures import FIGURES
from parapply.analysis.follow import look
from parapply.analysis.job import ReportRequest, check_readable, convert, fold, make_report, show
from parapply.analysis.logged import recorded_of
from parapply.analysis.page import Made, _tiles, by_slot, render
from parapply.analysis.prediction import Log
from parapply.analysis.progress import Silent
from parapply.analysis.store import SUFFIXES, Store
from parapply.analysis.views import Scope, make_views
from parapply.applylog_schema import (
    BackendSample,
    BatchRecord,
    ConflictCount,
    ConflictRecord,
    IntervalRecord,
    LateKey,
    LockHolder,
    WaitedFor,
    read_record,
)
from parapply.errors import ReportRefused
from parapply.limits import state_of
from parapply.model import parse_lsn
from parapply.runtime.observe.limiting import Limiting, Look
from parapply.wire.decode import decode
from parapply.wire.messages import Commit
from tests.analysis.hand_log import BEGIN, RECORDS, A, B, at, batch, old_line, transaction, write
from tests.fixtures.browser import browser, open_page
from tests.fixtures.plain import slot_route

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.analysis.duck import DuckEngine
    from parapply.analysis.job import ReportOutcome
    from parapply.applylog_schema import Record
    from tests.fixtures.daemon import StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.route import Route

#: A user who owns nothing.
_NOBODY = 65_534


@pytest.fixture(scope="module")
def hand_made(engine: DuckEngine, tmp_path_factory: pytest.TempPathFactory) -> tuple[ReportOutcome, Path]:
    """The report over the log made by hand, in two files, and its folder."""
    folder = tmp_path_factory.mktemp("hand made")  # a name with a space, as folders have
    write(folder / "log", "apply-1.jsonl", RECORDS[:3])
    write(folder / "log" / "host two", "apply-1.jsonl", RECORDS[3:])
    write(folder / "log", "apply-2.jsonl.open", ["not closed: not ours"])
    request = ReportRequest(log=str(folder / "log"), out=str(folder / "out"))
    return make_report(engine, request, Silent()), folder / "out"


def _rows(outcome: ReportOutcome, name: str, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row[column] for column in columns) for row in outcome.tables[name]]


def test_every_figure_has_the_columns_of_its_definition(
    hand_made: tuple[ReportOutcome, Path],
) -> None:
    """Definitions, queries and Parquet tables agree in names and order."""
    outcome, out = hand_made
    assert set(outcome.tables) == {figure.name for figure in FIGURES}
    assert set(QUERIES) | {"what_if", "ignored_files", "limits", "chain", "comparison", "days", "slots"} == set(
        outcome.tables
    )
    for figure in FIGURES:
        table = parquet.read_schema(out / "tables" / f"{figure.name}.parquet")
        assert table.names == list(figure.columns), figure.name


def test_work_of_a_hand_made_log(hand_made: tuple[ReportOutcome, Path]) -> None:
    """Sums, tables, sizes, repetitions and conflicts are those that the log was made with."""
    outcome, _ = hand_made
    (summary,) = outcome.tables["summary"]
    assert (summary["batches"], summary["transactions"], summary["row_changes"], summary["size_bytes"]) == (
        3,
        5,
        8,
        550,
    )
    assert (summary["workers"], summary["runs"], summary["repeated_batches"], summary["conflicts"]) == (2, 1, 1, 1)
    assert (summary["transaction_records"], summary["highest_end_lsn"]) == (5, "0/380")
    assert summary["last_at"] - summary["first_at"] == timedelta(seconds=11.95)
    assert _rows(outcome, "over_time", "at", "transactions", "row_changes", "transactions_per_s") == [
        (BEGIN, 4, 7, 4.0),
        (BEGIN + timedelta(seconds=12), 1, 1, 1.0),
    ]
    columns = ("table", "batches", "inserts", "updates", "deletes", "truncates")
    assert _rows(outcome, "tables", *columns) == [(B, 1, 4, 0, 0, 0), (A, 2, 1, 2, 0, 0), (B, 1, 0, 0, 1, 1)]
    assert _rows(outcome, "target_names", "table", "target") == [(A, "archive.a")]
    assert _rows(outcome, "workers", "worker", "transactions") == [(1, 1), (2, 3), (1, 1)]
    assert _rows(outcome, "batch_sizes", "at_least", "batches", "transactions") == [(1, 2, 2), (2, 1, 3)]
    assert _rows(outcome, "retries", "mode", "reason", "batches", "repeats") == [("set", "40P01", 1, 2)]
    assert _rows(outcome, "conflicts", "type", "table", "outcome", "conflicts") == [("delete_missing", B, "skipped", 1)]


def test_times_of_a_hand_made_log(hand_made: tuple[ReportOutcome, Path]) -> None:
    """Delays, waits, dependencies and parallelism are those that the log was made with."""
    outcome, _ = hand_made
    latency = {row["stage"]: (row["n"], row["p50_s"], row["max_s"]) for row in outcome.tables["latency"]}
    assert latency["oldest transaction of a batch"] == (3, 0.12, 0.15)
    assert latency["newest transaction of a batch"] == (3, 0.12, 0.13)
    assert latency["delivery"] == (3, 0.01, 0.01)
    assert latency["executing"] == (3, 0.06, 0.08)
    assert latency["each transaction"] == (5, 0.13, 0.15)
    waits = {row["part"]: (row["batches"], round(row["seconds"], 9)) for row in outcome.tables["waits"]}
    assert waits == {
        "no worker free": (3, 0.03), "dependency": (1, 0.01), "executing": (3, 0.17), "commit turn": (2, 0.04),
        "committing": (3, 0.04),
    }  # fmt: skip
    assert sum(row["share"] for row in outcome.tables["waits"]) == pytest.approx(1)
    columns = ("table", "kind", "name", "batches", "seconds", "late_keys")
    assert _rows(outcome, "dependencies", *columns) == [(A, "key", "a_pkey", 1, 0.01, 2)]
    states = {
        (row["at"] == BEGIN, row["held"], row["executing"]): round(row["seconds"], 6)
        for row in outcome.tables["parallelism"]
    }
    assert states == {
        (True, 1, 0): 0.02, (True, 1, 1): 0.04, (True, 2, 1): 0.04, (True, 2, 2): 0.03,
        (False, 1, 0): 0.02, (False, 1, 1): 0.03,
    }  # fmt: skip


def test_more_workers_of_a_hand_made_log(hand_made: tuple[ReportOutcome, Path]) -> None:
    """The what-if sees every batch with its times."""
    outcome, _ = hand_made
    rows = outcome.tables["what_if"]
    assert {row["units"] for row in rows} == {3}
    # The publisher committed the last batch 12 s after the first, and it takes 0.05 s: no number ends sooner.
    assert {round(row["seconds"], 2) for row in rows} == {12.05}
    assert {(round(row["speed_up"], 3), row["limit"]) for row in rows} == {(1.0, "source")}
    assert all(row["least_s"] <= row["seconds"] <= row["most_s"] for row in rows)
    assert "bring: with the commit order kept nothing (the source is the limit)" in outcome.in_short["app"][-1]


def test_questions_are_answered_beside_the_numbers(engine: DuckEngine, tmp_path: Path) -> None:
    """Each --what-if is a row with its text, on the terminal and on the page; the curves leave it out."""
    write(tmp_path / "log", "apply-1.jsonl", RECORDS)
    questions = ("workers=8,order=relaxed", "target_speed=2")
    request = ReportRequest(
        log=str(tmp_path / "log"), out=str(tmp_path / "out"), what_if=[read_change(text) for text in questions]
    )
    outcome = make_report(engine, request, Silent())
    rows = [row for row in outcome.tables["what_if"] if row["question"]]
    assert [(row["question"], row["commit_order"]) for row in rows] == [
        (questions[0], "relaxed"), (questions[1], "preserve"),
    ]  # fmt: skip
    assert all(row["least_s"] <= row["seconds"] <= row["most_s"] for row in rows)
    assert "With target_speed=2 the run would take 12" in outcome.in_short["app"][-1]
    text = _Elements()
    text.feed((tmp_path / "out" / "report.html").read_text())
    assert questions[0] in text.texts["With more workers"]
    # The log says nothing of sessions, so its COMMITs are taken for flushes.
    unknown = replace(request, what_if=[read_change("synchronous_commit=on")])
    assert make_report(engine, unknown, Silent()).tables["what_if"][-1]["question"] == "synchronous_commit=on"


def test_slow_ones_are_named(hand_made: tuple[ReportOutcome, Path]) -> None:
    """The slowest batches and transactions, with stage, tables and position, and the chain to the longest wait."""
    outcome, out = hand_made
    columns = ("seq", "xid", "end_lsn", "tables", "total_s", "stage", "stage_s")
    assert _rows(outcome, "slow_batches", *columns)[:2] == [
        (2, 2, "0/280", f"{B}, {A}", 0.12, "executing", 0.08), (1, 1, "0/180", A, 0.11, "executing", 0.06),
    ]  # fmt: skip
    timed = ("seq", "xid", "batch_seq", "tables", "total_s", "delivery_s")
    assert _rows(outcome, "slow_transactions", *timed)[0] == (2, 2, 2, A, 0.15, 0.01)
    assert _rows(outcome, "chain", "seq", "holder_seq", "name") == [(2, 1, "a_pkey"), (1, None, None)]
    assert _rows(outcome, "runs", "run", "batches", "workers") == [("r1", 3, 2)]
    assert _rows(outcome, "lanes", "seq", "worker") == [(1, 1), (2, 2), (3, 1)]
    text = _Elements()
    text.feed((out / "report.html").read_text())
    assert f"0/280{B}, {A}2024-11-20 23:59:50.150" in text.texts["Slowest batches"]


def test_two_spans_are_compared(engine: DuckEngine, tmp_path: Path) -> None:
    """--compare sets the figures of another span beside the report's; a span without a record is refused."""
    write(tmp_path / "log", "apply-1.jsonl", RECORDS)
    midnight = BEGIN + timedelta(seconds=10)
    request = ReportRequest(
        log=str(tmp_path / "log"), out=str(tmp_path / "out"), scope=Scope(since=midnight),
        compare=Scope(until=midnight), what_if=None,
    )  # fmt: skip
    outcome = make_report(engine, request, Silent())
    rows = {row["what"]: (row["then"], row["now"], row["change"]) for row in outcome.tables["comparison"]}
    assert rows["transactions"] == (4, 1, -0.75)
    assert rows["conflicts"] == (0, 1, None)
    assert rows["executing: half"] == (0.06, 0.03, -0.5)
    assert rows["oldest transaction of a batch: 99 %"] == (0.15, 0.07, pytest.approx(-8 / 15))
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Then: the beginning to 2024-11-21 00:00:00 UTC." in page
    assert "<td>-50\N{NO-BREAK SPACE}%</td>" in page or '<td class="number">-50\N{NO-BREAK SPACE}%</td>' in page
    with pytest.raises(ReportRefused, match="No record is in the span"):
        show(engine, replace(request, compare=Scope(since=BEGIN + timedelta(days=1))), Silent(), new_files=0)


def test_the_page_holds_everything_and_fetches_nothing(hand_made: tuple[ReportOutcome, Path]) -> None:
    """A place for each plot, names escaped wherever they stand, and a policy under which a browser fetches nothing."""
    page = (hand_made[1] / "report.html").read_text()
    body, _, rest = page.partition('<script type="application/json" id="plots">')
    drawn, _, _ = rest.partition("</script>")
    plots = json.loads(drawn)
    assert {f'id="{name}"' in body for name in plots} == {True}
    assert body.count('<div class="plot"') == len(plots) > 10
    assert f"with other names on the target: {A} is archive.a there." in body
    assert B not in page
    assert any("&lt;b&gt;" in json.dumps(plot) for plot in plots.values())
    assert "default-src 'none'" in body
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", body)


#: A name that a user may give a table; it would end an attribute, a text and a script.
_SCRIPT = """"><script>alert(1)</script>"""
#: Columns that hold texts of the log, which are the users'; the others' texts are words of ours.
_FROM_THE_LOG = {
    "slot", "table", "name", "link", "reason", "type", "outcome", "policy", "mode", "file", "example", "limit",
    "tables", "run", "key", "target",
}  # fmt: skip


class _Elements(HTMLParser):
    """Elements and attributes of a page, and the texts outside of scripts by the heading before them."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.texts: dict[str, str] = {"": ""}
        self.scripts: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes |= {name for name, _ in attrs}
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
        elif self._inside == "h2":
            self.texts[data] = ""
        else:
            self.texts[next(reversed(self.texts))] += data


def test_names_from_the_log_are_never_elements(hand_made: tuple[ReportOutcome, Path]) -> None:
    """Whatever the log calls a slot, a table or a key: the page has the same elements, and shows the text as it is."""
    outcome, _ = hand_made
    made = Made(log=_SCRIPT, at=BEGIN, version=_SCRIPT, interval_s=1, changed_files=(_SCRIPT,), refresh_s=1)
    bad = [{"slot": "", "file": "f", "reason": "r", "lines": 1, "example": "e"}]
    tables = {**outcome.tables, "bad_lines": bad}
    hostile = {
        table: [{**row, **dict.fromkeys(_FROM_THE_LOG & {name for name in row if row[name]}, _SCRIPT)} for row in rows]
        for table, rows in tables.items()
    }
    harmless, found = _Elements(), _Elements()
    harmless.feed(render(tables, made))
    found.feed(render(hostile, made))
    assert found.elements == harmless.elements
    assert found.attributes == harmless.attributes
    # Data of the plots, the library, and ours.
    assert found.elements["script"] == len(found.scripts) == 3
    # Plotly reads texts as markup, so they are escaped once more there.
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in json.dumps(json.loads(found.scripts[0]))
    assert [script for script in found.scripts[1:] if "alert(1)" in script] == []
    showing = {title for title, text in found.texts.items() if _SCRIPT in text}
    culprits = {
        "Slowest batches", "Slowest transactions", "Batches that waited for others", "The chain to the longest wait",
    }  # fmt: skip
    assert showing == culprits | {
        "",
        "In short",
        "Conflicts and repetitions",
        "With more workers",
        "The log itself",
        "Tables",
    }


@pytest.mark.browser
def test_the_page_opens_in_a_browser(hand_made: tuple[ReportOutcome, Path], tmp_path: Path) -> None:
    """Every plot is drawn, and the console has nothing to say: no error, nothing that the policy had to refuse."""
    program = browser()
    assert program
    page = hand_made[1] / "report.html"
    document, console = open_page(program, page, tmp_path)
    assert console == []
    assert 'data-drawn="yes"' in document
    assert document.count('class="plot js-plotly-plot"') == page.read_text().count('<div class="plot"') > 10


def _counts(engine: DuckEngine, request: ReportRequest) -> tuple[int, int]:
    """Return the numbers of records and of bad lines that count."""
    store = Store(engine, request.out)
    store.open()
    counted = _count(engine, "all_batch"), _count(engine, "bad_lines")
    assert sum(file.records for file in store.files.values()) == counted[0]
    return counted


def _count(engine: DuckEngine, view: str) -> int:
    ((n_rows,),) = engine.stream(f"SELECT count(*) FROM {view}")
    return int(n_rows)


def test_a_file_is_converted_once(engine: DuckEngine, tmp_path: Path) -> None:
    """A second report reads new files only; what a job that died has written does not count; two jobs do not mix."""
    log = tmp_path / "log"
    write(log, "apply-1.jsonl", [batch(1)])
    request = ReportRequest(log=str(log), out=str(tmp_path / "out"))
    assert convert(engine, request, Silent()) == 1
    (log / "apply-1.jsonl").unlink()  # retention: what was converted stays
    write(log, "apply-2.jsonl", [batch(2), batch(3)])
    died, late = (Store(engine, request.out) for _ in range(2))
    files = engine.storage.files(request.log, SUFFIXES)
    engine.read_lines(files, request.log)
    died._write({})
    assert _counts(engine, request) == (1, 0)
    assert convert(engine, request, Silent()) == 1
    with pytest.raises(ReportRefused, match="Another report"):
        late.load_files(files, request.log)
    assert _counts(engine, request) == (3, 0)
    write(log, "apply-2.jsonl", [batch(2)])
    assert convert(engine, request, Silent()) == 0
    assert Store(engine, request.out).changed(engine.storage.files(request.log, SUFFIXES)) == ["apply-2.jsonl"]


def test_two_versions_and_torn_lines_side_by_side(engine: DuckEngine, tmp_path: Path) -> None:
    """Old lines take defaults; newer, torn and foreign ones are counted with a reason; no figure contains them."""
    torn = old_line(batch(9))
    write(
        tmp_path / "log",
        "apply-1.jsonl",
        [
            old_line(batch(1)), batch(2), torn[: len(torn) // 2], b"\xff\xfe", "", '{"record": "poem"}',
            torn.replace('"schema_version":1', '"schema_version":2'), torn.replace('"worker":1', '"worker":"one"'),
            msgspec.json.encode(transaction(1, 1)).replace(b'"xid":1,', b""),
        ],
    )  # fmt: skip
    outcome = make_report(engine, ReportRequest(log=str(tmp_path / "log"), out=str(tmp_path / "out")), Silent())
    assert (outcome.records, outcome.bad_lines) == (2, 6)
    assert _rows(outcome, "summary", "batches", "conflicts", "repeated_batches") == [(2, 0, 0)]
    assert sorted(_rows(outcome, "bad_lines", "reason", "lines")) == [
        ("a transaction without the field xid", 1),
        ("not a record in JSON, or a field of another type", 3),
        ("schema version 2, which this parapply does not read", 1),
        ("unknown kind of record", 1),
    ]
    assert "schema version 2" in (tmp_path / "out" / "report.html").read_text()


def test_a_line_that_an_engine_refuses_is_only_a_bad_line(engine: DuckEngine, tmp_path: Path) -> None:
    """A key twice, numbers that no type holds, positions and times that are none: each is counted, and no more."""
    lines = [msgspec.json.encode(batch(seq)).decode() for seq in range(1, 9)]
    odd = [
        lines[0].replace('"seq":1', '"seq":1,"seq":1'), lines[1].replace('"size_bytes":100', f'"size_bytes":{10**30}'),
        lines[2].replace("0/380", "zz/yy"), lines[3].replace("0/480", "12345"),
        lines[4].replace("0/500", "0/123456789"), lines[5].replace("2024-11-20T23:59:50.12", "12024-11-20T23:59:50.12"),
        lines[6].replace("2024-11-20T23:59:50.01", "1026-11-20T23:59:50.01"),
    ]  # fmt: skip
    write(tmp_path / "log", "apply-1.jsonl", [*odd, lines[7]])
    outcome = make_report(engine, ReportRequest(log=str(tmp_path / "log"), out=str(tmp_path / "out")), Silent())
    assert (outcome.records, _rows(outcome, "summary", "batches")) == (1, [(1,)])
    assert sorted(_rows(outcome, "bad_lines", "reason", "lines")) == [
        ("not a record in JSON, or a field of another type", 3),
        ("the field end_lsn is no LSN", 2),
        ("the field first_end_lsn is no LSN", 1),
        ("the time received_at is before 2000 or after 2099", 1),
    ]
    write(tmp_path / "log", "apply-2.jsonl", [odd[5]])
    again = make_report(engine, ReportRequest(log=str(tmp_path / "log"), out=str(tmp_path / "out")), Silent())
    assert ("the time committed_at is before 2000 or after 2099", 1) in _rows(again, "bad_lines", "reason", "lines")


def test_the_delay_is_of_all_transactions_or_of_batches(engine: DuckEngine, tmp_path: Path) -> None:
    """Records of a few transactions are not the delay of the others: not in words, the table of slots, the tiles."""
    write(tmp_path / "log", "apply-1.jsonl", [batch(1), transaction(1, 1), batch(2, committed_at=90.0)])
    outcome = make_report(engine, ReportRequest(log=str(tmp_path / "log"), out=str(tmp_path / "out")), Silent())
    assert _rows(outcome, "slots", "delay_p99_s") == [(90.0,)]
    assert f"1 % took longer than {duration(90)}" in " ".join(outcome.in_short["app"])
    assert duration(90) in [value for value, *_ in _tiles(by_slot(outcome.tables)["app"])]


def test_each_slot_has_its_own_longest_waits(engine: DuckEngine, tmp_path: Path) -> None:
    """However much of locks, late rows and waits one slot has, the others' are not pushed out."""
    records: list[Record] = []
    for slot, n in (("app", 101), ("two", 2)):
        for seq in range(1, n + 1):
            late = (LateKey(table=A, key=f"{slot}{seq}"),)
            waited = WaitedFor(seq=seq - 1, table=A, kind="key") if seq > 1 else None
            waits_s = 1.0 if slot == "app" else 0.01
            records.append(
                batch(seq, slot=slot, late_keys=1, late_rows=late, waited_for=waited, wait_dependency_s=waits_s)
            )
            locks = (LockHolder(pid=seq, role=slot, relation=A, mode="ShareLock"),)
            interval = IntervalRecord(
                slot=slot, run="r1", ended_at=at(seq), length_s=waits_s, workers=4, leader_cpu_s=0.1, publisher_s=0.0,
                paused_s=0.0, behind_bytes=0, locks=locks,
            )  # fmt: skip
            records.append(interval)
    write(tmp_path / "log", "apply-1.jsonl", records)
    request = ReportRequest(log=str(tmp_path / "log"), out=str(tmp_path / "out"), what_if=None)
    outcome = make_report(engine, request, Silent())
    found = {
        name: Counter(slot for (slot,) in _rows(outcome, name, "slot")) for name in ("blockers", "hot_keys", "locks")
    }
    assert found == {
        "blockers": {"app": 20, "two": 1}, "hot_keys": {"app": 100, "two": 2}, "locks": {"app": 100, "two": 2},
    }  # fmt: skip


@pytest.mark.parametrize("scope", [Scope(), Scope(slot="two"), Scope(until=BEGIN + timedelta(seconds=1))])
def test_the_latest_hours_are_of_what_was_asked_for(engine: DuckEngine, tmp_path: Path, scope: Scope) -> None:
    """The latest of the slot, before --until, and not of a clock that was once years ahead: there are records."""
    day_s, year_s = 86_400.0, 31_536_000.0
    later = [
        batch(seq, slot=slot, started_at=at_s, committed_at=at_s + 0.1, received_at=at_s, commit_time_last=at_s)
        for seq, slot, at_s in ((4, "app", day_s), (5, "two", 0.0), (6, "app", 20 * year_s))
    ]
    write(tmp_path / "log", "apply-1.jsonl", [*RECORDS, *later])
    request = ReportRequest(
        log=str(tmp_path / "log"), out=str(tmp_path / "out"), scope=scope, what_if=None, window=timedelta(hours=1)
    )
    found = _rows(make_report(engine, request, Silent()), "summary", "slot", "batches")
    if scope.slot:
        assert found == [("two", 1)]
    elif scope.until:
        assert found == [("app", 2), ("two", 1)]
    else:
        assert found[0] in {("app", 2), ("app", 5)}, "the newest and the one years ahead; all, while the log is ahead"


def test_names_from_the_log_do_nothing_to_a_terminal(
    hand_made: tuple[ReportOutcome, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Slots, tables and files are shown with their control characters as escapes; our own percentages have none."""
    outcome, _ = hand_made
    row = {**outcome.tables["slots"][0], "slot": "a\x1b[2J", "limit_words": "on a.\x1b[31mt"}
    hostile = replace(
        outcome,
        tables={**outcome.tables, "slots": [row, row]},
        in_short={"a\x1b[2J": ["key in a.\x1b[31mt, 12\N{NO-BREAK SPACE}%"]},
        ignored=[{"file": "\x1b[2J", "size_bytes": 1, "reason": "r"}],
    )
    _print(hostile, is_json=False)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "key in a.\\x1b[31mt, 12 %" in shown


def test_a_scope_leaves_out_the_rest(engine: DuckEngine, tmp_path: Path) -> None:
    """--slot, --since and --until choose records; without any record the page says so."""
    write(tmp_path / "log", "apply-1.jsonl", [*RECORDS, batch(1, slot="other")])
    request = ReportRequest(log=str(tmp_path / "log"), out=str(tmp_path / "out"))
    assert make_report(engine, request, Silent()).tables["summary"]
    outcome = make_report(engine, replace(request, scope=Scope(slot="none")), Silent())
    assert outcome.tables["summary"] == []
    assert "Nothing to show" in (tmp_path / "out" / "report.html").read_text()
    assert not (tmp_path / "out" / "tables").exists(), "of another span"
    store, midnight = Store(engine, request.out), BEGIN + timedelta(seconds=10)
    for scope, counts in (
        (Scope(slot="app", until=midnight), (2, 4)),
        (Scope(slot="app", since=midnight), (1, 1)),
        (Scope(), (4, 5)),
    ):
        assert make_views(store, scope)
        assert (_count(engine, "batches"), _count(engine, "transactions")) == counts


def test_a_log_that_is_not_there_is_refused(engine: DuckEngine, tmp_path: Path) -> None:
    """A wrong folder is one clear error, not an empty report."""
    with pytest.raises(ReportRefused, match="is no folder"):
        make_report(engine, ReportRequest(log=str(tmp_path / "nowhere"), out=str(tmp_path / "out")), Silent())


@pytest.fixture(scope="module")
def flawed(engine: DuckEngine, tmp_path_factory: pytest.TempPathFactory) -> tuple[ReportOutcome, Path]:
    """The report over a log with everything that must not make a figure wrong, and its folder.

    Slot `app`: a streamed batch, a gap, more conflicts than a record lists, a packed file and a copy of it. Slot
    `relaxed`: batch 1 was lost with its run after batch 2 had committed, and the next run has applied it.
    """
    folder = tmp_path_factory.mktemp("flawed")
    log = folder / "log"
    conflict = {"type": "update_missing", "table": A, "policy": "skip", "outcome": "skipped"}
    write(
        log,
        "apply-1.jsonl",
        [
            # It is executed from 1.0 s on while it comes, until 5.5 s.
            batch(
                1,
                mode="streamed",
                received_at=5.0,
                started_at=1.0,
                committed_at=6.0,
                queued_s=0.0,
                execute_s=4.5,
                wait_dependency_s=0.75,
                wait_turn_s=0.25,
                commit_s=0.25,
            ),
            transaction(1, 1),
            batch(
                4,
                conflicts=(ConflictRecord(**conflict),) * 2,
                more_conflicts=(ConflictCount(**conflict, conflicts=530),),
            ),
            batch(5, n_transactions=-5),
        ],
    )
    packed = gzip.compress(write(folder, "rest", [batch(5), batch(6), transaction(6, 6)]).read_bytes())
    (log / "apply-2.jsonl.gz").write_bytes(packed)
    (log / "apply-3.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    write(log / "copy", "apply-9.jsonl", [batch(5), batch(6), transaction(6, 6)])
    write(
        log,
        "apply-4.jsonl",
        [
            batch(2, slot="relaxed", run="a", first_end_lsn="0/300", end_lsn="0/300", started_at=0.0, committed_at=1.0),
            batch(1, slot="relaxed", run="b", first_end_lsn="0/200", end_lsn="0/200", started_at=2.0, committed_at=2.5),
        ],
    )
    write(log, "apply-5.jsonl.open", [batch(7)])
    write(log, "notes.txt", ["a foreign file"])
    request = ReportRequest(log=str(log), out=str(log / "report"))
    return make_report(engine, request, Silent()), log / "report"


def test_a_flawed_log_gives_no_wrong_figure(flawed: tuple[ReportOutcome, Path]) -> None:
    """A packed file counts, a copy counts once, conflicts count that are not listed, and no number below 0 does."""
    outcome, _ = flawed
    columns = ("slot", "batches", "transactions", "conflicts", "transaction_records", "doubled_records")
    assert _rows(outcome, "summary", *columns) == [("app", 4, 4, 532, 2, 3), ("relaxed", 2, 2, 0, 0, 0)]
    assert [row["conflicts"] for row in outcome.tables["conflicts"]] == [532]
    assert [row["reason"] for row in outcome.tables["bad_lines"]] == ["the field n_transactions is below 0"]


def test_what_is_executed_while_it_comes_is_not_after_it_came(flawed: tuple[ReportOutcome, Path]) -> None:
    """The parts of the time from received to committed add up to it, also for a transaction that was streamed."""
    outcome, _ = flawed
    parts = {row["part"]: row["seconds"] for row in outcome.tables["waits"] if row["slot"] == "app"}
    # Three batches as `hand_log.batch` makes them, and the streamed one: 1 s from its last byte to its commit.
    assert sum(parts.values()) == pytest.approx(3 * 0.11 + 1.0)
    assert (parts["executing"], parts["dependency"]) == (pytest.approx(3 * 0.06 + 0.5), 0)


def test_gaps_in_the_numbers_are_found(flawed: tuple[ReportOutcome, Path]) -> None:
    """Batches 2 and 3 have no record, and the report says so. Batches that another run has applied are not missing."""
    outcome, out = flawed
    assert _rows(outcome, "gaps", "slot", "run", "after_seq", "before_seq", "missing") == [("app", "r1", 1, 4, 2)]
    assert outcome.in_short["app"][0].startswith("2 batch records are missing in 1 place")
    assert "Records that are missing" in (out / "report.html").read_text()
    assert "missing" not in outcome.in_short["relaxed"][0]


def test_files_that_are_not_read_are_named(flawed: tuple[ReportOutcome, Path]) -> None:
    """Open files, broken ones and foreign ones are named with the reason, the report's own are not."""
    outcome, out = flawed
    named = {row["file"]: row["reason"] for row in outcome.ignored}
    assert list(named) == ["apply-3.jsonl.gz", "apply-5.jsonl.open", "notes.txt"]
    assert "cannot be unpacked" in named["apply-3.jsonl.gz"]
    assert "rotate_s" in named["apply-5.jsonl.open"]
    page = (out / "report.html").read_text()
    assert all(name in page for name in named)


def test_throughput_is_over_the_time_with_work(flawed: tuple[ReportOutcome, Path]) -> None:
    """Seconds in which a long batch executes and nothing commits are no pause; those without any batch are."""
    outcome, _ = flawed
    # 1.0 to 6.0 s and, before, 0.02 to 0.12 s.
    assert any(text.startswith("0.78 transactions a second were applied") for text in outcome.in_short["app"])
    # 0.0 to 1.0 s and 2.0 to 2.5 s.
    assert outcome.in_short["relaxed"][0].startswith("1.3 transactions a second")


def _limited(slot: str, behind_bytes: int, backends: dict[str, int], **reading: Any) -> list[Record]:  # noqa: ANN401
    """Return intervals of ten seconds with four workers, as the daemon writes them."""
    values: dict[str, Any] = {"leader_cpu_s": 0.1, "publisher_s": 0.0, "paused_s": 0.0, **reading}
    samples = tuple(BackendSample(wait=wait, samples=number) for wait, number in backends.items())
    return [
        IntervalRecord(
            slot=slot, run="r1", ended_at=at(second), length_s=1.0, workers=4, behind_bytes=behind_bytes,
            backends=samples, **values,
        )
        for second in range(1, 11)
    ]  # fmt: skip


def _idle(slot: str) -> list[Record]:
    """Return batches of ten seconds, each alone and done before the next one comes."""
    return [
        batch(n, slot=slot, received_at=n / 10, started_at=n / 10, committed_at=n / 10 + 0.01, queued_s=0.0,
              execute_s=0.008, wait_turn_s=0.0, commit_s=0.002)
        for n in range(1, 101)
    ]  # fmt: skip


def _busy(slot: str, execute_s: float, turn_s: float, commit_s: float, **more: object) -> list[Record]:
    """Return batches of ten seconds that keep four workers busy: a new one every 50 ms, each for 200 ms."""
    return [
        batch(n, slot=slot, worker=1 + n % 4, received_at=n / 20, started_at=n / 20, committed_at=n / 20 + 0.2,
              queued_s=0.0, execute_s=execute_s, wait_turn_s=turn_s, commit_s=commit_s, **more)
        for n in range(1, 201)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def limited(engine: DuckEngine, tmp_path_factory: pytest.TempPathFactory) -> ReportOutcome:
    """The report over logs that are limited by one thing each: slots of that name."""
    folder = tmp_path_factory.mktemp("limited")
    write(folder / "log", "apply-1.jsonl", _limited_log())
    request = ReportRequest(log=str(folder / "log"), out=str(folder / "out"), what_if=None)
    return make_report(engine, request, Silent())


def _limited_log() -> list[Record]:
    """Return the records of those logs, each slot ten seconds long."""
    late: dict[str, Any] = {"late_keys": 1, "late_rows": (LateKey(table=A, key="ab12cd34"),)}
    waited: dict[str, Any] = {"waited_for": WaitedFor(seq=100, table=A, kind="key"), "xids": (4711,)}
    locks: dict[str, Any] = {"locks": (LockHolder(pid=4711, role="app", relation="archive.a", mode="ShareLock"),)}
    return [
        *_idle("source"), *_limited("source", 0, {"CPU": 1}, publisher_s=0.9),
        *_idle("throttle"), *_limited("throttle", 1 << 26, {"CPU": 1}, paused_s=0.85, throttled_s=0.8),
        *_idle("publisher"), *_limited("publisher", 1 << 26, {"CPU": 1}, publisher_s=0.8),
        *_idle("leader"), *_limited("leader", 1 << 26, {"CPU": 1}, leader_cpu_s=0.95),
        *_busy("hot_row", 0.05, 0.1, 0.05, **late, **waited), *_limited("hot_row", 1 << 26, {"CPU": 3}, paused_s=0.9),
        *_busy("order", 0.05, 0.1, 0.05), *_limited("order", 1 << 26, {"client": 2}, paused_s=0.9),
        *_busy("flush", 0.05, 0.1, 0.05), *_limited("flush", 1 << 26, {"IO:WALSync": 3, "CPU": 1}, paused_s=0.9),
        *_busy("disk", 0.18, 0.0, 0.02), *_limited("disk", 1 << 26, {"IO:DataFileRead": 3, "CPU": 1}, paused_s=0.9),
        *_busy("cpu", 0.18, 0.0, 0.02), *_limited("cpu", 1 << 26, {"CPU": 4}, paused_s=0.9),
        *_busy("locks", 0.18, 0.0, 0.02), *_limited("locks", 1 << 26, {"Lock:transactionid": 4}, paused_s=0.9, **locks),
        *[batch(n, slot="half", received_at=n, started_at=n, committed_at=n + 0.5, queued_s=0.0, execute_s=0.49,
                wait_turn_s=0.0, commit_s=0.01) for n in range(1, 12)],
        *_limited("half", 0, {"Lock:transactionid": 1}, publisher_s=0.5, **locks),
        *_busy("old", 0.18, 0.0, 0.02),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("slot", "limit", "detail", "advice"),
    [
        ("source", "source", "", "nothing"), ("throttle", "throttle", "", "raise apply.max_changes_per_s"),
        ("publisher", "publisher", "", "WAL sender"), ("leader", "leader", "", "processor"),
        ("hot_row", "dependency", "", "do not help"),
        ("order", "commit", "order", "relaxed"), ("flush", "commit", "flush", "synchronous_commit"),
        ("disk", "target", "disk", "more workers"), ("cpu", "target", "CPU", "idle processors"),
        ("locks", "target", "locks", "sessions that hold"), ("old", "target", "", "idle processors"),
    ],
)  # fmt: skip
def test_the_verdict_names_what_limits(limited: ReportOutcome, slot: str, limit: str, detail: str, advice: str) -> None:
    """Of a log that is limited by one thing the first line says which, with its part of the time, and what to do."""
    said = limited.verdicts[slot]
    assert (said.limit, said.detail) == (limit, detail)
    assert said.share > 0.6
    assert advice in said.advice
    # Ten seconds but for the ends, whatever the states.
    assert sum(row["seconds"] for row in limited.tables["moments"] if row["slot"] == slot) == pytest.approx(10, abs=0.3)


def test_all_slots_are_in_one_table(limited: ReportOutcome) -> None:
    """Many slots have a row each, with delay, conflicts, the largest wait and the limit, and a link to their part."""
    rows = {row["slot"]: row for row in limited.tables["slots"]}
    assert {slot: row["limit"] for slot, row in rows.items()} == {
        slot: said.limit for slot, said in limited.verdicts.items()
    }
    hot = rows["hot_row"]
    assert (hot["transactions"], hot["conflicts"], hot["wait"]) == (200, 0, "commit turn")
    assert hot["wait_share"] == pytest.approx(0.5)
    assert hot["delay_p50_s"] == pytest.approx(5.2, abs=0.1)
    page = Path(limited.page).read_text()
    for number, row in enumerate(limited.tables["summary"]):
        assert f'<td><a href="#slot-{number}">{row["slot"]}</a></td>' in page
        assert f'<div id="slot-{number}" data-slot="{number}"' in page


@pytest.mark.browser
def test_a_link_opens_a_slot(limited: ReportOutcome, tmp_path: Path) -> None:
    """A page that is opened with a slot's link shows that slot, and draws its plots only."""
    program = browser()
    assert program
    linked = tmp_path / "linked.html"
    # A file has no fragment here, so the page itself goes there first.
    text = Path(limited.page).read_text()
    assert text.count('"use strict";') >= 1
    linked.write_text(text.replace("const plots = JSON", 'location.hash = "slot-3";\nconst plots = JSON'))
    document, console = open_page(program, linked, tmp_path)
    assert console == []
    assert '<div id="slot-3" data-slot="3">' in document
    assert '<div id="slot-0" data-slot="0" hidden="">' in document


@pytest.mark.parametrize(
    "slot", ["source", "throttle", "publisher", "leader", "order", "flush", "disk", "cpu", "locks", "half"]
)
def test_the_daemon_says_the_same_of_the_same_seconds(limited: ReportOutcome, slot: str) -> None:
    """`status` shows what the report says: one rule, over the log and over looks at the same batches.

    Where a lock took half of the time, neither says that there is nothing to do. Both name who held it.
    """
    said, shown = limited.verdicts[slot], _shown(slot)
    assert (shown["limit"], shown["detail"], shown["advice"]) == (said.limit, said.detail, said.advice)
    assert shown["share"] == pytest.approx(said.share, abs=0.05)
    # But for the share, and for the span that is named.
    assert shown["words"].rpartition(",")[0] == said.words.rpartition(",")[0]
    held = [
        [one.rpartition(",")[0] for one in found if one.startswith("Locks: ")]
        for found in (shown["evidence"], said.evidence)
    ]
    assert held[0] == held[1]
    assert bool(held[0]) is (slot in {"locks", "half"})


def _shown(slot: str) -> dict[str, Any]:
    """Return what a daemon says that looks at a log's batches ten times a second, with what its intervals say."""
    records = [one for one in _limited_log() if one.slot == slot]
    batches = [one for one in records if isinstance(one, BatchRecord)]
    intervals = [one for one in records if isinstance(one, IntervalRecord)]
    limiting = Limiting()
    for number, interval_ in enumerate(intervals):
        for tenth in range(10):
            # At another place between two batches each time.
            moment = at(number + 1 + tenth / 10 + 0.011 * tenth)
            if moment >= batches[-1].started_at:
                break  # the report looks at nothing later
            held = [one for one in batches if one.started_at <= moment < one.committed_at]
            queued = [one for one in batches if one.received_at <= moment < one.started_at]
            executing = [
                one for one in held
                if datetime.fromisoformat(moment) - datetime.fromisoformat(one.started_at)
                < timedelta(seconds=one.execute_s)
            ]  # fmt: skip
            state = state_of(workers=4, queued=len(queued), blocked=0, held=len(held), executing=len(executing), late=0)
            limiting.add(
                Look(
                    state, 0.1, interval_.leader_cpu_s / 10, interval_.publisher_s / 10, interval_.paused_s / 10,
                    interval_.behind_bytes, tuple((one.wait, one.samples) for one in interval_.backends), (),
                    interval_.locks, interval_.throttled_s / 10,
                )
            )  # fmt: skip
    taken = limiting.take()
    assert taken is not None
    shown: dict[str, Any] = json.loads(taken)
    return shown


def test_the_verdict_names_who_waited_for_whom(limited: ReportOutcome) -> None:
    """A hot row is named by its table and hash, and the longest waits by transaction and LSN."""
    said = limited.verdicts["hot_row"]
    assert "key in public.a" in said.words
    assert any("Row ab12cd34 of public.a" in text and "200 batches" in text for text in said.evidence)
    assert any("transaction 4711" in text and "for batch 100" in text for text in said.evidence)


def test_another_log_is_not_mixed_in(engine: DuckEngine, tmp_path: Path, flawed: tuple[ReportOutcome, Path]) -> None:
    """The folder of a report takes one log only: files of two may have one name."""
    write(tmp_path / "log", "apply-1.jsonl", [batch(1)])
    with pytest.raises(ReportRefused, match="holds the report of another log"):
        convert(engine, ReportRequest(log=str(tmp_path / "log"), out=str(flawed[1])), Silent())


def test_a_file_that_may_not_be_read_is_refused_by_name(engine: DuckEngine, tmp_path: Path) -> None:
    """The file and the reason are named before anything is converted; a folder's permission is no matter of memory."""
    path = write(tmp_path / "log", "apply-1.jsonl", [batch(1)])
    path.chmod(0)
    storage = engine.storage
    files = storage.files(str(tmp_path / "log"), SUFFIXES)
    user = os.geteuid()
    if user == 0:  # root may read everything
        os.seteuid(_NOBODY)
    try:
        with pytest.raises(ReportRefused, match=r"apply-1\.jsonl cannot be read: Permission denied") as refused:
            check_readable(storage, files)
    finally:
        os.seteuid(user)
    assert "as a user who may read" in str(refused.value.hint)
    with pytest.raises(ReportRefused, match="/log: Permission denied"), engine.errors():
        raise PermissionError(errno.EACCES, "Permission denied", "/log")


def test_following_counts_each_record_once(engine: DuckEngine, tmp_path: Path) -> None:
    """A report that looks for new files counts each record once, also while another report converts files.

    A broken file is passed over, and read once it is whole.
    """
    log = tmp_path / "log"
    request = ReportRequest(log=str(log), out=str(tmp_path / "out"), what_if=None)
    loaded: list[int] = []
    ended = threading.Event()
    ended.set()  # after the first look

    def follow() -> None:
        look(engine, request, 60, lambda _, new_files, __: loaded.append(new_files), ended)

    write(log, "apply-1.jsonl", [batch(1), batch(2)])
    follow()
    packed = gzip.compress(write(log, "apply-2.jsonl", [batch(3), "torn"]).read_bytes())
    (log / "apply-2.jsonl").unlink()
    (log / "apply-2.jsonl.gz").write_bytes(packed[:40])
    follow()
    assert _counts(engine, request) == (2, 0)
    (log / "apply-2.jsonl.gz").write_bytes(packed)
    write(log, "apply-3.jsonl", [batch(4)])
    convert(engine, request, Silent())
    write(log, "apply-4.jsonl", [batch(5)])
    follow()
    assert loaded == [1, 1]
    assert _counts(engine, request) == (5, 1)


def test_small_loads_become_few(engine: DuckEngine, tmp_path: Path) -> None:
    """Records that came file by file are compacted: the same records, files and days, fewer entries and Parquet files.

    A day of which records come again is counted again, and only that.
    """
    log, out = tmp_path / "log", tmp_path / "out"
    request = ReportRequest(log=str(log), out=str(out), what_if=None, window=timedelta(hours=1))
    store = Store(engine, request.out)
    days: list[list[int]] = []
    for n in range(7):
        at_s = n * 43_200.0
        write(log, f"apply-{n}.jsonl", [batch(n + 1, received_at=at_s, started_at=at_s, committed_at=at_s)])
        assert convert(engine, request, Silent(), store) == 1
        days.append([row["batches"] for row in fold(store, request.out, Silent())])
        store.compact(3)
    assert [len(found) for found in days] == [1, 2, 2, 3, 3, 4, 4]
    assert days[-1] == [1, 2, 2, 2]
    assert len(list((out / "records" / "_manifest").glob("*.json"))) == 3
    assert len(list((out / "records").rglob("load=*"))) < 7
    assert _counts(engine, request) == (7, 0)
    again = Store(engine, request.out)
    assert (again.files, again.n_records, again.newest) == (store.files, 7, store.newest)
    assert fold(again, request.out, Silent()) == fold(store, request.out, Silent())
    latest = show(engine, request, Silent(), new_files=1, store=again).tables
    assert ([row["batches"] for row in latest["summary"]], latest["gaps"]) == ([1], [])
    assert [row["batches"] for row in latest["days"]] == days[-1]


@pytest.fixture
def route(source_db: Database, target_db: Database, init_route: Callable[[Route], None]) -> Route:
    """Two tables."""
    for database in (source_db, target_db):
        database.execute("CREATE TABLE item (id int PRIMARY KEY, v int); CREATE TABLE evt (n int PRIMARY KEY)")
    source_db.execute("CREATE PUBLICATION pub FOR TABLE item, evt")
    source_db.execute("SELECT pg_create_logical_replication_slot('observer_' || current_database(), 'pgoutput')")
    return slot_route(source_db, target_db, init_route, apply__workers=2, apply__max_batch_transactions=10)


def test_a_real_run_is_what_both_servers_say(
    engine: DuckEngine, route: Route, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """Transactions, rows and LSNs equal what the publisher sent and progress shows; conflicts equal the history's."""
    settings = {"applylog.directory": str(tmp_path / "log"), "applylog.detail": "transaction"}
    skip = {f"conflict.{kind}": "skip" for kind in ("insert_exists", "update_missing")}
    # In the way of the fifth transaction, and of two rows of the others.
    route.target.execute("INSERT INTO item VALUES (5, -1); INSERT INTO evt VALUES (7), (-70)")
    daemon = start_daemon(route, settings={**settings, **skip})
    route.source.execute(
        "DO $$ BEGIN FOR i IN 1..200 LOOP INSERT INTO item VALUES (i, 0); INSERT INTO evt VALUES (i), (-i);"
        " UPDATE item SET v = i WHERE id IN (i, i - 1); IF i % 10 = 0 THEN DELETE FROM evt WHERE n = -i; END IF;"
        " COMMIT; END LOOP; END $$"
    )
    route.source.execute("INSERT INTO item SELECT n, 0 FROM generate_series(1001, 1010) AS n")
    daemon.wait_caught_up()
    route.target.execute("DELETE FROM item WHERE id = 1 OR id > 1000")
    route.source.execute("UPDATE item SET v = 0 WHERE id = 1 OR id > 1000")
    daemon.finish()
    request = ReportRequest(log=str(tmp_path / "log"), out=str(tmp_path / "out"), what_if=None)
    outcome = make_report(engine, request, Silent())
    (summary,) = outcome.tables["summary"]
    assert (summary["transactions"], summary["transaction_records"], summary["conflicts"]) == (202, 202, 14)
    kept = route.target.rows(
        "SELECT conflict_type, schema_name || '.' || table_name, policy, outcome, count(*) FROM parapply.conflicts"
        " GROUP BY 1, 2, 3, 4"
    )
    found: Counter[tuple[Any, ...]] = Counter()
    for *name, n_conflicts in _rows(outcome, "conflicts", "type", "table", "policy", "outcome", "conflicts"):
        found[tuple(name)] += n_conflicts
    assert found == {tuple(name): n_conflicts for *name, n_conflicts in kept}
    sent = route.source.rows(
        "SELECT data FROM pg_logical_slot_get_binary_changes('observer_' || current_database(), NULL, NULL,"
        " 'proto_version', '1', 'publication_names', 'pub')"
    )
    commits = [message for (data,) in sent if isinstance(message := decode(bytes(data)), Commit)]
    assert len(commits) == summary["transactions"]
    assert parse_lsn(summary["highest_end_lsn"]) == commits[-1].end_lsn
    ((slot, lowest, highest),) = route.target.rows(
        "SELECT slot_name, lowest_remote_lsn::text, highest_remote_lsn::text FROM parapply.progress"
    )
    # An idle daemon goes on to the end of the publisher's WAL.
    assert (slot, lowest) == (summary["slot"], highest)
    assert parse_lsn(lowest) >= commits[-1].end_lsn
    sums = {table: [0, 0, 0] for table in ("public.item", "public.evt")}
    for row in outcome.tables["tables"]:
        for n, operation in enumerate(("inserts", "updates", "deletes")):
            sums[row["table"]][n] += row[operation]
    # A session's statements are counted for others when it ends, or later.
    route.source.execute("SELECT pg_stat_force_next_flush()")
    counted = route.source.rows(
        "SELECT schemaname || '.' || relname, pg_stat_get_tuples_inserted(relid), pg_stat_get_tuples_updated(relid),"
        " pg_stat_get_tuples_deleted(relid) FROM pg_stat_user_tables"
    )
    assert sums == {table: counts for table, *counts in counted}
    assert summary["transaction_records"] == summary["transactions"]
    records = [read_record(line) for path in (tmp_path / "log").iterdir() for line in path.read_bytes().splitlines()]
    batches = [record for record in records if isinstance(record, BatchRecord)]
    # The played batches are the same by SQL and by the records.
    recorded, intervals = more_workers.read(engine, summary["slot"], batches[0].run)
    by_records = recorded_of(records)
    assert [_rounded(row) for row in recorded] == [_rounded(row) for row in by_records[0]]
    assert [_rounded(row) for row in intervals] == [_rounded(row) for row in by_records[1]]
    log = Log(recorded, intervals)
    assert (log.order, log.workers) == ("preserve", 2)
    # How near the two are is the benchmark's affair (`bench.run_what_if`): another process may take a core at any time.
    assert log.played_s > 0
    assert log.measured_s > 0
    assert outcome.bad_lines == 0
    ((n_workers, leader_cpu_s, n_seconds),) = _rows(outcome, "reading", "workers", "leader_cpu_s", "seconds")
    assert n_workers == 2
    assert 0 < leader_cpu_s < n_seconds
    assert list(outcome.verdicts) == [summary["slot"]]


def _rounded(row: tuple[object, ...]) -> list[object]:
    return [round(one, 5) if isinstance(one, float) else one for one in row]


def test_the_tables_are_readable_as_json(hand_made: tuple[ReportOutcome, Path]) -> None:
    """The output of --json is JSON, with times in ISO 8601."""
    from parapply.analysis.command import _json_value  # noqa: PLC0415

    outcome, _ = hand_made
    tables = json.loads(json.dumps(outcome.tables, default=_json_value))
    assert tables["summary"][0]["first_at"] == "2024-11-20T23:59:50.120000+00:00"

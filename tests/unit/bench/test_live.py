"""Results of `parapply bench --live`: figures, tables, documents, a plot; and the systems that its options select."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from bench.command import bench
from bench.flow import Flow
from bench.live import Applying, LiveOptions, LiveTurn, read_applying
from bench.live_report import document, figures, small_table, visible_table
from bench.options import LIVE_SYSTEMS, STREAMINGS, Options
from bench.processes import Usage
from bench.run_attached import live_options
from parapply.applylog import utc_text
from parapply.applylog_schema import BatchRecord, RowCounts
from parapply.demo.errors import DemoError

if TYPE_CHECKING:
    from pathlib import Path

OURS = "parapply preserve 4"
FACTS: dict[str, str | float] = {
    "publisher": "18.4", "subscriber": "18.4", "parapply": "0.1.0", "cores": 2, "processor": "",
    "architecture": "x86_64",
}  # fmt: skip


def turn(
    number: int,
    system: str,
    visible_s: float,
    *,
    applying: Applying | None = None,
    hold_s: float = 0.0,
    is_equal: bool = True,
) -> LiveTurn:
    """Return a turn of a transaction that took 2 s on the publisher."""
    flow = Flow(
        write_s=1.5, commit_s=0.5, visible_s=visible_s, before_ms=(1.0, 2.0 * number), after_ms=(3.0,), gap_s=visible_s
    )
    usage = {"target": Usage(cpu_s=1.0, peak_bytes=5 << 20)}
    if applying:
        usage["leader"] = Usage(cpu_s=1.0, peak_bytes=number << 20)
    return LiveTurn(
        round_number=number, system=system, hold_s=hold_s, flow=flow, is_equal=is_equal, usage=usage, applying=applying
    )


def applying(mode: str = "streamed", because: str = "") -> Applying:
    """Return what the apply log said."""
    return Applying(mode=mode, spilled_because=because, attempts=1, execute_s=1, wait_turn_s=0, commit_s=0)


def turns() -> list[LiveTurn]:
    """Return two rounds, the second in the opposite order."""
    return [
        turn(1, "built-in", 4.0),
        turn(1, OURS, 1.0, applying=applying()),
        turn(2, OURS, 2.0, applying=applying("spilled", "a unique index")),
        turn(2, "built-in", 5.0),
    ]


def test_figures_are_of_all_rounds() -> None:
    """Seconds are medians, small transactions are taken together, gap and memory are the largest met."""
    built_in, ours = figures(turns())
    assert (built_in.visible_s, built_in.times_built_in, built_in.leader_peak_bytes) == (4.5, 1.0, None)
    assert (ours.visible_s, ours.best_s, ours.worst_s, ours.times_built_in) == (1.5, 1.0, 2.0, 3.0)
    assert (ours.own_s, ours.visible_per_own, ours.gap_s) == (2.0, 0.75, 2.0)
    assert ours.before is not None
    assert (ours.before.p50_ms, ours.before.max_ms) == (1.0, 4.0)
    assert (ours.leader_peak_bytes, ours.target_peak_bytes) == (2 << 20, 5 << 20)
    assert ours.modes == {"streamed": 1, "spilled: a unique index": 1}
    assert built_in.modes == {}


def test_holds_are_not_mixed() -> None:
    """A transaction that was held open is compared with others that were."""
    held = [turn(1, "built-in", 6.0, hold_s=10.0), turn(1, OURS, 0.5, hold_s=10.0, applying=applying())]
    found = figures([*turns(), *held])
    assert [(one.hold_s, one.system) for one in found] == [
        (hold_s, name) for hold_s in (0.0, 10.0) for name in ("built-in", OURS)
    ]
    assert [one.times_built_in for one in found] == [1.0, 3.0, 1.0, 12.0]


def test_no_built_in_and_no_small_one() -> None:
    """Nothing is compared with who was not measured, and a transaction too quick for small ones also has figures."""
    empty = Flow(write_s=1, commit_s=1, visible_s=-0.001, before_ms=(), after_ms=(), gap_s=0)
    bare = replace(turn(1, OURS, 1.0, applying=applying()), flow=empty)
    (one,) = figures([bare])
    assert (one.times_built_in, one.before) == (None, None)
    held = document(LiveOptions(systems=(), rows=1), [bare])
    assert held["turns"][0]["small_before"] == {"transactions": 0}
    small_table([one])


def test_tables_and_document_hold_everybody() -> None:
    """Each system has a line in both tables and each turn an entry; tables that differ are said."""
    every = figures([*turns(), turn(1, "built-in parallel", 3.0, is_equal=False)])
    console = Console(width=160, record=True)
    console.print(visible_table(every))
    console.print(small_table(every))
    text = console.export_text()
    assert text.count(OURS) == 2
    assert text.count("TABLES DIFFER") == 1
    assert "spilled: a unique index" in text
    held = msgspec.json.decode(msgspec.json.encode(document(LiveOptions(systems=(), rows=7), turns())))
    assert (held["rows"], len(held["turns"]), len(held["figures"])) == (7, 4, 2)
    assert held["turns"][1]["applying"]["mode"] == "streamed"
    assert held["turns"][0]["applying"] is None


@pytest.mark.slow
def test_the_plot_has_a_row_of_panels_for_each_hold(tmp_path: Path) -> None:
    """The drawing names every system, and the same figures give the same file."""
    every = figures([*turns(), turn(1, OURS, 0.5, hold_s=10.0, applying=applying(), is_equal=False)])
    from bench.live_plot import write_live_plot  # noqa: PLC0415  matplotlib: not for each process that collects tests

    drawing = write_live_plot(every, 1000, FACTS, tmp_path / "one.svg").read_text(encoding="utf-8")
    assert "1,000 rows, held open for 10 s" in drawing
    assert drawing.count(f">{OURS}<") == 2
    assert "DIFFERS" in drawing
    assert write_live_plot(every, 1000, FACTS, tmp_path / "two.svg").read_text(encoding="utf-8") == drawing


def test_small_transactions_are_streamed_too() -> None:
    """A transaction of any size comes in as many chunks; never above PostgreSQL's default, nor below its minimum."""
    limits = [LiveOptions(systems=(), rows=rows).work_mem_kb for rows in (10, 100_000, 1_000_000, 10_000_000)]
    assert limits == [64, 6553, 65_536, 65_536]


def record(mode: str, table: str, xid: int) -> bytes:
    """Return a line of the apply log."""
    at = utc_text(0)
    one = BatchRecord(
        slot="live", seq=1, worker=0, first_end_lsn="0/1", end_lsn="0/2", n_transactions=1, xids=(xid,),
        commit_time_first=at, commit_time_last=at, received_at=at, started_at=at, committed_at=at, queued_s=0,
        wait_dependency_s=0, execute_s=2, wait_turn_s=0.5, commit_s=0.25, attempts=2, mode=mode,
        rows={table: RowCounts(insert=1)}, size_bytes=1,
    )  # fmt: skip
    return msgspec.json.encode(one) + b"\n"


def test_how_it_was_applied_is_read_from_both_logs(tmp_path: Path) -> None:
    """The apply log names the transaction that has the large table; why its follower gave way is an event."""
    small, huge = record("set", "public.probe", 7), record("spilled", "public.items", 8)
    (tmp_path / "apply-1.jsonl").write_bytes(small + huge)
    log = b"""Fatal Python error: not JSON
{"event": "stream_spilled", "xid": 7, "reason": "another"}
{"event": "stream_spilled", "xid": 8, "reason": "a lock"}
"""
    found = read_applying(tmp_path, log)
    assert found == Applying(
        mode="spilled", spilled_because="a lock", attempts=2, execute_s=2, wait_turn_s=0.5, commit_s=0.25
    )
    assert read_applying(tmp_path, b"").spilled_because == ""
    (tmp_path / "apply-2.jsonl").write_bytes(huge)
    with pytest.raises(DemoError, match="2 times"):
        read_applying(tmp_path, b"")


def test_options_make_systems() -> None:
    """By default both built-in ways and both of parapply take part; repeated values count once."""
    options = Options(systems=LIVE_SYSTEMS, large_rows=1000, is_quick=True, settings=("apply.stream_start_bytes=1",))
    wanted = live_options(options, [0.0, 5.0, 0.0], [*STREAMINGS, "auto"])
    assert (wanted.rows, wanted.holds_s) == (100, (0.0, 5.0))
    assert [(one.name, one.streaming) for one in wanted.systems] == [
        ("built-in", "off"), ("built-in parallel", "parallel"), (OURS, "off"), (f"{OURS}, streaming off", "off"),
    ]  # fmt: skip
    _, _, auto, off = wanted.systems
    assert auto.settings is not None
    assert "apply.stream_start_bytes=1" in auto.settings
    assert off.settings == (*auto.settings, "source.streaming=off")


@pytest.mark.parametrize(
    "words", [["--latency"], ["--sync=on"], ["--workload=tpcb"], ["--system=ceiling", "--system=bulk-statement"]]
)
def test_what_cannot_be_measured_live_is_refused(words: list[str]) -> None:
    """Options that have no meaning here are a usage error, before any server is started."""
    done = CliRunner().invoke(bench, ["--live", *words])
    assert done.exit_code == 2
    assert "--live" in done.output

"""Results of the benchmark's turns: medians and ratios, documents, the plot; and the meaning of its options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from xml.dom import minidom

import click
import pytest
from click.testing import CliRunner

from bench.capture_mixed import WEIGHTS
from bench.catchup import Turn
from bench.command import bench
from bench.figures import figures
from bench.filling import Backlog
from bench.latency import BUILT_IN
from bench.options import FAST, SYSTEMS, Disk, Options
from bench.output import IN_CHECKOUT, OUTSIDE, Output
from bench.processes import Usage
from bench.report import Measured, applied_table, cost_table, document, time_table, wal_table
from bench.run_attached import latency_options
from bench.runners import runners
from bench.servers import programs_in
from bench.wal import Wal
from bench.workloads import WORKLOADS
from parapply.demo.errors import DemoError
from tests.fixtures.documents import ROOT

if TYPE_CHECKING:
    from pathlib import Path

BACKLOG = Backlog(transactions=1000, changes=2000, end_lsn="0/1")
FACTS: dict[str, str | float] = {
    "publisher": "18.4", "subscriber": "16.14", "parapply": "0.1.0", "cores": 2, "processor": "",
    "architecture": "x86_64",
}  # fmt: skip
OURS = "parapply preserve 4"
WAL = Wal(written_bytes=900_000, records=5000, image_bytes=100_000)


def usage(**cpu_s: float) -> dict[str, Usage]:
    """Return what roles have used; each a megabyte for every second."""
    return {role: Usage(cpu_s=seconds, peak_bytes=int(seconds * (1 << 20))) for role, seconds in cpu_s.items()}


def turns() -> list[Turn]:
    """Return three rounds of everybody."""
    found = []
    for number, factor in ((1, 1.0), (2, 3.0), (3, 2.0)):
        for runner, total_s, first_s, is_equal, used, wal in (
            ("pg_recvlogical", 3.0, None, None, usage(walsender=0.5, reader=0.1), None),
            ("read by query", 1.0, None, None, usage(walsender=0.2, reader=0.1), None),
            ("built-in", 4.0, 0.25, True, usage(walsender=1.0, target=4.0), WAL),
            (
                OURS,
                2.0,
                0.5,
                True,
                usage(leader=2.0, leader_stream=1.0, walsender=1.0, target=3.0),
                Wal(written_bytes=250_000 * number, records=4000, image_bytes=100_000),
            ),
            ("bulk statement", 2.0, None, True, usage(target=2.0), Wal(written_bytes=500_000)),
        ):
            found.append(
                Turn(
                    round_number=number, runner=runner, first_s=first_s, total_s=total_s * factor, is_equal=is_equal,
                    usage=used, wal=wal,
                )
            )  # fmt: skip
    return found


def measured(name: str = "simple-update") -> Measured:
    """Return a workload, measured."""
    return Measured(
        workload=WORKLOADS[name], sync="off", backlog=BACKLOG, turns=turns(), at=datetime.now(UTC), facts=FACTS
    )


def test_figures_are_medians_and_ratios_of_medians() -> None:
    """Time is the median of the rounds, ratios are of medians, memory the largest, and each has what it has only."""
    ceiling, by_query, built_in, ours, bulk = figures(turns(), BACKLOG)
    assert (ours.runner, ours.turns, ours.is_equal) == (OURS, 3, True)
    assert (ours.median_s, ours.best_s, ours.worst_s, ours.first_s) == (4.0, 2.0, 6.0, 0.5)
    assert (ours.transactions_per_s, ours.changes_per_s) == (250, 500)
    assert (ours.times_built_in, ours.times_ceiling) == (2.0, 0.5)
    # A second for two thousand changes, without the start of Python.
    assert (ours.leader_us_per_change, ours.target_us_per_change, ours.times_bulk) == (500, 1500, 1.5)
    assert (ours.cpu_s["leader"], ours.peak_bytes["leader"]) == (2.0, 2 << 20)
    assert (built_in.times_built_in, built_in.leader_us_per_change, built_in.times_bulk) == (1.0, None, 2.0)
    assert (ceiling.is_equal, ceiling.first_s, ceiling.target_us_per_change) == (None, None, None)
    assert bulk.times_bulk == 1.0
    # The faster of the two that apply nothing.
    assert (ceiling.times_ceiling, by_query.times_ceiling) == (1 / 3, 1.0)


def test_wal_is_compared_without_images_of_pages() -> None:
    """Images depend on the last checkpoint, so bytes are compared without them, and not where they are unknown."""
    ceiling, _, built_in, ours, bulk = figures(turns(), BACKLOG)
    assert (ours.wal_bytes_per_change, ours.wal_image_bytes_per_change, ours.wal_records_per_change) == (250, 50, 2)
    assert (built_in.times_built_in_wal, ours.times_built_in_wal) == (1.0, 0.5)
    assert (bulk.wal_bytes_per_change, bulk.wal_image_bytes_per_change, bulk.times_built_in_wal) == (250, None, None)
    assert (ceiling.wal_bytes_per_change, ceiling.times_built_in_wal) == (None, None)


def test_a_slow_disk_is_compared_with_the_same_disk() -> None:
    """Each disk has a built-in subscription of its own to be compared with, and no other is taken for it."""
    slow = Disk(read_us=150)
    found = [
        Turn(round_number=1, runner=f"{runner}{disk.text}", disk=disk.text, first_s=None, total_s=s, is_equal=True,
             usage={})
        for runner, disk, s in (("built-in", FAST, 1.0), ("built-in", slow, 8.0), (OURS, FAST, 0.5), (OURS, slow, 2.0))
    ]  # fmt: skip
    assert [one.times_built_in for one in figures(found, BACKLOG)] == [1.0, 1.0, 2.0, 4.0]
    assert figures(found[2:], BACKLOG)[0].times_built_in is None


def test_every_system_with_a_subscriber_meets_each_disk() -> None:
    """The decoder alone has no subscriber; all others take a turn for each pair of delays."""
    options = Options(
        large_rows=1, systems=("ceiling", "built-in", "parapply", "bulk-statement"), disks=(FAST, Disk(read_us=150))
    )
    assert [one.name for one in runners(WORKLOADS["simple-update"], options, "off")] == [
        "pg_recvlogical", "read by query", "built-in", "built-in, read 150 us", OURS, f"{OURS}, read 150 us",
        "bulk statement", "bulk statement, read 150 us",
    ]  # fmt: skip
    assert options.has_slow_disk


def test_a_ratio_needs_both_sides() -> None:
    """Without the built-in subscription, the ceiling or the bulk statement there is no ratio to it, not a guess."""
    (alone,) = figures([turn for turn in turns() if turn.runner == OURS], BACKLOG)
    assert (alone.times_built_in, alone.times_ceiling, alone.times_bulk) == (None, None, None)


def test_one_turn_that_differs_is_seen() -> None:
    """Tables that differ once make the whole measurement differ; a runner without a target does not."""
    assert measured().is_equal
    all_turns = [*turns(), Turn(round_number=4, runner=OURS, first_s=1, total_s=1, is_equal=False, usage={})]
    whole = Measured(
        workload=WORKLOADS["tpcb"], sync="on", backlog=BACKLOG, turns=all_turns, at=datetime.now(UTC), facts=FACTS
    )
    assert not whole.is_equal
    assert [one.is_equal for one in whole.figures if one.runner == OURS] == [False]


def test_tables_have_a_line_for_each_runner() -> None:
    """Time and cost have every runner, WAL all with a target, batches only runners that keep an apply log."""
    every = measured().figures
    tables = (time_table(every), cost_table(every), wal_table(every), applied_table(turns()))
    assert [table.row_count for table in tables] == [5, 5, 3, 0]


def test_a_document_is_json_and_names_what_was_asked() -> None:
    """The document survives JSON, with machine, workload, options, turns and figures."""
    content = json.loads(json.dumps(document(measured("large"), Options(large_rows=7, is_quick=True))))
    assert content["workload"]["large_rows"] == 1
    assert content["machine"]["subscriber"] == "16.14"
    assert len(content["turns"]) == 15
    assert content["figures"][OURS]["median_s"] == 4.0


@pytest.mark.slow
def test_a_plot_is_small_and_says_what_the_table_says(tmp_path: Path) -> None:
    """A picture takes less than 5 kB for each workload, is XML, and its numbers are whole."""
    from bench.plot import write_plot  # noqa: PLC0415  matplotlib: not for each process that collects tests

    # Rows of two panels, and one that is not full.
    names = list(WORKLOADS)[:7]
    path = write_plot([measured(name) for name in names], tmp_path / "plot.svg")
    text = path.read_text(encoding="utf-8")
    minidom.parseString(text)
    assert len(text) < 5000 * len(names)
    assert text.count(">8.00 s, 1.00 x<") == len(names)
    assert "18.4 to 16.14" in text


def test_every_workload_has_its_scripts() -> None:
    """A workload of our own has its scripts, and each script has its workload, but for the mixed capture."""
    scripts = ROOT / "bench" / "scripts"
    wanted = {
        f"{workload.stem}.{part}.sql"
        for workload in WORKLOADS.values()
        if workload.stem
        for part in ("schema", "load", *["beside"] * workload.has_beside)
    }
    wanted |= {f"mixed.{part}.sql" for part in ("schema", "night", *WEIGHTS)}
    assert {file.name for file in scripts.iterdir()} == wanted


def test_runners_are_everybody_once() -> None:
    """Each system and each parapply comes once; the bulk statement only where it can do the workload."""
    options = Options(
        large_rows=1, systems=(*SYSTEMS, "built-in"), orders=("preserve", "relaxed", "preserve"), workers=(1, 4),
        delays_s=(0.0, 0.0025), settings=("apply.max_batch_changes=1",),
    )  # fmt: skip
    found = runners(WORKLOADS["foreign-keys"], options, "on")
    ends = ("1", "1, 2.5 ms", "4", "4, 2.5 ms")
    assert [one.name for one in found] == [
        "pg_recvlogical", "read by query", "built-in", "built-in parallel",
        "parapply preserve 1", "parapply preserve 1, 2.5 ms", "parapply preserve 4", "parapply preserve 4, 2.5 ms",
        "parapply relaxed 1", "parapply relaxed 1, 2.5 ms", "parapply relaxed 4", "parapply relaxed 4, 2.5 ms",
        *[f"parapply interpreted {order} {end}" for order in ("preserve", "relaxed") for end in ends], "pglogical",
        "bulk statement",
    ]  # fmt: skip
    twins = {one.name for one in found if one.environment}
    assert twins == {one.name for one in found if "interpreted" in one.name}
    # The user's own come last and win.
    assert found[-3].settings == (
        "apply.workers=4", "apply.commit_order=relaxed", "target.synchronous_commit=on",
        "target.session_replication_role=origin", "apply.max_batch_changes=1",
    )  # fmt: skip
    assert "bulk statement" not in [one.name for one in runners(WORKLOADS["unique-taken"], options, "on")]


@pytest.mark.parametrize(
    ("transactions", "is_quick", "wanted"), [(None, False, 300_000), (None, True, 20_000), (7, False, 7), (7, True, 7)]
)
def test_quick_shortens_what_was_not_asked_for(transactions: int | None, *, is_quick: bool, wanted: int) -> None:
    """A quick run takes a tenth of the workload's own, 20,000 at most, and exactly as many as were asked for."""
    assert Options(large_rows=1, transactions=transactions, is_quick=is_quick).backlog(300_000) == wanted
    assert Options(large_rows=1, is_quick=True).backlog(150) == 15


def test_latency_takes_those_who_apply() -> None:
    """The built-in subscription and every parapply are measured; the ceiling and bulk statements have no latency."""
    wanted = latency_options(Options(large_rows=1, systems=SYSTEMS, workers=(2,), delays_s=(0.001,), rounds=5))
    assert wanted.systems[0] == BUILT_IN
    assert [(system.name, system.target_delay_s) for system in wanted.systems[1:]] == [
        ("parapply preserve 2, 1 ms", 0.001)
    ]
    assert wanted.rounds == 5


@pytest.mark.parametrize(
    "words", [["--latency", "--sync=on"], ["--latency", "--workload=tpcb"], ["--latency", "--system=ceiling"],
              ["--workload=nothing"], ["--rounds=0"], ["--delay-ms=-1"], ["--disk-sync-us=-1"],
              ["--system=pglogical", "--sync=both"], ["--system=pglogical", "--disk-read-us=150"],
              ["--live", "--disk-read-us=1"]],
)  # fmt: skip
def test_wrong_options_are_usage_errors(words: list[str]) -> None:
    """Options that cannot be measured are refused with exit code 2 before anything starts."""
    done = CliRunner().invoke(bench, words)
    assert done.exit_code == 2
    assert "Error: " in done.output


def test_every_option_says_what_it_does() -> None:
    """`--help` explains each option and starts nothing."""
    assert all(option.help for option in bench.params if isinstance(option, click.Option))
    assert CliRunner().invoke(bench, ["--help"]).exit_code == 0


def run_without(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `parapply bench` where a module is not installed."""
    script = (
        f"import sys; sys.modules[{module!r}] = None; from parapply.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", script, "bench", *words], capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "line_start"), [("matplotlib", "The plot needs matplotlib."), ("psutil", "The benchmark needs psutil.")]
)
def test_a_missing_package_is_one_line(package: str, line_start: str) -> None:
    """Before anything is measured, one line says what to install."""
    done = run_without(package)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    pins, needed = ROOT / "constraints.txt", ROOT / "bench" / "requirements.txt"
    assert line.startswith(f"parapply: {line_start} Hint: pip install -c {pins} -r {needed}")


def test_programs_that_do_not_run_are_refused(tmp_path: Path) -> None:
    """A directory without a server is an error that names it."""
    with pytest.raises(DemoError, match=r"has no initdb and postgres that the server's account can run"):
        programs_in(tmp_path)


def test_results_go_where_results_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout they go to bench/results, elsewhere to a directory that is made, or where it was said."""
    monkeypatch.chdir(tmp_path)
    outside = Output()
    outside.prepare()
    assert outside.path("a") == OUTSIDE / "a"
    assert OUTSIDE.is_dir()
    IN_CHECKOUT.mkdir(parents=True)
    assert Output().path("a") == IN_CHECKOUT / "a"
    (tmp_path / "file").touch()
    with pytest.raises(DemoError, match=r"cannot be made: .* exists"):
        Output(directory=tmp_path / "file").prepare()
    # Where nothing is written, nothing needs a place.
    Output(directory=tmp_path / "file", is_saved=False).prepare()


def test_the_document_alone_is_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json what people read goes to standard error."""
    output = Output(is_json=True, is_saved=False)
    output.say("progress")
    content: dict[str, Any] = {"results": []}
    output.print_document(content)
    captured = capsys.readouterr()
    assert (json.loads(captured.out), captured.err) == (content, "progress\n")

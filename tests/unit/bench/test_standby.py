"""Results that `parapply bench --synchronous` takes from pgbench's reports, and its options."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from bench.attached import System
from bench.options import Options
from bench.run_attached import standby_options
from bench.standby import NO_STANDBY, StandbyTurn, read_pgbench
from bench.standby_report import document, summary
from parapply.demo.errors import DemoError

_OURS = "parapply preserve 4"


def _turn(standby: str, per_s: float, *, number: int = 1, sync: str = "off", clients: int = 1) -> StandbyTurn:
    return StandbyTurn(
        round_number=number, standby=standby, sync="on" if sync == "on" else "off", level="on", clients=clients,
        per_s=per_s, cpu_us={"leader": 100.04},
    )  # fmt: skip


def test_pgbench_says_what_it_made() -> None:
    """Number and rate are read from its report; one that made nothing, or says neither, is an error."""
    text = "number of transactions actually processed: {}\nlatency average = 1 ms\ntps = 812.5 (without ...)\n"
    assert read_pgbench(text.format(4875)) == (4875, 812.5)
    for bad in (text.format(0), "tps = 1.0\n", ""):
        with pytest.raises(DemoError, match="no transactions"):
            read_pgbench(bad)


def test_each_system_is_measured_with_both_commits_beside_none() -> None:
    """A system that reads a slot and applies nothing is no standby."""
    options = standby_options(Options(large_rows=1, systems=("ceiling", "built-in", "parapply"), is_quick=True))
    found = [(one.name, one.sync) for one in options.standbys]
    assert found == [(NO_STANDBY, "off"), ("built-in", "off"), (_OURS, "off"), ("built-in", "on"), (_OURS, "on")]
    systems = [one.system for one in options.standbys]
    assert systems[3] == System(name="built-in", sync="on")
    assert systems[4] is not None
    assert "target.synchronous_commit=on" in (systems[4].settings or ())


def test_figures_are_medians_beside_the_better_built_in() -> None:
    """A cell is the median of its rounds, and how many times the built-in subscription's better figure that is."""
    turns = [
        _turn(NO_STANDBY, 1500), _turn("built-in", 10), _turn("built-in", 1000, sync="on"),
        *(_turn(_OURS, per_s, number=number) for number, per_s in enumerate((700, 900, 800), 1)),
        _turn(_OURS, 3000, clients=16),
    ]  # fmt: skip
    content = json.loads(json.dumps(document(turns)))
    assert [one["per_s"] for one in content["medians"]] == [1500, 10, 1000, 800, 3000]
    assert content["turns"][0]["cpu_us"] == {"leader": 100.0}
    complete = [*turns, _turn("built-in", 20, clients=16), _turn("built-in", 2000, sync="on", clients=16)]
    complete.append(_turn(NO_STANDBY, 7000, clients=16))
    console = Console(width=200, record=True)
    console.print(summary(complete))
    (line,) = [line for line in console.export_text().splitlines() if line.startswith(_OURS)]
    assert line.split()[3:] == ["off", "on", "800", "(0.80)", "3,000", "(1.50)"]

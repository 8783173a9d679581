"""`bench --latency`, `--synchronous` and `--live`: systems replicate one at a time while something is measured.

In go options; out comes an exit code. Only the files stay.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, get_args

from bench import latency, latency_report, live, live_report, standby, standby_report
from bench.attached import System
from bench.options import Sync
from bench.report import machine_facts
from bench.runners import runners
from bench.servers import make_stage, versions
from bench.workloads import WORKLOADS
from parapply.demo.stage import Interrupts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from rich.table import Table

    from bench.options import Options, Streaming
    from bench.output import Output
    from bench.runners import Runner
    from parapply.demo.stage import Stage

_DIFFERENT: Final = 1
# Of a quick latency run: enough for a median.
_QUICK_PROBES: Final = 100
_QUICK_CEILING_S: Final = 3
_STANDBY_S: Final = 6
_QUICK_STANDBY_S: Final = 2

_Turn = TypeVar("_Turn")


@dataclass(frozen=True, kw_only=True)
class Measurement(Generic[_Turn]):
    """Measurements while a system replicates.

    Attributes:
        name: begins the name of the file.
        title: of the document.
        begin: says what is measured, after the versions.
        measure: takes a stage and a listener for turns, and returns all turns.
        line: says what one turn was.
        tables: of all turns.
        document: of all turns.
        settings: of both servers.
        draw: writes a picture, and returns its place; None where there is nothing to compare.
        is_good: returns whether the exit code is 0.
    """

    name: str
    title: str
    begin: str
    measure: Callable[[Stage, Callable[[_Turn], None]], list[_Turn]]
    line: Callable[[_Turn], str]
    tables: Callable[[list[_Turn]], Sequence[Table]]
    document: Callable[[list[_Turn]], Mapping[str, Any]]
    settings: Mapping[str, str | int | bool] = field(default_factory=dict)
    draw: Callable[[list[_Turn], Mapping[str, str | float], Path], Path | None] = lambda _turns, _facts, _path: None
    is_good: Callable[[list[_Turn]], bool] = lambda _turns: True


def main(wanted: Measurement[_Turn], options: Options, output: Output) -> int:
    """Measure every system that was asked for, and return the exit code.

    Raises:
        DemoError: something is not installed, or a server, a program or a system failed; all is cleaned up.
        KeyboardInterrupt: Ctrl-C; all is cleaned up.
        SystemExit: SIGTERM or SIGHUP; all is cleaned up.
    """
    output.prepare()
    at = datetime.now(UTC)
    machine = machine_facts(os.getloadavg()[0])
    with Interrupts() as interrupts, make_stage(interrupts, options, settings=wanted.settings) as stage:
        facts = {**machine, **versions(stage)}
        output.say(f"{wanted.name}: PostgreSQL {facts['publisher']} to {facts['subscriber']}{wanted.begin} ...")
        turns = wanted.measure(stage, lambda turn: output.say(wanted.line(turn)))
    if not output.is_json:
        for table in wanted.tables(turns):
            output.say()
            output.console.print(table)
    content = {
        "benchmark": wanted.title,
        "measured_at": at.isoformat(timespec="seconds"),
        "machine": facts,
        **wanted.document(turns),
    }
    stem = f"{wanted.name}-{at:%Y%m%dT%H%M%SZ}"
    output.save(stem, content)
    if output.is_saved and (path := wanted.draw(turns, facts, output.path(f"{stem}.svg"))) is not None:
        output.say_written(path)
    output.print_document(content)
    return 0 if wanted.is_good(turns) else _DIFFERENT


def latency_measurement(options: Options) -> Measurement[latency.LatencyTurn]:
    """Return the measurement of the time from a commit until a reader on the subscriber sees it."""
    wanted = latency_options(options)
    return Measurement(
        name="latency",
        title="latency, from commit to visible",
        begin=". Sustained rate of each",
        measure=lambda stage, say: latency.measure(stage, wanted, say),
        line=lambda turn: f"round {turn.round_number} of {wanted.rounds}  {turn.system:26} {turn.load}",
        tables=lambda turns: [latency_report.summary(turns)],
        document=latency_report.document,
    )


def standby_measurement(options: Options) -> Measurement[standby.StandbyTurn]:
    """Return the measurement of a publisher that writes while a system is its synchronous standby."""
    wanted = standby_options(options)
    return Measurement(
        name="synchronous",
        title="synchronous standby",
        begin="",
        measure=lambda stage, say: standby.measure(stage, wanted, say),
        line=lambda turn: (
            f"round {turn.round_number} of {wanted.rounds}  {turn.standby:22} {turn.sync:4} {turn.level:13}"
            f" {turn.clients:3} clients {turn.per_s:10,.0f} a second"
        ),
        tables=lambda turns: [standby_report.summary(turns)],
        document=standby_report.document,
        # For 64 clients, and what replicates.
        settings={"max_connections": 150},
    )


def live_measurement(
    options: Options, holds_s: Sequence[float], streamings: Sequence[Streaming]
) -> Measurement[live.LiveTurn]:
    """Return the measurement of a huge transaction alongside small ones."""
    wanted = live_options(options, holds_s, streamings)

    def draw(turns: list[live.LiveTurn], facts: Mapping[str, str | float], path: Path) -> Path | None:
        found = live_report.figures(turns)
        if len({one.system for one in found}) < 2:
            return None
        from bench.live_plot import write_live_plot  # noqa: PLC0415  takes a second, and nothing else needs it

        return write_live_plot(found, wanted.rows, facts, path)

    def tables(turns: list[live.LiveTurn]) -> list[Table]:
        found = live_report.figures(turns)
        return [live_report.visible_table(found), live_report.small_table(found)]

    return Measurement(
        name="live",
        title="live, one huge transaction beside small ones",
        begin=f". {wanted.rows:,} rows beside {1 / wanted.interval_s:g} small transactions a second",
        measure=lambda stage, say: live.measure(stage, wanted, say),
        line=lambda turn: (
            f"round {turn.round_number} of {wanted.rounds}  {turn.system:36} held {turn.hold_s:g} s,"
            f" visible after {turn.flow.visible_s:.2f} s"
        ),
        tables=tables,
        document=lambda turns: live_report.document(wanted, turns),
        draw=draw,
        is_good=lambda turns: all(turn.is_equal for turn in turns),
    )


def latency_options(options: Options) -> latency.LatencyOptions:
    """Return what is asked of the measurement; systems that apply nothing, or not one by one, have no latency."""
    systems = []
    for runner in runners(WORKLOADS["simple-update"], options, "off"):
        if runner.system == "built-in":
            systems.append(latency.BUILT_IN)
        elif runner.system == "parapply":
            systems.append(_ours(runner))
    quick = {"probes": _QUICK_PROBES, "ceiling_s": _QUICK_CEILING_S} if options.is_quick else {}
    return latency.LatencyOptions(
        rounds=options.rounds, scale=options.scale, clients=options.clients, systems=tuple(systems), **quick
    )


def standby_options(options: Options) -> standby.StandbyOptions:
    """Return what is asked of the measurement; what applies nothing, or not one by one, is no standby."""
    standbys = [standby.Standby(system=None, sync="off")]
    for sync in get_args(Sync):
        for runner in runners(WORKLOADS["simple-update"], options, sync):
            if runner.system == "built-in":
                standbys.append(standby.Standby(system=System(name=runner.name, sync=sync), sync=sync))
            elif runner.system == "parapply":
                standbys.append(standby.Standby(system=_ours(runner), sync=sync))
    return standby.StandbyOptions(
        standbys=tuple(standbys),
        rounds=options.rounds,
        scale=options.scale,
        seconds=_QUICK_STANDBY_S if options.is_quick else _STANDBY_S,
    )


def live_options(options: Options, holds_s: Sequence[float], streamings: Sequence[Streaming]) -> live.LiveOptions:
    """Return what is asked of the measurement; systems that apply nothing, or not one by one, cannot take part."""
    systems = []
    for runner in runners(WORKLOADS["large"], options, "off"):
        if runner.system == "built-in":
            systems.append(System(name=runner.name))
        elif runner.system == "built-in-parallel":
            systems.append(System(name=runner.name, streaming="parallel"))
        elif runner.system == "parapply":
            systems += [_with_streaming(_ours(runner), streaming) for streaming in dict.fromkeys(streamings)]
    return live.LiveOptions(
        systems=tuple(systems), rows=options.large(), holds_s=tuple(dict.fromkeys(holds_s)), rounds=options.rounds
    )


def _ours(runner: Runner) -> System:
    return System(name=runner.name, settings=runner.settings, target_delay_s=runner.delay_s)


def _with_streaming(system: System, streaming: Streaming) -> System:
    if streaming == "auto":
        return system
    settings = (*(system.settings or ()), f"source.streaming={streaming}")
    return replace(system, name=f"{system.name}, streaming {streaming}", settings=settings)

"""`parapply bench --live`: a huge transaction alongside small ones, made while the systems replicate.

In go options; out comes an exit code. Only the files stay.
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from bench.attached import System
from bench.live import LiveOptions, measure
from bench.live_report import document, figures, small_table, visible_table
from bench.report import machine_facts
from bench.runners import runners
from bench.servers import make_stage, versions
from bench.workloads import WORKLOADS
from parapply.demo.interrupts import Interrupts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.live import LiveTurn
    from bench.options import Options, Streaming
    from bench.output import Output

_DIFFERENT: Final = 1


def main(options: Options, holds_s: Sequence[float], streamings: Sequence[Streaming], output: Output) -> int:
    """Measure and return the exit code: 0 if all tables were equal after every turn, else 1.

    Raises:
        DemoError: something is not installed, or a server or a system failed; all is cleaned up.
        KeyboardInterrupt: Ctrl-C; all is cleaned up.
        SystemExit: SIGTERM or SIGHUP; all is cleaned up.
    """
    output.prepare()
    at = datetime.now(UTC)
    machine = machine_facts(os.getloadavg()[0])
    wanted = live_options(options, holds_s, streamings)
    with Interrupts() as interrupts, make_stage(interrupts, options) as stage:
        facts = {**machine, **versions(stage)}
        output.say(
            f"live: PostgreSQL {facts['publisher']} to {facts['subscriber']}. {wanted.rows:,} rows beside"
            f" {1 / wanted.interval_s:g} small transactions a second ..."
        )

        def say(turn: LiveTurn) -> None:
            output.say(
                f"round {turn.round_number} of {wanted.rounds}  {turn.system:36} held {turn.hold_s:g} s,"
                f" visible after {turn.flow.visible_s:.2f} s"
            )

        turns = measure(stage, wanted, say)
    found = figures(turns)
    if not output.is_json:
        for table in (visible_table(found), small_table(found)):
            output.say()
            output.console.print(table)
    content = {
        "benchmark": "live, one huge transaction beside small ones",
        "measured_at": at.isoformat(timespec="seconds"),
        "machine": facts,
        **document(wanted, turns),
    }
    stem = f"live-{at:%Y%m%dT%H%M%SZ}"
    output.save(stem, content)
    if output.is_saved and len({one.system for one in found}) > 1:
        from bench.live_plot import write_live_plot  # noqa: PLC0415  takes a second, and nothing else needs it

        output.say_written(write_live_plot(found, wanted.rows, facts, output.path(f"{stem}.svg")))
    output.print_document(content)
    return 0 if all(turn.is_equal for turn in turns) else _DIFFERENT


def live_options(options: Options, holds_s: Sequence[float], streamings: Sequence[Streaming]) -> LiveOptions:
    """Return what is asked of the measurement; systems that apply nothing, or not one by one, cannot take part."""
    systems = []
    for runner in runners(WORKLOADS["large"], options, "off"):
        if runner.system == "built-in":
            systems.append(System(name=runner.name))
        elif runner.system == "built-in-parallel":
            systems.append(System(name=runner.name, streaming="parallel"))
        elif runner.system == "parapply":
            ours = System(name=runner.name, settings=runner.settings, target_delay_s=runner.delay_s)
            systems += [_with_streaming(ours, streaming) for streaming in dict.fromkeys(streamings)]
    return LiveOptions(
        systems=tuple(systems), rows=options.large(), holds_s=tuple(dict.fromkeys(holds_s)), rounds=options.rounds
    )


def _with_streaming(system: System, streaming: Streaming) -> System:
    if streaming == "auto":
        return system
    settings = (*(system.settings or ()), f"source.streaming={streaming}")
    return replace(system, name=f"{system.name}, streaming {streaming}", settings=settings)

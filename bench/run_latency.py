"""`parapply bench --latency`: how long after a commit a reader on the subscriber sees it, idle and at half load.

In go options; out comes an exit code. Only the file stays.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from bench.attached import System
from bench.latency import BUILT_IN, LatencyOptions, measure
from bench.latency_report import document, summary
from bench.report import machine_facts
from bench.runners import runners
from bench.servers import make_stage, versions
from bench.workloads import WORKLOADS
from parapply.demo.interrupts import Interrupts

if TYPE_CHECKING:
    from bench.latency import LatencyTurn
    from bench.options import Options
    from bench.output import Output

# Of a quick run: enough for a median.
_QUICK_PROBES = 100
_QUICK_CEILING_S = 3


def main(options: Options, output: Output) -> int:
    """Measure the built-in subscription and every parapply that was asked for, and return 0.

    Raises:
        DemoError: a server, a program or a system failed; all is cleaned up.
        KeyboardInterrupt: Ctrl-C; all is cleaned up.
        SystemExit: SIGTERM or SIGHUP; all is cleaned up.
    """
    output.prepare()
    at = datetime.now(UTC)
    machine = machine_facts(os.getloadavg()[0])
    wanted = latency_options(options)
    with Interrupts() as interrupts, make_stage(interrupts, options) as stage:
        facts = {**machine, **versions(stage)}
        output.say(f"latency: PostgreSQL {facts['publisher']} to {facts['subscriber']}. What each sustains ...")

        def say(turn: LatencyTurn) -> None:
            output.say(f"round {turn.round_number} of {wanted.rounds}  {turn.system:26} {turn.load}")

        turns = measure(stage, wanted, say)
    if not output.is_json:
        output.say()
        output.console.print(summary(turns))
    content = {
        "benchmark": "latency, from commit to visible",
        "measured_at": at.isoformat(timespec="seconds"),
        "machine": facts,
        **document(turns),
    }
    output.save(f"latency-{at:%Y%m%dT%H%M%SZ}", content)
    output.print_document(content)
    return 0


def latency_options(options: Options) -> LatencyOptions:
    """Return what is asked of the measurement; systems that apply nothing, or not one by one, have no latency."""
    systems = []
    for runner in runners(WORKLOADS["simple-update"], options, "off"):
        if runner.system == "built-in":
            systems.append(BUILT_IN)
        elif runner.system == "parapply":
            systems.append(System(name=runner.name, settings=runner.settings, target_delay_s=runner.delay_s))
    quick = {"probes": _QUICK_PROBES, "ceiling_s": _QUICK_CEILING_S} if options.is_quick else {}
    return LatencyOptions(
        rounds=options.rounds, scale=options.scale, clients=options.clients, systems=tuple(systems), **quick
    )

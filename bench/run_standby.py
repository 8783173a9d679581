"""`parapply bench --synchronous`: how much a publisher writes while a system is its synchronous standby.

In go options; out comes an exit code. Only the file stays.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, get_args

from bench.attached import System
from bench.options import Sync
from bench.report import machine_facts
from bench.runners import runners
from bench.servers import make_stage, versions
from bench.standby import Standby, StandbyOptions, measure
from bench.standby_report import document, summary
from bench.workloads import WORKLOADS
from parapply.demo.interrupts import Interrupts

if TYPE_CHECKING:
    from bench.options import Options
    from bench.output import Output
    from bench.standby import StandbyTurn

_SECONDS: Final = 6
_QUICK_SECONDS: Final = 2
# For 64 clients, and what replicates.
_SETTINGS: Final = {"max_connections": 150}


def main(options: Options, output: Output) -> int:
    """Measure without a standby, the built-in subscription and every parapply that was asked for, and return 0.

    Raises:
        DemoError: a server, a program or a system failed; all is cleaned up.
        KeyboardInterrupt: Ctrl-C; all is cleaned up.
        SystemExit: SIGTERM or SIGHUP; all is cleaned up.
    """
    output.prepare()
    at = datetime.now(UTC)
    machine = machine_facts(os.getloadavg()[0])
    wanted = standby_options(options)
    with Interrupts() as interrupts, make_stage(interrupts, options, settings=_SETTINGS) as stage:
        facts = {**machine, **versions(stage)}
        output.say(f"synchronous standby: PostgreSQL {facts['publisher']} to {facts['subscriber']} ...")

        def say(turn: StandbyTurn) -> None:
            output.say(
                f"round {turn.round_number} of {wanted.rounds}  {turn.standby:22} {turn.sync:4} {turn.level:13}"
                f" {turn.clients:3} clients {turn.per_s:10,.0f} a second"
            )

        turns = measure(stage, wanted, say)
    if not output.is_json:
        output.say()
        output.console.print(summary(turns))
    content = {
        "benchmark": "synchronous standby",
        "measured_at": at.isoformat(timespec="seconds"),
        "machine": facts,
        **document(turns),
    }
    output.save(f"synchronous-{at:%Y%m%dT%H%M%SZ}", content)
    output.print_document(content)
    return 0


def standby_options(options: Options) -> StandbyOptions:
    """Return what is asked of the measurement; what applies nothing, or not one by one, is no standby."""
    standbys = [Standby(system=None, sync="off")]
    for sync in get_args(Sync):
        for runner in runners(WORKLOADS["simple-update"], options, sync):
            if runner.system == "built-in":
                standbys.append(Standby(system=System(name=runner.name, sync=sync), sync=sync))
            elif runner.system == "parapply":
                ours = System(name=runner.name, settings=runner.settings, target_delay_s=runner.delay_s)
                standbys.append(Standby(system=ours, sync=sync))
    return StandbyOptions(
        standbys=tuple(standbys),
        rounds=options.rounds,
        scale=options.scale,
        seconds=_QUICK_SECONDS if options.is_quick else _SECONDS,
    )

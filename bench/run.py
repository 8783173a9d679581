"""Catch-up from begin to end: each workload on servers of its own, tables on the terminal, files in a directory.

In go workloads and options; out comes an exit code. Only the files stay.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from bench import pglogical
from bench.catchup import prepare, turns
from bench.disk import slow_disk
from bench.report import (
    Measured,
    applied_reasons,
    applied_table,
    cost_table,
    document,
    machine_facts,
    time_table,
    wal_table,
)
from bench.servers import make_stage, placed, versions
from bench.workloads import WORKLOADS
from parapply.demo.stage import Interrupts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bench.catchup import Turn
    from bench.disk import SlowDisk
    from bench.options import Options
    from bench.output import Output
    from bench.workloads import Workload
    from parapply.demo.stage import Stage

_DIFFERENT = 1
_VERDICTS: Final = {True: "tables equal", False: "TABLES DIFFER", None: ""}
_STAMP: Final = "%Y%m%dT%H%M%SZ"


def main(names: Sequence[str], options: Options, output: Output) -> int:
    """Measure workloads and return the exit code: 0 if all tables were equal after every turn, else 1.

    Raises:
        DemoError: something is not installed, or a server, a program or a runner failed; all is cleaned up.
        KeyboardInterrupt: Ctrl-C; all is cleaned up.
        SystemExit: SIGTERM or SIGHUP; all is cleaned up.
    """
    output.prepare()
    # Of others: a busy machine makes the figures worthless, and the reader shall see it. Later it would be our own.
    machine = machine_facts(os.getloadavg()[0])
    began_at = datetime.now(UTC)
    all_measured: list[Measured] = []
    for name in names:
        workload = WORKLOADS[name]
        with (
            Interrupts() as interrupts,
            slow_disk() if options.has_slow_disk else nullcontext() as disk,
            make_stage(interrupts, options, disk, is_local=workload.is_local) as stage,
            placed(stage, options.alone),
        ):
            for measured in _measure(stage, workload, options, machine, output, disk=disk):
                all_measured.append(measured)
                if not output.is_json:
                    _print_tables(output, measured)
                stem = f"catch-up-{name}-{measured.at:{_STAMP}}-sync-{measured.sync}"
                output.save(stem, document(measured, options))
                output.say()
    # A picture compares: of one system the figures say all.
    if output.is_saved and any(len(each.figures) > 1 for each in all_measured):
        from bench.plot import write_plot  # noqa: PLC0415  takes a second, and nothing else needs it

        output.say_written(write_plot(all_measured, output.path(f"catch-up-{began_at:{_STAMP}}.svg")))
    output.print_document({"results": [document(each, options) for each in all_measured]})
    return 0 if all(each.is_equal for each in all_measured) else _DIFFERENT


def _measure(  # noqa: PLR0913  one caller
    stage: Stage,
    workload: Workload,
    options: Options,
    machine: Mapping[str, str | float],
    output: Output,
    *,
    disk: SlowDisk | None,
) -> Iterator[Measured]:
    """Run one workload and yield what was measured with each synchronous_commit."""
    at = datetime.now(UTC)
    facts = {**machine, **versions(stage)}
    if pglogical.NAME in options.systems:
        facts[pglogical.NAME] = pglogical.version(stage.target)
    output.say(f"{workload.name}: {workload.text}")
    if disk is not None:
        disk.check(stage.target.pid)
        settings = disk.settings(stage.target.binaries.major)
        facts["subscriber_settings"] = ", ".join(f"{name} = {value}" for name, value in settings.items())
        output.say(f"The subscriber has {facts['subscriber_settings']}: a session waits for its own reads.")
    output.say(f"PostgreSQL {facts['publisher']} to {facts['subscriber']}. Making the backlog ...")
    backlog = prepare(stage, workload, options)
    output.say(f"{backlog.transactions:,} transactions, {backlog.changes:,} changes.")
    if "bulk-statement" in options.systems and not workload.is_bulk_possible:
        output.say("No bulk statement: it would break a unique index of these tables in between.")
    for sync in options.syncs:
        done: list[Turn] = []
        for turn in turns(stage, workload, options, backlog, sync, disk=disk):
            done.append(turn)
            output.say(
                f"sync {sync:3}  round {turn.round_number} of {options.rounds}  {turn.runner:26}"
                f" {turn.total_s:6.2f} s  {_VERDICTS[turn.is_equal]}".rstrip()
            )
        yield Measured(workload=workload, sync=sync, backlog=backlog, turns=done, at=at, facts=facts)


def _print_tables(output: Output, measured: Measured) -> None:
    every = measured.figures
    output.say(f"\n{measured.workload.name}, synchronous_commit {measured.sync}")
    output.console.print(time_table(every))
    output.say()
    output.console.print(cost_table(every))
    output.say()
    output.console.print(wal_table(every))
    if any(turn.applied for turn in measured.turns):
        output.say()
        output.console.print(applied_table(measured.turns))
    for line in applied_reasons(measured.turns):
        output.say(line)

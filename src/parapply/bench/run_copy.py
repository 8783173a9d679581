"""`parapply bench --copy`: the initial copy by parapply and by the built-in subscription.

In go options; out comes an exit code. Nothing is left behind but the file.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.table import Table

from parapply.bench.copying import SMALL_TABLES, medians, prepare, turns
from parapply.bench.report import machine_facts
from parapply.bench.servers import make_stage, versions
from parapply.demo.interrupts import Interrupts

if TYPE_CHECKING:
    from parapply.bench.options import Options
    from parapply.bench.output import Output

_DIFFERENT = 1
_MEGABYTE = 1e6


def main(options: Options, output: Output) -> int:
    """Measure and return the exit code: 0 if all tables were equal after every turn, else 1.

    Raises:
        DemoError: a server, a program or a runner failed; all is cleaned up.
        KeyboardInterrupt: Ctrl-C; all is cleaned up.
        SystemExit: SIGTERM or SIGHUP; all is cleaned up.
    """
    output.prepare()
    at = datetime.now(UTC)
    machine = machine_facts(os.getloadavg()[0])
    done = []
    with Interrupts() as interrupts, make_stage(interrupts, options) as stage:
        facts = {**machine, **versions(stage)}
        output.say(f"copy: PostgreSQL {facts['publisher']} to {facts['subscriber']}. Making the tables ...")
        size_bytes = prepare(stage, options)
        output.say(f"{size_bytes / _MEGABYTE:,.0f} MB in {SMALL_TABLES + 5} tables.")
        for turn in turns(stage, options):
            done.append(turn)
            verdict = "tables equal" if turn.is_equal else "TABLES DIFFER"
            output.say(
                f"round {turn.round_number} of {options.rounds}  {turn.runner:22} {turn.total_s:7.2f} s  {verdict}"
            )
    figures = medians(done)
    if not output.is_json:
        output.say()
        output.console.print(_table(figures, size_bytes))
    content = {
        "benchmark": "initial copy",
        "measured_at": at.isoformat(timespec="seconds"),
        "machine": facts,
        "scale": options.scale,
        "size_bytes": size_bytes,
        "tables": SMALL_TABLES + 5,
        "median_s": {name: round(total_s, 3) for name, total_s in figures.items()},
        "turns": [asdict(turn) for turn in done],
    }
    output.save(f"copy-{at:%Y%m%dT%H%M%SZ}", content)
    output.print_document(content)
    return 0 if all(turn.is_equal for turn in done) else _DIFFERENT


def _table(figures: dict[str, float], size_bytes: int) -> Table:
    table = Table(title="Initial copy, median of the rounds")
    for heading in ("", "seconds", "MB/s", "times built-in"):
        table.add_column(heading, justify="left" if not heading else "right")
    base = figures.get("built-in, 4 workers") or figures.get("built-in")
    for name, total_s in figures.items():
        gain = f"{base / total_s:.2f}" if base else ""
        table.add_row(name, f"{total_s:.2f}", f"{size_bytes / _MEGABYTE / total_s:,.0f}", gain)
    return table

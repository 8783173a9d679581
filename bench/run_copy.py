"""`parapply bench --copy`: the initial copy by parapply and by the built-in subscription.

In go options; out comes an exit code. Only the file stays.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.table import Table

from bench.copy_shapes import SHAPES
from bench.copying import medians, prepare, turns
from bench.report import machine_facts
from bench.servers import make_stage, versions
from parapply.demo.stage import Interrupts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.options import CopyShapeName, Options
    from bench.output import Output

#: Version of the document. Raised when a field changes its meaning or goes.
SCHEMA_VERSION = 2

_DIFFERENT = 1
_MEGABYTE = 1e6


def main(options: Options, shapes: Sequence[CopyShapeName], output: Output) -> int:
    """Measure and return the exit code: 0 if all tables were equal after every turn, else 1.

    Raises:
        DemoError: a server, a program or a runner failed; all is cleaned up.
        KeyboardInterrupt: Ctrl-C; all is cleaned up.
        SystemExit: SIGTERM or SIGHUP; all is cleaned up.
    """
    output.prepare()
    documents = [_measure(options, name, output) for name in dict.fromkeys(shapes)]
    output.print_document({"results": documents})
    return 0 if all(turn["is_equal"] for document in documents for turn in document["turns"]) else _DIFFERENT


def _measure(options: Options, name: CopyShapeName, output: Output) -> dict[str, Any]:
    at = datetime.now(UTC)
    machine = machine_facts(os.getloadavg()[0])
    shape = SHAPES[name]
    done = []
    with Interrupts() as interrupts, make_stage(interrupts, options) as stage:
        facts = {**machine, **versions(stage)}
        output.say(f"copy, {name}: PostgreSQL {facts['publisher']} to {facts['subscriber']}. Making {shape.text} ...")
        n_tables, size_bytes = prepare(stage, shape, options)
        output.say(f"{size_bytes / _MEGABYTE:,.0f} MB in {n_tables} tables.")
        for turn in turns(stage, options):
            done.append(turn)
            verdict = "tables equal" if turn.is_equal else "TABLES DIFFER"
            output.say(
                f"round {turn.round_number} of {options.rounds}  {turn.runner:22} {turn.total_s:7.2f} s"
                f"  {turn.cpu_s:6.2f} s of CPU  {verdict}"
            )
    figures = medians(done)
    if not output.is_json:
        output.say()
        output.console.print(_table(name, figures, size_bytes))
    content = {
        "schema_version": SCHEMA_VERSION,
        "benchmark": f"initial copy: {shape.text}",
        "measured_at": at.isoformat(timespec="seconds"),
        "machine": facts,
        "shape": name,
        "scale": options.scale,
        "size_bytes": size_bytes,
        "tables": n_tables,
        "rounds": options.rounds,
        "median_s": {runner: round(total_s, 3) for runner, (total_s, _) in figures.items()},
        "median_cpu_s": {runner: round(cpu_s, 3) for runner, (_, cpu_s) in figures.items()},
        "turns": [asdict(turn) for turn in done],
    }
    output.save(f"copy-{name}-{at:%Y%m%dT%H%M%SZ}", content)
    return content


def _table(name: str, figures: dict[str, tuple[float, float]], size_bytes: int) -> Table:
    table = Table(title=f"Initial copy, {name}, median of the rounds")
    for heading in ("", "seconds", "MB/s", "times built-in", "CPU s"):
        table.add_column(heading, justify="left" if not heading else "right")
    base, _ = figures.get("built-in, 4 workers") or figures.get("built-in") or (0.0, 0.0)
    for runner, (total_s, cpu_s) in figures.items():
        gain = f"{base / total_s:.2f}" if base else ""
        table.add_row(runner, f"{total_s:.2f}", f"{size_bytes / _MEGABYTE / total_s:,.0f}", gain, f"{cpu_s:.2f}")
    return table

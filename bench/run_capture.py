"""Captures as a load: the same bytes each time, and a publisher that does nothing.

`python -m bench.run_capture` makes the three captures of `bench/captures` again, each with the checksums of the
publisher's tables at its end. `parapply bench --capture DIR` replays captures into a server, once for each of
parapply's settings and rounds. All runs must leave equal tables, for our own captures the publisher's.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import psycopg
from psycopg import sql
from rich.table import Table

from bench.filling import fill, load
from bench.options import Options
from bench.report import machine_facts
from bench.servers import make_stage, versions
from bench.workloads import LARGE_ROWS, WORKLOADS
from parapply.capture.folder import look
from parapply.capture.scratch import SUM
from parapply.demo.errors import DemoError
from parapply.demo.stage import BANK, PUBLICATION, Interrupts, own_environment
from parapply.errors import ParapplyError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.output import Output
    from parapply.demo.stage import Stage

CAPTURES: Final = Path(__file__).parent / "captures"
#: Version of the document. Raised when a field changes its meaning or goes.
SCHEMA_VERSION: Final = 1
#: Workload and number of transactions of each capture; the tables have a scale of 1.
_MADE: Final = {"pgbench": ("tpcb", 6_000), "orders": ("foreign-keys", 6_000), "many-tables": ("many-tables", 3_000)}
#: Beside the files of a capture of ours: its workload, rows and checksum of each table of the publisher at its end.
_PUBLISHER: Final = "publisher.json"
_TABLES: Final = "SELECT relnamespace::regnamespace::text, relname FROM pg_class WHERE relkind = 'r' AND oid >= 16384"
_SLOT: Final = "capture"
#: Database of a replay, on the subscriber.
_SCRATCH: Final = "scratch"
_TIMEOUT_S: Final = 900
_DIFFERENT: Final = 1


def parapply(*words: str, codes: Sequence[int] = (0,)) -> str:
    """Run the command to its end and return what it printed.

    Raises:
        DemoError: it failed.
    """
    done = subprocess.run(  # noqa: S603  our own program, no shell
        [sys.executable, "-m", "parapply", *words],
        env=own_environment(), capture_output=True, text=True, check=False, timeout=_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode not in codes:
        raise DemoError(f"`parapply {words[0]}` ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _capture(stage: Stage, folder: Path) -> None:
    """Capture all that the publisher has written by now."""
    ((end_lsn,),) = stage.source.execute("SELECT pg_logical_emit_message(true, 'parapply bench', '')", dbname=BANK)
    parapply(
        "capture", str(folder), "--source", stage.source_dsn(), "--publication", PUBLICATION,
        "--kept-slot", _SLOT, "--until", str(end_lsn),
    )  # fmt: skip


def _sums(stage: Stage) -> dict[str, list[int | str]]:
    """Return rows and checksum of each of the publisher's tables, as a replay returns them."""
    found = {}
    with psycopg.connect(stage.source.dsn(BANK), autocommit=True) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        for schema, name in connection.execute(_TABLES).fetchall():
            query = sql.SQL("{} FROM {} AS t").format(sql.SQL(SUM), sql.Identifier(schema, name))
            found[f"{schema}.{name}"] = list(connection.execute(query).fetchall()[0])
    return dict(sorted(found.items()))


def make(folder: Path, names: Sequence[str]) -> int:
    """Make captures again, in the place of the present ones, and return their bytes.

    Raises:
        DemoError: a server or a program failed.
    """
    for name in names:
        workload_name, transactions = _MADE[name]
        workload = WORKLOADS[workload_name]
        options = Options(transactions=transactions, scale=1, large_rows=LARGE_ROWS, systems=("parapply",))
        with Interrupts() as interrupts, make_stage(interrupts, options) as stage:
            made = stage.directory / name
            fill(stage, workload, scale=1)
            _capture(stage, made)
            load(stage, workload, options)
            _capture(stage, made)
            known = {"workload": workload_name, "tables": _sums(stage)}
            (made / _PUBLISHER).write_text(json.dumps(known, separators=(",", ":")) + "\n", encoding="utf-8")
            shutil.rmtree(folder / name, ignore_errors=True)
            shutil.copytree(made, folder / name)
    return sum(path.stat().st_size for name in names for path in (folder / name).iterdir())


def main(folders: Sequence[Path], options: Options, output: Output) -> int:
    """Replay captures in rounds, and return the exit code: 0 if all tables were equal each time, else 1.

    Raises:
        CaptureRefused: one is damaged.
        DemoError: a server or a program failed.
    """
    output.prepare()
    for folder in folders:
        if (torn := look(folder).torn) is not None:
            raise torn
    at = datetime.now(UTC)
    machine = machine_facts(os.getloadavg()[0])
    captures = [_measure(folder, options) for folder in folders]
    if not output.is_json:
        output.console.print(_table(captures))
    content = {
        "schema_version": SCHEMA_VERSION, "benchmark": "captures", "measured_at": at.isoformat(timespec="seconds"),
        "machine": machine, "rounds": options.rounds, "captures": captures,
    }  # fmt: skip
    output.save(f"captures-{at:%Y%m%dT%H%M%SZ}", content)
    output.print_document(content)
    return 0 if all(one["is_equal"] for one in captures) else _DIFFERENT


def _measure(folder: Path, options: Options) -> dict[str, Any]:
    """Replay one capture into a server of its own."""
    path = folder / _PUBLISHER
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    groups = [
        " ".join([f"apply.workers={workers}", f"apply.commit_order={order}", f"target.synchronous_commit={sync}"])
        for workers in options.workers for order in options.orders for sync in options.syncs
    ]  # fmt: skip
    more = [word for setting in options.settings for word in ("--set", setting)]
    words = [*more, *[word for group in groups for word in ("--run", group)], "--json", "--again"]
    with Interrupts() as interrupts, make_stage(interrupts, options) as stage:
        rows = []
        if known is not None:
            fill(stage, WORKLOADS[known["workload"]], scale=1)
            rows = ["--copy-of", stage.target.dsn(BANK)]
        stage.target.execute(f"CREATE DATABASE {_SCRATCH}")
        call = ("replay", str(folder), "--target", stage.target.dsn(_SCRATCH), *rows, *words)
        rounds = [json.loads(parapply(*call, codes=(0, _DIFFERENT))) for _ in range(options.rounds)]
        facts = versions(stage)
    runs = [run for found in rounds for run in found["runs"]]
    failures = [run["failure"] for run in runs if run["failure"]]
    different = _different(known and known["tables"], [run["tables"] for run in runs if run["is_done"]])
    return {
        "capture": folder.name,
        "servers": facts,
        "figures": [
            {"settings": group, "seconds": [found["runs"][index]["seconds"] for found in rounds]}
            for index, group in enumerate(groups)
        ],
        "failures": failures,
        "different": different,
        "is_equal": not failures and not different,
    }


def _different(wanted: Mapping[str, Any] | None, found: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Return the tables that differ from the publisher's if those are known, or between two runs."""
    sums = [{name: [one["rows"], one["checksum"]] for name, one in tables.items()} for tables in found]
    # A partitioned table is none of the publisher's here: its rows are its partitions'.
    first = wanted or (sums[0] if sums else {})
    return sorted({name for one in sums for name in first if first[name] != one.get(name)})


def _table(captures: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("capture", "settings", "median s", "best s", "tables", box=None)
    for one in captures:
        verdict = "equal" if one["is_equal"] else "; ".join([*one["failures"], *one["different"]])
        for figure in one["figures"]:
            seconds = figure["seconds"]
            cells = (f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f}")
            table.add_row(one["capture"], figure["settings"], *cells, verdict)
    return table


@click.command()
@click.option("--name", "names", multiple=True, type=click.Choice(list(_MADE)), default=list(_MADE), help="Which.")
@click.option("--out", "folder", type=click.Path(path_type=Path, file_okay=False), default=CAPTURES, help="For them.")
def command(names: tuple[str, ...], folder: Path) -> None:
    """Make the captures of the benchmark again."""
    try:
        click.echo(f"{make(folder, names):,} bytes")
    except ParapplyError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    command()

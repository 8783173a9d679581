"""The command `parapply bench`: its options, and nothing that takes time to import before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from bench.options import (
    ALONE,
    AUTO,
    COPY_SHAPES,
    DEFAULT_SYSTEMS,
    LIVE_SYSTEMS,
    ORDERS,
    STREAMINGS,
    SYSTEMS,
    Disk,
    Options,
)
from bench.workloads import LARGE_ROWS, WORKLOADS

if TYPE_CHECKING:
    from bench.options import Streaming, Sync, System

_ALL: Final = "all"
_WORKLOAD: Final = "simple-update"
_ROUNDS: Final = 3
# Of --latency and --live, which take longer.
_FEW_ROUNDS: Final = 2
_SYNCS: Final[dict[str, tuple[Sync, ...]]] = {"off": ("off",), "on": ("on",), "both": ("off", "on")}
_DIRECTORY = click.Path(path_type=Path, file_okay=False)
_PROGRAMS = click.Path(path_type=Path, file_okay=False, exists=True)


class _Workers(click.ParamType[int | str]):
    """A number of workers, or the word that has it find itself."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:  # noqa: ANN401
        """Return the number or the word."""
        return AUTO if value == AUTO else click.IntRange(1, 64).convert(value, param, ctx)


@click.command(
    epilog="""\b
Examples:
  parapply bench
  parapply bench --quick --workload tpcb --workload hot-rows
  parapply bench --workload all --system built-in --system parapply --order preserve --order relaxed
  parapply bench --workers 1 --workers 2 --workers 4 --sync both
  parapply bench --workload inserts --alone publisher
  parapply bench --delay-ms 0 --delay-ms 2 --set apply.max_batch_transactions=500
  parapply bench --transactions 50000 --workers 4 --workers 16 --disk-read-us 150
  parapply bench --latency --quick
  parapply bench --synchronous --system built-in --system parapply
  parapply bench --copy --scale 50 --workers 2 --workers 4
  parapply bench --copy --shape all --scale 20
  parapply bench --live --hold-s 0 --hold-s 10
  parapply bench --live --system parapply --streaming auto --large-rows 10000000 --rounds 1
Meaning of each figure: docs/BENCHMARK.md.""",
)
@click.option(
    "--workload", "names", multiple=True, type=click.Choice([*WORKLOADS, _ALL]), default=[_WORKLOAD],
    show_default=True, help="Content of the backlog; repeatable.",
)  # fmt: skip
@click.option(
    "--system", "systems", multiple=True, type=click.Choice(SYSTEMS),
    help="System that drains it; repeatable."
    f"  [default: {', '.join(DEFAULT_SYSTEMS)}; with --live {', '.join(LIVE_SYSTEMS)}]",
)  # fmt: skip
@click.option("--transactions", type=click.IntRange(min=1), help="Backlog; by default the workload's own.")
@click.option(
    "--large-rows", type=click.IntRange(min=1), default=LARGE_ROWS, show_default=True,
    help="Rows of the huge transaction of the workload `large`, and of --live.",
)  # fmt: skip
@click.option("--scale", type=click.IntRange(min=1), default=10, show_default=True, help="Size of the tables.")
@click.option("--clients", type=click.IntRange(min=1), default=4, show_default=True, help="Clients making the backlog.")
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    help=f"Turns of each runner.  [default: {_ROUNDS}; {_FEW_ROUNDS} with --latency, --synchronous and --live]",
)
@click.option(
    "--quick",
    "is_quick",
    is_flag=True,
    help="One round, and a tenth of the workload's own transactions, 20,000 at most.",
)
@click.option(
    "--workers", multiple=True, type=_Workers(), default=[4], show_default=True,
    help='parapply\'s connections, or "auto"; repeatable.',
)  # fmt: skip
@click.option(
    "--order", "orders", multiple=True, type=click.Choice(ORDERS), default=["preserve"], show_default=True,
    help="parapply's commit order; repeatable.",
)  # fmt: skip
@click.option(
    "--delay-ms", "delays_ms", multiple=True, type=click.FloatRange(min=0, max=10_000), default=[0.0],
    show_default=True, help="A longer way between daemon and target, each direction; repeatable.",
)  # fmt: skip
@click.option(
    "--disk-read-us", "reads_us", multiple=True, type=click.IntRange(0, 1_000_000), default=[0], show_default=True,
    help="Each page read of the subscriber takes so much longer, with 32 MB of shared buffers; repeatable.",
)  # fmt: skip
@click.option(
    "--disk-sync-us", "syncs_us", multiple=True, type=click.IntRange(0, 1_000_000), default=[0], show_default=True,
    help="The same for each flush; repeatable.",
)  # fmt: skip
@click.option(
    "--sync", type=click.Choice(list(_SYNCS)), default="off", show_default=True,
    help="synchronous_commit on the subscriber.",
)  # fmt: skip
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE",
    help="Passed on to parapply, after the workload's own; repeatable.",
)  # fmt: skip
@click.option(
    "--alone", type=click.Choice(ALONE),
    help="Give that server a core for itself; all else shares the others, as with separate machines.",
)  # fmt: skip
@click.option("--bindir-source", type=_PROGRAMS, metavar="DIR", help="PostgreSQL's programs for the publisher.")
@click.option("--bindir-target", type=_PROGRAMS, metavar="DIR", help="The same for the subscriber.")
@click.option(
    "--out", "directory", type=_DIRECTORY, metavar="DIR",
    help="For JSON and plot.  [default: bench/results if there is one, else parapply-bench]",
)  # fmt: skip
@click.option("--latency", "is_latency", is_flag=True, help="Measure from commit to visible instead of catching up.")
@click.option(
    "--synchronous", "is_synchronous", is_flag=True,
    help="Measure what a publisher writes whose commits wait for the system, with 1, 16 and 64 clients.",
)  # fmt: skip
@click.option("--copy", "is_copy", is_flag=True, help="Measure the initial copy instead; --workers are connections.")
@click.option(
    "--shape", "shapes", multiple=True, type=click.Choice([*COPY_SHAPES, _ALL]), default=["one-large"],
    show_default=True, help="With --copy: what is copied; repeatable.",
)  # fmt: skip
@click.option("--live", "is_live", is_flag=True, help="Measure a huge transaction beside small ones, as it happens.")
@click.option(
    "--hold-s", "holds_s", multiple=True, type=click.FloatRange(min=0, max=3600), default=[0.0], show_default=True,
    help="With --live: seconds that the huge transaction stays open before its commit; repeatable.",
)  # fmt: skip
@click.option(
    "--streaming", "streamings", multiple=True, type=click.Choice(STREAMINGS), default=STREAMINGS, show_default=True,
    help="With --live: parapply's source.streaming; repeatable.",
)  # fmt: skip
@click.option(
    "--capture", "captures", type=click.Path(path_type=Path, file_okay=False, exists=True), multiple=True,
    metavar="DIR", help="Replay what `parapply capture` has kept there instead, by parapply alone; repeatable.",
)  # fmt: skip
@click.option("--no-save", "is_unsaved", is_flag=True, help="Write no files.")
@click.option("--json", "is_json", is_flag=True, help="Print the JSON document instead of tables.")
def bench(  # noqa: PLR0913  one parameter for each option
    *,
    names: tuple[str, ...],
    systems: tuple[System, ...],
    rounds: int | None,
    is_quick: bool,
    delays_ms: tuple[float, ...],
    reads_us: tuple[int, ...],
    syncs_us: tuple[int, ...],
    sync: str,
    directory: Path | None,
    is_unsaved: bool,
    is_json: bool,
    is_latency: bool,
    is_synchronous: bool,
    is_copy: bool,
    is_live: bool,
    holds_s: tuple[float, ...],
    streamings: tuple[Streaming, ...],
    shapes: tuple[Any, ...],
    captures: tuple[Path, ...],
    **others: Any,  # noqa: ANN401  click's options
) -> int:
    """Drain one backlog by parapply and by others in turn, and print times, CPU and memory."""
    systems = systems or (LIVE_SYSTEMS if is_live else DEFAULT_SYSTEMS)
    other = _other_measurement(latency=is_latency, synchronous=is_synchronous, live=is_live, copy=is_copy)
    if other:
        _check_other(other, systems, sync, has_workload=set(names) != {_WORKLOAD}, is_alone=bool(others["alone"]))
    disks = tuple(Disk(read_us=read_us, sync_us=sync_us) for read_us in reads_us for sync_us in syncs_us)
    options = Options(
        rounds=rounds or (1 if is_quick else _ROUNDS if other in ("", "--copy") else _FEW_ROUNDS),
        is_quick=is_quick,
        delays_s=tuple(delay_ms / 1000 for delay_ms in delays_ms),
        disks=disks,
        syncs=_SYNCS[sync],
        systems=systems,
        **others,
    )
    if (options.has_slow_disk or AUTO in options.workers) and other:
        raise click.UsageError("--disk-read-us, --disk-sync-us and --workers=auto are for catching up")
    _check_pglogical(options)
    from bench.installed import check_installed  # noqa: PLC0415

    check_installed(with_plot=not is_unsaved and not captures and other in ("", "--live"))
    from bench import run, run_attached  # noqa: PLC0415
    from bench.output import Output  # noqa: PLC0415

    output = Output(directory=directory, is_saved=not is_unsaved, is_json=is_json)
    if captures:
        from bench import run_capture  # noqa: PLC0415

        return run_capture.main(captures, options, output)
    if is_copy:
        from bench import run_copy  # noqa: PLC0415

        return run_copy.main(options, COPY_SHAPES if _ALL in shapes else shapes, output)
    if is_latency:
        return run_attached.main(run_attached.latency_measurement(options), options, output)
    if is_synchronous:
        return run_attached.main(run_attached.standby_measurement(options), options, output)
    if is_live:
        return run_attached.main(run_attached.live_measurement(options, holds_s, streamings), options, output)
    return run.main(list(WORKLOADS) if _ALL in names else list(dict.fromkeys(names)), options, output)


def _other_measurement(**wanted: bool) -> str:
    """Return the option of what is measured instead of catching up; empty: none is given."""
    given = [f"--{name}" for name, is_wanted in wanted.items() if is_wanted]
    if len(given) > 1:
        *first, last = [f"--{name}" for name in wanted]
        raise click.UsageError(f"{', '.join(first)} and {last} are different measurements: give one of them")
    return given[0] if given else ""


def _check_other(other: str, systems: tuple[System, ...], sync: str, *, has_workload: bool, is_alone: bool) -> None:
    """Refuse what is for catching up only."""
    if is_alone:
        raise click.UsageError("--alone is for catching up")
    measured = LIVE_SYSTEMS if other == "--live" else ("built-in", "parapply")
    how = {"--synchronous": ", with either synchronous_commit by itself", "--copy": ""}.get(other, ", with --sync off")
    has_other_systems = other != "--copy" and (sync != "off" or not {*systems} & {*measured})
    if has_workload or has_other_systems:
        names = ", ".join(measured[:-1]) + f" and {measured[-1]}"
        raise click.UsageError(f"{other} measures the systems {names}{how} and no --workload")


def _check_pglogical(options: Options) -> None:
    """Refuse what its turns cannot have: its server starts again for each, with settings of its own.

    Raises:
        click.UsageError: it was asked for together with one of these.
    """
    if "pglogical" in options.systems and (options.syncs != ("off",) or options.alone or options.has_slow_disk):
        raise click.UsageError(
            "--system pglogical is measured with --sync off, and without --alone, --disk-read-us and --disk-sync-us"
        )

"""The commands `parapply capture` and `parapply replay`."""

from __future__ import annotations

import asyncio
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from parapply.cli.options import Lsn, load, path_option, repeated, seconds, taken, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.analysis.changes import Change
    from parapply.capture.replay import ReplayOutcome
    from parapply.capture.show import Forecast
    from parapply.config import Config

#: Exit status of a replay that was stopped, as after Ctrl-C; of one whose runs differ, or failed.
_STOPPED, _DIFFERENT = 130, 1
#: A replay has a report, so its daemon says little; further settings win.
_QUIET = ("log.level=error", "log.format=console")
_OF_SOURCE = ("source.dsn", "source.slot", "source.publications")


@click.command(
    epilog="""\b
Examples:
  parapply capture day --source "host=a dbname=app" --publication app --for 3600
  parapply capture day --config app.toml --kept-slot capture_app --max-bytes 20000000000
  PARAPPLY_REDACT_KEY=$(cat key) parapply capture day --config app.toml --redact
Without --kept-slot the slot is temporary, and the capture ends with the command. With it the same command goes on where
it was, and the publisher keeps its WAL until then: drop the slot when it is no longer needed.
Exit 1: --max-bytes is reached."""
)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--source", metavar="DSN", help="Publisher: connection string or URI.")
@click.option("--publication", metavar="NAME", multiple=True, help="Publication to follow; repeatable.")
@click.option("--config", "config_path", metavar="FILE", type=click.Path(path_type=Path), help="TOML file.")
@click.option("--database", metavar="NAME", help="The one that is meant of a file of several databases.")
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Any key, e.g. source.two_phase=true.")
@click.option("--kept-slot", metavar="NAME", help="A slot that outlives the command; made if it is missing.")
@click.option("--redact", "is_redacted", is_flag=True, help="Replace every value by another one of its type.")
@click.option(
    "--max-bytes", "most_bytes", type=click.IntRange(min=0), default=0, metavar="N", help="End before more are used."
)
@whole("--file-bytes", "Bytes after which another file begins.", 256 * 1024 * 1024, metavar="N")
@seconds("--for", "for_s", "Seconds to go on.", default=math.inf)
@click.option("--until", "until_lsn", type=Lsn(), metavar="LSN", help="End when all up to there is kept.")
def capture(**options: Any) -> None:
    """Keep the stream of a slot in files, to apply it elsewhere."""
    config = load({"target": None, "slot": None, **options}, "target.dsn", "source.slot")
    from parapply.capture import command  # noqa: PLC0415
    from parapply.capture.folder import CaptureLimits  # noqa: PLC0415

    how = taken(command.CaptureOptions, options, limits=taken(CaptureLimits, options))
    asyncio.run(command.capture(config, how))


@click.command(
    epilog="""\b
Examples:
  parapply replay day --target "host=new dbname=scratch"
  parapply replay day --target "host=new dbname=scratch" --copy-of "host=old-copy dbname=app" --speed 1
  parapply replay day --config scratch.toml --run apply.workers=4 --run "apply.workers=8 server.work_mem=64MB"
  parapply replay day --config scratch.toml --run apply.workers=4 --run apply.workers=16 --predict log --plot day.svg
  parapply replay day --config scratch.toml --run apply.workers=4 --predict log --learn-changes 1000000
The database must be empty, or one of an earlier replay. Ctrl-C stops; the same command goes on, and runs that are done
are not repeated without --again. Exit 1: a run failed, or tables differ between runs."""
)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--target", metavar="DSN", help="Scratch database: connection string or URI.")
@click.option("--config", "config_path", metavar="FILE", type=click.Path(path_type=Path), help="TOML file.")
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Any key, for all runs.")
@repeated(
    "--run",
    "groups",
    "'KEY=VALUE ...'",
    "A run with these; server.NAME is a setting of the target's server; repeatable.",
)
@click.option("--copy-of", metavar="DSN", help="Database with the rows as the capture began with.")
@click.option(
    "--speed",
    type=click.FloatRange(min=0, min_open=True),
    default=math.inf,
    metavar="N",
    help="1: at the pace of the day; N: times as fast.  [default: as fast as it goes]",
)
@seconds(
    "--late-after",
    "late_after_s",
    "Report since when, and for how long, more than S seconds were missing.",
    default=60.0,
)
@path_option(
    "--predict",
    "log",
    "LOG",
    "Run the first group only and short trials, with apply logs in LOG, and predict the others from these.",
    file_okay=False,
)
@whole(
    "--learn-changes",
    "With --predict: apply the first N changes only, and predict all groups for the whole capture.",
    metavar="N",
)
@path_option(
    "--plot", "plot", "FILE", "Draw how late each run and prediction is over the day, as .svg or .png.", dir_okay=False
)
@click.option(
    "--despite-torn", "is_despite_torn", is_flag=True, help="Apply everything before the place where a file is torn."
)
@click.option("--again", "is_again", is_flag=True, help="Repeat runs that are done.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document for programs.")
def replay(*, groups: tuple[str, ...], plot: Path | None, **options: Any) -> int:
    """Apply a capture to a scratch database, once for each group of settings."""
    layers = {**options, "source": None, "slot": None, "publication": (), "database": None}

    def read(more: Sequence[str]) -> Config:
        return load({**layers, "overrides": (*_QUIET, *options["overrides"], *more)}, *_OF_SOURCE)

    from parapply.capture import replay as replaying  # noqa: PLC0415
    from parapply.capture.show import show  # noqa: PLC0415
    from parapply.login import Login  # noqa: PLC0415

    pairs = _settings(groups)
    log, learn_changes, late_after_s = options["log"], options["learn_changes"], options["late_after_s"]
    is_paced = options["speed"] < math.inf
    if learn_changes is not None and (log is None or is_paced):
        raise click.UsageError("--learn-changes: give --predict, and leave --speed out")
    changes = _changes(pairs, is_first_enough=learn_changes is not None) if log is not None else []
    if plot is not None:
        from parapply.analysis.late_plot import check_plot  # noqa: PLC0415

        check_plot(plot)
    copy_of = Login(_checked(options["copy_of"])) if options["copy_of"] else None
    # At the pace of the day nothing is learnt that a short run could add to.
    trials = _trials(read, pairs[0], changes) if changes and not is_paced else []
    settings = [_with(pairs[0], trial) for trial in trials]
    how = taken(replaying.ReplayOptions, options, copy_of=copy_of, verdict=_verdict(), trials=settings)
    outcome = replaying.replay(read, pairs, how)
    forecasts = _forecasts(outcome, changes, trials, is_paced=is_paced)
    show(outcome, late_after_s, forecasts, as_json=options["as_json"])
    if plot is not None:
        _draw(outcome, forecasts, late_after_s, plot)
    if outcome.is_stopped:
        return _STOPPED
    runs = [*outcome.runs, *([outcome.learnt.run, *outcome.learnt.trials] if outcome.learnt else [])]
    return _DIFFERENT if outcome.different or any(run.failure for run in runs) else 0


def _checked(dsn: str) -> str:
    """Return a connection string of the command line; raise UsageError, as for one of the configuration."""
    from parapply.config_values import dsn_parameters  # noqa: PLC0415

    try:
        dsn_parameters(dsn)
    except ValueError as error:
        raise click.UsageError(f"--copy-of: {error}") from error
    return dsn


def _verdict() -> Callable[[Path], str] | None:
    """Return the verdict of a run by its apply log; None where the report's engine is missing."""
    from parapply.analysis.command import check_installed  # noqa: PLC0415
    from parapply.errors import ReportRefused  # noqa: PLC0415

    try:
        check_installed("duckdb")
    except ReportRefused as error:
        click.echo(f"limits are of the last minutes of each run only. {error.line()}", err=True)
        return None

    def words(log: Path) -> str:
        from parapply.analysis.run_verdict import verdict_of  # noqa: PLC0415

        said = verdict_of(log)
        return said.words if said else ""

    return words


def _draw(outcome: ReplayOutcome, forecasts: Sequence[Forecast | None], late_after_s: float, path: Path) -> None:
    from parapply.analysis.late_plot import LateLines, draw  # noqa: PLC0415

    lines = [
        LateLines(run.settings, run.late.minutes, forecast.late.minutes if forecast and forecast.late else {})
        for run, forecast in zip(outcome.runs, forecasts, strict=True)
    ]
    draw(lines, late_after_s, path)


def _changes(groups: Sequence[Sequence[str]], *, is_first_enough: bool) -> list[Change]:
    """Return how each group's settings differ from the first one's; raise UsageError if none can be predicted."""
    from parapply.analysis.changes import change_between  # noqa: PLC0415

    first, *others = [dict([pair.split("=", 1) for pair in group]) for group in groups]
    if not others and not is_first_enough:
        raise click.UsageError("--predict: give a second --run, which is predicted")
    found = []
    for other in others:
        if missing := sorted(first.keys() - other.keys()):
            raise click.UsageError(f"--predict: {missing[0]} is in the first --run, so name it in the others also")
        try:
            found.append(change_between({key: value for key, value in other.items() if first.get(key) != value}))
        except ValueError as error:
            raise click.UsageError(f"--predict: {error}") from error
    return found


def _trials(read: Callable[[Sequence[str]], Config], pairs: Sequence[str], changes: Sequence[Change]) -> list[Change]:
    """Return how the settings of short runs differ from the first group's."""
    from parapply.analysis.changes import trials  # noqa: PLC0415

    apply = read([pair for pair in pairs if not pair.startswith("server.")]).apply
    return trials(None if apply.workers == "auto" else apply.workers, apply.commit_order, changes)


def _with(pairs: Sequence[str], change: Change) -> list[str]:
    from parapply.analysis.changes import SETTINGS  # noqa: PLC0415

    values = {SETTINGS[name]: value for name in SETTINGS if (value := getattr(change, name)) is not None}
    kept = [pair for pair in pairs if pair.partition("=")[0] not in values]
    return [*kept, *(f"{setting}={value}" for setting, value in values.items())]


def _forecasts(
    outcome: ReplayOutcome, changes: Sequence[Change], trials: Sequence[Change], *, is_paced: bool
) -> list[Forecast | None]:
    """Return the prediction of each run, as far as one is asked for: of the first one if it was applied in part."""
    learnt = outcome.learnt
    if learnt is None or not learnt.run.is_done:
        return [None] * len(outcome.runs)
    from parapply.analysis.changes import Change  # noqa: PLC0415
    from parapply.analysis.logged import Trial, predicted_of  # noqa: PLC0415
    from parapply.capture.show import Forecast  # noqa: PLC0415

    tried = zip(trials, learnt.trials, strict=False)
    done = [Trial(change, learnt.log.parent / run.log) for change, run in tried if run.is_done]
    logged = predicted_of(learnt.log, [Change(), *changes] if learnt.is_part else changes, done)
    whole_s, start_s = learnt.run.seconds, 0.0
    if learnt.is_part or learnt.run.lost_parts:
        whole_s = logged.seconds * learnt.arrivals.n_changes / max(1, logged.changes)
    elif logged.changes >= learnt.arrivals.n_changes:
        # The daemon's start and end take as long whatever the settings are.
        start_s = max(0.0, whole_s - logged.seconds)
    ratio = (whole_s - start_s) / logged.seconds if logged.seconds else 1.0
    found: list[Forecast | None] = [] if learnt.is_part else [None]
    for one in logged.predictions:
        seconds, least_s, most_s = (start_s + each * ratio for each in (one.seconds, one.least_s, one.most_s))
        late = None if is_paced else learnt.arrivals.late(seconds)
        found.append(Forecast(seconds, least_s, most_s, one.limit, late))
    return found


def _settings(groups: Sequence[str]) -> list[list[str]]:
    """Return the settings of each run, none of a single run without a group; raise UsageError if one is malformed."""
    from parapply.logs import redact_text  # noqa: PLC0415

    found = []
    for group in groups:
        try:
            pairs = shlex.split(group)
        except ValueError as error:
            raise click.UsageError(f"--run {redact_text(group)!r}: {error}") from error
        if wrong := [pair for pair in pairs if "." not in pair.partition("=")[0] or "=" not in pair]:
            raise click.UsageError(f"--run: {redact_text(wrong[0])!r} is not KEY=VALUE, as in apply.workers=4")
        found.append(pairs)
    return found or [[]]

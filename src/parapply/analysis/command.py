"""The command `parapply report`, and the same for spark-submit; imports an engine when it runs.

In go options; out come lines for people, or one JSON object, and the exit code.
"""

from __future__ import annotations

import json
import math
import re
import signal
import sys
import threading
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from datetime import UTC, date, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from parapply import amounts
from parapply.errors import ParapplyError, ReportRefused
from parapply.extras import install_hint
from parapply.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from parapply.analysis.changes import Change
    from parapply.analysis.job import ReportOutcome, ReportRequest
    from parapply.analysis.store import Engine, Store

_OUT: Final = "parapply-report"
#: Size of a log, unpacked, from which on it is Spark's.
_SPARK_BYTES: Final = 1 << 30
#: Factor, about, by which a packed file grows when it is unpacked.
_PACKED_TIMES: Final = 10
_MEMORY: Final = re.compile(r"[1-9][0-9]*[mgMG]")
#: Files that are not read, named on the terminal.
_SHOWN_FILES: Final = 10
#: Hours that a page shows which is made again and again.
_FOLLOWED_H: Final = 24.0
_EPILOG: Final = """\b
Examples:
  parapply report /var/log/parapply --out report
  parapply report /var/log/parapply --out report --follow --every 30
  parapply report /var/log/parapply --out report --window 24
  parapply report /var/log/parapply --slot app --since 2026-11-21T10:00 --json | jq .tables.summary
  parapply report /var/log/parapply --since 2026-11-21T10:00 --compare 2026-11-20T10:00..2026-11-21T10:00
  parapply report /var/log/parapply --what-if workers=8,order=relaxed --what-if batch_changes=5000,target_speed=2
  parapply report --bundle job
  spark-submit --py-files job/parapply.zip job/parapply_report.py hdfs:///logs/parapply --out hdfs:///reports/parapply
Every figure is explained on the page, and the verdict in docs/REPORT.md."""


def _memory(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    if not _MEMORY.fullmatch(value):
        raise click.BadParameter("give a number with m or g, such as 2g")
    return value.lower()


def _time(_context: click.Context, _parameter: click.Parameter, value: str | None) -> datetime | None:
    if value is None:
        return None
    try:
        time = datetime.fromisoformat(value)
    except ValueError as error:
        raise click.BadParameter(f"{value} is no time like 2026-11-21T10:00 or 2026-11-21T10:00:00+01:00") from error
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _span(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[datetime | None, datetime | None] | None:
    if value is None:
        return None
    since, dots, until = value.partition("..")
    if not dots:
        raise click.BadParameter("give two times, such as 2026-11-20..2026-11-21 or ..2026-11-20T10:00")
    return _time(context, parameter, since or None), _time(context, parameter, until or None)


def _changes(_context: click.Context, _parameter: click.Parameter, values: Sequence[str]) -> tuple[Change, ...]:
    try:
        from parapply.analysis.changes import read_change  # noqa: PLC0415  --help loads no types

        return tuple([read_change(value) for value in values])
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from error


def _common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = [
        click.option("--out", metavar="DIR", default=_OUT, show_default=True, help="The report's folder; added to."),
        click.option("--follow", "is_following", is_flag=True, help="Go on with new files until Ctrl-C."),
        click.option(
            "--every", "every_s", type=click.FloatRange(min=1), default=30.0, show_default=True, metavar="S",
            help="With --follow: seconds between looks for new files.",
        ),
        click.option(
            "--window", "window_h", type=click.FloatRange(min=0.1), metavar="HOURS",
            help="Without --since: figures of the latest hours, and a row for each day before; no row of days before"
            " them is opened.  [default: with --follow 24, else all]",
        ),
        click.option("--slot", metavar="NAME", help="Records of one slot only."),
        click.option("--since", metavar="TIME", callback=_time, help="Commits from then on; in UTC."),
        click.option("--until", metavar="TIME", callback=_time, help="Commits before then."),
        click.option(
            "--compare", metavar="SINCE..UNTIL", callback=_span, help="Another span of time next to it.",
        ),
        click.option(
            "--what-if", "what_if", multiple=True, callback=_changes, metavar="KEY=VALUE,...",
            help="Also predict the run with workers=8,order=relaxed or so; repeatable.",
        ),
        click.option("--no-what-if", "is_predicted", flag_value=False, default=True, help="Predict nothing."),
        click.option("--json", "is_json", is_flag=True, help="Print one JSON object for programs."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@click.command(epilog=_EPILOG)
@click.argument("logdir", required=False)
@_common_options
@click.option(
    "--engine",
    "engine_name",
    type=click.Choice(["auto", "duckdb", "spark"]),
    default="auto",
    show_default=True,
    help="DuckDB in this process, or Spark; auto: DuckDB for a log below 1 GB on this machine.",
)
@click.option(
    "--memory", default="2g", show_default=True, callback=_memory, help="The engine's memory; more goes to disk."
)
@click.option("--cores", type=click.IntRange(min=1), help="Processors to use.  [default: all]")
@click.option("--master", metavar="URL", help="Spark's, such as spark://host:7077 or yarn.  [default: this machine]")
@click.option("--spark", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of Spark; repeatable.")
@click.option(
    "--bundle", "bundle_folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False),
    help="Write the job for spark-submit into DIR and do nothing else.",
)  # fmt: skip
def report(  # noqa: PLR0913  one for each option
    *,
    logdir: str | None,
    engine_name: str,
    memory: str,
    cores: int | None,
    master: str | None,
    settings: tuple[str, ...],
    bundle_folder: Path | None,
    **options: Any,  # noqa: ANN401  click's options
) -> None:
    """Turn the apply log in LOGDIR into tables and one HTML page.

    LOGDIR and --out are local folders or anything that Hadoop knows (hdfs://, s3a://). Closed files are converted to
    Parquet once; the next report reads new ones only.
    """
    if bundle_folder is not None:
        from parapply.analysis.session import write_bundle  # noqa: PLC0415

        write_bundle(bundle_folder)
        click.echo(
            f"spark-submit --py-files {bundle_folder}/parapply.zip {bundle_folder}/parapply_report.py LOGDIR --out DIR"
        )
        return
    if logdir is None:
        raise click.UsageError("Missing argument 'LOGDIR'.")
    wrong = [one for one in settings if "=" not in one]
    if wrong:
        raise click.UsageError(f"--spark {wrong[0]}: give KEY=VALUE")
    is_sparks = master is not None or bool(settings)
    if engine_name == "duckdb" and is_sparks:
        raise click.UsageError("--master and --spark are for --engine spark")
    if engine_name == "auto":
        engine_name = "spark" if is_sparks else choose(logdir, options["out"])
    check_installed(engine_name)
    if engine_name == "duckdb":
        from parapply.analysis.duck import DuckEngine  # noqa: PLC0415
        from parapply.analysis.follow import look  # noqa: PLC0415

        with closing(DuckEngine(memory, cores)) as engine:
            _run(engine, logdir, options, look)
        return
    from parapply.analysis.follow import stream  # noqa: PLC0415
    from parapply.analysis.session import local_session  # noqa: PLC0415
    from parapply.analysis.spark import SparkEngine  # noqa: PLC0415

    with local_session(memory, cores, dict(one.split("=", 1) for one in settings), master) as local:
        _run(SparkEngine(local.session), logdir, options, stream)


@click.command()
@click.argument("logdir")
@_common_options
def _submitted(*, logdir: str, **options: Any) -> None:  # noqa: ANN401  click's options
    """Do the same in the session that spark-submit has started."""
    from pyspark.sql import SparkSession  # noqa: PLC0415

    from parapply.analysis.follow import stream  # noqa: PLC0415
    from parapply.analysis.session import SETTINGS  # noqa: PLC0415
    from parapply.analysis.spark import SparkEngine  # noqa: PLC0415

    builder = SparkSession.builder.appName("parapply report")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        _run(SparkEngine(spark), logdir, options, stream)
    finally:
        spark.stop()


def submitted(arguments: Sequence[str]) -> int:
    """Run the job of `bundle` and return its exit code; errors are lines that begin with ``parapply:``."""
    try:
        _submitted.main(list(arguments), prog_name="parapply_report.py", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except ParapplyError as error:
        click.echo(f"parapply: {error.line()}", err=True)
        return error.exit_code
    return 0


def check_installed(engine: str) -> None:
    """Refuse to run without the extra; raise ReportRefused if a package is missing."""
    needed = {"duckdb": ("duckdb", "pytz"), "spark": ("pyspark",)}[engine]
    missing = [name for name in (*needed, "pyarrow", "plotly", "jinja2") if find_spec(name) is None]
    if missing:
        java = f"; without Java: {install_hint('report', 'java')}" if engine == "spark" else ""
        raise ReportRefused(f"The report needs {' and '.join(missing)}.", hint=f"{install_hint('report')}{java}")


def choose(log: str, out: str) -> str:
    """Return the engine for a log: duckdb where both folders are of this machine and the log is not large, else spark.

    Raises:
        ReportRefused: a folder of the log may not be read.
    """
    from parapply.analysis.local import LocalStorage, is_local  # noqa: PLC0415
    from parapply.analysis.store import PACKED, SUFFIXES  # noqa: PLC0415

    if find_spec("duckdb") is None or not (is_local(log) and is_local(out)):
        return "spark"
    try:
        files = LocalStorage().files(log, SUFFIXES)
    except OSError as error:
        raise ReportRefused(f"{error.filename} cannot be read: {error.strerror}.") from error
    size_bytes = sum(file.size_bytes * (_PACKED_TIMES if file.name.endswith(PACKED) else 1) for file in files)
    return "duckdb" if size_bytes < _SPARK_BYTES else "spark"


def _run(engine: Engine, logdir: str, options: dict[str, Any], follow: Callable[..., None]) -> None:
    from parapply.analysis.job import ReportRequest, make_report  # noqa: PLC0415
    from parapply.analysis.progress import shown  # noqa: PLC0415
    from parapply.analysis.views import Scope  # noqa: PLC0415

    slot, span, window_h = options["slot"], options["compare"], options["window_h"]
    if window_h is None and options["is_following"]:
        window_h = _FOLLOWED_H
    request = ReportRequest(
        log=logdir,
        out=options["out"],
        scope=Scope(slot=slot, since=options["since"], until=options["until"]),
        compare=Scope(slot=slot, since=span[0], until=span[1]) if span else None,
        what_if=options["what_if"] if options["is_predicted"] else None,
        window=None if window_h is None else timedelta(hours=window_h),
    )
    if options["is_following"]:
        _follow(engine, request, options["every_s"], options["is_json"], follow)
        return
    with shown(engine) as steps:
        outcome = make_report(engine, request, steps)
    _print(outcome, options["is_json"])


def _follow(
    engine: Engine,
    request: ReportRequest,
    every_s: float,
    is_json: bool,  # noqa: FBT001
    follow: Callable[..., None],
) -> None:
    from parapply.analysis.job import show  # noqa: PLC0415
    from parapply.analysis.progress import Silent  # noqa: PLC0415

    request = replace(request, refresh_s=math.ceil(every_s))

    def on_load(mine: Engine, new_files: int, store: Store | None) -> None:
        _print(show(mine, request, Silent(), new_files=new_files, store=store), is_json)

    with _stop_asked() as stop:
        # The page exists from the beginning, and shows the records so far.
        on_load(engine, 0, None)
        follow(engine, request, every_s, on_load, stop)


@contextmanager
def _stop_asked() -> Iterator[threading.Event]:
    """Give an event that Ctrl-C and SIGTERM set; an exception in the middle of a call would cut the line to Java."""
    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: stop.set()) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _print(outcome: ReportOutcome, is_json: bool) -> None:  # noqa: FBT001  passed on

    if is_json:
        document = {
            "page": outcome.page,
            "new_files": outcome.new_files,
            "records": outcome.records,
            "bad_lines": outcome.bad_lines,
            "ignored_files": outcome.ignored,
            "verdicts": {slot: asdict(said) for slot, said in outcome.verdicts.items()},
            "tables": outcome.tables,
        }
        click.echo(json.dumps(document, default=_json_value))
        sys.stdout.flush()
        return
    if len(outcome.tables.get("slots", ())) > 1:
        _print_overview(outcome)
    for slot, texts in outcome.in_short.items():
        _say(f"{slot}:")
        said = outcome.verdicts.get(slot)
        if said is not None:
            _say(f"  Limit: {said.words}", f"  Advice: {said.advice}.", *[f"    {text}" for text in said.evidence])
        _say(*[f"  - {text}" for text in texts])
    for file in outcome.ignored[:_SHOWN_FILES]:
        _say(f"not read: {file['file']} ({amounts.size(file['size_bytes'])}): {file['reason']}")
    if len(outcome.ignored) > _SHOWN_FILES:
        click.echo(f"and {len(outcome.ignored) - _SHOWN_FILES:,} more files not read: see the page")
    bad = f", {outcome.bad_lines:,} lines not readable" if outcome.bad_lines else ""
    click.echo(f"{outcome.records:,} records, {outcome.new_files:,} new files{bad}. Page: {outcome.page}")
    sys.stdout.flush()


def _say(*texts: str) -> None:
    for text in texts:
        click.echo(_shown(text))


def _shown(text: str) -> str:
    """Return a text, in which names are other people's, for a terminal; ours have spaces that do not break a line."""
    return printable(text.replace("\N{NO-BREAK SPACE}", " "))


def _print_overview(outcome: ReportOutcome) -> None:
    from rich import box  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from parapply.analysis.words import HEADER, cells  # noqa: PLC0415

    table = Table(*HEADER, box=box.SIMPLE)
    for row in cells(outcome.tables["slots"]):
        table.add_row(*[Text(_shown(cell)) for cell in row])
    Console().print(table)


def _json_value(value: object) -> str:
    if isinstance(value, (date, datetime)):
        return value.isoformat()
    raise TypeError(f"no JSON for {type(value)}")

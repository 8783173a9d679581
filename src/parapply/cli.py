"""The command line. Parses, loads the configuration, calls the implementation, turns errors into exit codes.

Each command imports what it needs when it runs, so that ``--help`` and a wrong option answer at once.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from parapply import WHY_INTERPRETED, __version__, driver_versions, probes
from parapply.errors import ParapplyError
from parapply.model import parse_lsn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.config import Config

#: Exit status after Ctrl-C, as shells count it: 128 + SIGINT.
_INTERRUPTED = 130

_Command = TypeVar("_Command", bound="Callable[..., Any]")


class _Lsn(click.ParamType[int]):
    """An LSN as PostgreSQL prints it; becomes a number."""

    name = "lsn"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401  click's
        """Return the LSN as a number, or fail as a usage error."""
        try:
            lsn = value if isinstance(value, int) else parse_lsn(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if not 0 <= lsn < 1 << 64:
            self.fail(f"{value!r} is not an LSN like 16/B374D848", param, ctx)
        return lsn


def _print_version(ctx: click.Context, _param: click.Parameter, is_asked: bool) -> None:  # noqa: FBT001  click's
    if not is_asked or ctx.resilient_parsing:
        return
    import psycopg  # noqa: PLC0415

    libpq = psycopg.pq.version()
    hot_path = f"interpreted ({WHY_INTERPRETED})" if WHY_INTERPRETED else "compiled"
    python = ".".join(map(str, sys.version_info[:3]))
    click.echo(f"parapply {__version__}")
    click.echo(f"python {python}, psycopg {psycopg.__version__} ({psycopg.pq.__impl__}), ", nl=False)
    click.echo(f"libpq {libpq // 10000}.{libpq % 10000}, hot path {hot_path}")
    ctx.exit()


def _connection_options(command: _Command) -> _Command:
    options = [
        click.option("--source", metavar="DSN", help="Publisher: connection string or URI."),
        click.option("--target", metavar="DSN", help="Subscriber: connection string or URI."),
        click.option("--slot", metavar="NAME", help="Replication slot on the publisher."),
        click.option("--publication", metavar="NAME", multiple=True, help="Publication to follow; repeatable."),
        click.option("--config", "config_path", metavar="FILE", type=click.Path(path_type=Path), help="TOML file."),
        click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Any key, e.g. apply.workers=8."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _load(options: dict[str, Any], *not_needed: str) -> Config:
    from parapply.config import REQUIRED, load_config  # noqa: PLC0415

    flags = {
        "source.dsn": options["source"],
        "target.dsn": options["target"],
        "source.slot": options["slot"],
        "source.publications": options["publication"],
    }
    required = [key for key in REQUIRED if key not in not_needed]
    return load_config(options["config_path"], options["overrides"], flags, os.environ, required=required)


#: Commands that are imported when they are asked for, with the place of each: bench's options and workloads alone are
#: 4 ms of every other command's start.
_LATER = {
    "bench": ("parapply.bench.command", "bench"),
    "report": ("parapply.analysis.command", "report"),
    "synth-log": ("parapply.analysis.synth_command", "synth_log"),
}


class _Commands(click.Group):
    """Imports the commands of `_LATER` when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted([*super().list_commands(ctx), *_LATER])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of a name."""
        if cmd_name not in _LATER:
            return super().get_command(ctx, cmd_name)
        module, name = _LATER[cmd_name]
        found: click.Command = getattr(importlib.import_module(module), name)
        return found


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  parapply demo
  parapply init --source "host=a dbname=app" --target "host=b dbname=app" --slot app --publication app
  parapply run --config /etc/parapply/app.toml

\b
Exit codes: 0 done, 1 not reached in time, 2 usage or configuration, 3 source refused,
4 target refused, 5 stopped on a conflict or a data error, 130 interrupted.""",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print versions."
)
def cli() -> None:
    """Apply a PostgreSQL publication in parallel on a target database."""


@cli.command(
    epilog="""\b
Examples:
  parapply init --source "host=a dbname=app" --target "host=b dbname=app" --slot app --publication app
  parapply init --config app.toml
Passwords are better in PARAPPLY_SOURCE__DSN and PARAPPLY_TARGET__DSN, or in ~/.pgpass, than in a flag.""",
)
@_connection_options
def init(**options: Any) -> None:  # noqa: ANN401  click's options
    """Check both ends; create the slot and the state schema."""
    config = _load(options)
    from parapply.runtime import operations  # noqa: PLC0415

    operations.init(config)


@cli.command(
    epilog="""\b
Examples:
  parapply run --config app.toml
  parapply run --config app.toml --set apply.workers=8
  parapply run --config app.toml --until 16/B374D848""",
)
@_connection_options
@click.option("--until", "until_lsn", type=_Lsn(), metavar="LSN", help="Stop once all up to LSN is durable.")
@click.option("--takeover", is_flag=True, help="End another daemon's sessions on the target instead of waiting.")
def run(*, until_lsn: int | None, takeover: bool, **options: Any) -> int:  # noqa: ANN401  click's options
    """Run the daemon: SIGTERM or Ctrl-C drains, a second one aborts."""
    # Modules make many objects and no garbage: the daemon lets the collector in again, behind them.
    gc.disable()
    driver_versions.tell_own()
    config = _load(options)
    from parapply import logs  # noqa: PLC0415
    from parapply.runtime import daemon  # noqa: PLC0415

    logs.configure(config.log.level, config.log.format)
    return daemon.run(config, until_lsn, takeover)


@cli.command(
    epilog="""\b
Examples:
  parapply status --config app.toml
  parapply status --config app.toml --watch
  parapply status --config app.toml --json | jq .lag_bytes""",
)
@_connection_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object for programs.")
@click.option("--watch", is_flag=True, help="Refresh every second until Ctrl-C.")
def status(*, as_json: bool, watch: bool, **options: Any) -> None:  # noqa: ANN401  click's options
    """Show state, lag, watermark, workers and tables."""
    if as_json and watch:
        raise click.UsageError("--json and --watch exclude each other")
    config = _load(options, "source.publications")
    from parapply.runtime import status as screen  # noqa: PLC0415

    screen.show(config, as_json, watch)


@cli.command(
    epilog="""\b
Examples:
  lsn=$(psql "$SOURCE" -Atc 'SELECT pg_current_wal_insert_lsn()')
  parapply wait --config app.toml --lsn "$lsn" --timeout 30""",
)
@_connection_options
@click.option("--lsn", type=_Lsn(), metavar="LSN", required=True, help="Return when the target shows all up to it.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    default=math.inf,
    metavar="S",
    help="Give up after S seconds with exit 1; without it, wait for ever.",
)
def wait(*, lsn: int, timeout_s: float, **options: Any) -> None:  # noqa: ANN401  click's options
    """Read your writes: wait until the target has everything up to an LSN."""
    config = _load(options, "source.dsn", "source.publications")
    from parapply.runtime import operations  # noqa: PLC0415

    operations.wait(config, lsn, timeout_s)


@cli.command(
    epilog="""\b
Examples:
  parapply drop --config app.toml
  parapply drop --config app.toml --yes""",
)
@_connection_options
@click.option("--yes", "assume_yes", is_flag=True, help="Do not ask.")
def drop(*, assume_yes: bool, **options: Any) -> None:  # noqa: ANN401  click's options
    """Remove the slot and the state; ask first."""
    config = _load(options, "source.publications")
    from parapply.runtime import operations  # noqa: PLC0415

    operations.drop(config, assume_yes)


@cli.command(
    epilog="""\b
Examples:
  parapply demo
  parapply demo --duration-s 60 --clients 8
  parapply demo --keep""",
)
@click.option("--duration-s", type=click.IntRange(min=1), default=15, show_default=True, help="Length of the load.")
@click.option("--clients", type=click.IntRange(min=1), default=4, show_default=True, help="pgbench clients.")
@click.option("--workers", type=click.IntRange(1, 64), default=4, show_default=True, help="Target connections.")
@click.option("--scale", type=click.IntRange(min=1), default=1, show_default=True, help="pgbench scale factor.")
@click.option("--keep", is_flag=True, help="Leave servers and daemon running and print their connection strings.")
def demo(*, duration_s: int, clients: int, workers: int, scale: int, keep: bool) -> int | None:
    """Two servers of its own, a load, the daemon, a proof, and a race against the built-in subscription."""
    from parapply.demo import run as show  # noqa: PLC0415

    return show.main(duration_s=duration_s, clients=clients, workers=workers, scale=scale, keep=keep)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors are lines on standard error that begin with ``parapply:``."""
    try:
        probes.arm(os.environ)
        code = cli.main(None if arguments is None else list(arguments), prog_name="parapply", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except ParapplyError as error:
        return _report(error)
    except (click.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    return code if isinstance(code, int) else 0


def _report(error: ParapplyError) -> int:
    from parapply.errors import ConfigError  # noqa: PLC0415
    from parapply.logs import redact_text  # noqa: PLC0415

    # The configuration's errors come all at once, a line each; every other error is one line.
    lines = str(error).splitlines() if isinstance(error, ConfigError) and not error.hint else [error.line()]
    for line in lines:
        click.echo(f"parapply: {redact_text(line)}", err=True)
    return error.exit_code

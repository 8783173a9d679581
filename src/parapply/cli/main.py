"""The command line. Parses, loads the configuration, calls the implementation, turns errors into exit codes.

Each command imports what it needs when it runs, so that ``--help`` and a wrong option answer at once.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from parapply import driver_versions, failpoints
from parapply.cli import ending, version
from parapply.errors import ParapplyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from parapply.config import Config
    from parapply.config_fleet import Fleet
    from parapply.model import Until

#: Exit status after Ctrl-C, as shells count it: 128 + SIGINT.
_INTERRUPTED = 130

_Command = TypeVar("_Command", bound="Callable[..., Any]")


class _Lsn(click.ParamType[int]):
    """An LSN as PostgreSQL prints it; becomes a number."""

    name = "lsn"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401  click's
        """Return the LSN as a number, or fail as a usage error."""
        from parapply.model import parse_lsn  # noqa: PLC0415

        try:
            lsn = value if isinstance(value, int) else parse_lsn(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if not 0 <= lsn < 1 << 64:
            self.fail(f"{value!r} is not an LSN like 16/B374D848", param, ctx)
        return lsn


class _Until(click.ParamType["Until"]):
    """An LSN, or a time with its offset from UTC."""

    name = "lsn or time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Until:  # noqa: ANN401  click's
        """Return where to end, or fail as a usage error."""
        from parapply.model import Until, parse_time  # noqa: PLC0415

        if isinstance(value, Until):
            return value
        if "/" in value:
            return Until(lsn=_Lsn().convert(value, param, ctx))
        try:
            return Until(time_us=parse_time(value))
        except ValueError as error:
            self.fail(f"{error}; give an LSN like 16/B374D848 or a time like '2026-11-23 14:05:00+00'", param, ctx)


def _connection_options(command: _Command) -> _Command:
    options = [
        click.option("--source", metavar="DSN", help="Publisher: connection string or URI."),
        click.option("--target", metavar="DSN", help="Subscriber: connection string or URI."),
        click.option("--slot", metavar="NAME", help="Replication slot on the publisher."),
        click.option("--publication", metavar="NAME", multiple=True, help="Publication to follow; repeatable."),
        click.option("--config", "config_path", metavar="FILE", type=click.Path(path_type=Path), help="TOML file."),
        click.option("--database", metavar="NAME", help="The one that is meant of a file of several databases."),
        click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Any key, e.g. apply.workers=8."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@contextmanager
def _light_start() -> Iterator[None]:
    """Import without the garbage collector: modules make many objects, and no garbage."""
    gc.disable()
    driver_versions.tell_own()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _copy_options(command: _Command) -> _Command:
    options = [
        click.option(
            "--connections",
            type=click.IntRange(1, 64),
            default=4,
            show_default=True,
            help="Sessions of the copy, on each side.",
        ),
        click.option("--truncate", "truncates", is_flag=True, help="Empty tables that hold rows before the copy."),
        click.option(
            "--defer-indexes",
            "defers_indexes",
            is_flag=True,
            help="Drop indexes without a constraint, make them after.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _load(options: dict[str, Any], *not_needed: str) -> Config:
    """Return the configuration of one database."""
    from parapply.config_fleet import one_of  # noqa: PLC0415

    return one_of(_load_all(options, *not_needed), options["database"])


def _load_all(options: dict[str, Any], *not_needed: str) -> Config | Fleet:
    """Return the configuration, of several databases where the file names them."""
    from parapply.config import REQUIRED  # noqa: PLC0415
    from parapply.config_fleet import load  # noqa: PLC0415

    required = [key for key in REQUIRED if key not in not_needed]
    return load(options["config_path"], options["overrides"], _flags(options), os.environ, required=required)


def _flags(options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are options, by their keys; None: not given. `flags`: options of one command only."""
    return {
        "source.dsn": options["source"],
        "target.dsn": options["target"],
        "source.slot": options["slot"],
        "source.publications": options["publication"],
        **options.get("flags", {}),
    }


#: Commands that are imported when they are asked for, with the place of each: bench's options and workloads alone are
#: 4 ms of every other command's start.
_LATER = {
    "check": ("parapply.cli.databases", "check"),
    "drop": ("parapply.cli.databases", "drop"),
    "status": ("parapply.cli.databases", "status"),
    "verify": ("parapply.cli.databases", "verify"),
    "bench": ("parapply.cli.bench", "bench"),
    "capture": ("parapply.cli.capture", "capture"),
    "conflicts": ("parapply.cli.conflicts", "conflicts"),
    "cutover": ("parapply.cli.cutover", "cutover"),
    "heal": ("parapply.cli.heal", "heal"),
    "migrate": ("parapply.cli.migrate", "migrate"),
    "seed": ("parapply.cli.seed", "seed"),
    "skip": ("parapply.cli.conflicts", "skip"),
    "pause": ("parapply.cli.pause", "pause"),
    "replay": ("parapply.cli.capture", "replay"),
    "resume": ("parapply.cli.pause", "resume"),
    "top": ("parapply.cli.top", "top"),
    "report": ("parapply.analysis.command", "report"),
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
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=version.show, help="Print versions."
)
def cli() -> None:
    """Apply a PostgreSQL publication in parallel on a target database."""


@cli.command(
    epilog="""\b
Examples:
  parapply init --source "host=a dbname=app" --target "host=b dbname=app" --slot app --publication app
  parapply init --config app.toml
  parapply init --config app.toml --copy --schema
  parapply init --config app.toml --copy --truncate --connections 8 --defer-indexes
  parapply init --config app.toml --despite table_missing
  parapply init --config app.toml --ddl
  parapply init --config app.toml --ddl=print | psql "$SOURCE"
  parapply init --config app.toml --ddl=print-automatic --ddl-inexact warn | psql "$SOURCE" -U postgres
It looks first as `parapply check` does: what would be refused stops it before anything is made.
A copy that was interrupted goes on with the same command.
Passwords are better in PARAPPLY_SOURCE__DSN and PARAPPLY_TARGET__DSN, in a file that PARAPPLY_SOURCE__DSN_FILE
names, or in ~/.pgpass, than in a flag.""",
)
@_connection_options
@click.option("--copy", "is_copy", is_flag=True, help="Also copy the rows of all published tables.")
@click.option("--schema", "brings_schema", is_flag=True, help="With --copy: make the tables first, with pg_dump.")
@click.option("--pg-dump", metavar="FILE", help="The program for --schema.  [default: pg_dump]")
@click.option("--despite", metavar="CODE", multiple=True, help="Go on with an arguable refusal; repeatable.")
@click.option(
    "--ddl",
    type=click.Choice(["queue", "automatic", "print", "print-automatic"]),
    is_flag=False,
    flag_value="queue",
    help="Also make parapply.replicate_ddl and its queue on the publisher. automatic: and event triggers, which put"
    " typed commands into it (a superuser makes them). print, print-automatic: show the SQL, make nothing.",
)
@click.option(
    "--ddl-inexact",
    type=click.Choice(["refuse", "warn"]),
    help="With automatic: the reaction to a command that cannot be recorded exactly.  [default: refuse]",
)
@_copy_options
def init(
    *,
    is_copy: bool,
    brings_schema: bool,
    pg_dump: str | None,
    despite: tuple[str, ...],
    ddl: str | None,
    ddl_inexact: Literal["refuse", "warn"] | None,
    **options: Any,  # noqa: ANN401  click's
) -> None:
    """Check both ends; create the slot and the state schema; copy the rows if asked to."""
    how = {key: options.pop(key) for key in ("connections", "truncates", "defers_indexes")}
    if not is_copy and (brings_schema or pg_dump or how["truncates"] or how["defers_indexes"]):
        raise click.UsageError("--schema, --pg-dump, --truncate and --defer-indexes belong to --copy")
    is_automatic = ddl is not None and ddl.endswith("automatic")
    if ddl_inexact and not is_automatic:
        raise click.UsageError("--ddl-inexact belongs to --ddl=automatic")
    inexact = ddl_inexact or "refuse" if is_automatic else None
    with _light_start():
        config = _load(options)
        from parapply import init as beginning  # noqa: PLC0415
        from parapply.copy import command  # noqa: PLC0415
    if ddl is not None and ddl.startswith("print"):
        beginning.print_queue(config, inexact=inexact)
        return
    copy = command.CopyOptions(brings_schema=brings_schema, pg_dump=pg_dump, **how) if is_copy else None
    beginning.init(config, copy, despite=despite, makes_queue=ddl is not None, inexact=inexact)


@cli.command(
    epilog="""\b
Examples:
  psql "$SOURCE" -c 'ALTER PUBLICATION app ADD TABLE orders'
  parapply refresh --config app.toml
  parapply refresh --config app.toml --table public.orders --truncate
The daemon may run at the same time.""",
)
@_connection_options
@click.option("--table", "tables", metavar="SCHEMA.TABLE", multiple=True, help="Copy just this one; repeatable.")
@_copy_options
def refresh(
    *,
    tables: tuple[str, ...],
    connections: int,
    truncates: bool,
    defers_indexes: bool,
    **options: Any,  # noqa: ANN401  click's
) -> None:
    """Copy tables added to the publication and join them to the stream."""
    with _light_start():
        config = _load(options)
        from parapply.copy import command  # noqa: PLC0415

    how = command.CopyOptions(
        connections=connections, truncates=truncates, defers_indexes=defers_indexes, tables=tables
    )
    command.refresh(config, how)


@cli.command(
    epilog="""\b
Examples:
  parapply run --config app.toml
  parapply run --config app.toml --set apply.workers=8
  parapply run --config fleet.toml
  parapply run --config app.toml --until 16/B374D848
  parapply run --config app.toml --set apply.delay_s=0 --until '2026-11-23 14:05:00+00'
With a time it ends before the first transaction, in commit order, that committed later; commit times are by
the publisher's clock. A time that the target has passed is refused.""",
)
@_connection_options
@click.option("--until", type=_Until(), metavar="LSN|TIME", help="Stop once all up to there is durable.")
@click.option("--takeover", is_flag=True, help="End another daemon's sessions on the target instead of waiting.")
def run(*, until: Until | None, takeover: bool, **options: Any) -> int:  # noqa: ANN401  click's options
    """Run the daemon: SIGTERM or Ctrl-C drains, a second one aborts, SIGHUP reads the configuration again."""
    # Modules make many objects and no garbage: the daemon lets the collector in again, behind them.
    gc.disable()
    driver_versions.tell_own()
    read = _load_all if options["database"] is None else _load
    found = read(options)
    from parapply.cli.healing import heal_lost  # noqa: PLC0415
    from parapply.config_fleet import Fleet, one_of  # noqa: PLC0415
    from parapply.errors import ConfigError  # noqa: PLC0415
    from parapply.model import Until  # noqa: PLC0415

    def load_again() -> Config | Fleet:
        path = options["config_path"]
        if path is not None and path.exists() and not path.is_file():
            # A pipe would be empty by now, which reads as a file without a word, or never end.
            raise ConfigError(f"--config: {path} is no regular file, so it cannot be read again")
        return read(options)

    if isinstance(found, Fleet):
        from parapply.runtime import fleet  # noqa: PLC0415

        return fleet.run(found, load_again, until or Until(), takeover=takeover, heal=heal_lost)
    from parapply.runtime import daemon  # noqa: PLC0415

    return daemon.run(
        found, lambda: one_of(load_again(), options["database"]), until or Until(), takeover=takeover, heal=heal_lost
    )


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
    from parapply.commands import lifecycle  # noqa: PLC0415

    lifecycle.wait(config, lsn, timeout_s)


@cli.command(
    epilog="""\b
Examples:
  parapply snapshot --config app.toml
  parapply snapshot --config app.toml -- sh -c 'pg_dump --snapshot="$PARAPPLY_SNAPSHOT" -d app -f app.sql'
  parapply snapshot --config app.toml --lsn 16/B374D848
  parapply snapshot --config orders.toml --with customers.toml --json
The daemons must run. Several targets of one publisher are cut at the same LSN. Without a command the snapshots are
kept until Ctrl-C; a command finds them in PARAPPLY_SNAPSHOT and PARAPPLY_LSN (_2, _3 ... for the others).""",
)
@_connection_options
@click.option("--lsn", type=_Lsn(), metavar="LSN", help="LSN of the publisher; by default the earliest possible.")
@click.option(
    "--with",
    "others",
    metavar="FILE",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Configuration of another target of the same publisher; repeatable.",
)
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0), default=60, show_default=True, metavar="S", help="Give up."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document for programs.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def snapshot(
    *,
    lsn: int | None,
    others: tuple[Path, ...],
    timeout_s: float,
    as_json: bool,
    command: tuple[str, ...],
    **options: Any,  # noqa: ANN401  click's options
) -> int:
    """Export a snapshot of the target that equals the source at one LSN."""
    configs = [_load(options, "source.dsn", "source.publications")]
    from parapply.config import load_config  # noqa: PLC0415

    required = ("source.slot", "target.dsn")
    configs += [load_config(path, options["overrides"], {}, {}, required=required) for path in others]
    from parapply.commands import snapshot as taking  # noqa: PLC0415

    return taking.run(configs, lsn, timeout_s, command, as_json=as_json)


@cli.command(
    epilog="""\b
Examples:
  parapply sequences --config app.toml
  parapply sequences --config app.toml --dry-run
  parapply sequences --config app.toml --ahead 10000
At a cut-over: stop the writers, `parapply wait` for the source's last LSN, then this. It may be run earlier, with
--ahead, and again. Exit 1: a sequence is missing on the target or could not be set.""",
)
@_connection_options
@click.option(
    "--ahead", type=click.IntRange(min=0), default=0, show_default=True, help="Steps further than the source."
)
@click.option("--exact", "is_exact", is_flag=True, help="Also move sequences backwards.")
@click.option("--dry-run", "is_dry", is_flag=True, help="Only report the sequences that would move.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document for programs.")
def sequences(
    *,
    ahead: int,
    is_exact: bool,
    is_dry: bool,
    as_json: bool,
    **options: Any,  # noqa: ANN401  click's options
) -> int:
    """Copy sequence values, for the cut-over."""
    config = _load(options, "source.slot", "source.publications")
    from parapply.copy.sequences import copy_sequences  # noqa: PLC0415
    from parapply.sequences import SequenceOptions  # noqa: PLC0415

    how = SequenceOptions(ahead=ahead, is_exact=is_exact, is_dry=is_dry)
    return copy_sequences(config, how, as_json=as_json)


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
    """Show two servers, a load, the daemon, a proof, and a race against the built-in subscription."""
    from parapply.demo import run as show  # noqa: PLC0415

    return show.main(duration_s=duration_s, clients=clients, workers=workers, scale=scale, keep=keep)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors are lines on standard error that begin with ``parapply:``."""
    try:
        failpoints.arm(os.environ)
        code = cli.main(None if arguments is None else list(arguments), prog_name="parapply", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except ParapplyError as error:
        return ending.report(error)
    except (click.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except OSError as error:
        if not ending.is_unwritten(error):
            raise
        return ending.give_up_output(error)
    return code if isinstance(code, int) else 0

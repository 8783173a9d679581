"""The command line. Parses, loads the configuration, calls the implementation, turns errors into exit codes.

Each command imports what it needs when it runs, so that ``--help`` and a wrong option answer at once.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import hashlib
import importlib
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

import parapply
from parapply import driver_versions, failpoints
from parapply.cli.options import (
    Lsn,
    UntilType,
    connection_options,
    copy_options,
    light_start,
    load,
    load_all,
    repeated,
    seconds,
    taken,
    whole,
)
from parapply.errors import ParapplyError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from parapply.config import Config
    from parapply.config_fleet import Fleet
    from parapply.model import Until

#: Exit status after Ctrl-C, as shells count it: 128 + SIGINT.
_INTERRUPTED = 130
#: Errors of an output that takes nothing: a full disk, a quota, a terminal that has gone.
_UNWRITTEN: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
#: Commands that are imported when they are asked for, with the place of each: bench's options and workloads alone are
#: 4 ms of every other command's start.
_PLACES = {
    "parapply.cli.databases": ("check", "drop", "status", "verify"),
    "parapply.cli.bench": ("bench",),
    "parapply.cli.capture": ("capture", "replay"),
    "parapply.cli.conflicts": ("conflicts", "skip"),
    "parapply.cli.cutover": ("cutover",),
    "parapply.cli.rows": ("heal", "seed", "pause", "resume"),
    "parapply.cli.migrate": ("migrate",),
    "parapply.cli.top": ("top",),
    "parapply.analysis.command": ("report",),
}
_LATER = {name: place for place, names in _PLACES.items() for name in names}
#: Digits of the digest that are shown: enough for all commits of a project.
_DIGITS: Final = 12


def show(ctx: click.Context, _param: click.Parameter, is_asked: bool) -> None:  # noqa: FBT001  click's
    """Print the versions and end the program, if it is asked to."""
    if is_asked and not ctx.resilient_parsing:
        click.echo("\n".join(_lines()))
        ctx.exit()


def _lines() -> Iterator[str]:
    import psycopg  # noqa: PLC0415  help does without it

    libpq = psycopg.pq.version()
    hot_path = f"interpreted ({parapply.WHY_INTERPRETED})" if parapply.WHY_INTERPRETED else "compiled"
    yield f"parapply {parapply.__version__}"
    yield f"sources {sources_digest(Path(parapply.__file__).parent)}, hot path {hot_path}"
    yield (
        f"python {'.'.join(map(str, sys.version_info[:3]))}, psycopg {psycopg.__version__} ({psycopg.pq.__impl__}),"
        f" libpq {libpq // 10000}.{libpq % 10000}"
    )


def sources_digest(package: Path) -> str:
    """Return a digest of the names and contents of a package's modules, which is the same in a checkout and a wheel."""
    digest = hashlib.sha256()
    for name, file in sorted((file.relative_to(package).as_posix(), file) for file in package.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:_DIGITS]


class _Commands(click.Group):
    """Imports the commands of `_LATER` when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_LATER])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _LATER:
            return super().get_command(ctx, cmd_name)
        found: click.Command = getattr(importlib.import_module(_LATER[cmd_name]), cmd_name)
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
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=show, help="Print versions.")
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
names, or in ~/.pgpass, than in a flag."""
)
@connection_options
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
@copy_options
def init(*, is_copy: bool, ddl: str | None, **options: Any) -> None:
    """Check both ends; create the slot and the state schema; copy the rows if asked to."""
    if not is_copy and any(options[key] for key in ("brings_schema", "pg_dump", "truncates", "defers_indexes")):
        raise click.UsageError("--schema, --pg-dump, --truncate and --defer-indexes belong to --copy")
    is_automatic = ddl is not None and ddl.endswith("automatic")
    if options["ddl_inexact"] and not is_automatic:
        raise click.UsageError("--ddl-inexact belongs to --ddl=automatic")
    inexact: Any = options["ddl_inexact"] or "refuse" if is_automatic else None
    with light_start():
        config = load(options)
        from parapply import init as beginning  # noqa: PLC0415
        from parapply.copy import command  # noqa: PLC0415
    if ddl is not None and ddl.startswith("print"):
        beginning.print_queue(config, inexact=inexact)
        return
    copy = taken(command.CopyOptions, options) if is_copy else None
    beginning.init(config, copy, despite=options["despite"], makes_queue=ddl is not None, inexact=inexact)


@cli.command(
    epilog="""\b
Examples:
  psql "$SOURCE" -c 'ALTER PUBLICATION app ADD TABLE orders'
  parapply refresh --config app.toml
  parapply refresh --config app.toml --table public.orders --truncate
The daemon may run at the same time."""
)
@connection_options
@click.option("--table", "tables", metavar="SCHEMA.TABLE", multiple=True, help="Copy just this one; repeatable.")
@copy_options
def refresh(**options: Any) -> None:
    """Copy tables added to the publication and join them to the stream."""
    with light_start():
        config = load(options)
        from parapply.copy import command  # noqa: PLC0415

    asyncio.run(command.refresh(config, taken(command.CopyOptions, options)))


@cli.command(
    epilog="""\b
Examples:
  parapply run --config app.toml
  parapply run --config app.toml --set apply.workers=8
  parapply run --config fleet.toml
  parapply run --config app.toml --until 16/B374D848
  parapply run --config app.toml --set apply.delay_s=0 --until '2026-11-23 14:05:00+00'
With a time it ends before the first transaction, in commit order, that committed later; commit times are by
the publisher's clock. A time that the target has passed is refused."""
)
@connection_options
@click.option("--until", type=UntilType(), metavar="LSN|TIME", help="Stop once all up to there is durable.")
@click.option("--takeover", is_flag=True, help="End another daemon's sessions on the target instead of waiting.")
def run(*, until: Until | None, takeover: bool, **options: Any) -> int:
    """Run the daemon: SIGTERM or Ctrl-C drains, a second one aborts, SIGHUP reads the configuration again."""
    # Modules make many objects and no garbage: the daemon lets the collector in again, behind them.
    gc.disable()
    driver_versions.tell_own()
    read = load_all if options["database"] is None else load
    found = read(options)
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

        return fleet.run(found, load_again, until or Until(), takeover=takeover, heal=_heal_lost)
    from parapply.runtime import start  # noqa: PLC0415

    return start.run(
        found, lambda: one_of(load_again(), options["database"]), until or Until(), takeover=takeover, heal=_heal_lost
    )


async def _heal_lost(config: Config) -> tuple[int, int] | None:
    """Heal for the daemon, whose rooms import no command, by modules that few daemons ever need."""
    from parapply.heal import automatic  # noqa: PLC0415

    return await automatic.heal_lost(config)


@cli.command(
    epilog="""\b
Examples:
  lsn=$(psql "$SOURCE" -Atc 'SELECT pg_current_wal_insert_lsn()')
  parapply wait --config app.toml --lsn "$lsn" --timeout 30"""
)
@connection_options
@click.option("--lsn", type=Lsn(), metavar="LSN", required=True, help="Return when the target shows all up to it.")
@seconds("--timeout", "timeout_s", "Give up after S seconds with exit 1; without it, wait for ever.", default=math.inf)
def wait(*, lsn: int, timeout_s: float, **options: Any) -> None:
    """Read your writes: wait until the target has everything up to an LSN."""
    config = load(options, "source.dsn", "source.publications")
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
kept until Ctrl-C; a command finds them in PARAPPLY_SNAPSHOT and PARAPPLY_LSN (_2, _3 ... for the others)."""
)
@connection_options
@click.option("--lsn", type=Lsn(), metavar="LSN", help="LSN of the publisher; by default the earliest possible.")
@repeated(
    "--with",
    "others",
    "FILE",
    "Configuration of another target of the same publisher; repeatable.",
    type=click.Path(path_type=Path),
)
@seconds("--timeout", "timeout_s", "Give up.", default=60)
@click.option("--json", "as_json", is_flag=True, help="One JSON document for programs.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def snapshot(
    *,
    lsn: int | None,
    others: tuple[Path, ...],
    timeout_s: float,
    as_json: bool,
    command: tuple[str, ...],
    **options: Any,
) -> int:
    """Export a snapshot of the target that equals the source at one LSN."""
    configs = [load(options, "source.dsn", "source.publications")]
    from parapply.config import load_config  # noqa: PLC0415

    required = ("source.slot", "target.dsn")
    configs += [load_config(path, options["overrides"], {}, {}, required=required) for path in others]
    from parapply.commands import snapshot as taking  # noqa: PLC0415

    return asyncio.run(taking.run(configs, lsn, timeout_s, command, as_json=as_json))


@cli.command(
    epilog="""\b
Examples:
  parapply sequences --config app.toml
  parapply sequences --config app.toml --dry-run
  parapply sequences --config app.toml --ahead 10000
At a cut-over: stop the writers, `parapply wait` for the source's last LSN, then this. It may be run earlier, with
--ahead, and again. Exit 1: a sequence is missing on the target or could not be set."""
)
@connection_options
@whole("--ahead", "Steps further than the source.", 0, least=0)
@click.option("--exact", "is_exact", is_flag=True, help="Also move sequences backwards.")
@click.option("--dry-run", "is_dry", is_flag=True, help="Only report the sequences that would move.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document for programs.")
def sequences(*, as_json: bool, **options: Any) -> int:
    """Copy sequence values, for the cut-over."""
    config = load(options, "source.slot", "source.publications")
    from parapply.copy.sequences import bring  # noqa: PLC0415
    from parapply.sequences import SequenceOptions  # noqa: PLC0415

    return asyncio.run(bring(config, taken(SequenceOptions, options), as_json=as_json))


@cli.command(
    epilog="""\b
Examples:
  parapply demo
  parapply demo --duration-s 60 --clients 8
  parapply demo --keep"""
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
        return _report(error)
    except (click.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except OSError as error:
        # Of an open output, and not of a file by its name.
        if error.errno not in _UNWRITTEN or error.filename is not None:
            raise
        return _give_up_output(error)
    return code if isinstance(code, int) else 0


def _report(error: ParapplyError) -> int:
    """Print an error of ours on standard error, and return its exit code."""
    from parapply.errors import ConfigError  # noqa: PLC0415
    from parapply.logs import is_journal, prioritized, redact_text  # noqa: PLC0415

    # The configuration's errors come all at once, a line each; every other error is one line.
    lines = str(error).splitlines() if isinstance(error, ConfigError) and not error.hint else [error.line()]
    for line in lines:
        text = f"parapply: {redact_text(line)}"
        click.echo(prioritized(text.encode(), "error") if is_journal(sys.stderr) else text, err=True)
    return error.exit_code


def _give_up_output(error: OSError) -> int:
    """Report in a line that standard output takes nothing; the rest is dropped, or Python tries it again."""
    click.echo(f"parapply: standard output: {error.strerror}", err=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1

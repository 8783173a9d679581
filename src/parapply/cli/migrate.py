"""The command `parapply migrate`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from parapply.cli.main import _connection_options as connection_options
from parapply.cli.main import _light_start as light_start
from parapply.cli.main import _load as load
from parapply.vocabulary import MigrationStep

if TYPE_CHECKING:
    from parapply.config import Config

_EPILOG = """\b
Examples:
  parapply migrate --config app.toml --roles
  parapply migrate --config app.toml --exclude 'archive.*' --jobs 8 --max-rate 50M
  parapply migrate --config app.toml --no-owner --no-privileges --large-objects copy
  parapply migrate --config app.toml --only analyze
  parapply migrate --config app.toml --show
Steps: check, roles (with --roles), schema, copy, indexes, catch-up, constraints, large-objects, unlogged, sequences,
analyze, views, follow. Interrupted, the same command goes on. The daemon is a separate process and stays when this
command ends. pg_dump of the source's version or newer is on PATH or in --pg-bin."""

_UNITS: Final = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3}
_RATE: Final = re.compile(r"(\d+)([KMG]?)")


class _Rate(click.ParamType[int]):
    """Bytes a second, with K, M or G for powers of 1000."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401  click's
        """Return bytes a second, or fail as a usage error."""
        if isinstance(value, int):
            return value
        found = _RATE.fullmatch(value.strip().upper())
        if found is None or not int(found[1]):
            self.fail(f"{value!r} is not a rate like 500K or 50M", param, ctx)
        return int(found[1]) * _UNITS[found[2]]


_STEPS = click.Choice([step.value for step in MigrationStep])
_OUTSIDE = click.Choice(["refuse", "copy", "skip"])


@click.command(epilog=_EPILOG)
@connection_options
@click.option("--include", metavar="PATTERN", multiple=True, help="Only tables like schema.table; * and ?; repeatable.")
@click.option("--exclude", metavar="PATTERN", multiple=True, help="No tables like schema.table; repeatable.")
@click.option("--roles", "has_roles", is_flag=True, help="Make roles that the target does not have.")
@click.option("--no-owner", is_flag=True, help="The target's role owns all; else owners are kept.")
@click.option("--no-privileges", is_flag=True, help="Bring no GRANT over.")
@click.option("--no-tablespaces", is_flag=True, help="All in the target's default tablespace.")
@click.option("--large-objects", type=_OUTSIDE, default="refuse", show_default=True, help="No stream brings them.")
@click.option(
    "--unlogged", type=_OUTSIDE, default="refuse", show_default=True, help="Rows of unlogged tables: the same."
)
@click.option("--jobs", type=click.IntRange(1, 64), default=4, show_default=True, help="Connections, on each side.")
@click.option(
    "--max-rate",
    "max_bytes_per_s",
    type=_Rate(),
    default=0,
    metavar="RATE",
    help="Bytes a second of the copy, such as 50M.",
)
@click.option("--truncate", "truncates", is_flag=True, help="Empty tables that hold rows before the copy.")
@click.option("--pg-bin", metavar="DIR", type=click.Path(path_type=Path), help="Folder of pg_dump.  [default: PATH]")
@click.option("--despite", metavar="CODE", multiple=True, help="Go on with an arguable refusal; repeatable.")
@click.option("--only", type=_STEPS, metavar="STEP", help="Run this step alone, though it is done.")
@click.option(
    "--from", "first", type=_STEPS, metavar="STEP", help="Run this step and all after it, though they are done."
)
@click.option("--to", "last", type=_STEPS, metavar="STEP", help="End after this step.")
@click.option(
    "--max-lag",
    "max_lag_s",
    type=click.FloatRange(min=0),
    default=1,
    show_default=True,
    metavar="S",
    help="Lag that is small.",
)
@click.option("--no-wait", is_flag=True, help="End as soon as the lag is small; the daemon continues.")
@click.option(
    "--daemon-log", metavar="FILE", type=click.Path(path_type=Path), help="Log of the daemon.  [default: SLOT.log]"
)
@click.option("--show", "is_show", is_flag=True, help="Only print how far each step is.")
@click.option("--json", "as_json", is_flag=True, help="A JSON document a line for programs.")
def migrate(  # noqa: PLR0913  one for each option
    *,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    has_roles: bool,
    no_owner: bool,
    no_privileges: bool,
    no_tablespaces: bool,
    large_objects: Any,  # noqa: ANN401  click's
    unlogged: Any,  # noqa: ANN401  click's
    jobs: int,
    max_bytes_per_s: int,
    truncates: bool,
    pg_bin: Path | None,
    despite: tuple[str, ...],
    only: str | None,
    first: str | None,
    last: str | None,
    max_lag_s: float,
    no_wait: bool,
    daemon_log: Path | None,
    is_show: bool,
    as_json: bool,
    **options: Any,  # noqa: ANN401  click's options
) -> int:
    """Migrate a database: schema, rows, indexes and constraints, and follow until the cut-over."""
    if only and (first or last):
        raise click.UsageError("--only stands alone, without --from and --to")
    with light_start():
        config = load(options)
        from parapply.migrate import command, show  # noqa: PLC0415
        from parapply.migrate.options import Choice, MigrateOptions  # noqa: PLC0415
    if is_show:
        return show.show_steps(config, as_json=as_json)
    how = MigrateOptions(
        choice=Choice(
            include=include, exclude=exclude, has_owners=not no_owner, has_privileges=not no_privileges,
            has_tablespaces=not no_tablespaces, large_objects=large_objects, unlogged=unlogged,
        ),
        has_roles=has_roles,
        jobs=jobs,
        max_bytes_per_s=max_bytes_per_s,
        truncates=truncates,
        pg_bin=pg_bin,
        despite=despite,
        only=MigrationStep(only) if only else None,
        first=MigrationStep(first) if first else None,
        last=MigrationStep(last) if last else None,
        is_waiting=not no_wait,
        max_lag_s=max_lag_s,
        as_json=as_json,
        run_arguments=tuple(_run_arguments(options, config)),
        run_environ=tuple(_run_environ(config).items()),
        daemon_log=daemon_log or Path(f"{config.source.slot}.log"),
    )  # fmt: skip
    return command.migrate(config, how)


#: Settings that the daemon gets through its environment, because every user of the machine can read arguments.
_SECRETS: Final = ("source.dsn", "target.dsn")


def _run_arguments(options: dict[str, Any], config: Config) -> list[str]:
    path = options["config_path"]
    overrides = [one for one in options["overrides"] if one.partition("=")[0].strip() not in _SECRETS]
    return [
        *(["--config", str(path)] if path else []),
        *["--slot", config.source.slot],
        *[word for name in config.source.publications for word in ("--publication", name)],
        *[word for one in overrides for word in ("--set", one)],
    ]


def _run_environ(config: Config) -> dict[str, str]:
    secrets = {
        "PARAPPLY_SOURCE__DSN": config.source.dsn.get_secret_value(),
        "PARAPPLY_TARGET__DSN": config.target.dsn.get_secret_value(),
    }
    # A file that names a DSN and the DSN itself exclude each other; and a failpoint is of this process.
    others = {
        name: value
        for name, value in os.environ.items()
        if name.removesuffix("_FILE").upper() not in secrets and not name.startswith("PARAPPLY_FAILPOINT")
    }
    return {**others, **secrets}

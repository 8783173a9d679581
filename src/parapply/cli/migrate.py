"""The command `parapply migrate`."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from parapply.cli.options import connection_options, light_start, path_option, seconds, switched_off, taken
from parapply.cli.several import Result, Several, configs, several_options, worst
from parapply.printable import printable
from parapply.vocabulary import MigrationStep

if TYPE_CHECKING:
    from parapply.config import Config
    from parapply.migrate.options import MigrateOptions

_EPILOG = """\b
Examples:
  parapply migrate --config app.toml --roles
  parapply migrate --config app.toml --exclude 'archive.*' --jobs 8 --max-rate 50M
  parapply migrate --config app.toml --no-owner --no-privileges --large-objects copy
  parapply migrate --config app.toml --only analyze
  parapply migrate --config app.toml --show
  parapply migrate --config all.toml --all-databases --exclude-databases postgres --roles --run-config fleet.toml
Steps: check, roles (with --roles), schema, copy, indexes, catch-up, constraints, large-objects, unlogged, sequences,
analyze, views, follow. Interrupted, the same command goes on. The daemon is a separate process and stays when this
command ends. pg_dump of the source's version or newer is on PATH or in --pg-bin.
Of several databases, those that are missing on the target are made, connections and rate are shared, and
`parapply run` is left to you."""

_UNITS: Final = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3}
_RATE: Final = re.compile(r"(\d+)([KMG]?)")


class _Rate(click.ParamType[int]):
    """Bytes a second, with K, M or G for powers of 1000."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
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
@several_options
@click.option("--include", metavar="PATTERN", multiple=True, help="Only tables like schema.table; * and ?; repeatable.")
@click.option("--exclude", metavar="PATTERN", multiple=True, help="No tables like schema.table; repeatable.")
@click.option("--roles", "has_roles", is_flag=True, help="Make roles that the target does not have.")
@switched_off("--no-owner", "has_owners", "The target's role owns all; else owners are kept.")
@click.option("--no-privileges", "has_privileges", flag_value=False, default=True, help="Bring no GRANT over.")
@switched_off("--no-tablespaces", "has_tablespaces", "All in the target's default tablespace.")
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
@seconds("--max-lag", "max_lag_s", "Lag that is small.", default=1)
@switched_off("--no-wait", "is_waiting", "End as soon as the lag is small; the daemon continues.")
@path_option(
    "--daemon-log", "daemon_log", "FILE", "Log of the daemon; of several databases a folder.  [default: SLOT.log]"
)
@path_option("--run-config", "run_config", "FILE", "Of several: write the file by which `parapply run` follows them.")
@click.option("--dry-run", "is_dry", is_flag=True, help="Of several: only name what would be done.")
@click.option("--show", "is_show", is_flag=True, help="Only print how far each step is.")
@click.option("--json", "as_json", is_flag=True, help="A JSON document a line for programs.")
def migrate(*, daemon_log: Path | None, run_config: Path | None, is_dry: bool, is_show: bool, **options: Any) -> int:
    """Migrate a database: schema, rows, indexes and constraints, and follow until the cut-over."""
    if options["only"] and (options["first"] or options["last"]):
        raise click.UsageError("--only stands alone, without --from and --to")
    with light_start():
        found = configs(options)
        from parapply.migrate import command, show  # noqa: PLC0415
        from parapply.migrate.options import Choice, MigrateOptions  # noqa: PLC0415
    if is_show:
        as_json = options["as_json"]
        return (
            _show(found, as_json=as_json)
            if isinstance(found, Several)
            else asyncio.run(show.show_steps(found, as_json=as_json))
        )
    steps = {key: MigrationStep(options[key]) for key in ("only", "first", "last") if options[key]}
    how = taken(MigrateOptions, options, choice=taken(Choice, options), **steps)
    if isinstance(found, Several):
        return _Several(found, how, options, daemon_log).migrate(run_config, is_dry=is_dry)
    if run_config or is_dry:
        raise click.UsageError("--run-config and --dry-run belong to several databases")
    return command.migrate(found, _with_daemon(how, options, found, daemon_log))


def _with_daemon(how: MigrateOptions, options: dict[str, Any], config: Config, log: Path | None) -> MigrateOptions:
    """Return the options with the daemon that they start."""
    from msgspec.structs import replace  # noqa: PLC0415

    return replace(
        how,
        run_arguments=tuple(_run_arguments(options, config)),
        run_environ=tuple(_run_environ(config).items()),
        daemon_log=log or Path(f"{config.source.slot}.log"),
    )


def _show(found: Several, *, as_json: bool) -> int:
    import msgspec  # noqa: PLC0415

    from parapply.migrate import show  # noqa: PLC0415

    def one(config: Config) -> Result:
        known = asyncio.run(show.steps(config))
        latest = max(known.values(), key=lambda row: row.started_at, default=None)
        said = "not begun" if latest is None else f"{latest.step}: {latest.state} {latest.detail}"
        return Result(0, said, {"steps": [msgspec.to_builtins(row) for row in known.values()]})

    return found.each(one, as_json=as_json)


class _Several:
    def __init__(self, found: Several, how: MigrateOptions, options: dict[str, Any], log_folder: Path | None) -> None:
        if MigrationStep.FOLLOW in {how.only, how.first, how.last}:
            raise click.UsageError(f"{MigrationStep.FOLLOW} is of one database: `parapply run` follows several")
        self._found = found
        self._how = how
        self._options = options
        self._log_folder = log_folder or Path()

    def migrate(self, run_config: Path | None, *, is_dry: bool) -> int:
        """Migrate them, and report the file by which a daemon follows them."""
        from parapply.migrate import several  # noqa: PLC0415

        if run_config is not None:
            if self._found.is_of_file:
                raise click.UsageError("--run-config: the configuration names the databases, and is that file")
            path = self._options["config_path"]
            if path is not None and not path.is_file():
                # A pipe would be empty by then.
                raise click.UsageError(f"--run-config: {path} is no regular file, so it cannot be read again")
            several.listed(run_config)
        members = {}
        for name, config in self._found.configs.items():
            log = self._log_folder / f"{config.source.slot}.log"
            members[name] = several.Member(config, _with_daemon(self._how, self._named(name, config), config, log))
        ended, missing = asyncio.run(several.migrate(members, is_dry=is_dry))
        found = {name: Result(one.exit_code, one.said, one.report(), one.error) for name, one in ended.items()}
        if self._how.as_json:
            servers = {"servers": [one._asdict() for one in missing]} if is_dry else {}
            click.echo(json.dumps({**self._found.document(found), **servers}))
        else:
            for one in missing:
                click.echo(printable(f"would make roles: {', '.join(one.roles) or 'none'}"))
                click.echo(printable(f"would make tablespaces: {', '.join(one.tablespaces) or 'none'}"))
            self._found.print(found)
        if not is_dry:
            self._say_next([name for name, one in ended.items() if one.is_complete], run_config)
        return worst(found)

    def _named(self, name: str, config: Config) -> dict[str, Any]:
        """Return the options of a daemon that brings one database forward during the migration."""
        overrides = self._options["overrides"]
        if config.metrics.listen is not None:
            # Several may run at the same time, and the address is of one.
            overrides = (*overrides, "metrics.listen=127.0.0.1:0")
        return {**self._options, "database": name if self._found.is_of_file else None, "overrides": overrides}

    def _say_next(self, done: list[str], run_config: Path | None) -> None:
        from parapply.migrate import several  # noqa: PLC0415

        path = self._options["config_path"]
        if not done:
            return
        if self._found.is_of_file:
            text = f"next: parapply run --config {path}"
        elif run_config is not None:
            several.write_run_config(run_config, done, path)
            text = f"next: parapply run --config {run_config}"
        else:
            text = f"next: the first line of the file for `parapply run`: {several.databases_line(done)}"
        click.echo(text, err=self._how.as_json)


#: Settings that the daemon gets through its environment, because every user of the machine can read arguments.
_SECRETS: Final = ("source.dsn", "target.dsn")


def _run_arguments(options: dict[str, Any], config: Config) -> list[str]:
    path, database, slot = options["config_path"], options["database"], config.source.slot
    overrides = [one for one in options["overrides"] if one.partition("=")[0].strip() not in _SECRETS]
    if database is not None:
        # Its entry makes the slot's name of the shared one.
        slot = options["slot"]
    return [
        *(["--config", str(path)] if path else []),
        *([f"--database={database}"] if database is not None else []),
        *([f"--slot={slot}"] if slot else []),
        *[f"--publication={name}" for name in config.source.publications],
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

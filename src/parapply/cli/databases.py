"""The commands that take one database or several: `check`, `status`, `verify`, `drop`. Loaded when one is asked for."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import click

from parapply.cli.options import connection_options, connections, seconds, taken, whole
from parapply.cli.several import Result, Several, configs, several_options
from parapply.vocabulary import Provider

if TYPE_CHECKING:
    from parapply.config import Config

_PROVIDERS = click.Choice([provider.value for provider in Provider])


def _heading(config: Config) -> None:
    click.echo(f"slot {config.source.slot}:")


@click.command(
    epilog="""\b
Examples:
  parapply check --source "host=a dbname=app" --target "host=b dbname=app" --slot app --publication app
  parapply check --config app.toml --copy
  parapply check --config app.toml --copy --schema
  parapply check --config app.toml --copy --provider rds --target-provider azure
  parapply check --config app.toml --json | jq -r '.findings[] | select(.severity == "refused") | .fix'
It makes nothing. Exit 0: nothing, or notes only; 1: warnings; 3 or 4: `init` would refuse, and end so."""
)
@connection_options
@several_options
@click.option("--copy", "is_copy", is_flag=True, help="Also look at the needs of `init --copy`.")
@click.option("--schema", "brings_schema", is_flag=True, help="With --copy: tables that are missing will be made.")
@click.option("--truncate", "truncates", is_flag=True, help="With --copy: tables that hold rows will be emptied.")
@connections("Sessions of the copy.")
@click.option("--provider", type=_PROVIDERS, help="Also look at the rules of this service, which runs the publisher.")
@click.option("--target-provider", type=_PROVIDERS, help="The same for the service that runs the target.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document for programs.")
def check(*, as_json: bool, **options: Any) -> int:
    """Report what would make init, the copy or the stream fail or hurt, before anything is made."""
    if not options["is_copy"] and (options["brings_schema"] or options["truncates"]):
        raise click.UsageError("--schema and --truncate belong to --copy")
    found = configs(options, as_run=True)
    from parapply.check import look, show  # noqa: PLC0415
    from parapply.check.source import CheckOptions  # noqa: PLC0415

    providers = {key: Provider(options[key]) for key in ("provider", "target_provider") if options[key] is not None}
    how = taken(CheckOptions, options, **providers)
    if not isinstance(found, Several):
        report = asyncio.run(look.look(found, how))
        show.show(report, as_json=as_json)
        return report.exit_code

    def one(config: Config) -> Result:
        report = asyncio.run(look.look(config, how))
        if report.exit_code and not as_json:
            _heading(config)
            show.show(report, as_json=False)
        return Result(report.exit_code, show.summary(report), show.document(report))

    return found.each(one, as_json=as_json)


@click.command(
    epilog="""\b
Examples:
  parapply status --config app.toml
  parapply status --config app.toml --watch
  parapply status --config app.toml --json | jq .lag_bytes
  parapply status --config app.toml --json --watch | jq --unbuffered .lag_s
  parapply status --json-schema"""
)
@connection_options
@several_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object for programs; with --watch one a line.")
@click.option("--json-schema", "shows_schema", is_flag=True, help="Print the JSON Schema of --json; asks no server.")
@click.option("--watch", is_flag=True, help="Refresh every second until Ctrl-C.")
def status(*, as_json: bool, shows_schema: bool, watch: bool, **options: Any) -> int:
    """Show state, lag, watermark, workers and tables; of several databases, a line of each."""
    if shows_schema:
        from parapply.commands import status_schema  # noqa: PLC0415

        click.echo(json.dumps(status_schema.schema(), indent=2))
        return 0
    found = configs(options, "source.publications")
    from parapply.commands import state_reader  # noqa: PLC0415
    from parapply.commands import status as screen  # noqa: PLC0415

    if not isinstance(found, Several):
        screen.show(found, as_json, watch)
        return 0
    if watch:
        raise click.UsageError("--watch is of one database: give --database NAME")

    def one(config: Config) -> Result:
        report = asyncio.run(state_reader.collect(config))
        return Result(0, screen.line(report), report)

    return found.each(one, as_json=as_json)


@click.command(
    epilog="""\b
Examples:
  parapply verify --config app.toml
  parapply verify --config app.toml --table public.orders --statements
  parapply verify --config app.toml --json | jq '.tables[] | select(.is_equal | not)'
Exit 0: all equal; 1: a table differs. The daemon must run; both sides stay in use."""
)
@connection_options
@several_options
@click.option("--table", "tables", metavar="SCHEMA.TABLE", multiple=True, help="Compare just this one; repeatable.")
@connections("On each side.", 2)
@whole("--max-keys", "Differing keys named for a table.", 100)
@click.option(
    "--sampled",
    "sampled_ranges",
    type=click.IntRange(min=1),
    metavar="N",
    help="Compare N ranges of about 10,000 rows of each large table, others each time.  [default: all]",
)
@seconds("--max-pause", "max_pause_s", "Longest pause of the daemon for the source's snapshot.", default=10, least=0.1)
@click.option("--statements", "prints_statements", is_flag=True, help="Print SQL that would repair the target.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document for programs.")
def verify(**options: Any) -> int:
    """Compare source and target at one LSN, online."""
    found = configs(options)
    from parapply.verify import command  # noqa: PLC0415

    how = taken(command.VerifyOptions, options)
    if not isinstance(found, Several):
        return asyncio.run(command.verify(found, how))

    def one(config: Config) -> Result:
        if not how.as_json:
            _heading(config)
        result = asyncio.run(command.comparison(config, how))
        return Result(0 if result.is_equal else 1, command.said(result), command.document(result))

    return found.each(one, as_json=how.as_json)


@click.command(
    epilog="""\b
Examples:
  parapply drop --config app.toml
  parapply drop --config app.toml --yes
  parapply drop --config fleet.toml --exclude-databases billing"""
)
@connection_options
@several_options
@click.option("--yes", "assume_yes", is_flag=True, help="Do not ask.")
def drop(*, assume_yes: bool, **options: Any) -> int:
    """Remove the slot and the state; ask first, once for several databases."""
    found = configs(options, "source.publications")
    from parapply.commands import lifecycle  # noqa: PLC0415

    if not isinstance(found, Several):
        lifecycle.drop(found, assume_yes)
        return 0
    if not assume_yes:
        lifecycle.ask(list(found.configs.values()))

    def one(config: Config) -> Result:
        _heading(config)
        return Result(0, "dropped" if asyncio.run(lifecycle.drop_one(config)) else "neither slot nor state")

    return found.each(one, as_json=False)

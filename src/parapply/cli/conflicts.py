"""The commands about conflicts: `conflicts list|show|replay|drop` and `skip`. Loaded when one of them is asked for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from parapply.cli.options import Lsn, connection_options, load, seconds, taken, together, whole
from parapply.vocabulary import ConflictOutcome, ConflictType

if TYPE_CHECKING:
    from parapply.conflict.listing import Filter

#: Choices of the filters.
TYPES = tuple([one.value for one in ConflictType])
OUTCOMES = tuple([one.value for one in ConflictOutcome])
#: Conflicts shown unless asked for more.
_LIMIT = 50
#: Seconds to wait for a daemon to have skipped a transaction: it looks once a second.
_WAIT_S = 5.0


@click.group(
    epilog="""\b
Examples:
  parapply conflicts list --config app.toml
  parapply conflicts show --config app.toml 17
  parapply conflicts replay --config app.toml 17 18"""
)
def conflicts() -> None:
    """Look at changes that found other rows on the target; replay or drop the kept ones."""


_filter_options = together(
    click.argument("ids", metavar="[ID]...", nargs=-1, type=click.IntRange(min=1)),
    click.option("--type", type=click.Choice(TYPES), help="Conflicts of one type."),
    click.option("--table", metavar="SCHEMA.TABLE", help="Conflicts on one table."),
    click.option("--outcome", type=click.Choice(OUTCOMES), help="Conflicts with one outcome."),
    click.option("--lsn", type=Lsn(), metavar="LSN", help="Conflicts of the transaction that ends there."),
    click.option("--since", metavar="TIME", help="Conflicts since then; anything PostgreSQL reads as a time."),
)


def _filter(options: dict[str, Any]) -> Filter:
    from parapply.conflict.listing import Filter  # noqa: PLC0415

    return taken(Filter, options)


@conflicts.command(
    "list",
    epilog="""\b
Examples:
  parapply conflicts list --config app.toml
  parapply conflicts list --config app.toml --type update_missing --table public.orders --since yesterday
  parapply conflicts list --config app.toml --outcome stopped --json | jq -r '.[].remote_lsn'""",
)
@connection_options
@_filter_options
@whole("--limit", "Number of the latest ones; 0: all.", _LIMIT, least=0)
@click.option("--json", "as_json", is_flag=True, help="One JSON array for programs.")
def list_(*, as_json: bool, **options: Any) -> None:
    """List conflicts, the latest last, without the rows."""
    wanted = _filter(options)
    config = load(options, "source.dsn", "source.publications")
    from parapply.commands import conflicts as conflict_commands  # noqa: PLC0415

    asyncio.run(conflict_commands.list_conflicts(config, wanted, as_json=as_json))


@conflicts.command(
    epilog="""\b
Examples:
  parapply conflicts show --config app.toml 17
  parapply conflicts show --config app.toml --lsn 16/B374D848 --json"""
)
@connection_options
@_filter_options
@click.option("--json", "as_json", is_flag=True, help="One JSON array for programs.")
def show(*, as_json: bool, **options: Any) -> None:
    """Show conflicts with both rows, column by column."""
    wanted = _filter(options)
    if wanted.is_empty:
        raise click.UsageError("name conflicts by their id, or give a filter")
    config = load(options, "source.dsn", "source.publications")
    from parapply.commands import conflicts as conflict_commands  # noqa: PLC0415

    asyncio.run(conflict_commands.show_conflicts(config, wanted, as_json=as_json))


@conflicts.command(
    "replay",
    epilog="""\b
Examples:
  parapply conflicts replay --config app.toml 17
  parapply conflicts replay --config app.toml --lsn 16/B374D848 --dry-run
  parapply conflicts replay --config app.toml --table public.orders --outcome skipped --yes""",
)
@connection_options
@_filter_options
@click.option("--dry-run", is_flag=True, help="Only show what it would do.")
@click.option("--yes", "assume_yes", is_flag=True, help="Do not ask.")
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON array of effects for programs; needs --yes or --dry-run."
)
def replay_(*, dry_run: bool, assume_yes: bool, as_json: bool, **options: Any) -> None:
    """Apply kept changes now, in one transaction, after showing what they would do."""
    wanted = _filter(options)
    if wanted.is_empty:
        raise click.UsageError("name conflicts by their id, or give a filter")
    if as_json and not (assume_yes or dry_run):
        raise click.UsageError("--json needs --yes or --dry-run")
    config = load(options, "source.dsn", "source.publications")
    from parapply.commands import conflicts as conflict_commands  # noqa: PLC0415

    doing = conflict_commands.replay_conflicts(config, wanted, is_dry=dry_run, assume_yes=assume_yes, as_json=as_json)
    asyncio.run(doing)


@conflicts.command(
    "drop",
    epilog="""\b
Examples:
  parapply conflicts drop --config app.toml 17 18
  parapply conflicts drop --config app.toml --outcome repaired --yes
  parapply conflicts drop --config app.toml --all""",
)
@connection_options
@_filter_options
@click.option("--all", "is_all", is_flag=True, help="Every conflict of the slot.")
@click.option("--yes", "assume_yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for programs; needs --yes.")
def drop_(*, is_all: bool, assume_yes: bool, as_json: bool, **options: Any) -> None:
    """Drop conflicts from the history; the tables are not touched."""
    wanted = _filter(options)
    if wanted.is_empty != is_all:
        raise click.UsageError("name conflicts by their id, give a filter, or --all")
    if as_json and not assume_yes:
        raise click.UsageError("--json needs --yes")
    config = load(options, "source.dsn", "source.publications")
    from parapply.commands import conflicts as conflict_commands  # noqa: PLC0415

    asyncio.run(conflict_commands.drop_conflicts(config, wanted, assume_yes=assume_yes, as_json=as_json))


@click.command(
    epilog="""\b
Examples:
  parapply skip --config app.toml --lsn 16/B374D848
  parapply skip --config app.toml --lsn 16/B374D848 --cancel
The error of the daemon, `parapply status` and `parapply conflicts list` name the LSN. Everything of the transaction is
left out, and kept: `parapply conflicts list --lsn 16/B374D848`, `parapply conflicts replay`."""
)
@connection_options
@click.option("--lsn", type=Lsn(), metavar="END_LSN", required=True, help="Where the transaction ends.")
@click.option("--cancel", is_flag=True, help="Take the request back, if it was not carried out yet.")
@seconds("--wait", "wait_s", "How long to wait for a running daemon to have skipped it.", default=_WAIT_S)
@click.option("--json", "as_json", is_flag=True, help="One JSON object for programs.")
def skip(*, lsn: int, cancel: bool, wait_s: float, as_json: bool, **options: Any) -> None:
    """Skip exactly one transaction, by its end LSN; refused once it has been applied."""
    config = load(options, "source.dsn", "source.publications")
    from parapply.commands import conflicts as conflict_commands  # noqa: PLC0415

    if cancel:
        asyncio.run(conflict_commands.cancel_skip(config, lsn, as_json=as_json))
    else:
        asyncio.run(conflict_commands.skip(config, lsn, wait_s, as_json=as_json))

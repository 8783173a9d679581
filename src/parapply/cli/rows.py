"""The commands by which a target gets or loses rows beside the stream: `heal`, `seed`, `pause` and `resume`."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from parapply.cli.options import connection_options, connections, load, repeated, taken, whole

#: As `seed.came_along.CameAlong` has them.
_KINDS = ("prepared", "subscriptions", "slots", "jobs", "states", "publications")
_EPILOG = """\b
Examples:
  parapply pause public.orders --config app.toml
  parapply resume public.orders --config app.toml
While a table is paused its changes are left out, and the slot keeps nothing for it: resume empties the target's table
and copies all of its rows again. All other tables go on; no snapshot or verify is taken in the meantime."""


@click.command(
    epilog="""\b
Examples:
  parapply heal --config app.toml --dry-run
  parapply heal --config app.toml
  parapply heal --config app.toml --max-rows 20000000 --whole public.events
For a slot that was dropped or invalidated, or that a failover left behind. The daemon must be stopped. Exit 1 with
--dry-run: something differs. Killed anywhere, the same command goes on."""
)
@connection_options
@click.option("--dry-run", "is_dry", is_flag=True, help="Compare, and show what would be copied; change nothing.")
@whole("--max-rows", "Refuse to copy or delete more rows than that.", 1_000_000, least=0, metavar="N")
@repeated("--whole", "whole", "SCHEMA.TABLE", "Empty this table and copy all of its rows; repeatable.")
@click.option(
    "--follow-unpublished",
    "follows_unpublished",
    is_flag=True,
    help="Also delete and change rows where the publications leave out such changes.",
)
@connections("On each side.")
def heal(**options: Any) -> int:
    """Replace a slot that is lost, and copy only what differs."""
    config = load(options)
    from parapply.heal import command  # noqa: PLC0415

    return asyncio.run(command.heal(config, taken(command.HealOptions, options)))


@click.command(
    epilog="""\b
Examples:
  parapply seed --config app.toml --prepare
  parapply seed --config app.toml --dry-run
  parapply seed --config app.toml --clean slots --clean subscriptions
First --prepare. Then make the copy (a standby, a restored backup, cloned files with standby.signal) and promote it.
Then the same command without --prepare finds the LSN at which its recovery ended, and `parapply run` goes on there.
Killed anywhere, the same command goes on."""
)
@connection_options
@click.option("--prepare", "is_preparing", is_flag=True, help="Make publication and slot, before the copy is made.")
@click.option("--dry-run", "is_dry", is_flag=True, help="Only look, and show where the copy would join.")
@click.option(
    "--clean",
    "cleans",
    type=click.Choice(_KINDS),
    multiple=True,
    help="End what came along with the copy, of this kind; repeatable.",
)
@click.option(
    "--despite", metavar="CODE", multiple=True, help="Go on with a kind that came along, writes, or what init may."
)
def seed(*, is_preparing: bool, **options: Any) -> None:
    """Join a physical copy of the publisher to the slot, without a copy of rows."""
    if is_preparing and (options["is_dry"] or options["cleans"] or options["despite"]):
        raise click.UsageError("--prepare goes with the options of a connection only")
    config = load(options, *(["target.dsn"] if is_preparing else []))
    from parapply.seed import command  # noqa: PLC0415
    from parapply.seed.came_along import CameAlong  # noqa: PLC0415

    if is_preparing:
        asyncio.run(command.prepare(config))
        return
    how = taken(command.SeedOptions, options, cleans=tuple(map(CameAlong, options["cleans"])))
    asyncio.run(command.seed(config, how))


@click.command(epilog=_EPILOG)
@connection_options
@click.argument("tables", metavar="SCHEMA.TABLE...", nargs=-1, required=True)
def pause(*, tables: tuple[str, ...], **options: Any) -> None:
    """Take tables out of the stream, until `parapply resume` copies them again."""
    config = load(options)
    from parapply.copy import command  # noqa: PLC0415

    asyncio.run(command.pause(config, tables))


@click.command(epilog=_EPILOG)
@connection_options
@connections("On each side.")
@click.argument("tables", metavar="SCHEMA.TABLE...", nargs=-1, required=True)
def resume(*, tables: tuple[str, ...], connections: int, **options: Any) -> None:
    """Copy tables again that are paused, and join them to the stream."""
    config = load(options)
    from parapply.copy import command  # noqa: PLC0415

    how = command.CopyOptions(connections=connections, truncates=True, tables=tables, resumes=True)
    asyncio.run(command.refresh(config, how))

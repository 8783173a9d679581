"""The command `parapply seed`."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from parapply.cli.options import connection_options, load, taken

#: As `seed.came_along.CameAlong` has them.
_KINDS = ("prepared", "subscriptions", "slots", "jobs", "states", "publications")


@click.command(
    epilog="""\b
Examples:
  parapply seed --config app.toml --prepare
  parapply seed --config app.toml --dry-run
  parapply seed --config app.toml --clean slots --clean subscriptions
First --prepare. Then make the copy (a standby, a restored backup, cloned files with standby.signal) and promote it.
Then the same command without --prepare finds the LSN at which its recovery ended, and `parapply run` goes on there.
Killed anywhere, the same command goes on.""",
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

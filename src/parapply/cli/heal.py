"""The command `parapply heal`."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from parapply.cli.options import connection_options, load, taken


@click.command(
    epilog="""\b
Examples:
  parapply heal --config app.toml --dry-run
  parapply heal --config app.toml
  parapply heal --config app.toml --max-rows 20000000 --whole public.events
For a slot that was dropped or invalidated, or that a failover left behind. The daemon must be stopped. Exit 1 with
--dry-run: something differs. Killed anywhere, the same command goes on.""",
)
@connection_options
@click.option("--dry-run", "is_dry", is_flag=True, help="Compare, and show what would be copied; change nothing.")
@click.option(
    "--max-rows",
    type=click.IntRange(min=0),
    default=1_000_000,
    show_default=True,
    metavar="N",
    help="Refuse to copy or delete more rows than that.",
)
@click.option(
    "--whole", metavar="SCHEMA.TABLE", multiple=True, help="Empty this table and copy all of its rows; repeatable."
)
@click.option("--connections", type=click.IntRange(1, 64), default=4, show_default=True, help="On each side.")
def heal(**options: Any) -> int:
    """Replace a slot that is lost, and copy only what differs."""
    config = load(options)
    from parapply.heal import command  # noqa: PLC0415

    return asyncio.run(command.heal(config, taken(command.HealOptions, options)))

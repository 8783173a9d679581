"""The commands `parapply pause` and `parapply resume`."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from parapply.cli.options import connection_options, load

_EPILOG = """\b
Examples:
  parapply pause public.orders --config app.toml
  parapply resume public.orders --config app.toml
While a table is paused its changes are left out, and the slot keeps nothing for it: resume empties the target's table
and copies all of its rows again. All other tables go on; no snapshot or verify is taken in the meantime."""


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
@click.option("--connections", type=click.IntRange(1, 64), default=4, show_default=True, help="On each side.")
@click.argument("tables", metavar="SCHEMA.TABLE...", nargs=-1, required=True)
def resume(*, tables: tuple[str, ...], connections: int, **options: Any) -> None:
    """Copy tables again that are paused, and join them to the stream."""
    config = load(options)
    from parapply.copy import command  # noqa: PLC0415

    how = command.CopyOptions(connections=connections, truncates=True, tables=tables, resumes=True)
    asyncio.run(command.refresh(config, how))

"""Refuses a copy of a snapshot before which something has come that neither it nor the stream brings.

In: what was known before the snapshot was awaited, and the snapshot. Out: nothing, or the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from parapply.copy import snapshot as snapshots
from parapply.copy.published import published_tables
from parapply.errors import SourceRefused
from parapply.source import ddl_queue, publishing

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from parapply.config import Config
    from parapply.copy.published import PublishedTable
    from parapply.copy.snapshot import SourceSnapshot

IS_LEFT: Final = "tables that are complete stay, and the same command goes on with the others"


async def check_commands(config: Config, snapshot: SourceSnapshot, have_run: Collection[int]) -> None:
    """Refuse a slot behind commands that the schema does not have: the stream does not bring them."""
    login, name = config.source.login, f"parapply copy {config.source.slot}"
    async with await snapshots.open_reader(login, name, snapshot) as reader:
        missed = sorted(await ddl_queue.numbers(reader) - set(have_run))
    if missed:
        raise SourceRefused(
            f"source: {len(missed)} commands of parapply.ddl_queue, from number {missed[0]} on, came after the schema"
            " was brought and before the slot, so no stream brings them",
            hint="do on the target what they do, and go on with `parapply migrate --from copy`; or `parapply drop`,"
            " empty the target and begin again",
        )


def came_late() -> SourceRefused:
    """Return the error for a command that the copy already has."""
    return SourceRefused(
        "source: a command that is to run here came before the copy's snapshot",
        hint=f"run the same command again; {IS_LEFT}",
    )


async def check_unchanged(
    config: Config, tables: Sequence[PublishedTable], snapshot: SourceSnapshot, have_run: Collection[int] | None
) -> dict[int, str]:
    """Refuse tables that changed while the snapshot was awaited, which may take as long as other transactions do.

    A column that came in that time would be left out of the copy, and the stream does not bring what is before it.
    A command that came in that time would run on rows that have what it did.

    Args:
        config: publications.
        tables: as they were before.
        snapshot: to be copied.
        have_run: commands of the publisher that have run here, by number; None: none run here that the snapshot shows.

    Returns:
        How they are published in the snapshot.
    """
    login, name = config.source.login, f"parapply copy {config.source.slot}"
    async with await snapshots.open_reader(login, name, snapshot) as reader:
        published = await published_tables(reader, config.source.publications, config.mapping)
        marks = await publishing.published(reader, config.source.publications, [table.oid for table in tables])
        has_more = have_run is not None and not (await ddl_queue.numbers(reader)).issubset(have_run)
    if has_more:
        raise came_late()
    now = {table.oid: _shape(table) for table in published}
    if changed := [table.text for table in tables if now.get(table.oid) != _shape(table)]:
        raise SourceRefused(
            f"source: changed, or no longer published, while the snapshot was awaited: {', '.join(changed)}",
            hint=f"run the same command again; {IS_LEFT}",
        )
    return marks


def _shape(table: PublishedTable) -> tuple[object, ...]:
    leaves = frozenset((leaf.schema, leaf.name) for leaf in table.leaves)
    return table.full_name, table.columns, table.types, table.modifiers, table.row_filter, table.key, leaves

"""Reports of the tables that a copy leaves out, although they are published."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from parapply import continuity, sharing
from parapply.amounts import few
from parapply.printable import printable
from parapply.target.state import copies
from parapply.wire.ddl_queue import QUEUE

if TYPE_CHECKING:
    from collections.abc import Collection

    from parapply.config import Config
    from parapply.connect import Connections
    from parapply.plan.copy_starts import Name
    from parapply.source.slot import SourceFacts
    from parapply.target.state.copies import Copies


def say_paused(known: Copies) -> None:
    """Report which tables are left out until they are resumed."""
    if paused := [f"{row.schema_name}.{row.table_name}" for row in known.tables if row.is_paused]:
        click.echo(f"paused, and left out until `parapply resume`: {printable(few(paused))}")


def say_schema_only(known: Copies) -> None:
    """Report whose rows are left out, all of them, because nothing else shows that they are missing."""
    if names := [".".join(row.name) for row in known.tables if row.is_schema_only]:
        click.echo(printable(f"schema only, so their rows are left out: {len(names):,} tables: {', '.join(names)}"))


async def note(config: Config, ends: Connections, slot_id: int) -> None:
    """Have the state of a new slot say which rows are left out and where they have constants; report the first."""
    await sharing.claim(ends.source, ends.target, config, slot_id)
    known = await copies.load(ends.target, config.target.state_schema, slot_id)
    known = await continuity.leave_out(ends.source, ends.target, config, slot_id, known)
    await continuity.keep_names(ends.source, ends.target, config, slot_id, known)
    await continuity.keep_columns(ends.source, ends.target, config, slot_id, known)
    say_schema_only(known)


def say_state(facts: SourceFacts, published: Collection[Name]) -> None:
    """Report whose progress is published and will not be brought over."""
    for schema in sorted(facts.state_schemas.intersection([name[0] for name in published if name != QUEUE])):
        click.echo(
            f"source: schema {printable(schema)} holds the progress of a parapply that applies, or applied, there: it"
            " is published, and left out here; publish the other tables or schemas by name (docs/CONFLICTS.md, two-way"
            " replication)"
        )

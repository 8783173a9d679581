"""Display of a migration and of a cut-over while they run: steps, figures, whether a command works on them.

In: any session that may read the state schema. Out: plain records. Nothing here decides anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import psycopg

from parapply.target.session.settings import target_errors
from parapply.target.state import cutovers, migrations
from parapply.target.state.schema import in_schema
from parapply.vocabulary import CutoverStep, MigrationStep

if TYPE_CHECKING:
    from psycopg import sql

    from parapply.target.session.settings import Connection


class Moves(msgspec.Struct, frozen=True, kw_only=True):
    """The migration and the cut-over of one slot."""

    migration: list[dict[str, Any]] = []  # the steps that were begun, in their order
    cutover: dict[str, Any] | None = None

    @property
    def are_under_way(self) -> bool:
        """Return whether a step is under way that is over soon."""
        # The last one waits for as long as the stream is followed.
        steps = [one["state"] == "running" and one["step"] != MigrationStep.FOLLOW for one in self.migration]
        return any(steps) or (self.cutover is not None and self.cutover["step"] != CutoverStep.DONE)


async def read_moves(conn: Connection, schema: str, slot_name: str, slot_id: int | None) -> Moves:
    """Return the moves of a slot; without its number only the migration that has not made it yet."""
    with target_errors("reading how far the migration is"):
        steps = await records(conn, in_schema(migrations.SHOWN, schema), [slot_name, slot_id, None])
        found = await records(conn, in_schema(cutovers.SHOWN, schema), [slot_id])
    return Moves(migration=steps, cutover=found[0] if found else None)


async def records(conn: Connection, query: sql.Composed, params: list[object]) -> list[dict[str, Any]]:
    """Return the rows of a query by the names of its columns."""
    async with psycopg.AsyncRawCursor(conn) as cursor:
        await cursor.execute(query, params)
        names = [column.name for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in await cursor.fetchall()]

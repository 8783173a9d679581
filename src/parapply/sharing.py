"""Tables of the target in which a slot's rows have constants: a slot without constants must not write there.

A TRUNCATE of its publisher would empty the whole table, and its changes could find rows of the others. So each slot
notes in the state where its rows have constants, before it applies, and each one looks at what the others noted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.errors import TargetRefused
from parapply.source import slot
from parapply.target.state.schema import state_rows

if TYPE_CHECKING:
    from collections.abc import Collection

    from parapply.config import Config
    from parapply.plan.copy_starts import Name
    from parapply.target.session.settings import Connection

#: Advice for each problem.
HINT = "give this slot's rows constants in `set` of [mapping] as well, or `parapply drop` the other slot"


async def others(conn: Connection, schema: str, slot_id: int) -> dict[str, str]:
    """Return the slots whose rows have constants, by the tables on the target, as schema.table.

    Args:
        conn: session on the target, which has the state schema.
        schema: of the state.
        slot_id: slot that is left out; 0: none is.

    Raises:
        TargetRefused, TargetLost: the state could not be read.
    """
    query = (
        "SELECT place, slot_name FROM {s}.slots, LATERAL pg_catalog.unnest(constants_in) AS place"
        " WHERE slot_id <> $1::int"
    )
    return dict(await state_rows(conn, schema, "looking where rows of other slots have constants", query, [slot_id]))


def problems(config: Config, names: Collection[Name], taken: dict[str, str]) -> list[str]:
    """Return why tables of the publisher may not be written, by what `others` returned; nothing if they may."""
    found = []
    for name in names:
        place = ".".join(config.mapping.target_of(name))
        if place in taken and not config.mapping.constants_of(name) and not config.mapping.is_schema_only(name):
            found.append(
                f"target table {place} has rows of slot {taken[place]!r} with constants, and rows of {'.'.join(name)}"
                " would have none"
            )
    return found


async def claim(source: slot.Connection, target: Connection, config: Config, slot_id: int) -> None:
    """Note where this slot's rows have constants; refuse tables where only other slots' rows have them.

    Raises:
        TargetRefused: there is one, or the state cannot be written.
        SourceLost, TargetLost: an end cannot be asked.
    """
    schema = config.target.state_schema
    taken = await others(target, schema, slot_id)
    # Without either nothing needs the publisher's tables, which may be many.
    mine: list[str] = []
    if taken or config.mapping.has_constants:
        names = await slot.tables_to_expect(source, config.source.publications)
        if found := problems(config, names, taken):
            raise TargetRefused(f"[mapping] lacks constants: {'; '.join(found)}", hint=HINT)
        mine = sorted({".".join(config.mapping.target_of(name)) for name in names if config.mapping.constants_of(name)})
    query = "UPDATE {s}.slots SET constants_in = $2::text[] WHERE slot_id = $1::int AND constants_in <> $2::text[]"
    await state_rows(target, schema, "noting where rows have constants", query, [slot_id, mine])

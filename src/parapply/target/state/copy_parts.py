"""Parts of a table under way that are copied, and their LSN: an interrupted copy need not read them again.

In: a session on the target, the schema's name, a slot_id. Out: rows of `parapply.copy_parts`, each written in the
transaction that copies its part, and gone when the table is complete or is emptied.

Every function raises TargetRefused or TargetLost where the server does not do it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from parapply.model import format_lsn
from parapply.target.state.schema import state_rows, struct_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.target.session.settings import Connection


class CopiedPart(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of a relation whose rows are copied."""

    source_oid: int  # of the table
    leaf_schema: str
    leaf_name: str
    first_page: int
    end_page: int | None  # None: to the end of the relation, however long it is
    lsn: int  # they are as of
    rows: int
    size_bytes: int
    fingerprint: str  # of the publisher's catalogue: what must be as it was


async def load(conn: Connection, schema: str, slot_id: int) -> list[CopiedPart]:
    """Read all parts of a slot."""
    query = (
        "SELECT source_oid, leaf_schema, leaf_name, first_page, end_page, lsn::text, rows, size_bytes, fingerprint"
        " FROM {s}.copy_parts WHERE slot_id = $1::int ORDER BY 1, 2, 3, 4"
    )
    found = await state_rows(conn, schema, "reading which parts are copied", query, [slot_id])
    return [struct_of(CopiedPart, row) for row in found]


async def add(conn: Connection, schema: str, slot_id: int, part: CopiedPart) -> None:
    """Note a part, in the transaction that copies it."""
    query = (
        "INSERT INTO {s}.copy_parts (slot_id, source_oid, leaf_schema, leaf_name, first_page, end_page, lsn, rows,"
        " size_bytes, fingerprint) VALUES ($1::int, $2::bigint, $3, $4, $5::bigint, $6::bigint, $7::pg_lsn, $8::bigint,"
        " $9::bigint, $10)"
    )
    values = [
        slot_id, part.source_oid, part.leaf_schema, part.leaf_name, part.first_page, part.end_page,
        format_lsn(part.lsn), part.rows, part.size_bytes, part.fingerprint,
    ]  # fmt: skip
    await state_rows(conn, schema, "noting a part that is copied", query, values)


async def bring_forward(  # noqa: PLR0913  the columns of a row
    conn: Connection, schema: str, slot_id: int, source_oid: int, *, lsn: int, more_rows: int
) -> None:
    """Note that all parts of a table are as of another LSN, in the transaction that makes them so."""
    # The rows on one part: only the sum is used.
    query = (
        "UPDATE {s}.copy_parts AS p SET lsn = $3::pg_lsn,"
        " rows = p.rows + CASE WHEN p.ctid = (SELECT min(q.ctid) FROM {s}.copy_parts AS q"
        " WHERE q.slot_id = $1::int AND q.source_oid = $2::bigint) THEN $4::bigint ELSE 0 END"
        " WHERE p.slot_id = $1::int AND p.source_oid = $2::bigint"
    )
    await state_rows(
        conn, schema, "noting what the parts hold now", query, [slot_id, source_oid, format_lsn(lsn), more_rows]
    )


async def forget(conn: Connection, schema: str, slot_id: int, source_oids: Sequence[int]) -> None:
    """Forget the parts of tables, before their rows go."""
    query = "DELETE FROM {s}.copy_parts WHERE slot_id = $1::int AND source_oid = ANY ($2::bigint[])"
    await state_rows(conn, schema, "forgetting parts of a copy", query, [slot_id, list(source_oids)])

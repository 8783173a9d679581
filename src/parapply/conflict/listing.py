"""Reading and dropping rows of the history, for people and scripts.

In: a session on the target and filters. Out: one dict a conflict, its keys the columns of `parapply.conflicts`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import psycopg

from parapply.conflict.history import DROPPING
from parapply.errors import ConfigError
from parapply.model import format_lsn
from parapply.target.session.settings import rows, target_errors
from parapply.target.state.schema import in_schema

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.target.session.settings import Connection

#: Columns as shown; times and LSNs as text. Rows are left out of lists: they may be large, and hold values.
_COLUMNS: Final = (
    "conflict_id, conflict_type, schema_name, table_name, operation, key, constraints, remote_lsn::text,"
    " remote_xid, remote_commit_time::text, change_no, local_commit_time::text, local_origin, policy, outcome,"
    " attempts, is_complete, recorded_at::text, replayed_at::text"
)
_ROWS: Final = ", local_row, remote_row"


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Selection of conflicts; a field that is None or empty does not limit it."""

    ids: tuple[int, ...] = ()
    type: str | None = None
    table: str | None = None  # schema.table
    outcome: str | None = None
    lsn: int | None = None
    since: str | None = None  # anything that PostgreSQL reads as a time
    limit: int = 0  # number of the latest; 0: all

    @property
    def is_empty(self) -> bool:
        """Return whether it takes everything."""
        return self == Filter(limit=self.limit)


_WHERE: Final = (
    "slot_id = $1::int AND ($2::bigint[] IS NULL OR conflict_id = ANY ($2::bigint[]))"
    " AND ($3::text IS NULL OR conflict_type = $3) AND ($4::text IS NULL OR schema_name || '.' || table_name = $4)"
    " AND ($5::text IS NULL OR outcome = $5) AND ($6::pg_lsn IS NULL OR remote_lsn = $6::pg_lsn)"
    " AND ($7::timestamptz IS NULL OR recorded_at >= $7::timestamptz)"
)


async def read(
    conn: Connection, schema: str, slot_id: int, wanted: Filter, *, with_rows: bool = False
) -> list[dict[str, Any]]:
    """Return conflicts, in the order of their transactions, the latest last.

    Any session that may read the history serves. `local_row` and `remote_row` are in them `with_rows` only.

    Raises:
        ConfigError: a filter cannot be read.
    """
    columns = _COLUMNS + (_ROWS if with_rows else "")
    query = in_schema(
        f"SELECT * FROM (SELECT {columns} FROM {{s}}.conflicts WHERE {_WHERE}"  # noqa: S608  own text
        " ORDER BY conflicts.remote_lsn DESC, change_no DESC, conflict_type DESC LIMIT nullif($8::bigint, 0)) AS latest"
        " ORDER BY remote_lsn::pg_lsn, change_no, conflict_type",
        schema,
    )
    with target_errors("reading the history of conflicts"):
        async with psycopg.AsyncRawCursor(conn) as cursor:
            try:
                await cursor.execute(query, [slot_id, *_values(wanted), wanted.limit])
            except psycopg.DataError as error:
                raise ConfigError("a filter is not written as it must be", hint="--since takes a time") from error
            names = [column.name for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in await cursor.fetchall()]


async def drop(conn: Connection, schema: str, slot_id: int, wanted: Filter) -> int:
    """Drop conflicts from the history and return how many; raise ConfigError if a filter cannot be read."""
    query = in_schema(DROPPING.replace("CONDITION", _WHERE), schema)
    with target_errors("dropping conflicts from the history"):
        try:
            ((n_dropped,),) = await rows(conn, query, [slot_id, *_values(wanted)])
        except psycopg.DataError as error:
            raise ConfigError("a filter is not written as it must be", hint="--since takes a time") from error
    return int(n_dropped)


async def count(conn: Connection, schema: str, slot_id: int) -> list[dict[str, Any]]:
    """Return how many conflicts are kept, by type, table and outcome."""
    query = in_schema(
        "SELECT conflict_type, schema_name || '.' || table_name, outcome, pg_catalog.count(*), max(recorded_at)::text"
        " FROM {s}.conflicts WHERE slot_id = $1::int GROUP BY 1, 2, 3 ORDER BY 2, 1, 3",
        schema,
    )
    with target_errors("counting conflicts"):
        found = await rows(conn, query, [slot_id])
    return [dict(zip(("type", "table", "outcome", "count", "latest"), row, strict=True)) for row in found]


def _values(wanted: Filter) -> Sequence[object]:
    return [
        list(wanted.ids) or None,
        wanted.type,
        wanted.table,
        wanted.outcome,
        None if wanted.lsn is None else format_lsn(wanted.lsn),
        wanted.since,
    ]

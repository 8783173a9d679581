"""The table `ddl` of the state: commands of the publisher, and what became of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from psycopg import sql

from parapply.model import parse_lsn
from parapply.target.session.settings import rows, target_errors

if TYPE_CHECKING:
    from parapply.target.session.settings import Connection

COMMANDS: Final = """
CREATE TABLE {s}.ddl (
    slot_id int NOT NULL REFERENCES {s}.slots,
    commit_lsn pg_lsn NOT NULL,
    number bigint NOT NULL,
    tag text NOT NULL,
    command text NOT NULL,
    source_role text NOT NULL,
    outcome text NOT NULL CHECK (outcome IN ('applied', 'left_out')),
    reason text NOT NULL DEFAULT '',
    recorded_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    PRIMARY KEY (slot_id, commit_lsn, number));
"""

#: What monitoring roles may read of it: a command may hold values.
COLUMNS_WITHOUT_COMMANDS: Final = (
    "slot_id",
    "commit_lsn",
    "number",
    "tag",
    "source_role",
    "outcome",
    "reason",
    "recorded_at",
)


def command_sql(schema: str) -> str:
    """Return the INSERT that notes a command inside the target transaction that runs it, or leaves it out.

    Parameters, in text format: $1 slot_id, $2 commit LSN of the source transaction, $3 number of the queue's row, $4
    tag, $5 command, $6 role that ran it on the publisher, $7 outcome, $8 reason.
    """
    text = (
        "INSERT INTO {s}.ddl (slot_id, commit_lsn, number, tag, command, source_role, outcome, reason)"
        " VALUES ($1::int, $2::pg_lsn, $3::bigint, $4::text, $5::text, $6::text, $7::text, $8::text)"
    )
    return sql.SQL(text).format(s=sql.Identifier(schema)).as_string(None)


async def noted(conn: Connection, schema: str, slot_id: int) -> tuple[frozenset[int], int]:
    """Return the numbers of the commands that have come here, and the watermark.

    Raises:
        TargetRefused, TargetLost: it could not be read.
    """
    text = (
        "SELECT ARRAY(SELECT number FROM {s}.ddl WHERE slot_id = $1::int), lowest_remote_lsn::text"
        " FROM {s}.progress JOIN {s}.slots USING (slot_name) WHERE slots.slot_id = $1::int"
    )
    query = sql.SQL(text).format(s=sql.Identifier(schema))
    with target_errors("reading which commands have come"):
        found = await rows(conn, query, [slot_id])
    return (frozenset(found[0][0]), parse_lsn(found[0][1])) if found else (frozenset(), 0)

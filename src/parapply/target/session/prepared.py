"""Prepared transactions on the target: their names, which are pending, and what proves that one was committed.

The row that a prepared transaction writes in `committed_prepared` is visible once it was committed, and that is the
proof: COMMIT PREPARED cannot write a record in the same transaction (trap T-57). It goes when the record of the COMMIT
PREPARED itself is written. A row in `undecided`, from the record of the PREPARE to the record of the outcome,
distinguishes a transaction that was lost from one that was never prepared here because it has no changes. PREPARE,
COMMIT PREPARED and ROLLBACK PREPARED always wait for the disk.

Source: PostgreSQL manual, "PREPARE TRANSACTION"; trap T-56 for the names.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from parapply.errors import TargetRefused
from parapply.model import format_lsn, parse_lsn
from parapply.target.session.settings import rows, target_errors
from parapply.target.state.slots import stamp_sql

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import LiteralString

    from parapply.target.session.settings import Connection

# Every role may prepare under any name, and committed in the place of ours that one would lose what ours holds. Only a
# role that may write the state could have written the proof.
_OURS: LiteralString = (
    "database = pg_catalog.current_database() AND pg_catalog.starts_with(gid, $1) AND pg_catalog.has_table_privilege("
    "owner, pg_catalog.to_regclass(pg_catalog.format('%I.committed_prepared', $2::text)), 'INSERT')"
)
_GID = re.compile(r"parapply_(?P<slot>\d+)_(?P<xid>\d+)_(?P<lsn>[0-9A-F]+/[0-9A-F]+)")


def gid_of(slot_id: int, xid: int, end_lsn: int) -> str:
    """Return the name here of a transaction prepared on the publisher.

    Args:
        slot_id: of the state: two slots may bring the same xid.
        xid: on the publisher.
        end_lsn: of its PREPARE: xids come again.
    """
    return start_of_gid(slot_id, xid) + format_lsn(end_lsn)


def start_of_gid(slot_id: int, xid: int) -> str:
    """Return the begin of the name, for callers that do not know the end: an outcome names only the xid."""
    return f"parapply_{slot_id}_{xid}_"


async def pending(conn: Connection, schema: str, slot_id: int) -> dict[int, tuple[str, int]]:
    """Return the transactions prepared here for a slot: (name, end LSN of the PREPARE) by xid of the publisher.

    A transaction of a role that may not write the state is none of ours, whatever its name is.
    """
    query = sql.SQL(f"SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE {_OURS} ORDER BY prepared")  # noqa: S608
    with target_errors("reading what is prepared"):
        found = [str(gid) for (gid,) in await rows(conn, query, [f"parapply_{slot_id}_", schema])]
    matches = [match for match in map(_GID.fullmatch, found) if match is not None]
    return {int(match["xid"]): (match[0], parse_lsn(match["lsn"])) for match in matches}


async def proved_lsns(conn: Connection, schema: str, slot_id: int) -> frozenset[int]:
    """Return the end LSNs of PREPAREs that are committed here for a slot, without the record of their commit.

    Raises:
        TargetLost: the connection broke.
    """
    query = sql.SQL("SELECT gid FROM {}.committed_prepared WHERE slot_id = $1::int").format(sql.Identifier(schema))
    with target_errors("reading what was prepared"):
        matches = [_GID.fullmatch(str(gid)) for (gid,) in await rows(conn, query, [slot_id])]
    return frozenset([parse_lsn(match["lsn"]) for match in matches if match is not None])


async def check_possible(conn: Connection) -> None:
    """Refuse a target that can prepare nothing (trap T-59).

    Raises:
        TargetRefused: max_prepared_transactions is 0.
    """
    with target_errors("asking for max_prepared_transactions"):
        ((most,),) = await rows(conn, sql.SQL("SELECT pg_catalog.current_setting('max_prepared_transactions')::int"))
    if most == 0:
        raise TargetRefused(
            "source.two_phase is on, but the target has max_prepared_transactions = 0",
            hint="set it on the target to at least the publisher's and restart it, or set source.two_phase = false",
        )


def check_ending(pending: Collection[int], proved_lsns: Collection[int], *, two_phase: bool) -> None:
    """Raise TargetRefused if transactions of `pending` or `proved_lsns` would come in another way than as prepared."""
    if (n_open := len(pending) + len(proved_lsns)) and not two_phase:
        raise TargetRefused(
            f"{n_open} transactions are prepared on the target, or committed without a record of it, but"
            " source.two_phase is off",
            hint="set source.two_phase = true; `parapply drop` rolls back what the publisher may have committed",
        )


async def others(conn: Connection, schema: str, slot_id: int) -> list[str]:
    """Return the names under which roles that may not write the state have prepared, of the form of a slot's."""
    here = "database = pg_catalog.current_database() AND pg_catalog.starts_with(gid, $1)"
    query = sql.SQL(f"SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE {here} AND ({_OURS}) IS NOT TRUE")  # noqa: S608
    with target_errors("reading what is prepared"):
        return [str(gid) for (gid,) in await rows(conn, query, [f"parapply_{slot_id}_", schema])]


async def check_no_orphans(conn: Connection) -> None:
    """Refuse a target with transactions prepared by a built-in subscription that no longer exists.

    Its outcome comes through the slot, and would find nothing under a name of ours.

    Raises:
        TargetRefused: it does.
    """
    query = sql.SQL(
        "SELECT gid FROM pg_catalog.pg_prepared_xacts AS x WHERE database = pg_catalog.current_database()"
        " AND gid ~ '^pg_gid_[0-9]+_[0-9]+$' AND NOT EXISTS (SELECT FROM pg_catalog.pg_subscription AS s"
        " WHERE s.oid::text = pg_catalog.split_part(x.gid, '_', 3)) ORDER BY prepared"
    )
    with target_errors("reading what subscriptions have prepared"):
        gids = [str(gid) for (gid,) in await rows(conn, query)]
    if gids:
        raise TargetRefused(
            f"target: {len(gids)} transactions are prepared by a subscription that was dropped (the first is "
            f"{gids[0]!r}): their outcome would find nothing",
            hint="roll them back (ROLLBACK PREPARED), drop the slot on the publisher, and make another with `parapply "
            "init --copy --truncate`",
        )


async def check_may_end(conn: Connection, schema: str, slot_id: int) -> None:
    """Refuse a role that may not end the transactions prepared here for a slot: only a superuser and their owners may.

    Raises:
        TargetRefused: another role prepared some of it.
    """
    query = sql.SQL(
        f"SELECT DISTINCT owner::text FROM pg_catalog.pg_prepared_xacts WHERE {_OURS} AND owner <> CURRENT_USER"  # noqa: S608
        " AND pg_catalog.current_setting('is_superuser') = 'off' ORDER BY 1"
    )
    with target_errors("reading what is prepared"):
        owners = [str(owner) for (owner,) in await rows(conn, query, [f"parapply_{slot_id}_", schema])]
    if owners:
        raise TargetRefused(
            f"target: transactions of the slot are prepared there by another role: {', '.join(owners)}",
            hint="run the command as that role, or as a superuser",
        )


async def roll_back(conn: Connection, gids: Sequence[str]) -> None:
    """Roll back prepared transactions, as far as they are still prepared and no other session is ending them.

    Raises:
        TargetRefused: another role prepared them.
    """
    with target_errors("rolling back what is prepared"):
        for gid in gids:
            with suppress(psycopg.errors.UndefinedObject, psycopg.errors.ObjectNotInPrerequisiteState):
                await conn.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))


def proof_sql(schema: str, *, stamps: bool = False) -> str:
    """Return the INSERT that a transaction sends before it is prepared.

    Parameters: $1 slot_id; $2 gid; with `stamps`, which is as of `record_sql`, $3 end_lsn; $4 time of the PREPARE.
    """
    text = "INSERT INTO {s}.committed_prepared (slot_id, gid) SELECT $1::int, $2::text"
    return (
        sql.SQL(text + (f" FROM {stamp_sql('$3', '$4')}" if stamps else ""))
        .format(s=sql.Identifier(schema))
        .as_string(None)
    )


def is_proved_sql(schema: str) -> str:
    """Return the SELECT that finds a row if a transaction was committed. Parameters: $1 slot_id; $2 `start_of_gid`."""
    text = "SELECT FROM {s}.committed_prepared WHERE slot_id = $1::int AND pg_catalog.starts_with(gid, $2)"
    return sql.SQL(text).format(s=sql.Identifier(schema)).as_string(None)


def note_sql(schema: str) -> str:
    """Return the INSERT that goes with the record of a PREPARE. Parameters: $1 slot_id; $2 gid."""
    text = "INSERT INTO {s}.undecided (slot_id, gid) VALUES ($1::int, $2) ON CONFLICT DO NOTHING"
    return sql.SQL(text).format(s=sql.Identifier(schema)).as_string(None)


def is_noted_sql(schema: str) -> str:
    """Return the SELECT that finds a row if the record of a PREPARE was written. Parameters as `is_proved_sql`."""
    text = "SELECT FROM {s}.undecided WHERE slot_id = $1::int AND pg_catalog.starts_with(gid, $2)"
    return sql.SQL(text).format(s=sql.Identifier(schema)).as_string(None)


def forget_sql(schema: str) -> str:
    """Return the DELETE of note and proof, for the transaction that records the outcome. Parameters likewise."""
    text = (
        "WITH noted AS (DELETE FROM {s}.undecided WHERE slot_id = $1::int AND pg_catalog.starts_with(gid, $2))"
        " DELETE FROM {s}.committed_prepared WHERE slot_id = $1::int AND pg_catalog.starts_with(gid, $2)"
    )
    return sql.SQL(text).format(s=sql.Identifier(schema)).as_string(None)

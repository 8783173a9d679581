"""Where a physical copy of the publisher joins its stream: at the end of the copy's recovery.

A server that ends archive recovery begins a new timeline, and notes in that timeline's history where it left the
one before: behind the last record that it has replayed. So the copy has exactly the transactions whose commit record
ends there or before. Servers that were promoted apart may give their timelines one number; then they left the common
one at different places, and the earlier one is where the two part.

A copy without a new timeline was started as its files lay. Nothing on it says afterwards which record was the
last of the publisher: its first checkpoint may lie behind a commit of the publisher that was cut off at a page's end.

In: what the copy says, and the publisher's history. Out: timeline and LSN, or a refusal.
Source: `src/backend/access/transam/xlog.c`, StartupXLOG (EndOfLog); `timeline.c`, writeTimeLineHistory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import psycopg
from psycopg import sql

from parapply.errors import SlotLost, TargetRefused
from parapply.model import format_lsn
from parapply.source.refusals import parse_timeline_history
from parapply.target.session.settings import rows, target_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parapply.target.session.settings import Connection

#: Above every LSN: where a server's own timeline will be left.
_NEVER: Final = 1 << 64
_AGAIN: Final = "make the copy again"


class CopiedServer(NamedTuple):
    """The copy's server."""

    system_identifier: str
    timeline: int  # of the WAL being written
    history: Mapping[int, int]  # earlier timelines, and where each was left


class Joint(NamedTuple):
    """The place up to which a copy and the publisher are one server."""

    timeline: int
    lsn: int


async def check_promoted(conn: Connection) -> None:
    """Raise TargetRefused if the server is still in recovery."""
    with target_errors("asking for the end of its recovery"):
        ((is_standby, lsn),) = await rows(
            conn, sql.SQL("SELECT pg_catalog.pg_is_in_recovery(), pg_catalog.pg_last_wal_replay_lsn()::text")
        )
    if is_standby:
        raise TargetRefused(
            f"target: the server is in recovery, and has replayed WAL up to {lsn}: it ends nowhere yet",
            hint="SELECT pg_promote() there ends it, or restart it with recovery_target_lsn and"
            " recovery_target_action = 'promote'",
        )


async def read_copy(conn: Connection) -> CopiedServer:
    """Read identity and timelines of a server that is not in recovery."""
    identity = sql.SQL(
        "SELECT system_identifier, ('x' || pg_catalog.substr(pg_catalog.pg_walfile_name("
        "pg_catalog.pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int FROM pg_catalog.pg_control_system()"
    )
    history = sql.SQL(
        "SELECT pg_catalog.pg_read_file('pg_wal/' || pg_catalog.lpad(pg_catalog.upper(pg_catalog.to_hex($1::int)), 8,"
        " '0') || '.history')"
    )
    with target_errors("reading its timelines"):
        ((identifier, timeline),) = await rows(conn, identity)
        text = ""
        if timeline > 1:
            try:
                ((text,),) = await rows(conn, history, [timeline])
            except psycopg.errors.InsufficientPrivilege as error:
                raise TargetRefused(
                    "target: the role may not read the history of the server's timeline",
                    hint="GRANT EXECUTE ON FUNCTION pg_catalog.pg_read_file(text) TO the target's role; a superuser"
                    " needs none",
                ) from error
    return CopiedServer(str(identifier & 0xFFFF_FFFF_FFFF_FFFF), timeline, parse_timeline_history(text))


def joint(copy: CopiedServer, timeline: int, history: Mapping[int, int]) -> Joint:
    """Return where a copy left the publisher.

    Raises:
        TargetRefused: it never did, so that the place is not known.
        SlotLost: it has WAL that the publisher has not.
    """
    parted: Joint | None = None
    for (ours, left_lsn), (theirs, source_lsn) in zip(
        _line(copy.timeline, copy.history), _line(timeline, history), strict=False
    ):
        if ours != theirs:
            break
        if left_lsn < source_lsn:
            return Joint(ours, left_lsn)
        if left_lsn > source_lsn:
            raise SlotLost(
                f"target: the copy has replayed timeline {ours} beyond {format_lsn(source_lsn)}, where the publisher,"
                f" now on timeline {timeline}, left it: it has transactions that the publisher lost",
                hint=f"{_AGAIN}, from the present publisher",
            )
        if left_lsn == _NEVER:
            raise TargetRefused(
                f"target: the server writes the publisher's timeline {ours}: it was started without a recovery, and"
                " nothing says where it left the publisher",
                hint=f"{_AGAIN}, and before its first start put the file standby.signal into its data directory; then"
                " SELECT pg_promote()",
            )
        parted = Joint(ours, left_lsn)
    if parted is None:
        raise TargetRefused(
            f"target: the server and the publisher have no timeline in common: the copy's first is"
            f" {min([copy.timeline, *copy.history])}",
            hint=f"{_AGAIN}, from this publisher",
        )
    return parted


def _line(timeline: int, history: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return a server's timelines in order, each with where it was left."""
    return [*sorted(history.items()), (timeline, _NEVER)]

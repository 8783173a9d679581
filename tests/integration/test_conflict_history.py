"""The history of conflicts on the target: the names of its rows."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest

from parapply.conflict.history import ConflictHistory
from parapply.conflict.kinds import Conflict, Policy, Source
from parapply.model import format_lsn
from parapply.vocabulary import ConflictOutcome, ConflictType
from tests.integration.test_state import control, made

if TYPE_CHECKING:
    from tests.fixtures.databases import Database

pytestmark = pytest.mark.each_session

_SCHEMA = "parapply"
_FIRST = Conflict(
    type=ConflictType.INSERT_EXISTS, schema="public", table="t", operation="insert", key={"id": "1"},
    remote_row={"id": "1"}, is_complete=True, local_rows=(), change_no=1, policy=Policy.SKIP,
    outcome=ConflictOutcome.SKIPPED, source=Source(xid=11, commit_lsn=0x1000, end_lsn=0x1030, commit_time_us=0),
)  # fmt: skip
#: Its commit record follows the first one's directly, and it had not come whole when the conflict was settled.
_SECOND = msgspec.structs.replace(_FIRST, source=Source(xid=12, commit_lsn=0x1030, end_lsn=0, commit_time_us=0))


def test_t68_a_large_transaction_takes_no_name_of_the_one_before(target_db: Database) -> None:
    """A commit record may lie where the transaction before it ends; both keep their conflicts, with their own ends."""

    async def run() -> None:
        async with control(target_db.dsn) as conn:
            history = ConflictHistory(_SCHEMA, await made(conn, _SCHEMA))
            for conflict in (_FIRST, _SECOND):
                await history.write(conn, conflict)
            for one in history.naming_end(_SECOND.source.commit_lsn, 0x1060):
                conn.pgconn.exec_params(one.prepared.text, list(one.parameters))

    asyncio.run(run())
    named = target_db.rows(f"SELECT remote_xid, remote_lsn::text, attempts FROM {_SCHEMA}.conflicts ORDER BY 1")
    assert named == [(11, format_lsn(0x1030), 1), (12, format_lsn(0x1060), 1)]

"""The history of conflicts on the target: the names of its rows, and what a replay makes of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest

from parapply.config import TargetConfig
from parapply.config_mapping import MappingConfig
from parapply.config_values import Secret
from parapply.conflict import listing
from parapply.conflict.asking import ask
from parapply.conflict.history import ConflictHistory
from parapply.conflict.kinds import Conflict, Policy, Source
from parapply.conflict.replay import Effect, as_lines, replay
from parapply.conflict.skips import forget_other_history
from parapply.errors import TargetRefused
from parapply.model import format_lsn, parse_lsn
from parapply.vocabulary import ConflictOutcome, ConflictType
from tests.integration.test_state import control, made

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.target.session.settings import Connection
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


async def test_t68_a_large_transaction_takes_no_name_of_the_one_before(target_db: Database) -> None:
    """A commit record may lie where the transaction before it ends; both keep their conflicts, with their own ends."""
    async with control(target_db.dsn) as conn:
        history = ConflictHistory(_SCHEMA, await made(conn, _SCHEMA))
        for conflict in (_FIRST, _SECOND):
            await history.write(conn, conflict)
        for one in history.naming_end(_SECOND.source.commit_lsn, 0x1060):
            conn.pgconn.exec_params(one.prepared.text, list(one.parameters))
    named = target_db.rows(f"SELECT remote_xid, remote_lsn::text, attempts FROM {_SCHEMA}.conflicts ORDER BY 1")
    assert named == [(11, format_lsn(0x1030), 1), (12, format_lsn(0x1060), 1)]


async def test_another_history_takes_none_of_what_was_asked_of_this_one(target_db: Database) -> None:
    """On another timeline requests and stopped conflicts above the watermark are forgotten, and nothing else.

    A command that waits for such a request says so.
    """
    later = parse_lsn("FF/FFFFFFF0") + 8  # the watermark is below
    async with control(target_db.dsn) as conn, control(target_db.dsn) as other:
        slot_id = await made(conn, _SCHEMA)
        history = ConflictHistory(_SCHEMA, slot_id)
        for end_lsn in (0x1030, later):
            for number, outcome in enumerate((ConflictOutcome.STOPPED, ConflictOutcome.SKIPPED)):
                source = Source(xid=11, commit_lsn=end_lsn - 8, end_lsn=end_lsn, commit_time_us=0)
                one = msgspec.structs.replace(_FIRST, source=source, change_no=number, outcome=outcome)
                await history.write(conn, one)
        asked = f"INSERT INTO {_SCHEMA}.skips (slot_id, lsn, outcome) VALUES ({slot_id}, '{{}}', '{{}}')"
        for lsn, status in ((format_lsn(later), "accepted"), (format_lsn(later + 8), "skipped"), ("0/1", "requested")):
            target_db.execute(asked.format(lsn, status))
        assert await forget_other_history(conn, _SCHEMA, slot_id, 1) == []
        assert target_db.rows(f"SELECT count(*) FROM {_SCHEMA}.skips") == [(3,)]
        await conn.execute(f"LISTEN parapply_{slot_id}".encode())
        waiting = asyncio.create_task(ask(other, _SCHEMA, slot_id, later, 60, source_lsn=None))
        async for _ in conn.notifies(stop_after=1):
            assert not waiting.done()
        assert await forget_other_history(conn, _SCHEMA, slot_id, 2) == [format_lsn(later)]
        with pytest.raises(TargetRefused, match="another history since") as refused:
            await waiting
        assert "ask again" in refused.value.hint
    assert target_db.rows(f"SELECT lsn::text FROM {_SCHEMA}.skips") == [("0/1",)]
    left = target_db.rows(f"SELECT remote_lsn::text, outcome FROM {_SCHEMA}.conflicts ORDER BY conflict_id")
    assert left == [("0/1030", "stopped"), ("0/1030", "skipped"), (format_lsn(later), "skipped")]


async def _kept(conn: Connection, *conflicts: Conflict) -> list[dict[str, object]]:
    """Write conflicts, and return them as a replay reads them."""
    slot_id = await made(conn, _SCHEMA)
    history = ConflictHistory(_SCHEMA, slot_id)
    for conflict in conflicts:
        await history.write(conn, conflict)
    return await listing.read(conn, _SCHEMA, slot_id, listing.Filter(), with_rows=True)


async def _replayed(conn: Connection, kept: Sequence[dict[str, object]]) -> list[Effect]:
    async with conn.transaction():
        return await replay(conn, _SCHEMA, kept, MappingConfig(), TargetConfig(dsn=Secret("")))


async def test_two_replays_of_one_conflict_insert_one_row(target_db: Database) -> None:
    """Both have read it and asked; the second finds that the first has replayed it, and applies nothing."""
    target_db.execute("CREATE TABLE t (id text)")
    async with control(target_db.dsn) as conn:
        kept = await _kept(conn, _FIRST)
        await _replayed(conn, kept)
        with pytest.raises(TargetRefused, match="was replayed or dropped since it was read"):
            await _replayed(conn, kept)
    assert target_db.rows("SELECT id FROM t") == [("1",)]


async def test_a_change_with_two_conflicts_is_one_change(target_db: Database) -> None:
    """One that stopped it, and one of its skip: the first of them replays it for both, and it is forgotten once."""
    target_db.execute("CREATE TABLE t (id text, v text); INSERT INTO t VALUES ('1', 'a'), ('1', 'a')")
    deleted = msgspec.structs.replace(_FIRST, operation="delete", key={"id": "1", "v": "a"})
    conflicts = [msgspec.structs.replace(deleted, type=kind, change_no=number) for number in (1, 2)
                 for kind in (ConflictType.DELETE_MISSING, ConflictType.SKIPPED)]  # fmt: skip
    forgotten = []
    async with control(target_db.dsn) as conn:
        kept = await _kept(conn, *conflicts)
        target_db.execute(f"UPDATE {_SCHEMA}.slots SET begin_lsn = '0/0'")
        ((slot_id,),) = target_db.rows(f"SELECT slot_id FROM {_SCHEMA}.slots")
        done = await _replayed(conn, kept[:2])
        second = listing.Filter(ids=(2,))
        again = await _replayed(conn, await listing.read(conn, _SCHEMA, slot_id, second, with_rows=True))
        for number in (1, 3, 4):
            assert await listing.drop(conn, _SCHEMA, slot_id, listing.Filter(ids=(number,))) == 1
            forgotten += target_db.rows(f"SELECT n_forgotten FROM {_SCHEMA}.slots")
    assert [(one.action, one.reason) for one in done] == [
        ("delete", ""),
        ("nothing", "conflict 1 is of the same change"),
    ]
    assert [one.reason.startswith("it was replayed at") for one in again] == [True]
    assert forgotten == [(0,), (0,), (1,)]
    assert target_db.rows("SELECT id FROM t") == [("1",)]


async def test_a_long_history_is_dropped_in_time_that_grows_with_its_length(target_db: Database) -> None:
    """In little memory too, whether all goes or half of it: the comparison of all rows with all takes minutes."""
    columns = (
        "slot_id, conflict_type, schema_name, table_name, operation, is_complete, constraints, remote_lsn, remote_xid,"
        " remote_commit_time, policy, outcome"
    )
    async with control(target_db.dsn) as conn:
        await _kept(conn, _FIRST)
        ((slot_id,),) = target_db.rows(f"UPDATE {_SCHEMA}.slots SET begin_lsn = '0/0' RETURNING slot_id")
        target_db.execute(
            f"INSERT INTO {_SCHEMA}.conflicts ({columns}, change_no) SELECT {columns}, n FROM {_SCHEMA}.conflicts,"
            f" generate_series(2, 24000) AS n; ANALYZE {_SCHEMA}.conflicts"
        )
        await conn.execute("SET work_mem = '64kB'; SET statement_timeout = '20s'")
        await ConflictHistory(_SCHEMA, slot_id).prune(conn, 3600, 12_000)
        assert target_db.rows(f"SELECT n_forgotten FROM {_SCHEMA}.slots") == [(12_000,)]
        assert await listing.drop(conn, _SCHEMA, slot_id, listing.Filter()) == 12_000
    assert target_db.rows(f"SELECT n_forgotten FROM {_SCHEMA}.slots") == [(24_000,)]


async def test_a_replayed_delete_of_a_null_takes_no_composite_of_nulls(target_db: Database) -> None:
    """Without a key rows are found by their values, and a composite of NULLs is another one."""
    target_db.execute("CREATE TYPE two AS (x int, y int); CREATE TABLE t (c two); INSERT INTO t VALUES ((NULL, NULL))")
    deleted = msgspec.structs.replace(_FIRST, operation="delete", key={"c": None})
    async with control(target_db.dsn) as conn:
        (effect,) = await _replayed(conn, await _kept(conn, deleted))
    assert (effect.action, effect.reason) == ("nothing", "the row is not there")


async def test_a_replayed_change_that_a_trigger_leaves_out_is_not_said_to_be_applied(target_db: Database) -> None:
    """It does nothing, for a reason, and is not marked; so of insert, update and delete."""
    target_db.execute(
        "CREATE TABLE t (id text PRIMARY KEY, v text); INSERT INTO t VALUES ('2', 'a'), ('3', 'a');"
        "CREATE FUNCTION veto() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
        "CREATE TRIGGER veto BEFORE INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION veto();"
        "ALTER TABLE t ENABLE ALWAYS TRIGGER veto"
    )
    changes = [
        msgspec.structs.replace(_FIRST, operation=operation, change_no=number, key={"id": str(number)},
                                remote_row={"id": str(number), "v": "b"})
        for number, operation in enumerate(("insert", "update", "delete"), 1)
    ]  # fmt: skip
    async with control(target_db.dsn) as conn:
        done = await _replayed(conn, await _kept(conn, *changes))
    assert [(one.action, one.reason) for one in done] == [("nothing", "code on the target left it out")] * 3
    assert target_db.rows(f"SELECT count(*) FROM {_SCHEMA}.conflicts WHERE replayed_at IS NOT NULL") == [(0,)]


async def test_a_replayed_truncate_without_its_tables_is_refused(target_db: Database) -> None:
    """A name with characters that the target's encoding lacks is left out; then nothing would be emptied, and said."""
    target_db.execute("CREATE TABLE t (id text)")
    emptied = msgspec.structs.replace(_FIRST, operation="truncate", key={}, remote_row=None, is_complete=False)
    async with control(target_db.dsn) as conn:
        with pytest.raises(TargetRefused, match="the names of its tables could not be kept"):
            await _replayed(conn, await _kept(conn, emptied))


async def test_a_replay_of_values_that_were_not_kept_says_so(target_db: Database) -> None:
    """The values of the row's other columns are written; a row that only they would find is not guessed."""
    target_db.execute("CREATE TABLE t (id text PRIMARY KEY, v text, w text); INSERT INTO t VALUES ('1', 'a', 'a')")
    cut = msgspec.structs.replace(_FIRST, remote_row={"id": "1", "v": "b"}, is_complete=False)
    async with control(target_db.dsn) as conn:
        kept = await _kept(conn, cut)
        (effect,) = await _replayed(conn, kept)
        await conn.execute("ALTER TABLE public.t DROP CONSTRAINT t_pkey")
        deleted = {**kept[0], "operation": "delete", "replayed_at": None}
        await conn.execute(f"UPDATE {_SCHEMA}.conflicts SET replayed_at = NULL".encode())
        with pytest.raises(TargetRefused, match="a value could not be kept, so its row cannot be found"):
            await _replayed(conn, [deleted])
        lines = as_lines(effect)
        await conn.execute("ALTER TABLE public.t ADD PRIMARY KEY (id, v)")
        with pytest.raises(TargetRefused, match="a value could not be kept, so its row cannot be found"):
            await _replayed(conn, [deleted])
    assert "columns without a value here stay as they were" in lines[1]
    assert target_db.rows("SELECT * FROM t") == [("1", "b", "a")]

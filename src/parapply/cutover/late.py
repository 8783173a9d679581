"""Transactions of the source that the target has not applied: asked of the slot itself, once no daemon reads it.

In: a plain session on the source. Out: how many there are. The slot stays where it is.

Source: PostgreSQL manual, "Replication Management Functions"; "Logical Replication Message Formats", Begin.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from parapply.check.server import read_rows
from parapply.cutover import fence
from parapply.errors import SlotBusy
from parapply.source import slot
from parapply.source.options import start_options
from parapply.source.slot import source_errors
from parapply.state_mark import STATE_SCHEMAS_SQL
from parapply.wire.ddl_queue import QUEUE

if TYPE_CHECKING:
    from parapply.config import Config
    from parapply.source.slot import Connection

#: Seconds between two looks at a slot that is about to be left.
_POLL_S: Final = 0.01
#: Seconds until the process that sends the stream is ended: a daemon that is stopped (SIGSTOP) holds it.
_PATIENCE_S: Final = 3.0

# The messages Begin and Begin Prepare, with the LSN of the record of the commit or the PREPARE, and Insert, Update,
# Delete, Truncate, with tables' OIDs. Transactions without a change of a
# published table send none.
_CHANGES: Final = """
SELECT pg_catalog.get_byte(data, 0),
       pg_catalog.substr(data, 2, CASE pg_catalog.get_byte(data, 0) WHEN 84 THEN pg_catalog.length(data) ELSE 8 END)
  FROM pg_catalog.pg_logical_slot_peek_binary_changes($1::name, NULL, NULL, VARIADIC $2::text[])
 WHERE pg_catalog.get_byte(data, 0) IN (66, 98, 73, 85, 68, 84)"""
_BEGIN, _BEGIN_PREPARE, _TRUNCATE = b"BbT"
# A publication FOR ALL TABLES also has the state of the way back, which the cut-over itself writes there.
_OWN: Final = f"""
SELECT c.oid::bigint FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND n.nspname IN (SELECT schema_name FROM {STATE_SCHEMAS_SQL} AS own)
   AND (n.nspname, c.relname) <> ($1::name, $2::name)"""  # noqa: S608  a constant


async def wait_until_unread(source: Connection, slot_name: str, deadline_s: float) -> None:
    """Return once no process reads the slot.

    Raises:
        SlotBusy: one still does.
        SourceRefused, SourceLost: as `slot.read_slot`; the process could not be ended.
    """
    patience_s = time.monotonic() + _PATIENCE_S
    while (found := await slot.read_slot(source, slot_name)) and found.active_pid is not None:
        now_s = time.monotonic()
        if now_s >= deadline_s:
            raise SlotBusy(f"slot {slot_name!r} is in use by process {found.active_pid}", hint="stop its reader")
        if now_s >= patience_s:
            with source_errors("ending the sender of the slot"):
                await source.execute(f"SELECT pg_catalog.pg_terminate_backend({found.active_pid:d})".encode())
            patience_s = now_s + _PATIENCE_S
        await asyncio.sleep(_POLL_S)


async def count(source: Connection, config: Config, low_lsn: int) -> int:
    """Return how many transactions with published changes have committed on the source and are not on the target.

    Raises:
        SlotBusy: a process reads the slot.
        SourceRefused, SourceLost: it could not be read.
    """
    version, wanted = source.info.server_version, config.source
    found = start_options(version, wanted.publications, wanted.origin, two_phase=wanted.two_phase)
    words = [word for pair in found for word in pair]
    # WAL may be flushed to the end of a page, within a record. The slot is read up to there and waits for the rest,
    # which a fenced server flushes after 15 s. A durable commit flushes it now.
    await fence.mark(source)
    with source_errors("reading what came after the fence"):
        changes = await read_rows(source, _CHANGES, [config.source.slot, words])
        own = {oid for (oid,) in await read_rows(source, _OWN, list(QUEUE))}
    late: set[int] = set()
    commit_lsn = 0
    for kind, data in changes:
        if kind in {_BEGIN, _BEGIN_PREPARE}:
            commit_lsn = int.from_bytes(bytes(data))
        # A transaction that ends at the watermark has its commit record before it.
        elif commit_lsn >= low_lsn and not own.issuperset(_tables(kind, bytes(data))):
            late.add(commit_lsn)
    return len(late)


def _tables(kind: int, data: bytes) -> list[int]:
    """Return the OIDs of the tables that a message changes: a Truncate has their number and its options before them."""
    if kind != _TRUNCATE:
        return [int.from_bytes(data[:4])]
    count = int.from_bytes(data[:4])
    return [int.from_bytes(data[start : start + 4]) for start in range(5, 5 + 4 * count, 4)]

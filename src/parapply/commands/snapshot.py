"""`parapply snapshot`: takes snapshots, prints them, keeps them while a command runs or until it is stopped.

Several targets of one publisher are cut at one LSN: each daemon first stops at its position, and all of them go on to
the furthest of these. `runtime/control/requests.py` is the other side.

In: configurations and options. Out: a line for each target, or a JSON document; the exit code of the command.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Final

import click
import msgspec
from psycopg import sql

from parapply import connect
from parapply.conflict.history import CHANGE, LEFT_OUT
from parapply.errors import ParapplyError, TargetLost, TargetRefused
from parapply.model import format_lsn
from parapply.target.session import lease, settings
from parapply.target.state import copies, requests
from parapply.target.state import slots as state

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from parapply.config import Config
    from parapply.target.session.settings import Connection
    from parapply.target.state.requests import SnapshotRequest

#: Environment of the command; of the second target on with _2, _3 ... behind the name.
_SNAPSHOT_VARIABLE = "PARAPPLY_SNAPSHOT"
_LSN_VARIABLE = "PARAPPLY_LSN"
#: Seconds between two looks at a request without a notification.
_LOOK_S = 0.5
#: Where a heal is of a later LSN, nothing is missing.
_LEFT_OUT: Final = (
    f"SELECT s.n_forgotten, (SELECT pg_catalog.count(DISTINCT ({', '.join(CHANGE)})) FROM {{s}}.conflicts"  # noqa: S608  own text
    f" WHERE conflicts.slot_id = s.slot_id AND remote_lsn > s.begin_lsn AND {LEFT_OUT})"
    " FROM {s}.slots AS s WHERE s.slot_id = $1::int"
)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that can be imported while the block lasts."""

    name: str  # for SET TRANSACTION SNAPSHOT and pg_dump --snapshot
    at_lsn: int  # of the publisher: every transaction that ends here or before is in it, and no other
    pause_s: float  # for which nothing later was applied
    slot_name: str
    n_left_out: int  # changes that a policy or a skip has left out: the publisher has them
    n_forgotten: int  # of them that the history no longer holds


@asynccontextmanager
async def snapshots(
    configs: Sequence[Config],
    *,
    lsn: int | None = None,
    choose: Callable[[int], Awaitable[int]] | None = None,
    timeout_s: float,
) -> AsyncIterator[list[Snapshot]]:
    """Take a snapshot of each target, all at the same LSN.

    Args:
        configs: targets and slots; the sources are not connected to.
        lsn: of the publisher; None for the earliest that is possible.
        choose: called with a position where all daemons can pause, and do; returns the LSN to go to, not before that.
        timeout_s: how long to wait for the LSN and the daemons.

    Raises:
        ParapplyError: not there in time; exit code 1.
        TargetRefused: no daemon runs, the LSN is in the past, or tables are not copied yet.
    """
    stands = choose is not None or (lsn is None and len(configs) > 1)
    deadline_s = time.monotonic() + timeout_s
    async with AsyncExitStack() as stack:
        asked = [await stack.enter_async_context(_asking(config, deadline_s)) for config in configs]
        for one in asked:
            await one.ask(lsn, stands=stands)
        if stands:
            standing = [await one.wait_for("standing") for one in asked]
            lsn = max(request.at_lsn or 0 for request in standing)
            if choose is not None:
                lsn = await choose(lsn)
            for one in asked:
                await one.go(lsn)
        yield [await one.take() for one in asked]


@asynccontextmanager
async def _asking(config: Config, deadline_s: float) -> AsyncIterator[_Asking]:
    async with AsyncExitStack() as stack:
        asking = await stack.enter_async_context(await connect.open_target(config, "asking"))
        keeping = await stack.enter_async_context(await connect.open_target(config, "snapshot"))
        schema, name = config.target.state_schema, config.source.slot
        query = state.in_schema("SELECT slot_id FROM {s}.slots WHERE slot_name = $1", schema)
        await state.has_schema(asking, schema)  # refuses another version
        with settings.target_errors("looking for the slot"):
            found = await settings.rows(asking, query, [name])
        if len(found) != 1:
            raise TargetRefused(f"the target knows nothing of slot {name!r}", hint="run `parapply init`")
        slot_id = int(found[0][0])
        if not await _has_daemon(asking, slot_id):
            raise TargetRefused(
                f"no daemon applies slot {name!r}: a snapshot at an LSN is its work", hint="start `parapply run`"
            )
        await requests.listen(asking, copies.channel(slot_id))
        one = _Asking(asking, keeping, schema, slot_id, name, deadline_s)
        try:
            yield one
        finally:
            await one.withdraw()


async def _has_daemon(conn: Connection, slot_id: int) -> bool:
    return any(holder.is_leader for holder in await lease.holders(conn, slot_id))


class _Asking:
    def __init__(  # noqa: PLR0913, PLR0917  one place makes it
        self, asking: Connection, keeping: Connection, schema: str, slot_id: int, slot_name: str, deadline_s: float
    ) -> None:
        self._asking = asking
        self._keeping = keeping
        self._schema = schema
        self._slot_id = slot_id
        self._slot_name = slot_name
        self._deadline_s = deadline_s
        self._request_id = 0

    async def ask(self, lsn: int | None, *, stands: bool) -> None:
        self._request_id = await requests.ask(self._asking, self._schema, self._slot_id, lsn, stands=stands)

    async def go(self, lsn: int) -> None:
        await requests.answer(self._asking, self._schema, self._slot_id, self._request_id, "go", lsn=lsn)

    async def wait_for(self, wanted: str) -> SnapshotRequest:
        """Return the request when the daemon has brought it to a state."""
        while True:
            found = await requests.read(self._asking, self._schema, self._request_id)
            if found is None:
                raise TargetLost("target: the request for a snapshot is gone")
            if found.state == wanted:
                return found
            if found.state == "refused":
                raise TargetRefused(
                    f"slot {self._slot_name!r}: {found.reason}", hint="ask for a later LSN, or for none"
                )
            # One that is not begun is the next daemon's, which refuses all others.
            if found.state != "asked" and not await _has_daemon(self._asking, self._slot_id):
                raise TargetRefused(
                    f"slot {self._slot_name!r}: the daemon ended while it made the snapshot",
                    hint="start `parapply run`, and give the command again",
                )
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                where = f"{format_lsn(found.lsn)} " if found.lsn is not None else ""
                raise ParapplyError(
                    f"slot {self._slot_name!r}: no snapshot {where}in time, the request is {found.state}",
                    hint="see `parapply status`; give a longer --timeout, or an LSN that the publisher has reached",
                )
            await requests.wait_for_call(self._asking, min(_LOOK_S, left_s))

    async def take(self) -> Snapshot:
        """Import the snapshot that the daemon has exported, so that the daemon can release it."""
        ready = await self.wait_for("ready")
        assert ready.snapshot_name is not None
        assert ready.at_lsn is not None
        with settings.target_errors("importing the snapshot"):
            await self._keeping.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            await self._keeping.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(ready.snapshot_name)))
            ((name,),) = await settings.rows(self._keeping, sql.SQL("SELECT pg_catalog.pg_export_snapshot()"))
        await requests.answer(self._asking, self._schema, self._slot_id, self._request_id, "taken")
        with settings.target_errors("reading the history of conflicts"):
            query = state.in_schema(_LEFT_OUT, self._schema)
            ((n_forgotten, n_kept),) = await settings.rows(self._keeping, query, [self._slot_id])
        return Snapshot(
            name=name,
            at_lsn=ready.at_lsn,
            pause_s=ready.pause_s or 0.0,
            slot_name=self._slot_name,
            n_left_out=n_kept + n_forgotten,
            n_forgotten=n_forgotten,
        )

    async def withdraw(self) -> None:
        """Take the request back; the daemon does it for a session that is gone."""
        if self._request_id and not self._asking.closed:
            try:
                await asyncio.shield(requests.withdraw(self._asking, self._schema, self._slot_id, self._request_id))
            except (TargetLost, TargetRefused):
                return


async def run(
    configs: Sequence[Config], lsn: int | None, timeout_s: float, command: Sequence[str], *, as_json: bool
) -> int:
    """Take the snapshots and keep them; return the command's exit code, or 0.

    Raises:
        ParapplyError, TargetRefused, TargetLost: as `ask.snapshots`.
    """
    async with snapshots(configs, lsn=lsn, timeout_s=timeout_s) as taken:
        if as_json:
            click.echo(json.dumps([_document(one) for one in taken]))
        else:
            for one in taken:
                click.echo(
                    f"slot {one.slot_name}: snapshot {one.name} equals the publisher at {format_lsn(one.at_lsn)}"
                    f"{_but_for(one)} (paused {one.pause_s * 1000:.1f} ms)"
                )
        if command:
            return await _run_command(command, taken)
        if not as_json:
            click.echo("kept until Ctrl-C or SIGTERM", err=True)
        await _signalled()
        return 0


def _but_for(one: Snapshot) -> str:
    if not one.n_left_out:
        return ""
    changes = "1 change that was" if one.n_left_out == 1 else f"{one.n_left_out} changes that were"
    gone = f", which no longer has {one.n_forgotten} of them" if one.n_forgotten else ""
    return f", but for {changes} left out (`parapply conflicts list`{gone})"


def _document(one: Snapshot) -> dict[str, str | float]:
    return {
        "slot_name": one.slot_name,
        "snapshot": one.name,
        "at_lsn": format_lsn(one.at_lsn),
        "pause_s": round(one.pause_s, 6),
        "n_left_out": one.n_left_out,
        "n_forgotten": one.n_forgotten,
    }


async def _run_command(command: Sequence[str], taken: Sequence[Snapshot]) -> int:
    variables = dict(os.environ)
    for number, one in enumerate(taken, 1):
        behind = f"_{number}" if number > 1 else ""
        variables[_SNAPSHOT_VARIABLE + behind] = one.name
        variables[_LSN_VARIABLE + behind] = format_lsn(one.at_lsn)
    try:
        process = await asyncio.create_subprocess_exec(*command, env=variables)
    except OSError as error:
        raise click.UsageError(f"{command[0]}: {error.strerror}") from error
    return await process.wait()


async def _signalled() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()

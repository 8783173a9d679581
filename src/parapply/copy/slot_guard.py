"""The WAL that the slot keeps while tables are copied (`source.retained_wal_limit_bytes`).

A copy keeps WAL in three ways. A daemon that applies the slot stops at the first change of a table that is being
copied, and the slot with it. The snapshot comes from a temporary slot, which keeps the WAL from there on until the copy
ends. And without a daemon no process reads the slot at all. Its snapshots also keep vacuum on the publisher from its
work.

So a copy that pauses gives all of that up: it ends its sessions and its lock. Then the daemon leaves the changes of its
tables out and goes on. Complete tables stay, and the copy goes on with a new snapshot. Without a daemon a pause would
free nothing, and is only warned about.

In: the configuration and a copy under way. Out: its end, or the reason why it was interrupted.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import click

from parapply import connect, retention
from parapply.commands import lifecycle
from parapply.errors import WalLimitReached
from parapply.target.session import lease
from parapply.tasks import end_tasks

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from parapply.config import Config

#: Seconds between two looks at the slot.
_LOOK_S: Final = 2.0
#: A copy goes on when the slot keeps no more than this part of the limit.
_GO_ON_PART: Final = 0.5
_NO_DAEMON: Final = ". No daemon reads the slot: `parapply run` may run beside a copy"


class CopyPaused(Exception):
    """A copy was interrupted until the slot keeps less WAL."""


async def guarded(config: Config, slot_id: int, work: Coroutine[None, None, None]) -> None:
    """Do the work of a copy as long as the slot keeps no more WAL than allowed.

    Raises:
        CopyPaused: the work was interrupted, and can go on later.
        SlotLost: it was interrupted, and the slot dropped.
        ParapplyError: of the work.
    """
    if not retention.wal_limit(config.source).limit_bytes:
        await work
        return
    copying = asyncio.create_task(work, name="copy")
    guard = asyncio.create_task(_watch(config, slot_id), name="copy-guard")
    try:
        await asyncio.wait({copying, guard}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks([guard, copying])
    if not copying.cancelled():
        copying.result()
        return
    try:
        guard.result()
    except WalLimitReached:
        if (lost := await retention.give_up(config, lifecycle.say_whom_it_waits_for)) is not None:
            raise lost from None
        raise


async def until_free(config: Config, slot_id: int) -> None:
    """Return when a copy that was paused may go on; warn if no daemon frees WAL."""
    allowed_bytes = retention.wal_limit(config.source).limit_bytes * _GO_ON_PART
    has_daemon = True
    async with connect.open_both(config, "guard") as ends:
        while True:
            found, flush_lsn = await retention.look(ends.source, config.source.slot)
            if found is None or (found.retained_bytes(flush_lsn) or 0) <= allowed_bytes:
                return
            had_daemon, has_daemon = has_daemon, bool(await lease.holders(ends.target, slot_id))
            if had_daemon and not has_daemon:
                click.echo(f"warning: the copy waits until the slot keeps less WAL{_NO_DAEMON}", err=True)
            await asyncio.sleep(_LOOK_S)


async def _watch(config: Config, slot_id: int) -> None:
    """Look until the copy is to be interrupted; raise CopyPaused or WalLimitReached, the reason."""
    limit = retention.wal_limit(config.source)
    is_told = False
    async with connect.open_both(config, "guard") as ends:
        while True:
            found, flush_lsn = await retention.look(ends.source, config.source.slot)
            kept_bytes = limit.exceeded_bytes(found, flush_lsn)
            if kept_bytes is not None:
                has_daemon = bool(await lease.holders(ends.target, slot_id))
                if limit.action == "pause_copy" and has_daemon:
                    click.echo(f"the copy pauses: {limit.words(kept_bytes)}", err=True)
                    raise CopyPaused
                if limit.action == "drop_slot" and not has_daemon:
                    raise WalLimitReached(limit.words(kept_bytes))
                if not is_told:
                    is_told = True
                    click.echo(f"warning: {limit.words(kept_bytes)}{'' if has_daemon else _NO_DAEMON}", err=True)
            await asyncio.sleep(_LOOK_S)

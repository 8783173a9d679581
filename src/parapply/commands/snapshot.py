"""`parapply snapshot`: takes snapshots, prints them, keeps them while a command runs or until it is stopped.

In: configurations and options. Out: a line for each target, or a JSON document; the exit code of the command.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING

import click

from parapply.commands.snapshot_client import snapshots
from parapply.model import format_lsn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.commands.snapshot_client import Snapshot
    from parapply.config import Config

#: Environment of the command; of the second target on with _2, _3 ... behind the name.
_SNAPSHOT_VARIABLE = "PARAPPLY_SNAPSHOT"
_LSN_VARIABLE = "PARAPPLY_LSN"


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
    return f", but for {changes} left out (`parapply conflicts list`)"


def _document(one: Snapshot) -> dict[str, str | float]:
    return {
        "slot_name": one.slot_name,
        "snapshot": one.name,
        "at_lsn": format_lsn(one.at_lsn),
        "pause_s": round(one.pause_s, 6),
        "n_left_out": one.n_left_out,
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

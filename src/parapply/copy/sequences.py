"""`parapply sequences`: the publisher's sequence values brought to the target, for the cut-over.

In: the configuration and options. Out: a line for each sequence that moved or could not, or a JSON document.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click
import msgspec

from parapply import connect
from parapply.printable import printable
from parapply.sequences import carry
from parapply.source import slot
from parapply.target.state import cutovers, schema
from parapply.target.state import slots as state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.config import Config
    from parapply.sequences import SequenceOptions, SequenceOutcome
    from parapply.target.session.settings import Connection

_INCOMPLETE = 1


async def bring(
    config: Config, how: SequenceOptions, *, ends: connect.Connections | None = None, as_json: bool = False
) -> int:
    """Copy and report; return 0, or 1 if a sequence is missing on the target or could not be set.

    Without `ends` it opens sessions of its own.
    """
    async with connect.open_both(config, "sequences") if ends is None else nullcontext(ends) as open_ends:
        outcomes = await _copy(config, how, open_ends)
    _print(outcomes, is_dry=how.is_dry, as_json=as_json)
    return _INCOMPLETE if any(not one.is_carried for one in outcomes) else 0


async def _copy(config: Config, how: SequenceOptions, ends: connect.Connections) -> list[SequenceOutcome]:
    await schema.has_schema(ends.target, config.target.state_schema)  # another version's commands are not ours
    if not how.is_dry:
        await connect.check_back(config, ends.source, await slot.inspect(ends.source, config.source.slot))
        await _check_not_cut_over(config, ends.target)
    return await carry(ends, how)


async def _check_not_cut_over(config: Config, target: Connection) -> None:
    """Refuse a target that clients take values from; no state is needed otherwise."""
    schema, name = config.target.state_schema, config.source.slot
    if await state.has_schema(target, schema):
        for slot_id in await state.find_slots(target, schema, name):
            await cutovers.check_may_write(target, schema, slot_id, name)


def _print(outcomes: Sequence[SequenceOutcome], *, is_dry: bool, as_json: bool) -> None:
    if as_json:
        document: list[Any] = [msgspec.to_builtins(one) for one in outcomes]
        click.echo(json.dumps({"is_dry": is_dry, "sequences": document}, indent=2))
        return
    for one in outcomes:
        name = printable(f"{one.schema_name}.{one.sequence_name}")
        if one.outcome == "moved" and one.before and one.after:
            click.echo(f"{name}: {one.before.last_value} -> {one.after.last_value}")
        elif one.outcome == "ahead" and one.before:
            click.echo(f"{name}: stays at {one.before.last_value}, which is ahead of the source")
        elif one.reason:
            click.echo(f"{name}: {one.outcome}: {printable(one.reason)}")
    moved = sum(one.outcome == "moved" for one in outcomes)
    would = "would move" if is_dry else "moved"
    click.echo(f"{len(outcomes)} sequences, {moved} {would}")

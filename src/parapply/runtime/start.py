"""The start of a daemon: both ends are being opened while most of its modules are loaded, which takes as long."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from parapply.runtime.first_sessions import FirstSessions
from parapply.tasks import load_modules

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.config import Config
    from parapply.model import Until
    from parapply.runtime.daemon import Heal

#: Modules of the daemon, in steps of a millisecond or two: each with those that it imports and the ones before did not.
_MODULES: Final = (
    "source.refusals",
    "target.session.prepared",
    "plan.table",
    "target.catalogue.query",
    "conflict.policies",
    "target.state.slots",
    "plan.table_changes",
    "target.state.copies",
    "connect",
    "applylog",
    "metrics.figures",
    "runtime.observe.gauges",
    "engine.job",
    "runtime.observe.health",
    "target.sql.statements",
    "runtime.worker_sessions",
    "source.stream",
    "source.catch_up_stream",
    "continuity",
    "runtime.sessions",
    "runtime.daemon",
)
#: Seconds at most until the target is asked before they are loaded: longer than a server takes that is near.
_ASKING_S: Final = 0.02


def run(config: Config, load: Callable[[], Config], until: Until, *, takeover: bool, heal: Heal) -> int:
    """Run a daemon; as `runtime.daemon.run`."""
    return asyncio.run(_run(config, load, until, takeover=takeover, heal=heal))


async def _run(config: Config, load: Callable[[], Config], until: Until, *, takeover: bool, heal: Heal) -> int:
    first = FirstSessions(config)
    try:
        # The target plans its description of the tables for as long as the other modules are loaded.
        await asyncio.wait({first.asking}, timeout=_ASKING_S)
        await load_modules(_MODULES)
        from parapply.runtime import daemon  # noqa: PLC0415  loaded by then

        return await daemon.run(config, load, until, takeover=takeover, heal=heal, first=first)
    finally:
        await first.close()

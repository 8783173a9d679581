"""Sequences carried along while the daemon runs: `sequences.interval_s`.

It opens separate sessions for as long as it takes, because a sequence that is being altered is locked, and neither the
stream nor the displays may wait for that.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from parapply import connect
from parapply.errors import ParapplyError
from parapply.logs import get_logger
from parapply.runtime.tables.copied import DailyWarnings
from parapply.sequences import SequenceOptions, carry

if TYPE_CHECKING:
    from parapply.blocked import BlockedSession
    from parapply.config import Config

#: Seconds for one round.
_LIMIT_S: Final = 60.0


def _leave_to_daemon(_: BlockedSession) -> None:
    """The daemon looks after all of its sessions."""


class SequenceCarrier:
    """All fields are written by its own task."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._warnings = DailyWarnings()
        self._failures = DailyWarnings()
        self._clock = asyncio.get_running_loop().time
        self._log = get_logger()

    async def run(self) -> None:
        """Carry sequences forward in intervals until cancelled; a failure is a warning, and is tried again."""
        while True:
            failure = await self._carry()
            for _, text in self._failures.due([("", failure)] if failure else [], self._clock()):
                self._log.warning("sequences_not_carried", error=text)
            await asyncio.sleep(self._config.sequences.interval_s)

    async def _carry(self) -> str:
        """Do one round; return why nothing could be carried, empty if it could."""
        try:
            async with (
                asyncio.timeout(_LIMIT_S),
                connect.open_both(self._config, "sequences", _leave_to_daemon) as ends,
            ):
                outcomes = await carry(ends, SequenceOptions())
        except ParapplyError as error:
            # Tasks that need a lost end notice the loss themselves.
            return error.line()
        except TimeoutError:
            return f"not done in {_LIMIT_S:g} s: one may be locked"
        left = {(one.schema_name, one.sequence_name): one.reason for one in outcomes if not one.is_carried}
        for name in self._warnings.due(left, self._clock()):
            self._log.warning("sequence_missing", relation=".".join(name), reason=left[name])
        return ""

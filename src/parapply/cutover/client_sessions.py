"""The clients' sessions of a cut-over: kept from writing on the source, and let in again, there or on the target.

The fence is the setting of the database (`fence.py`) or a command of the operator's.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from parapply.amounts import few
from parapply.cutover import fence
from parapply.errors import ConfigError, ParapplyError
from parapply.logs import redact_text

if TYPE_CHECKING:
    from datetime import datetime

    from parapply.cutover.look import CutoverLook
    from parapply.source.slot import Connection

#: Seconds that sessions from behind a fence may take to end.
_READERS_S: Final = 5.0


class ClientSessions:
    """The sessions that write on the source, and those that will on the target."""

    def __init__(self, source: Connection, look: CutoverLook, command: str) -> None:
        self._source = source
        self._look = look
        self._command = command
        #: By this call, and not by a command of the operator's.
        self._fenced_at: datetime | None = None

    @property
    def kind(self) -> str:
        """Return the kind of the fence."""
        return fence.COMMAND if self._command else fence.DATABASE

    async def keep_out(self, deadline_s: float) -> str:
        """Keep them from the source, also behind a fence that stands, and return how, in words.

        Raises:
            SourceRefused, SourceLost, ParapplyError: as `fence.put_up` and `fence.end_writers`, or the command failed.
        """
        if self._command:
            await fence.run_command(self._command, self._source, is_on=True)
            return "by --fence-command"
        self._fenced_at = await fence.put_up(self._source, deadline_s)
        n_ended = await fence.end_writers(
            self._source, await self._look.kept(with_daemon=True), self._fenced_at, deadline_s
        )
        return f"the source's database {self._source.info.dbname!r} is read only, {n_ended} sessions ended"

    async def end_others(self, deadline_s: float) -> None:
        """End what has a name like the daemon's, which is gone, and is another program's.

        Raises:
            SourceRefused, SourceLost, ParapplyError: as `fence.end_writers`.
        """
        if self._fenced_at is not None:
            kept = await self._look.kept(with_daemon=False)
            await fence.end_writers(self._source, kept, self._fenced_at, deadline_s)

    async def let_in(self, kind: str, conn: Connection) -> None:
        """Lift a fence.

        Raises:
            ConfigError: it was a command's, and none is given.
            SourceRefused, SourceLost, ParapplyError: it could not be lifted.
        """
        if kind == fence.COMMAND:
            if not self._command:
                raise ConfigError("the fence was a command's, which has to lift it: --fence-command")
            await fence.run_command(self._command, conn, is_on=False)
        elif kind == fence.DATABASE:
            lifted_at = await fence.lift_fence(conn)
            try:
                kept = await self._look.kept(with_daemon=True)
                left = await fence.end_readers(conn, kept, lifted_at, time.monotonic() + _READERS_S)
            except ParapplyError as error:
                left = [redact_text(error.line())]
            if left:
                self._look.warn(f"sessions that began behind the fence stay read only: {few(left)}")

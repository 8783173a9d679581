"""Opens a capture and its scratch target for the ordinary daemon: the files answer what is asked of a publisher.

A capture has no catalogue. The scratch target's, which has no publications, stands for it, so that every table is taken
as the stream announces it. It reads the capture's tables ahead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply import connect
from parapply.capture.stream import CapturedStream
from parapply.errors import TargetRefused
from parapply.runtime.sessions import Connector
from parapply.source import slot
from parapply.target.state import slots as state

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AsyncExitStack

    from parapply.capture.lateness import Lateness
    from parapply.capture.records import CaptureStart
    from parapply.capture.stream import Read
    from parapply.config import Config
    from parapply.engine.shares import Share
    from parapply.source.slot_stream import SlotStream
    from parapply.target.session import settings


class CapturedConnector(Connector):
    """Opens the same capture again and again."""

    def __init__(  # noqa: PLR0913  two of the daemon, four of the replay
        self,
        config: Config,
        share: Share,
        *,
        start: CaptureStart,
        read: Read,
        lateness: Lateness,
        tables: Sequence[tuple[str, str]],
    ) -> None:
        super().__init__(config, share, takeover=False)
        self._tables = tables
        self._start_record = start
        self._read = read
        self._lateness = lateness

    def take_whole(self, end_lsn: int) -> None:
        """Do nothing: the files hold each transaction in one way only."""

    def _facts(self) -> slot.SourceFacts:
        start = self._start_record
        return slot.SourceFacts(
            system_identifier=start.system_identifier, timeline=start.timeline, database=start.database,
            server_version_num=start.server_version_num, wal_level="logical", is_in_recovery=False,
            wal_sender_timeout_s=0.0, decoding_memory_bytes=0, flush_lsn=self._read.places[-1].header.end_lsn,
            slot=None,
        )  # fmt: skip

    async def _look(self, stack: AsyncExitStack) -> tuple[slot.Connection, slot.SourceFacts]:
        login = self._config.target.login
        conn = await stack.enter_async_context(await slot.connect(login, application_name="parapply replay"))
        return conn, self._facts()

    async def _published_tables(self, looking: object) -> Sequence[tuple[str, str]]:  # noqa: ARG002  known already
        return self._tables

    async def _adopt(self, source: slot.Connection, control: settings.Connection) -> state.SlotState:  # noqa: ARG002
        schema, facts = self._config.target.state_schema, self._facts()
        begin_lsn = next(place.header.end_lsn for place in self._read.places if place.header.end_lsn)
        await state.create(control, schema, connect.new_slot(self._config, facts, begin_lsn))
        return await self._known(control)

    async def _known(self, control: settings.Connection) -> state.SlotState:
        identifier, name = self._start_record.system_identifier, self._config.source.slot
        found = await state.load(control, self._config.target.state_schema, name, identifier)
        if found is None:
            raise TargetRefused("the state of the replay was removed", hint="run one replay at a time")
        return found

    async def _recover(
        self,
        control: settings.Connection,
        source: slot.Connection,  # noqa: ARG002  nothing is asked
        first_look: slot.SourceFacts,
        slot_id: int,  # noqa: ARG002  one state is in a scratch database
    ) -> tuple[slot.SourceFacts, state.SlotState, frozenset[str]]:
        return first_look, await self._known(control), frozenset(self._start_record.operations)

    async def _connect_stream(
        self,
        stack: AsyncExitStack,
        asked: slot.Connection,  # noqa: ARG002
        facts: slot.SourceFacts,  # noqa: ARG002
    ) -> SlotStream:
        stream = CapturedStream(self._read, self._lateness)
        stack.push_async_callback(stream.close)
        return stream

    async def _start(  # noqa: PLR0913  as the one that it stands for
        self,
        connecting: asyncio.Task[SlotStream],
        source_conn: slot.Connection,  # noqa: ARG002
        facts: slot.SourceFacts,  # noqa: ARG002
        found: state.SlotState,
        streaming: str,  # noqa: ARG002
        *,
        two_phase: bool,  # noqa: ARG002
    ) -> SlotStream:
        stream = await connecting
        assert isinstance(stream, CapturedStream), "it was opened here"
        stream.begin(found.resume_lsn)
        return stream

    def _asking(
        self,
        source: slot.Connection,  # noqa: ARG002
        stream: SlotStream,
    ) -> Callable[[], Awaitable[slot.SourcePosition]]:
        assert isinstance(stream, CapturedStream), "it was opened here"
        return stream.position

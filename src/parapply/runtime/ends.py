"""Both ends of one epoch: every session the daemon needs, opened in the order that makes them safe, closed together.

The order matters. The lease first, so that no other daemon goes on; then the fence, which waits until the last session
of an earlier daemon is gone, commits in doubt included; only then is the state read, and the publisher checked against
it; the stream and the workers last, all at the same time (traps T-14, T-15, F18, F20). Only the desk, which just asks,
opens beside all this.
"""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psycopg import sql

from parapply import __version__, probes
from parapply.errors import ParapplyError, TargetLost, TargetRefused
from parapply.logs import get_logger
from parapply.model import format_lsn
from parapply.runtime import operations
from parapply.runtime.desk import Desk
from parapply.source import options, refusals, slot
from parapply.source.stream import ReplicationStream
from parapply.target import lease, settings, state
from parapply.target.session import SessionOptions, WorkerSession

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from contextlib import AsyncExitStack

    from parapply.config import Config

#: A target that has no connection left for one more worker still serves fewer (F17).
_TOO_MANY = ("too many", "remaining connection slots")


@dataclass(frozen=True, slots=True)
class Ends:
    """Open sessions; whoever gave the exit stack closes them."""

    control: settings.Connection
    source: slot.Connection  # plain session, for questions
    source_facts: slot.SourceFacts
    stream: ReplicationStream
    sessions: tuple[WorkerSession, ...]
    desk: Desk
    state: state.SlotState


class Opener:
    """Opens both ends again and again. Remembers its sessions on the target, to end what a broken network left."""

    def __init__(self, config: Config, *, takeover: bool) -> None:
        """Open nothing yet; `takeover` holds for the first time only."""
        self._config = config
        self._takeover = takeover
        self._own_pids: list[int] = []
        self._log = get_logger()

    async def open(self, stack: AsyncExitStack) -> Ends:
        """Open everything.

        Raises:
            SourceRefused, SourceLost, SlotBusy: the publisher cannot serve, or not now.
            TargetRefused, TargetLost, LeaseHeld: the same for the target.
        """
        control = await stack.enter_async_context(await operations.open_target(self._config, "leader"))
        await self._end_own(control)
        # The desk first: it serves, too, where connections are scarce and workers must be fewer.
        desk, (source, source_facts, found) = await _together(self._desk(stack), self._own(stack, control))
        sessions, stream = await _together(
            self._workers(stack, found.slot_id, control.info.backend_pid), self._stream(stack, source_facts, found)
        )
        self._log.info("target_connected", low_lsn=format_lsn(found.lowest_lsn), workers=len(sessions))
        self._log.info("source_connected", slot=found.slot_name, start_lsn=format_lsn(found.resume_lsn))
        self._own_pids = [control.info.backend_pid, *(session.pipeline.backend_pid for session in sessions)]
        probes.probe(probes.CONNECTED)
        return Ends(control, source, source_facts, stream, sessions, desk, found)

    async def _desk(self, stack: AsyncExitStack) -> Desk:
        target, slot_name = self._config.target, self._config.source.slot
        desk = Desk(target.dsn.get_secret_value(), target.session_replication_role, f"parapply desk {slot_name}")
        await stack.enter_async_context(desk)
        await desk.warm_up()
        return desk

    async def _own(
        self, stack: AsyncExitStack, control: settings.Connection
    ) -> tuple[slot.Connection, slot.SourceFacts, state.SlotState]:
        """Take the lease and read the state behind the fence, with a plain session on the publisher to compare it."""
        config = self._config
        await state.ensure_schema(control, config.target.state_schema)
        source = await stack.enter_async_context(
            await slot.connect(config.source.dsn.get_secret_value(), application_name=f"parapply {config.source.slot}")
        )
        found = await self._state(control, source)
        await self._own_the_slot(control, found.slot_id)
        probes.probe(probes.RECOVERY)
        found = await self._state(control, source)
        source_facts = await refusals.verify(
            source, config.source.dsn.get_secret_value(), config.source.slot, operations.known_position(found)
        )
        await slot.check_publications(source, config.source.publications)
        await state.write_daemon(control, config.target.state_schema, found.slot_id, self._daemon_row(source_facts))
        return source, source_facts, found

    async def _end_own(self, control: settings.Connection) -> None:
        """End what an earlier connection of this very process left behind a broken network (F16)."""
        if not self._own_pids:
            return
        query = sql.SQL(
            "SELECT pg_catalog.pg_terminate_backend(pid) FROM pg_catalog.pg_stat_activity"
            " WHERE pid = ANY($1::int[]) AND application_name LIKE 'parapply %' AND usename = CURRENT_USER"
            " AND pid <> pg_catalog.pg_backend_pid()"
        )
        with settings.target_errors("ending sessions left by a broken connection"):
            await settings.rows(control, query, [self._own_pids])

    async def _state(self, control: settings.Connection, source: slot.Connection) -> state.SlotState:
        """Read the state of the slot; adopt the slot if the target knows nothing of it."""
        config = self._config
        facts = await slot.inspect(source, config.source.slot)
        found = await state.load(control, config.target.state_schema, config.source.slot, facts.system_identifier)
        if found is None:
            found = await operations.adopt(config, operations.Ends(source, control))
            self._log.warning("slot_adopted", slot=config.source.slot, start_lsn=format_lsn(found.lowest_lsn))
        return found

    async def _own_the_slot(self, control: settings.Connection, slot_id: int) -> None:
        def waits(sessions: Sequence[lease.Holder]) -> None:
            self._log.warning("lease_waiting", holder=[str(session) for session in sessions])

        wait_s = self._config.target.lease_wait_s
        await lease.take_lease(control, slot_id, wait_s, takeover=self._takeover, on_wait=waits)
        self._takeover = False
        await lease.fence(control, slot_id, waits)
        self._log.info("lease_taken", slot=self._config.source.slot)

    def _daemon_row(self, facts: slot.SourceFacts) -> state.DaemonRow:
        return state.DaemonRow(
            timeline=facts.timeline,
            publications=tuple(self._config.source.publications),
            commit_order=self._config.apply.commit_order,
            workers=self._config.apply.workers,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=__version__,
        )

    async def _workers(self, stack: AsyncExitStack, slot_id: int, leader_pid: int) -> tuple[WorkerSession, ...]:
        numbers = range(1, self._config.apply.workers + 1)
        tries = [self._worker(stack, number, slot_id, leader_pid) for number in numbers]
        opened = await _together(*tries)
        sessions = tuple([session for session in opened if isinstance(session, WorkerSession)])
        errors = [error for error in opened if isinstance(error, ParapplyError)]
        if errors:
            if not sessions:
                raise errors[0]
            self._log.warning("workers_reduced", workers=len(sessions), error=str(errors[0]))
        return sessions

    async def _worker(
        self, stack: AsyncExitStack, number: int, slot_id: int, leader_pid: int
    ) -> WorkerSession | ParapplyError:
        """Open one session; return the error if the target has no connection left for it."""
        config = self._config
        session_options = SessionOptions(
            dsn=config.target.dsn.get_secret_value(),
            schema=config.target.state_schema,
            slot_id=slot_id,
            leader_pid=leader_pid,
            role=config.target.session_replication_role,
            synchronous_commit=config.target.synchronous_commit,
            application_name=f"parapply worker {number} {config.source.slot}",
        )
        try:
            session = await WorkerSession.connect(session_options)
        except (TargetLost, TargetRefused) as error:
            if any(words in str(error) for words in _TOO_MANY):
                return error
            raise
        stack.push_async_callback(session.close)
        return session

    async def _stream(
        self, stack: AsyncExitStack, facts: slot.SourceFacts, found: state.SlotState
    ) -> ReplicationStream:
        source = self._config.source
        command = options.start_replication_sql(
            source.slot,
            found.resume_lsn,
            options.start_options(facts.server_version_num, source.publications, source.origin),
        )
        connection = await slot.connect(
            source.dsn.get_secret_value(), application_name=source.slot, is_replication=True
        )
        stream = ReplicationStream(connection)
        stack.push_async_callback(stream.close)
        await stream.start(command)
        return stream


async def _together(*works: Coroutine[None, None, Any]) -> list[Any]:
    """Do all at the same time and return their results; when one fails the others end before its error is raised."""
    tasks = [asyncio.create_task(work, name=f"open-{number}") for number, work in enumerate(works, 1)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            # Once: a second time would interrupt the cleaning up after the first.
            if not task.cancelling():
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""Both ends of one epoch: every session the daemon needs, opened in the order that makes them safe, closed together.

The order matters. The lease first, so that no other daemon goes on; then the fence, which waits until the last session
of an earlier daemon is gone, commits in doubt included; only then is the state read, and the publisher checked against
it; the stream starts where that state says (traps T-14, T-15, F18, F20).

What only asks or only connects is under way at the same time: the publisher is looked at and the desk opens while the
lease is taken; the stream connects while the state is read, and the workers while it starts: the publisher has most to
do. Nothing is applied before all of it is done.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec
from psycopg import sql

from parapply import __version__, probes
from parapply.conflict.rules import Rules
from parapply.errors import ParapplyError, TargetLost, TargetRefused
from parapply.logs import get_logger
from parapply.model import format_lsn
from parapply.runtime import operations
from parapply.runtime.ahead import FactsAhead
from parapply.runtime.desk import Desk
from parapply.source import options, refusals, slot
from parapply.source.stream import ReplicationStream
from parapply.target import copies, lease, origins, prepared, settings, state
from parapply.target.session import SessionOptions, WorkerSession

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
    from contextlib import AsyncExitStack

    from parapply.config import Config

#: A target that has no connection left for one more worker still serves fewer (F17).
_TOO_MANY = ("too many", "remaining connection slots")
#: Published tables whose facts are read before they are announced; of more nobody knows which will come first.
_FEW_TABLES = 8

_Look: TypeAlias = "tuple[slot.Connection, slot.SourceFacts]"
_T = TypeVar("_T")


class Ends(msgspec.Struct, frozen=True):
    """Open sessions; whoever gave the exit stack closes them."""

    control: settings.Connection
    source: slot.Connection  # plain session, for questions
    source_facts: slot.SourceFacts
    stream: ReplicationStream
    sessions: tuple[WorkerSession, ...]
    desk: Desk
    ahead: FactsAhead
    state: state.SlotState
    streaming: str  # off, on or parallel
    prepared: dict[int, tuple[str, int]]  # what is prepared on the target, as `prepared.pending` gives it
    copies: copies.Copies
    awaits_two_phase: bool  # it is wanted, and begins with the next epoch once every table is copied
    own_origins: tuple[int, ...]  # replication origins by which rows of this daemon are known
    tracks_commits: bool  # the target knows when and by whom rows were written


class Opener:
    """Opens both ends again and again. Remembers its sessions on the target, to end what a broken network left."""

    def __init__(self, config: Config, *, takeover: bool) -> None:
        """Open nothing yet; `takeover` holds for the first time only."""
        self._config = config
        self._takeover = takeover
        self._own_pids: list[int] = []
        self._rules = Rules(config.conflict)
        self._is_told_of_origins = False
        self._log = get_logger()

    def use(self, config: Config) -> None:
        """Open with another configuration from now on; nothing is being opened."""
        if config.target.dsn != self._config.target.dsn:
            # Elsewhere the same numbers are other sessions.
            self._own_pids = []
        self._config = config
        self._rules = Rules(config.conflict)

    async def open(self, stack: AsyncExitStack) -> Ends:
        """Open everything.

        Raises:
            SourceRefused, SourceLost, SlotBusy: the publisher cannot serve, or not now.
            TargetRefused, TargetLost, LeaseHeld: the same for the target.
        """
        async with _beginning() as begin:
            looking = begin(self._look(stack))
            answers = asyncio.Event()
            # The desk before the workers: it serves, too, where connections are scarce and workers must be fewer.
            (control, slot_id), (desk, ahead) = await _together(
                self._own(stack, looking, answers), self._desk(stack, looking, answers)
            )
            source, first_look = await looking
            # Not before the fence: until then the sessions of an earlier daemon may be all that the servers can give.
            tracks_commits = await origins.tracks_commits(control)
            self._check_tracking(tracks_commits=tracks_commits)
            connecting = begin(self._connect_stream(stack, first_look))
            source_facts, found = await self._recover(control, source, first_look, slot_id)
            pending = await self._prepared(control, slot_id)
            known = await copies.load(control, self._config.target.state_schema, slot_id)
            two_phase = self._config.source.two_phase and known.is_settled(found.lowest_lsn)
            streaming = options.streaming_of(source_facts.server_version_num, self._config.source.streaming)
            # The stream first: the publisher decodes while everything else is made ready.
            stream, sessions, _ = await _together(
                self._start(connecting, source_facts, found, streaming, two_phase=two_phase),
                self._workers(stack, slot_id, control.info.backend_pid, tracks_commits=tracks_commits),
                self._write_daemon(control, source_facts, slot_id, two_phase=two_phase),
            )
        self._check_origins(sessions)
        own_origins = await origins.own_origins(control, slot_id) if self._rules.needs_origin else ()
        self._log.info("target_connected", low_lsn=format_lsn(found.lowest_lsn), workers=len(sessions))
        self._log.info("source_connected", slot=found.slot_name, start_lsn=format_lsn(found.resume_lsn))
        self._own_pids = [control.info.backend_pid, *(session.pipeline.backend_pid for session in sessions)]
        probes.probe(probes.CONNECTED)
        return Ends(
            control,
            source,
            source_facts,
            stream,
            sessions,
            desk,
            ahead,
            found,
            streaming=streaming,
            prepared=pending,
            copies=known,
            awaits_two_phase=self._config.source.two_phase and not two_phase,
            own_origins=own_origins,
            tracks_commits=tracks_commits,
        )

    def _check_tracking(self, *, tracks_commits: bool) -> None:
        if not tracks_commits and (needing := self._rules.needing()):
            raise TargetRefused(
                f"target: {needing} needs commit timestamps, and track_commit_timestamp is off",
                hint="set track_commit_timestamp = on and restart the target server, or choose another policy",
            )

    def _check_origins(self, sessions: Sequence[WorkerSession]) -> None:
        """Refuse policies that need origins which the workers do not have; say what else will not work."""
        problem = next((session.origin_problem for session in sessions if session.origin_problem), "")
        if problem and (needing := self._rules.needing()):
            raise TargetRefused(
                f"target: {needing} needs replication origins: {problem}",
                hint=f"{origins.HINT}, or choose another policy",
            )
        if problem and not self._is_told_of_origins:
            self._is_told_of_origins = True
            self._log.warning(
                "origin_missing",
                error=problem,
                hint=f"changes applied here look like local ones: in a two-way set-up they go round; {origins.HINT}",
            )

    async def _look(self, stack: AsyncExitStack) -> tuple[slot.Connection, slot.SourceFacts]:
        """Open the plain session on the publisher and look at it for the first time."""
        source = self._config.source
        conn = await stack.enter_async_context(
            await slot.connect(source.dsn.get_secret_value(), application_name=f"parapply {source.slot}")
        )
        return conn, await slot.inspect(conn, source.slot)

    async def _own(
        self, stack: AsyncExitStack, looking: asyncio.Task[_Look], answers: asyncio.Event
    ) -> tuple[settings.Connection, int]:
        """Take the lease of the slot and wait for the fence; return the session that holds it, and the slot's id."""
        config = self._config
        control = await stack.enter_async_context(await operations.open_target(config, "leader"))
        answers.set()
        await self._end_own(control)
        await state.ensure_schema(control, config.target.state_schema)
        source, facts = await looking
        found = await state.load(control, config.target.state_schema, config.source.slot, facts.system_identifier)
        if found is None:
            found = await operations.adopt(config, operations.Ends(source, control))
            self._log.warning("slot_adopted", slot=config.source.slot, start_lsn=format_lsn(found.lowest_lsn))
        await self._own_the_slot(control, found.slot_id)
        probes.probe(probes.RECOVERY)
        return control, found.slot_id

    async def _desk(
        self, stack: AsyncExitStack, looking: asyncio.Task[_Look], answers: asyncio.Event
    ) -> tuple[Desk, FactsAhead]:
        # A pool that waits for a silent network takes seconds to close: no signal shall wait for that (F38).
        await answers.wait()
        target, slot_name = self._config.target, self._config.source.slot
        desk = Desk(target.dsn.get_secret_value(), target.session_replication_role, f"parapply desk {slot_name}")
        await stack.enter_async_context(desk)
        ahead = FactsAhead(desk, target.session_replication_role, lambda: self._few_tables(looking))
        stack.push_async_callback(ahead.close)
        return desk, ahead

    async def _few_tables(self, looking: asyncio.Task[_Look]) -> Sequence[tuple[str, str]]:
        # Shielded: who gives up reading ahead must not end the look itself.
        source, _ = await asyncio.shield(looking)
        return await slot.few_published_tables(source, self._config.source.publications, _FEW_TABLES)

    async def _recover(
        self, control: settings.Connection, source: slot.Connection, first_look: slot.SourceFacts, slot_id: int
    ) -> tuple[slot.SourceFacts, state.SlotState]:
        """Read the state, which is final now, and the publisher again; check the one against the other."""
        config = self._config
        name = config.source.slot
        facts, found = await _together(
            slot.inspect(source, name),
            state.load(control, config.target.state_schema, name, first_look.system_identifier),
        )
        if found is None or found.slot_id != slot_id:
            raise TargetLost(f"target: the state of slot {name!r} was removed while this daemon took the lease")
        dsn = config.source.dsn.get_secret_value()
        await refusals.check(facts, dsn, name, operations.known_position(found), two_phase=config.source.two_phase)
        await slot.check_publications(source, config.source.publications)
        return facts, found

    async def _prepared(self, control: settings.Connection, slot_id: int) -> dict[int, tuple[str, int]]:
        """Return what is prepared on the target; refuse where that cannot go on, or could not begin.

        Raises:
            TargetRefused: two_phase is on and nothing can be prepared, or off and something is.
        """
        is_two_phase = self._config.source.two_phase
        if is_two_phase:
            await prepared.check_possible(control)
        pending = await prepared.pending(control, slot_id)
        if pending and not is_two_phase:
            raise TargetRefused(
                f"{len(pending)} transactions are prepared on the target, but source.two_phase is off",
                hint="set source.two_phase = true; `parapply drop` rolls them back and forgets the slot",
            )
        return pending

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

    async def _own_the_slot(self, control: settings.Connection, slot_id: int) -> None:
        def waits(sessions: Sequence[lease.Holder]) -> None:
            self._log.warning("lease_waiting", holder=[str(session) for session in sessions])

        wait_s = self._config.target.lease_wait_s
        await lease.take_lease(control, slot_id, wait_s, takeover=self._takeover, on_wait=waits)
        self._takeover = False
        await lease.fence(control, slot_id, waits)
        self._log.info("lease_taken", slot=self._config.source.slot)

    async def _write_daemon(
        self, control: settings.Connection, facts: slot.SourceFacts, slot_id: int, *, two_phase: bool
    ) -> None:
        config = self._config
        row = state.DaemonRow(
            timeline=facts.timeline,
            publications=tuple(config.source.publications),
            commit_order=config.apply.commit_order,
            workers=config.apply.workers,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=__version__,
            two_phase="enabled" if two_phase else "pending" if config.source.two_phase else "disabled",
        )
        await state.write_daemon(control, config.target.state_schema, slot_id, row)

    async def _workers(
        self, stack: AsyncExitStack, slot_id: int, leader_pid: int, *, tracks_commits: bool
    ) -> tuple[WorkerSession, ...]:
        numbers = range(1, self._config.apply.workers + 1)
        tries = [self._worker(stack, number, slot_id, leader_pid, tracks_commits=tracks_commits) for number in numbers]
        opened = await _together(*tries)
        sessions = tuple([session for session in opened if not isinstance(session, ParapplyError)])
        errors = [error for error in opened if isinstance(error, ParapplyError)]
        if errors:
            if not sessions:
                raise errors[0]
            self._log.warning("workers_reduced", workers=len(sessions), error=str(errors[0]))
        return sessions

    async def _worker(
        self, stack: AsyncExitStack, number: int, slot_id: int, leader_pid: int, *, tracks_commits: bool
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
            origin=origins.origin_name(slot_id, number),
            tracks_commits=tracks_commits,
        )
        try:
            session = await WorkerSession.connect(session_options)
        except (TargetLost, TargetRefused) as error:
            if any(words in str(error) for words in _TOO_MANY):
                return error
            raise
        stack.push_async_callback(session.close)
        return session

    async def _connect_stream(self, stack: AsyncExitStack, facts: slot.SourceFacts) -> ReplicationStream:
        source = self._config.source
        streams = options.streaming_of(facts.server_version_num, source.streaming) != "off"
        is_less = source.decoding_memory_bytes < facts.decoding_memory_bytes
        connection = await slot.connect(
            source.dsn.get_secret_value(),
            application_name=source.slot,
            is_replication=True,
            decoding_memory_bytes=source.decoding_memory_bytes if streams and is_less else 0,
        )
        stream = ReplicationStream(connection)
        stack.push_async_callback(stream.close)
        return stream

    async def _start(
        self,
        connecting: asyncio.Task[ReplicationStream],
        facts: slot.SourceFacts,
        found: state.SlotState,
        streaming: str,
        *,
        two_phase: bool,
    ) -> ReplicationStream:
        source = self._config.source
        command = options.start_replication_sql(
            source.slot,
            found.resume_lsn,
            options.start_options(
                facts.server_version_num,
                source.publications,
                source.origin,
                streaming=streaming,
                two_phase=two_phase,
            ),
        )
        stream = await connecting
        await stream.start(command)
        return stream


@asynccontextmanager
async def _beginning() -> AsyncIterator[Callable[[Coroutine[None, None, _T]], asyncio.Task[_T]]]:
    """Give a function that begins works whose results are needed later; what still runs at the end is ended.

    Each error is raised where the result is needed, so that of two always the same is told: the target's first.
    """
    tasks: list[asyncio.Task[Any]] = []

    def begin(work: Coroutine[None, None, _T]) -> asyncio.Task[_T]:
        task = asyncio.create_task(work, name=f"open-{len(tasks) + 1}")
        tasks.append(task)
        return task

    try:
        yield begin
    finally:
        await _end(tasks)


async def _together(*works: Awaitable[Any]) -> list[Any]:
    """Do all at the same time and return their results; when one fails the others end before its error is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        # Once: a second time would interrupt the cleaning up after the first.
        if not (isinstance(task, asyncio.Task) and task.cancelling()):
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

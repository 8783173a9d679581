"""Both ends of one epoch: every session the daemon needs, opened in the order that makes them safe, closed together.

The order matters. The lease first, so that no other daemon continues; then the fence, which waits until the last
session of an earlier daemon is gone, commits in doubt included; only then is the state read, and the publisher checked
against it; the stream starts where that state says (traps T-14, T-15, F18, F20).

Queries and connections that change nothing run at the same time. The publisher is queried and the control pool opens
while the lease is taken. The stream connects while the state is read. The workers connect while the stream starts,
because the publisher has most to do then. Nothing is applied before all of it is done.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec
from psycopg import sql

from parapply import __version__, cascades, connect, continuity, failpoints, sharing
from parapply.config import settings_without_table
from parapply.conflict.policies import Rules
from parapply.conflict.skips import OTHER_HISTORY_HINT, forget_other_history
from parapply.errors import ParapplyError, SlotBusy, StateClosed, StateGone, TargetLost, TargetRefused
from parapply.logs import get_logger
from parapply.model import format_lsn
from parapply.runtime.first_sessions import FirstSessions
from parapply.runtime.tables.control_pool import ControlPool
from parapply.runtime.tables.prefetch import CataloguePrefetch
from parapply.runtime.worker_sessions import WorkerSessions
from parapply.source import failover, options, refusals, slot
from parapply.source.catch_up import UNFINISHED, CatchUp, range_limits, range_options, why_stream
from parapply.source.catch_up_stream import CatchUpStream
from parapply.source.slot_stream import SlotStream
from parapply.target.session import lease, prepared, settings
from parapply.target.session.session import WorkerSession
from parapply.target.state import copies, cutovers, heals
from parapply.target.state import slots as state
from parapply.vocabulary import Reading

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
    from contextlib import AsyncExitStack

    from parapply.config import Config
    from parapply.engine.shares import Share

#: Newest major version of the server that the tests run with.
NEWEST_MAJOR = 18
#: Seconds to wait for the end of a session that runs a publisher's commands: its daemon's lease is free already.
_COMMANDS_WAIT_S = 2.0
#: Divisor for the part of the target's table of locks that batches may take: a fifth is left to other sessions.
_LOCKED_PART = 1.25
#: Parts of that for one batch in relaxed order, where any number of them may be in flight: see `Flight`.
_RELAXED_PARTS = 4
#: Shown from then on, until a heal has compared every table.
LACKS_ORIGINS = "source.origin was none: rows that were replicated to the publisher then are missing"
_STATE_HINT = "correct target.dsn, or bring the target back with its state schema"
_LOCAL_CHANGES = "changes applied here look like local ones to every subscriber of this server"

_T = TypeVar("_T")
AskPosition: TypeAlias = "Callable[[], Awaitable[slot.SourcePosition]]"


class Sessions(msgspec.Struct, frozen=True):
    """Open sessions; the owner of the exit stack closes them."""

    control: settings.Connection
    source: slot.Connection  # plain session, for questions
    source_facts: slot.SourceFacts
    stream: SlotStream
    ask_position: AskPosition
    sessions: tuple[tuple[int, WorkerSession], ...]  # of the first workers, by their numbers
    opener: WorkerSessions  # has all of them, and opens more
    control_pool: ControlPool
    ahead: CataloguePrefetch
    state: state.SlotState
    streaming: str  # off, on or parallel
    whole_until_lsn: int  # streaming is wanted, and off until all up to here is applied; 0 if it is not off for that
    large_ends: dict[int, int]  # for `Skips`; outlives the epoch
    prepared: dict[int, tuple[str, int]]  # prepared on the target, as `prepared.pending` gives them
    proved_lsns: frozenset[int]  # as `prepared.proved_lsns`
    copies: copies.Copies
    awaits_two_phase: bool  # it is wanted, and begins with the next epoch once every table is copied
    most_places: int  # of a batch, in the target's table of locks
    tracks_commits: bool  # the target knows when rows were written, and by which origin
    published: frozenset[str]  # of insert, update, delete, truncate
    taken: sharing.Taken  # tables in which rows of other slots have constants
    names: dict[int, tuple[str, str]]  # of tables in epochs before, by OID, that the state does not know
    may_change_role: bool  # session_replication_role is origin, and sessions may also take replica


class Connector:
    """Opens both ends again and again. Remembers its sessions on the target, to end any that a broken network left."""

    def __init__(self, config: Config, share: Share, *, takeover: bool, first: FirstSessions | None = None) -> None:
        """Open nothing yet; `takeover` and `first`, which are open or being opened, hold for the first time only."""
        self._config = config
        self._share = share
        self._takeover = takeover
        self._first = first
        self._own_pids: list[int] = []
        #: The target knew the slot, or was given its state. One that no longer does is never adopted.
        self._has_state = False
        self._rules = Rules(config.conflict)
        self._is_told_of_origins = False
        self._is_told_of_lacking = False
        self._is_failover_told = False
        #: Sections of the configuration that were logged as naming no published table.
        self._without_table: set[str] = set()
        #: Ends whose server was logged as newer than the tested ones.
        self._newer: set[str] = set()
        self._whole_until_lsn = 0
        self._large_ends: dict[int, int] = {}
        self._locked_part = _LOCKED_PART
        self._last_reader: CatchUpStream | None = None
        self._sender_pid = 0
        #: The server that the last stream began on, and when it had started.
        self._server = ("", 0)
        #: When the server had started that was last known to have all that the target had.
        self._proved_us = 0
        self._ranges_from_lsn = 0
        self._log = get_logger()

    def use(self, config: Config, share: Share) -> None:
        """Open with another configuration from now on; nothing is being opened."""
        self._share = share
        if config.target.dsn != self._config.target.dsn:
            # Elsewhere the same numbers are other sessions, and the state is another.
            self._own_pids = []
        self._config = config
        self._rules = Rules(config.conflict)
        # A range under way was ended on purpose.
        self._last_reader = None

    def take_whole(self, end_lsn: int) -> None:
        """Ask for no transaction in progress until the one that ends at an LSN is applied: the publisher keeps it."""
        self._whole_until_lsn = max(self._whole_until_lsn, end_lsn)

    def take_fewer_tables(self) -> None:
        """Let batches have half as many tables from now on, because the target had no place for their locks."""
        self._locked_part *= 2

    async def open(self, stack: AsyncExitStack) -> Sessions:
        """Open everything.

        Raises:
            SourceRefused, SourceLost, SlotBusy: the publisher cannot serve, or not now.
            TargetRefused, TargetLost, LeaseHeld: the same for the target.
        """
        async with _beginning() as begin:
            first = await self._open_first(stack)
            # The control pool before the workers: it also serves where connections are scarce and workers fewer.
            (control, slot_id), (control_pool, ahead) = await _together(self._own(first), first.asking)
            source, first_look = await first.looking
            # Open them only after the fence, because until then the sessions of an earlier daemon may be all that the
            # servers can give.
            server = await settings.target_settings(control)
            self._check_tracking(tracks_commits=server.tracks_commits)
            await connect.check_ddl_role(self._config, control)
            may_change_role = await self._may_change_role(control)
            connecting = begin(self._connect_stream(stack, source, first_look))
            # Awaited later, because a problem on the publisher is to be reported first.
            noting = begin(self._noted(control, slot_id))
            source_facts, found, published = await self._recover(control, source, first_look, slot_id)
            pending, proved_lsns, known = await noting
            taken = await sharing.claim(source, control, self._config, slot_id, is_daemon=True)
            self._own_pids = [control.info.backend_pid]
            opener = WorkerSessions(self._config, slot_id, control.info.backend_pid, self._own_pids, server)
            stack.push_async_callback(opener.close_all)
            # The stream first, because the publisher decodes while everything else is made ready.
            claimed = begin(self._claimed(connecting, source, source_facts, found))
            workers = begin(self._workers(opener))
            if self._is_to_be_noted(found):
                # Behind all that may refuse the configuration, which would be noted for good.
                await _together(claimed, workers)
            if {*found.publications} != {*self._config.source.publications}:
                # Before the stream passes changes of a table that no longer comes, and the new list is kept.
                continuity.warn_of_altered(await continuity.look(source, control, self._config, slot_id, known))
                known = await copies.load(control, self._config.target.state_schema, slot_id)
            known = await continuity.leave_out(source, control, self._config, slot_id, known)
            await continuity.drop_marks(source, control, self._config, slot_id, known)
            names = await continuity.keep_names(source, control, self._config, slot_id, known)
            await continuity.keep_columns(source, control, self._config, slot_id, known)
            # A copy may have been made under another session_replication_role.
            await cascades.check(source, control, self._config, known, found.low_lsn)
            two_phase = self._config.source.two_phase and known.is_settled(found.low_lsn)
            streaming = self._streaming(source_facts)
            if found.low_lsn >= self._whole_until_lsn:
                self._whole_until_lsn = 0
            else:
                streaming = "off"
                self._log.warning("streaming_paused", until_lsn=format_lsn(self._whole_until_lsn))
            stream, sessions, _ = await _together(
                self._start(claimed, source_facts, found, streaming, two_phase=two_phase),
                workers,
                self._write_daemon(control, source_facts, slot_id, two_phase=two_phase),
            )
        if self._proved_us and self._proved_us != found.source_started_us:
            await heals.note_source(control, self._config.target.state_schema, slot_id, self._proved_us)
        self._warn_of_lacking(found)
        await self._tell_without_table(source)
        self._tell_newer(source=source_facts.server_version_num, target=control.info.server_version)
        self._log.info("target_connected", low_lsn=format_lsn(found.low_lsn), workers=len(sessions))
        restart_lsn = (source_facts.slot.restart_lsn if source_facts.slot else None) or found.resume_lsn
        self._log.info(
            "source_connected",
            slot=found.slot_name,
            start_lsn=format_lsn(found.resume_lsn),
            size_bytes=max(0, found.resume_lsn - restart_lsn),
        )
        if source_facts.state_schemas:
            self._log.info("state_left_out", schemas=sorted(source_facts.state_schemas))
        failpoints.probe(failpoints.CONNECTED)
        return Sessions(
            control, source, source_facts, stream, self._asking(source, stream), sessions, opener, control_pool, ahead,
            found,
            streaming=streaming, whole_until_lsn=self._whole_until_lsn, large_ends=self._large_ends,
            prepared=pending, proved_lsns=proved_lsns, copies=known, most_places=self._most_places(server.lock_places),
            awaits_two_phase=self._config.source.two_phase and not two_phase, tracks_commits=server.tracks_commits,
            published=published, taken=taken, names=names, may_change_role=may_change_role,
        )  # fmt: skip

    def _most_places(self, lock_places: int) -> int:
        n_parts = _RELAXED_PARTS if self._config.apply.commit_order == "relaxed" else 1
        return max(1, int(lock_places / (self._locked_part * n_parts)))

    async def _tell_without_table(self, source: slot.Connection) -> None:
        """Log once that a section of the configuration names a table that is not published."""
        config = self._config
        mapping = config.mapping
        if not (
            config.apply.tables or config.conflict.tables or mapping.tables or mapping.schemas or mapping.schema_only
        ):
            return
        names = await slot.tables_to_expect(source, config.source.publications)
        published = [".".join(name) for name in names]
        unknown = settings_without_table(config, published) | mapping.schema_only_unknown(published)
        for section, what in unknown.items():
            if section not in self._without_table:
                self._without_table.add(section)
                hint = "correct the name; if the table is published later, the setting holds from then on"
                self._log.warning("setting_without_table", setting=section, reason=what, hint=hint)

    def _tell_newer(self, **versions: int) -> None:
        """Log once that a server is newer than every version that this program was run with."""
        newer = {end: number for end, number in versions.items() if number // 10_000 > NEWEST_MAJOR}
        for end, number in newer.items():
            if end not in self._newer:
                self._newer.add(end)
                hint = f"the newest that parapply was tested with is {NEWEST_MAJOR}; run `parapply verify` now and then"
                self._log.warning("server_untested", end=end, server_version=number, hint=hint)

    def _check_tracking(self, *, tracks_commits: bool) -> None:
        if not tracks_commits and (needing := self._rules.needing()):
            raise TargetRefused(
                f"target: {needing} needs commit timestamps, and track_commit_timestamp is off",
                hint="set track_commit_timestamp = on and restart the target server, or choose another policy",
            )

    async def _may_change_role(self, control: settings.Connection) -> bool:
        """Return whether foreign keys are enforced, and could be left to a query of ours."""
        if self._config.target.session_replication_role != "origin":
            return False
        with settings.target_errors("asking for session_replication_role"):
            return await settings.may_take_role(control, "replica")

    def _check_origins(self, sessions: Sequence[WorkerSession]) -> None:
        """Refuse settings that need origins if the workers have none; log the other features that will not work.

        A daemon that reads only changes that no subscriber wrote has a partner that reads the changes written here in
        the same way. So without origins every change would go round between the two.
        """
        problem = next((session.origin_problem for session in sessions if session.origin_problem), None)
        if problem is None:
            return
        needing = self._rules.needing()
        if needing or self._config.source.origin == "none":
            what = needing or 'source.origin = "none"'
            other = "choose another policy" if needing else 'set source.origin = "any" if nothing replicates back'
            raise TargetRefused(
                f"target: {what} needs replication origins: {problem.text}", hint=f"{problem.hint}, or {other}"
            )
        if not self._is_told_of_origins:
            self._is_told_of_origins = True
            self._log.warning("origin_missing", error=problem.text, hint=f"{_LOCAL_CHANGES}; {problem.hint}")

    async def _open_first(self, stack: AsyncExitStack) -> FirstSessions:
        """Return the first sessions, which the stack closes; the process may have begun to open them."""
        first, self._first = self._first, None
        if first is not None and first.config is not self._config:
            await first.close()
            first = None
        first = first or self._begin_first()
        stack.push_async_callback(first.close)
        return first

    def _warn_of_lacking(self, found: state.SlotState) -> None:
        """Log once that rows were left out which come now: the stream has passed them, and nothing sends them again."""
        if found.lacks_origins and self._config.source.origin == "any" and not self._is_told_of_lacking:
            self._is_told_of_lacking = True
            hint = "`parapply verify` says which tables differ; `parapply refresh --table ... --truncate` copies one"
            self._log.warning("origin_gap", slot=found.slot_name, reason=LACKS_ORIGINS, hint=hint)

    def _begin_first(self) -> FirstSessions:
        return FirstSessions(self._config)

    async def _own(self, first: FirstSessions) -> tuple[settings.Connection, int]:
        """Take the lease of the slot and wait for the fence; return the session that holds it, and the slot's id."""
        config = self._config
        control = await first.leading
        await self._end_own(control)
        schema, name = config.target.state_schema, config.source.slot
        # Nothing is made before the slot may be adopted, because an operator may be bringing the state back.
        has_schema = await state.check_schema(control, schema)
        source, facts = await first.looking
        # Before the slot is adopted, because a cut-over refuses a way back that is applied already.
        await connect.check_back(config, source, facts)
        found = await state.load(control, schema, name, facts.system_identifier) if has_schema else None
        await connect.check_apart(config, connect.Connections(source, control), facts)
        if found is None:
            self._check_new()
            found = await self._adopt(source, control)
            self._log.warning("slot_adopted", slot=name, start_lsn=format_lsn(found.low_lsn))
        self._has_state = True
        # Before the lease, which the command holds that cuts over; and after it, which may have been awaited.
        await cutovers.check_may_write(control, schema, found.slot_id, name)
        await self._own_the_slot(control, found.slot_id)
        if config.ddl.apply:
            await lease.take_commands(control, facts.system_identifier, facts.database, _COMMANDS_WAIT_S)
        await cutovers.check_may_write(control, schema, found.slot_id, name)
        failpoints.probe(failpoints.RECOVERY)
        return control, found.slot_id

    def _check_new(self) -> None:
        """Refuse a target without the state that an epoch before had: what was confirmed since is not there."""
        if self._has_state:
            raise StateGone(
                f"the target no longer knows slot {self._config.source.slot!r}: it is another one, or an older one",
                hint=f"{_STATE_HINT}; else stop the daemon, `parapply drop`, and `parapply init --copy`",
            )

    async def _adopt(self, source: slot.Connection, control: settings.Connection) -> state.SlotState:
        """Write the state of a slot that the target does not know; refuse one that was read before."""
        name = self._config.source.slot
        if await slot.has_sent(source, name):
            raise StateClosed(
                f"the target does not know slot {name!r}, which was read before: it is another one, or an older one",
                hint=f"{_STATE_HINT}; `parapply init --despite slot_read` takes the slot over if the target has all"
                " that its reader confirmed; else `parapply drop`, then `parapply init --copy`",
            )
        async with connect.state_schema(control, self._config.target.state_schema):
            return await connect.adopt(self._config, connect.Connections(source, control))

    def _asking(
        self,
        source: slot.Connection,
        stream: SlotStream,  # noqa: ARG002  of a capture, which has no other source
    ) -> AskPosition:
        return lambda: slot.position(source)

    async def _recover(
        self, control: settings.Connection, source: slot.Connection, first_look: slot.SourceFacts, slot_id: int
    ) -> tuple[slot.SourceFacts, state.SlotState, frozenset[str]]:
        """Read the state, which is final now, and the publisher again; check each against the other."""
        config = self._config
        name = config.source.slot
        facts, found = await _together(
            slot.inspect(source, name),
            state.load(control, config.target.state_schema, name, first_look.system_identifier),
        )
        if found is None or found.slot_id != slot_id:
            raise TargetLost(f"target: the state of slot {name!r} was removed while this daemon took the lease")
        login = config.source.login
        known = await connect.known_position(control, config.target.state_schema, found)
        facts = await refusals.check(source, facts, login, name, known, two_phase=config.source.two_phase)
        facts = await failover.ensure(config.source, facts)
        if config.source.failover == "auto" and not self._is_failover_told and (why := failover.unprotected(facts)):
            self._is_failover_told = True
            self._log.warning("failover_unprotected", slot=name, reason=why)
        return facts, found, await slot.check_publications(source, config.source.publications)

    async def _noted(
        self, control: settings.Connection, slot_id: int
    ) -> tuple[dict[int, tuple[str, int]], frozenset[int], copies.Copies]:
        """Return what is prepared on the target, the ends of what is committed without a record, and the copies.

        Refuse prepared transactions if they cannot go on, or could not begin.
        """
        is_two_phase = self._config.source.two_phase
        if is_two_phase:
            await prepared.check_possible(control)
        schema = self._config.target.state_schema
        pending = await prepared.pending(control, schema, slot_id)
        proved_lsns = await prepared.proved_lsns(control, schema, slot_id)
        prepared.check_ending(pending, proved_lsns, two_phase=is_two_phase)
        return pending, proved_lsns, await copies.load(control, schema, slot_id)

    async def _end_own(self, control: settings.Connection) -> None:
        """End the sessions that this very process left on the other side of a broken network (F16).

        After a failover of the target their numbers may be of other slots' sessions. A server cuts long names.
        """
        if not self._own_pids:
            return
        query = sql.SQL(
            "SELECT pg_catalog.pg_terminate_backend(pid) FROM pg_catalog.pg_stat_activity"
            " WHERE pid = ANY($1::int[]) AND usename = CURRENT_USER AND pid <> pg_catalog.pg_backend_pid()"
            " AND application_name = pg_catalog.left(pg_catalog.substring(application_name,"
            " '^parapply (?:leader|worker [0-9]+) ') || $2, pg_catalog.current_setting('max_identifier_length')::int)"
        )
        with settings.target_errors("ending sessions left by a broken connection"):
            await settings.rows(control, query, [self._own_pids, self._config.source.slot])

    async def _own_the_slot(self, control: settings.Connection, slot_id: int) -> None:
        wait_s = self._config.target.lease_wait_s
        await lease.take_lease(control, slot_id, wait_s, takeover=self._takeover, on_wait=log_wait)
        self._takeover = False
        await lease.fence(control, slot_id, log_wait)
        self._log.info("lease_taken", slot=self._config.source.slot)

    def _is_to_be_noted(self, found: state.SlotState) -> bool:
        """Return whether what the state keeps of an earlier configuration is to change."""
        source = self._config.source
        is_other_list = {*found.publications} != {*source.publications}
        return is_other_list or (source.origin == "none" and not found.lacks_origins)

    async def _write_daemon(
        self, control: settings.Connection, facts: slot.SourceFacts, slot_id: int, *, two_phase: bool
    ) -> None:
        config = self._config
        row = state.DaemonRow(
            timeline=facts.timeline,
            publications=tuple(config.source.publications),
            commit_order=config.apply.commit_order,
            workers=config.apply.most_workers,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=__version__,
            two_phase="enabled" if two_phase else "pending" if config.source.two_phase else "disabled",
            lacks_origins=config.source.origin == "none",
        )
        schema = config.target.state_schema
        for lsn in await forget_other_history(control, schema, slot_id, facts.timeline):
            self._log.warning("skip_passed", end_lsn=lsn, hint=OTHER_HISTORY_HINT)
        await state.write_daemon(control, schema, slot_id, row)

    async def _workers(self, opener: WorkerSessions) -> tuple[tuple[int, WorkerSession], ...]:
        numbers = range(1, self._share.first_workers + 1)
        opened = list(zip(numbers, await _together(*[opener.open(number) for number in numbers]), strict=True))
        sessions = tuple([(number, session) for number, session in opened if not isinstance(session, ParapplyError)])
        errors = [error for _, error in opened if isinstance(error, ParapplyError)]
        if errors:
            if not sessions:
                raise errors[0]
            self._log.warning("workers_reduced", workers=len(sessions), error=str(errors[0]))
        self._check_origins([session for _, session in sessions])
        return sessions

    def _streaming(self, facts: slot.SourceFacts) -> str:
        """Return how transactions in progress come: not at all where none may be applied when it commits."""
        config = self._config
        found = options.streaming_of(facts.server_version_num, config.source.streaming)
        return "off" if config.apply.held_back_by else found

    async def _connect_stream(
        self, stack: AsyncExitStack, asked: slot.Connection, facts: slot.SourceFacts
    ) -> SlotStream:
        """Return a stream to the server of the facts, which has the slot for itself."""
        name = self._config.source.slot
        stream = CatchUpStream(await self._connect_decoder(facts), lambda: slot.read_slot(asked, name))
        stack.push_async_callback(stream.close)
        await stream.check_same(await refusals.with_timeline(asked, facts, self._config.source.login))
        # Noted before the answer: a network that is silent from now on may leave the claim to that process.
        own_pid, self._sender_pid = self._sender_pid, stream.sender_pid
        try:
            await stream.claim(name, own_pid)
        except SlotBusy:
            self._sender_pid = own_pid
            raise
        return stream

    async def _connect_decoder(self, facts: slot.SourceFacts) -> slot.Connection:
        source = self._config.source
        lowers = self._streaming(facts) != "off" and source.decoding_memory_bytes < facts.decoding_memory_bytes
        return await slot.connect(
            source.login,
            application_name=source.slot,
            is_replication=True,
            decoding_memory_bytes=source.decoding_memory_bytes if lowers else 0,
        )

    async def _claimed(
        self,
        connecting: asyncio.Task[SlotStream],
        source_conn: slot.Connection,
        facts: slot.SourceFacts,
        found: state.SlotState,
    ) -> SlotStream:
        """Return a stream that may be started; refuse a publisher with another history."""
        stream = await connecting
        await self._check_history(source_conn, facts, found)
        return stream

    async def _start(
        self,
        claimed: asyncio.Task[SlotStream],
        facts: slot.SourceFacts,
        found: state.SlotState,
        streaming: str,
        *,
        two_phase: bool,
    ) -> SlotStream:
        source = self._config.source
        start = options.start_options(
            facts.server_version_num, source.publications, source.origin, streaming=streaming, two_phase=two_phase
        )

        def command(start_lsn: int) -> str:
            return options.start_replication_sql(source.slot, start_lsn, start)

        stream = await claimed
        assert isinstance(stream, CatchUpStream), "a slot is read so"
        reason = await self._catch_up(
            stream, facts, found, command, is_streaming=streaming != "off", two_phase=two_phase
        )
        if reason:
            await stream.start(command(found.resume_lsn), found.resume_lsn, reason)
        self._last_reader = stream
        self._server = (facts.system_identifier, facts.started_us)
        return stream

    async def _check_history(self, conn: slot.Connection, facts: slot.SourceFacts, found: state.SlotState) -> None:
        """Refuse a publisher that was put back to an older state, and has written since, where its slot is behind."""
        slot_lsn = (facts.slot.confirmed_flush_lsn if facts.slot else None) or 0
        if slot_lsn >= found.high_lsn:
            if slot_lsn >= found.copied_lsn:
                self._proved_us = facts.started_us
            return
        # A server that has served this daemon since its start was not put back, unless with its memory: such a one, of
        # a virtual machine, has forgotten what its slot was told.
        is_told = slot_lsn >= found.confirmed_flush_lsn
        if is_told and self._server == (facts.system_identifier, facts.started_us):
            return
        if found.high_lsn <= found.begin_lsn:
            # The watermark has not moved; the way back of a cut-over begins past its slot.
            return
        why = await connect.check_history(self._config, conn, facts.server_version_num, found)
        if why:
            self._log.warning("history_unproved", slot=self._config.source.slot, reason=why)
        else:
            self._proved_us = facts.started_us

    async def _catch_up(  # noqa: PLR0913  what there is to read, and how
        self,
        stream: CatchUpStream,
        facts: slot.SourceFacts,
        found: state.SlotState,
        command: Callable[[int], str],
        *,
        is_streaming: bool,
        two_phase: bool,
    ) -> str:
        """Begin to read in ranges if there is much to catch up; return the reason if a stream is read."""
        source = self._config.source
        if source.catch_up == "off":
            return "source.catch_up is off"
        if setting := self._config.apply.held_back_by:
            # Changes held back on purpose are no backlog, and a query that is not read would keep a transaction open
            # for hours.
            return f"{setting} holds changes back"
        limits = range_limits(self._config)
        last = self._last_reader
        # After an error of a range another connection has to stream, however much is to catch up.
        reason = last.refusal if last is not None else ""
        reason = reason or why_stream(facts, found.resume_lsn, limits, two_phase=two_phase)
        lag_bytes = facts.flush_lsn - found.resume_lsn
        was_in_ranges = last is not None and last.reading is Reading.RANGES
        has_moved = found.resume_lsn > self._ranges_from_lsn
        if not reason and last is not None and (last.is_unfinished or (was_in_ranges and not has_moved)):
            # Whatever ended it may end the next one the same way, and the stream always makes progress.
            reason = UNFINISHED
        if not reason:
            plan = CatchUp(
                slot=source.slot,
                start_lsn=found.resume_lsn,
                options=range_options(facts.server_version_num, source.publications, source.origin),
                is_streaming=is_streaming,
                limits=limits,
            )
            self._ranges_from_lsn = found.resume_lsn
            self._last_reader = stream
            reason = await stream.catch_up(plan, command, lag_bytes, lambda: self._connect_decoder(facts))
        if reason and lag_bytes >= limits.enter_bytes:
            self._log.info("catch_up_declined", reason=reason, size_bytes=lag_bytes)
        return reason


def log_wait(sessions: Sequence[lease.Holder]) -> None:
    """Log the sessions that are waited for, because they hold the lease or worked for an earlier leader."""
    get_logger().warning("lease_waiting", holder=[str(session) for session in sessions])


@asynccontextmanager
async def _beginning() -> AsyncIterator[Callable[[Coroutine[None, None, _T]], asyncio.Task[_T]]]:
    """Give a function that starts tasks whose results are needed later; tasks still running at the end are ended.

    Each error is raised where the result is needed. So if both ends fail, the same error is always reported: the
    target's.
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
        # Cancel once, because a second cancel would interrupt the cleaning up after the first.
        if not (isinstance(task, asyncio.Task) and task.cancelling()):
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

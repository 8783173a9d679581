"""Requests of commands to a running daemon: to read which tables are copied, and to pause for a snapshot.

Both come through tables of the state schema (`target/state/copies.py`, `target/state/requests.py`) and a notification.
One request is served after the other.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from parapply.errors import ParapplyError, SourceLost, TargetLost, TargetRefused
from parapply.logs import get_logger
from parapply.model import format_lsn
from parapply.runtime.rest import LONG_S
from parapply.source.waits import stream_ends_first
from parapply.target.session import settings
from parapply.target.state import copies, requests
from parapply.tasks import end_tasks

if TYPE_CHECKING:
    from parapply.config import TargetConfig
    from parapply.runtime.control.progress import Progress
    from parapply.runtime.intake.batcher import Admission
    from parapply.runtime.tables.control_pool import ControlPool
    from parapply.target.session.settings import Connection
    from parapply.target.state.requests import SnapshotRequest
    from parapply.target.state.slots import StatePlace

#: Seconds between two checks without a notification, because an interrupted copy sends none.
_LOOK_S = 1.0
#: Without a session to listen with.
_POLL_S = 0.2
#: Seconds between questions for the publisher's position while a wanted LSN is not reached.
_ASK_S = 0.05
#: Seconds of apply.delay_s from which no command can wait for what has just been committed on the publisher.
_LONGEST_DELAY_S = 30.0
#: Seconds to pause for a command that has not named an LSN.
_STAND_S = 60.0


class Awaited(NamedTuple):
    """For what the stream is to begin again, and how late it is on purpose."""

    #: Every table must be copied, then two-phase commit begins.
    two_phase: bool
    #: Streaming is off until then; 0: it is not.
    whole_until_lsn: int
    delay_s: float


class Requests:
    """All fields are written by its own task."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        config: TargetConfig,
        place: StatePlace,
        control_pool: ControlPool,
        *,
        admission: Admission,
        progress: Progress,
        awaited: Awaited,
    ) -> None:
        self._config = config
        self._slot_name, self._slot_id = place.slot_name, place.slot_id
        self._control_pool = control_pool
        self._batcher = admission.batcher
        self._admission = admission
        self._engine = admission.batcher.pool.flight.state
        self._rest = admission.batcher.pool.rest
        self._progress = progress
        self._copied = admission.copied
        self._awaits_two_phase, self._whole_until_lsn, self._delay_s = awaited
        self._first_exact_lsn = self._batcher.taken_lsn
        self._listener: Connection | None = None
        #: Position of the stream when the newest change of the copied tables came into force; None: the copy command
        #: knows of it.
        self._unseen_from_lsn: int | None = self._batcher.taken_lsn
        #: A large transaction was being taken at the last look, so its end is behind that position.
        self._was_in_large = False
        #: Changes of the copied tables that were noticed here.
        self._n_changes = self._copied.n_changes
        #: True if the state had open requests at the last look.
        self.are_open = False
        #: Sessions that keep a snapshot until it is taken.
        self._exports: dict[int, Connection] = {}
        #: Set by the epoch when a batch has committed or a worker is idle.
        self.moved = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._log = get_logger()

    async def run(self) -> None:
        """Serve until cancelled.

        Raise TargetRefused if the state is gone, SourceLost if the stream must start again.
        """
        try:
            await self._listen()
            await self._refuse_old()
            is_called = True
            while True:
                await self._look(is_called=is_called)
                await self._tell_copier()
                async with stream_ends_first():
                    await self._copied.look()
                self._begin_two_phase()
                self._stream_again()
                is_called = await self._wait_for_call(_POLL_S / 10 if self._has_news() else _LOOK_S)
        finally:
            self._admission.let_pass()
            for session in (*self._exports.values(), *([self._listener] if self._listener else [])):
                await session.close()

    @property
    def hears_calls(self) -> bool:
        """Return whether a command that calls is heard."""
        return self._listener is not None

    async def _connect(self, what: str) -> Connection:
        return await settings.connect_control(
            self._config.login,
            role=self._config.session_replication_role,
            application_name=f"parapply {what} {self._slot_name}",
        )

    async def _listen(self) -> None:
        """Open a session that listens; do without if the target has no connection left, or refuses one."""
        try:
            self._listener = await self._connect("requests")
        except (TargetLost, TargetRefused) as error:
            self._log.info("requests_polled", error=error.line())
        else:
            await requests.listen(self._listener, copies.channel(self._slot_id))

    async def _wait_for_call(self, timeout_s: float) -> bool:
        """Wait, and return whether a command may have called."""
        if self._listener is None:
            await asyncio.sleep(min(timeout_s, _POLL_S))
            return True
        if timeout_s < _LOOK_S or not self._rest.is_on:
            return await requests.wait_for_call(self._listener, timeout_s)
        is_over = asyncio.Event()
        call = asyncio.create_task(requests.wait_for_call(self._listener, LONG_S), name="call")
        call.add_done_callback(lambda _: is_over.set())
        try:
            await self._rest.sleep(timeout_s, until=is_over)
            return call.done() and call.result()
        finally:
            # A call that comes in the same moment is heard the next time.
            await end_tasks([call])

    async def _refuse_old(self) -> None:
        """Refuse requests that an earlier connection of the daemon has left half done."""
        async with self._control_pool.session() as conn:
            found = await requests.open_requests(conn, self._config.state_schema, self._slot_id)
        for request in found:
            if request.state in ("standing", "go", "ready"):
                await self._refuse(request, "the daemon has connected again since")

    async def _look(self, *, is_called: bool) -> None:
        if is_called:
            self._rest.end()
        await self._copied.read(is_called=is_called, may_wait=self._rest.is_on)
        if not (is_called or self.are_open):
            return
        async with self._control_pool.session() as conn:
            asked = await requests.open_requests(conn, self._config.state_schema, self._slot_id)
        for request_id in [*self._exports]:
            if not any(request.request_id == request_id and request.state == "ready" for request in asked):
                await self._exports.pop(request_id).close()
        # A command that is gone does not call, and a call is not heard while another command is served.
        self.are_open = bool(asked)
        for request in asked:
            if request.state == "asked":
                await self._serve(request)

    def _has_news(self) -> bool:
        """Return whether the copy command does not know yet that the newest change of the copied tables is in force."""
        if self._n_changes != self._copied.n_changes:
            self._n_changes, self._unseen_from_lsn = self._copied.n_changes, self._batcher.taken_lsn
        return self._unseen_from_lsn is not None

    async def _tell_copier(self) -> None:
        """Inform the copy command that changes to its tables are now skipped until their rows have been copied.

        Do so only when everything taken before is committed, because it may hold such changes. A large transaction that
        stands at the copy is no part of that: the snapshot that is made now shows it, its rest is left out then, and
        the command asks again before it writes.
        """
        has_news = self._has_news()
        if self._batcher.large is not None and not self._admission.stands_at_copy:
            self._was_in_large = True
            return
        if self._was_in_large:
            # Its last piece came after the news, and its commit is still to come.
            self._was_in_large = False
            if has_news:
                self._unseen_from_lsn = self._batcher.taken_lsn
        if self._unseen_from_lsn is None or self._engine.watermark.low_lsn < self._unseen_from_lsn:
            return
        # Tables that change while this is written are for the next time.
        known, self._unseen_from_lsn = self._copied.known, None
        async with self._control_pool.session() as conn:
            await copies.tell_seen(conn, self._config.state_schema, self._slot_id, known)

    def _begin_two_phase(self) -> None:
        """Raise SourceLost as soon as two-phase commit, which is configured, can begin at a new start of the stream."""
        if self._awaits_two_phase and self._copied.known.is_settled(self._engine.watermark.low_lsn):
            raise SourceLost("every table is copied: the stream starts again, with two_phase")

    def _stream_again(self) -> None:
        """Raise SourceLost once the transaction that disk had no room for is applied: streaming is then on again."""
        if 0 < self._whole_until_lsn <= self._engine.watermark.low_lsn:
            raise SourceLost("the transaction that was not kept is applied: the stream starts again, with streaming")

    async def _serve(self, request: SnapshotRequest) -> None:
        if self._delay_s >= _LONGEST_DELAY_S and (request.stands or request.lsn is not None):
            await self._refuse(
                request, f"changes are held back for {self._delay_s:g} s: set apply.delay_s = 0 and reload the daemon"
            )
            return
        # A table that is published and not applied may not have come in the stream yet.
        async with stream_ends_first():
            await self._copied.look(is_due=True)
        try:
            session = await self._connect("snapshot")
        except (TargetLost, TargetRefused) as error:
            await self._refuse(request, error.line())
            return
        try:
            await self._export(request, session)
            self._exports[request.request_id] = session
        except _NotServed as error:
            await session.close()
            self._admission.let_pass()
            await self._refuse(request, str(error))
        except BaseException:
            await session.close()
            raise
        finally:
            self._admission.let_pass()

    async def _export(self, request: SnapshotRequest, session: Connection) -> None:
        """Pause at the wanted LSN, export, resume."""
        with settings.target_errors("beginning a snapshot"):
            await session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        lsn = None if request.stands else request.lsn
        began_s, at_lsn = await self._stand(request, lsn)
        if request.stands:
            await self._answer(request, "standing", at_lsn=at_lsn)
            lsn = await self._told(request)
            _, at_lsn = await self._stand(request, lsn)
        with settings.target_errors("exporting a snapshot"):
            cursor = await session.execute("SELECT pg_catalog.pg_export_snapshot()")
            ((name,),) = await cursor.fetchall()
        self._admission.let_pass()
        pause_s = self._clock() - began_s
        await self._answer(request, "ready", at_lsn=at_lsn, snapshot_name=str(name), pause_s=pause_s)
        self._log.info("snapshot_exported", at_lsn=format_lsn(at_lsn), pause_s=round(pause_s, 6))

    async def _stand(self, request: SnapshotRequest, lsn: int | None) -> tuple[float, int]:
        """Return when everything before an LSN, or some LSN if None, is committed and nothing later can be.

        Returns:
            The time since which apply is paused, and the LSN at which the target equals the publisher.

        Raises:
            _NotServed: the LSN is in the past, or tables are not copied yet.
        """
        batcher, hold = self._batcher, self._admission.hold
        exact_lsn = self._admission.starts.exact_from_lsn
        if exact_lsn is None:
            raise _NotServed("tables are not copied: `parapply status` names them")
        exact_lsn = max(exact_lsn, self._first_exact_lsn)
        _check_ahead(lsn, max(exact_lsn, batcher.taken_lsn))
        wanted_lsn = exact_lsn if lsn is None else lsn
        self._admission.hold_at(wanted_lsn)
        began_s = self._clock()
        asked_s = began_s
        while not self._stands_at(wanted_lsn):
            if not batcher.is_taking:
                batcher.close_open()
            now_s = self._clock()
            if lsn is not None and not hold.is_reached:
                # Still on its way there, applying, so this is no pause yet.
                began_s = now_s
            if batcher.received_lsn < wanted_lsn and now_s - asked_s >= _ASK_S:
                asked_s = now_s
                self._progress.report(is_asking=True)
                await self._read(request)
            await self._sleep()
        # The rest of a large transaction whose first piece had passed is not held, however late it commits.
        _check_ahead(lsn, batcher.taken_lsn)
        return began_s, lsn if lsn is not None else max(batcher.taken_lsn, batcher.received_lsn)

    def _stands_at(self, lsn: int) -> bool:
        batcher = self._batcher
        has_come = self._admission.hold.is_reached or (not batcher.is_taking and batcher.received_lsn >= lsn)
        is_empty = batcher.is_empty and batcher.large is None and not batcher.is_torn
        return has_come and not self._engine.jobs and is_empty

    async def _sleep(self) -> None:
        self.moved.clear()
        try:
            async with asyncio.timeout(_ASK_S / 10):
                await self.moved.wait()
        except TimeoutError:
            pass

    async def _told(self, request: SnapshotRequest) -> int:
        """Return the LSN to go to, as soon as the command says it; raise _NotServed if it does not."""
        end_s = self._clock() + _STAND_S
        while self._clock() < end_s:
            found = await self._read(request)
            if found.state == "go" and found.lsn is not None:
                return found.lsn
            await self._wait_for_call(_POLL_S)
        raise _NotServed(f"no LSN was named within {_STAND_S:g} s")

    async def _read(self, request: SnapshotRequest) -> SnapshotRequest:
        async with self._control_pool.session() as conn:
            found = await requests.read(conn, self._config.state_schema, request.request_id)
        if found is None:
            raise _NotServed("the command that asked for it is gone")
        return found

    async def _answer(self, request: SnapshotRequest, state: str, **values: Any) -> None:  # noqa: ANN401  as `answer`
        async with self._control_pool.session() as conn:
            await requests.answer(conn, self._config.state_schema, self._slot_id, request.request_id, state, **values)

    async def _refuse(self, request: SnapshotRequest, reason: str) -> None:
        self._log.info("snapshot_refused", reason=reason)
        await self._answer(request, "refused", reason=reason)


def _check_ahead(lsn: int | None, taken_lsn: int) -> None:
    if lsn is not None and lsn < taken_lsn:
        raise _NotServed(f"{format_lsn(lsn)} is in the past: the target has {format_lsn(taken_lsn)}")


class _NotServed(ParapplyError):
    """A request cannot be served; the message goes to the command that asked."""

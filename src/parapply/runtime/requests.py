"""What commands ask of a running daemon: take note of copied tables, and stand still for a snapshot.

Both come through tables of the state schema (`target/copies.py`, `target/requests.py`) and a notification. One request
is served after the other.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from parapply.errors import ParapplyError, SourceLost, TargetLost, TargetRefused
from parapply.logs import get_logger
from parapply.model import format_lsn
from parapply.target import copies, requests, settings

if TYPE_CHECKING:
    from parapply.config import TargetConfig
    from parapply.runtime.crew import Crew
    from parapply.runtime.desk import Desk
    from parapply.runtime.intake import Intake
    from parapply.runtime.progress import Progress
    from parapply.target.requests import Request
    from parapply.target.settings import Connection

#: Seconds between two looks although nobody called: a copy that was interrupted calls nobody.
_LOOK_S = 1.0
#: Without a session to listen with.
_POLL_S = 0.2
#: Seconds between questions for the publisher's position while a wanted LSN is not reached.
_ASK_S = 0.05
#: Seconds to stand still for a command that has not said where to go.
_STAND_S = 60.0


class Requests:
    """All fields are written by its own task."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        config: TargetConfig,
        slot_name: str,
        slot_id: int,
        desk: Desk,
        *,
        intake: Intake,
        crew: Crew,
        progress: Progress,
        known: copies.Copies,
        awaits_two_phase: bool,
    ) -> None:
        """Tell intake which tables are copied, as read with the state; look at nothing yet."""
        self._config = config
        self._slot_name = slot_name
        self._slot_id = slot_id
        self._desk = desk
        self._intake = intake
        self._crew = crew
        self._progress = progress
        self._known = known
        self._awaits_two_phase = awaits_two_phase
        self._low_lsn = crew.watermark.low_lsn
        self._intake.starts.update(known.starts(self._low_lsn), is_listed=known.is_listed)
        self._first_exact_lsn = intake.taken_lsn
        self._listener: Connection | None = None
        #: Where the stream was when the newest change of what is copied came into force; None: the copier knows of it.
        self._unseen_from_lsn: int | None = intake.taken_lsn
        #: Sessions that keep a snapshot until it is taken.
        self._exports: dict[int, Connection] = {}
        #: Set by the epoch when a batch has committed or a worker is idle.
        self.moved = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._log = get_logger()

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            TargetLost: the connection ended.
            TargetRefused: the state is gone.
            SourceLost: the stream must start anew.
        """
        try:
            self._listener = await self._listen()
            await self._refuse_old()
            while True:
                await self._look()
                await self._tell_copier()
                self._begin_two_phase()
                await self._wait_for_call(_LOOK_S if self._unseen_from_lsn is None else _POLL_S / 10)
        finally:
            self._intake.gate.open()
            for session in (*self._exports.values(), *([self._listener] if self._listener else [])):
                await session.close()

    async def _connect(self, what: str) -> Connection:
        return await settings.connect_control(
            self._config.dsn.get_secret_value(),
            role=self._config.session_replication_role,
            application_name=f"parapply {what} {self._slot_name}",
        )

    async def _listen(self) -> Connection | None:
        """Return a session that listens; None where the target has no connection left, or may not be asked for one."""
        try:
            conn = await self._connect("requests")
        except (TargetLost, TargetRefused) as error:
            self._log.info("requests_polled", error=error.line())
            return None
        await requests.listen(conn, copies.channel(self._slot_id))
        return conn

    async def _wait_for_call(self, timeout_s: float) -> None:
        if self._listener is None:
            await asyncio.sleep(min(timeout_s, _POLL_S))
        else:
            await requests.wait_for_call(self._listener, timeout_s)

    async def _refuse_old(self) -> None:
        """Refuse what an earlier connection of the daemon has left half done."""
        async with self._desk.session() as conn:
            found = await requests.open_requests(conn, self._config.state_schema, self._slot_id)
        for request in found:
            if request.state in ("standing", "go", "ready"):
                await self._refuse(request, "the daemon has started anew since")

    async def _look(self) -> None:
        async with self._desk.session() as conn:
            found = await copies.load(conn, self._config.state_schema, self._slot_id)
            asked = await requests.open_requests(conn, self._config.state_schema, self._slot_id)
        self._take_copies(found)
        for request_id in [*self._exports]:
            if not any(request.request_id == request_id and request.state == "ready" for request in asked):
                await self._exports.pop(request_id).close()
        for request in asked:
            if request.state == "asked":
                await self._serve(request)

    def _take_copies(self, found: copies.Copies) -> None:
        starts = found.starts(self._low_lsn)
        if starts == self._known.starts(self._low_lsn) and found.is_listed == self._known.is_listed:
            return
        self._known = found
        self._log.info("copies_changed", **{state: found.count(state) for state in ("waiting", "copying", "copied")})
        self._intake.starts.update(starts, is_listed=found.is_listed)
        self._intake.starts_changed.set()
        self._unseen_from_lsn = self._intake.taken_lsn

    async def _tell_copier(self) -> None:
        """Tell who wants to copy tables that none of their changes is applied any more before their rows are here.

        Not before everything that was taken until then is committed: it may hold such changes.
        """
        seen_lsn = self._unseen_from_lsn
        if seen_lsn is None or self._intake.is_inside_large or self._crew.watermark.low_lsn < seen_lsn:
            return
        async with self._desk.session() as conn:
            await copies.tell_seen(conn, self._config.state_schema, self._slot_id, self._known)
        self._unseen_from_lsn = None

    def _begin_two_phase(self) -> None:
        """End the epoch as soon as two-phase commit, which is wanted, can begin: with a new start of the stream.

        Raises:
            SourceLost: now.
        """
        if self._awaits_two_phase and self._known.is_settled(self._crew.watermark.low_lsn):
            raise SourceLost("every table is copied: the stream starts anew, with two_phase")

    async def _serve(self, request: Request) -> None:
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
            self._intake.gate.open()
            await self._refuse(request, str(error))
        except BaseException:
            await session.close()
            raise
        finally:
            self._intake.gate.open()

    async def _export(self, request: Request, session: Connection) -> None:
        """Stand still where it is wanted, export, go on."""
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
        self._intake.gate.open()
        pause_s = self._clock() - began_s
        await self._answer(request, "ready", at_lsn=at_lsn, snapshot_name=str(name), pause_s=pause_s)
        self._log.info("snapshot_exported", at_lsn=format_lsn(at_lsn), pause_s=round(pause_s, 6))

    async def _stand(self, request: Request, lsn: int | None) -> tuple[float, int]:
        """Return when everything before an LSN, or some LSN if None, is committed and nothing later can be.

        Returns:
            Since when it stands still, and where: the target equals the publisher there.

        Raises:
            _NotServed: the LSN is in the past, or tables are not copied yet.
        """
        intake = self._intake
        exact_lsn = intake.starts.exact_from_lsn
        if exact_lsn is None:
            raise _NotServed("tables are not copied yet: `parapply status` names them")
        exact_lsn = max(exact_lsn, self._first_exact_lsn)
        if lsn is not None and lsn < max(exact_lsn, intake.taken_lsn):
            past_lsn = format_lsn(max(exact_lsn, intake.taken_lsn))
            raise _NotServed(f"{format_lsn(lsn)} is in the past: the target has {past_lsn}")
        wanted_lsn = exact_lsn if lsn is None else lsn
        intake.gate.close(wanted_lsn)
        began_s = self._clock()
        asked_s = began_s
        while not self._stands_at(wanted_lsn):
            if not intake.is_taking:
                intake.close_open()
            now_s = self._clock()
            if lsn is not None and not intake.gate.is_reached:
                # Still on its way: what is applied meanwhile is no pause.
                began_s = now_s
            if intake.received_lsn < wanted_lsn and now_s - asked_s >= _ASK_S:
                asked_s = now_s
                self._progress.report(is_asking=True)
                await self._read(request)
            await self._sleep()
        return began_s, lsn if lsn is not None else max(intake.taken_lsn, intake.received_lsn)

    def _stands_at(self, lsn: int) -> bool:
        intake = self._intake
        has_come = intake.gate.is_reached or (not intake.is_taking and intake.received_lsn >= lsn)
        return has_come and self._crew.is_idle and intake.building_is_empty and not intake.is_inside_large

    async def _sleep(self) -> None:
        self.moved.clear()
        try:
            async with asyncio.timeout(_ASK_S / 10):
                await self.moved.wait()
        except TimeoutError:
            pass

    async def _told(self, request: Request) -> int:
        """Return the LSN to go to, as soon as the command says it.

        Raises:
            _NotServed: it does not.
        """
        end_s = self._clock() + _STAND_S
        while self._clock() < end_s:
            found = await self._read(request)
            if found.state == "go" and found.lsn is not None:
                return found.lsn
            await self._wait_for_call(_POLL_S)
        raise _NotServed(f"no LSN was named within {_STAND_S:g} s")

    async def _read(self, request: Request) -> Request:
        async with self._desk.session() as conn:
            found = await requests.read(conn, self._config.state_schema, request.request_id)
        if found is None:
            raise _NotServed("nobody waits for it any more")
        return found

    async def _answer(self, request: Request, state: str, **values: Any) -> None:  # noqa: ANN401  those of `answer`
        async with self._desk.session() as conn:
            await requests.answer(conn, self._config.state_schema, self._slot_id, request.request_id, state, **values)

    async def _refuse(self, request: Request, reason: str) -> None:
        self._log.info("snapshot_refused", reason=reason)
        await self._answer(request, "refused", reason=reason)


class _NotServed(ParapplyError):
    """A request cannot be served; the message goes to who asked."""

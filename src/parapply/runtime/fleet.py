"""Several slots in one process: each has its leader, and the rest belongs to the process.

docs/design/FLEET.md says why. One event loop runs the leaders of all slots. A leader that ends with an error is started
again after a pause that grows, alone, while the others keep on. The process has the signals, the systemd socket, the
HTTP endpoint and the totals; a leader has everything else, as if it were alone.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

from structlog.contextvars import bound_contextvars

from parapply import __version__, logs
from parapply.config import Config
from parapply.config_fleet import CONTROL_CONNECTIONS
from parapply.errors import ConfigError, ParapplyError, SlotLost
from parapply.metrics.figures import Figures
from parapply.runtime.daemon import Host, Leader, calm_garbage_collector
from parapply.runtime.observe.http import FleetSlot, endpoint_of_fleet
from parapply.runtime.observe.systemd import Notifier
from parapply.runtime.reload import IDENTITY, Reloader, changed
from parapply.runtime.sessions import Connector
from parapply.runtime.shares import SharedSlot, share_out
from parapply.runtime.signals import Signals
from parapply.spill import SpillRoom
from parapply.tasks import end_tasks
from parapply.vocabulary import DaemonState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.config_fleet import Fleet, FleetDatabase
    from parapply.engine.shares import Share
    from parapply.model import Until
    from parapply.runtime.daemon import Heal
    from parapply.runtime.observe.gauges import Parts

#: Seconds until a slot that failed is started again, at first and at most.
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0
#: Seconds that a leader ran after which it has recovered: its next failure counts as the first.
_GOOD_RUN_S: Final = 10.0
#: Seconds between two divisions of the totals; less if systemd's watchdog is less patient than four of them.
_LOOK_S: Final = 1.0
#: Exit code of an error that is none of ours, as Python's own for an exception.
_UNKNOWN_CODE: Final = 1
#: Slots that are named in the line for systemd.
_MOST_NAMED: Final = 3


def run(fleet: Fleet, load: Callable[[], Config | Fleet], until: Until, *, takeover: bool, heal: Heal) -> int:
    """Run all slots until stopped; signals act as on one daemon, on all of them.

    Args:
        fleet: to begin with.
        load: reads the layers of the configuration again, for SIGHUP; raises ConfigError.
        until: where each slot ends.
        takeover: end other daemons' sessions on the targets.
        heal: for source.on_lost_slot = "heal".

    Returns:
        The worst exit code of all slots: 0 if none was in an error at the end.

    Raises:
        ConfigError: the endpoint cannot be opened, and the log is for people.
    """
    logs.configure(fleet.log.level, fleet.log.format)
    calm_garbage_collector()
    return asyncio.run(_FleetDaemon(fleet, load, until, takeover=takeover, heal=heal).run())


class _Slot:
    """One slot of the fleet. Written by its task; `stop` and `use` come from signals."""

    def __init__(
        self, database: FleetDatabase, until: Until, spill_room: SpillRoom, *, takeover: bool, heal: Heal
    ) -> None:
        self.database = database
        self._spill_room = spill_room
        self.shared = SharedSlot(database.config.apply, database.memory_limit_bytes)
        #: True once its own part of the totals is free.
        self.may_begin = False
        #: Of the error that it ended with last and has not recovered from; 0: none.
        self.exit_code = 0
        #: LSN up to which everything was applied then.
        self._failed_lsn = 0
        self.leader: Leader | None = None
        self._figures = Figures()
        self._until = until
        self._heal = heal
        self._reloader = self._new_reloader()
        #: Outlives leaders, because a later one must not adopt a slot whose state is gone.
        self._opener = Connector(database.config, self.shared.share, takeover=takeover)
        self._signals = Signals()
        #: Ends a pause.
        self._news = asyncio.Event()
        self._log = logs.get_logger()

    @property
    def name(self) -> str:
        return self.database.config.source.slot

    @property
    def parts(self) -> Parts | None:
        view = None if self.leader is None else self.leader.view
        return None if view is None else view.gauges.parts

    @property
    def is_stopping(self) -> bool:
        """Return whether it was asked for its end."""
        return self._signals.is_stop

    @property
    def has_answered(self) -> bool:
        """Return whether it is known whether the slot can be served."""
        return bool(self.exit_code) or self.report()["state"] != DaemonState.STARTING

    def report(self) -> dict[str, Any]:
        view = None if self.leader is None else self.leader.view
        report = {"slot": self.name, "live": True, "ready": False, "state": DaemonState.STARTING, "reason": "",
                  "lag_s": None} if view is None else view.health.report()  # fmt: skip
        return {"database": self.database.name, **report}

    def shown(self) -> FleetSlot:
        return FleetSlot(self.name, self.report(), None if self.leader is None else self.leader.view)

    def stop(self) -> None:
        """Ask for an orderly end, the second time at once."""
        self._signals.stop()
        self._news.set()

    def use(self, database: FleetDatabase) -> None:
        """Go on with another configuration; a slot that waits for its next start begins at once."""
        if changed(self.database.config, database.config) & IDENTITY:
            # Named by the reloader, which takes nothing of it.
            self._reload(database)
            return
        self.database = database
        self.shared.use(database.config.apply, database.memory_limit_bytes)
        self._reload(database)
        self._news.set()

    def _reload(self, database: FleetDatabase) -> None:
        self._wanted = database.config
        with bound_contextvars(slot=self.name, database=database.name):
            if self._reloader.reload() and not self._signals.is_stop:
                self._signals.end.set()

    def _new_reloader(self) -> Reloader:
        self._wanted = self.database.config
        return Reloader(self._wanted, lambda: self._wanted)

    async def run(self) -> None:
        """Start the leader again and again until it ends in order; every line that it logs has slot and database."""
        with bound_contextvars(slot=self.name, database=self.database.name):
            pause_s = _FIRST_PAUSE_S
            while not (self._signals.is_stop and self.exit_code):
                await self._wait_for_part()
                began_s = time.monotonic()
                exit_code = await self._serve()
                low_lsn = 0 if self.leader is None else self.leader.low_lsn
                has_recovered = low_lsn > self._failed_lsn or time.monotonic() - began_s >= _GOOD_RUN_S
                if has_recovered:
                    pause_s, self.exit_code = _FIRST_PAUSE_S, 0
                if exit_code == 0:
                    return
                self.exit_code, self._failed_lsn = exit_code, low_lsn
                self._figures.failures += 1
                self._log.error("slot_failed", exit_code=self.exit_code, wait_s=pause_s)
                await self._pause(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _wait_for_part(self) -> None:
        while not (self.may_begin or self._signals.is_stop):
            self._news.clear()
            await self._news.wait()

    def begin(self) -> None:
        """Let the first leader start: its part of the totals is free."""
        self.may_begin = True
        self._news.set()

    async def _serve(self) -> int:
        """Run a leader to its end; return the exit code that its process would have."""
        self._signals.renew()
        self._reloader = self._new_reloader()
        host = Host(
            self._signals, Notifier({}), self.shared.share, self._spill_room,
            connector=self._connector, heal=self._heal, figures=self._figures,
        )  # fmt: skip
        self.leader = leader = Leader(self._reloader, self._until, host, takeover=False)
        shown = DaemonState.STOPPED
        try:
            await leader.run()
        except ParapplyError as error:
            # The leader has logged it.
            exit_code, reason = error.exit_code, error.line()
            shown = DaemonState.LOST if isinstance(error, SlotLost) else shown
        except Exception as error:  # noqa: BLE001  a slot for itself
            # A mistake of ours that one slot's data brings out must not end the others.
            self._log.exception("daemon_failed", error=type(error).__name__, hint="this is a bug: please report it")
            exit_code, reason = _UNKNOWN_CODE, type(error).__name__
        else:
            exit_code, reason = 0, "ended in order"
        if leader.view is not None:
            leader.view.health.left(shown, reason)
        return exit_code

    def _connector(self, config: Config, share: Share) -> Connector:
        self._opener.use(config, share)
        return self._opener

    async def _pause(self, pause_s: float) -> None:
        if self._signals.is_stop:
            return
        self._news.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._news.wait()


class _FleetDaemon:
    def __init__(
        self, fleet: Fleet, load: Callable[[], Config | Fleet], until: Until, *, takeover: bool, heal: Heal
    ) -> None:
        #: In force. Written by a reload.
        self._fleet = fleet
        self._load = load
        self._until = until
        self._takeover = takeover
        self._heal = heal
        self._signals = Signals()
        self._notifier = Notifier()
        self._spill_room = SpillRoom(fleet.totals.spill_limit_bytes)
        self._is_ready = False
        #: By their names.
        self._slots: dict[str, _Slot] = {}
        #: By their tasks, also slots that a reload has removed, until they have ended.
        self._tasks: dict[asyncio.Task[None], _Slot] = {}
        #: Totals and claims that were divided last.
        self._divided: object = None
        self._news = asyncio.Event()
        self._log = logs.get_logger()

    async def run(self) -> int:
        """Run until every slot has ended; return as `run` of this module."""
        fleet = self._fleet
        self._signals.listen(stopping=self._stop, reload=self._reload)
        self._log.info("fleet_started", version=__version__, pid=os.getpid(), databases=len(fleet.databases))
        async with AsyncExitStack() as stack:
            endpoint = endpoint_of_fleet(lambda: [slot.shown() for slot in self._slots.values()])
            stack.push_async_callback(endpoint.close)
            if fleet.metrics.listen is not None:
                try:
                    await endpoint.open(fleet.metrics.listen)
                except ConfigError as error:
                    self._log.error("daemon_failed", error=str(error), hint=error.hint)
                    if fleet.log.format == "console":
                        raise
                    return error.exit_code
            for database in fleet.databases:
                self._add(database)
            looking = asyncio.create_task(self._look(), name="fleet")
            looking.add_done_callback(lambda _: self._news.set())
            stack.push_async_callback(end_tasks, [looking])
            while self._tasks:
                self._news.clear()
                await self._news.wait()
                for task in [task for task in self._tasks if task.done()]:
                    del self._tasks[task]
                    task.result()  # raises a mistake of ours, and so does the next line
                if looking.done():
                    looking.result()
        code = max([slot.exit_code for slot in self._slots.values()])
        self._log.info("fleet_stopped", exit_code=code)
        return code

    def _add(self, database: FleetDatabase) -> None:
        slot = _Slot(database, self._until, self._spill_room, takeover=self._takeover, heal=self._heal)
        self._slots[slot.name] = slot
        task = asyncio.create_task(slot.run(), name=f"slot {slot.name}")
        self._tasks[task] = slot
        task.add_done_callback(lambda _: self._news.set())

    def _stop(self) -> None:
        self._notifier.stopping("draining")
        for slot in self._tasks.values():
            # One that a reload has removed is stopping already, and this may be the first signal.
            if self._signals.abort.is_set() or not slot.is_stopping:
                slot.stop()

    def _reload(self) -> bool:
        """Read the layers again: start new slots, end removed ones, and pass on changed settings."""
        refused = "databases: the file names none any more"
        try:
            found = self._load()
        except ConfigError as error:
            found, refused = Config(), str(error)
        if isinstance(found, Config):
            self._log.error("config_refused", error=refused, hint="the configuration in force stays")
            return False
        if found.metrics != self._fleet.metrics:
            self._log.warning("config_needs_restart", settings=["metrics.listen"])
        logs.configure(found.log.level, found.log.format)
        self._fleet = found
        wanted = {database.config.source.slot: database for database in found.databases}
        added, removed = sorted(wanted.keys() - self._slots.keys()), sorted(self._slots.keys() - wanted.keys())
        self._log.info("fleet_reloaded", added=added, removed=removed)
        for name in removed:
            self._slots.pop(name).stop()
        for name, slot in self._slots.items():
            slot.use(wanted[name])
        for name in added:
            self._add(wanted[name])
        return False

    async def _look(self) -> None:
        """Divide the totals, and report to systemd, in intervals."""
        watchdog_s = self._notifier.watchdog_s
        interval_s = min(_LOOK_S, watchdog_s / 4) if watchdog_s else _LOOK_S
        while True:
            self._divide()
            self._report()
            await asyncio.sleep(interval_s)

    def _divide(self) -> None:
        self._spill_room.limit_bytes = self._fleet.totals.spill_limit_bytes
        self._spill_room.n_slots = len(self._tasks)
        now_s = time.monotonic()
        claimed = [(slot, slot.shared.claims(slot.parts, now_s)) for slot in self._tasks.values()]
        # In a fleet at rest nothing changes for minutes, and to divide takes longer than to compare.
        divided = self._fleet.totals, [(slot.shared, slot.shared.most_workers, claims) for slot, claims in claimed]
        if divided != self._divided:
            share_out(self._fleet.totals, [(slot.shared, claims) for slot, claims in claimed])
            self._divided = divided
        most = self._fleet.totals.max_connections
        n_taken = sum(
            [
                # Sessions that it has, or may open before the next look.
                CONTROL_CONNECTIONS + max(claims.workers.holds, slot.shared.share.most_workers)
                for slot, claims in claimed
                if slot.may_begin
            ]
        )
        for slot, claims in claimed:
            needed = CONTROL_CONNECTIONS + claims.workers.own
            if not slot.may_begin and (not most or n_taken + needed <= most):
                n_taken += needed
                slot.begin()

    def _report(self) -> None:
        # In a large fleet the reports take longer than most of what a resting slot does.
        if not self._notifier.is_heard:
            return
        reports = [slot.report() for slot in self._slots.values()]
        if not all(report["live"] for report in reports):
            return
        if self._is_ready:
            self._notifier.alive(_line(reports))
        elif all(slot.has_answered for slot in self._slots.values()):
            self._is_ready = True
            self._notifier.ready(_line(reports))


def _line(reports: Sequence[dict[str, Any]]) -> str:
    waiting = [report["slot"] for report in reports if not report["ready"]]
    named = ", ".join(waiting[:_MOST_NAMED]) + (", ..." if len(waiting) > _MOST_NAMED else "")
    return f"{len(reports) - len(waiting)} of {len(reports)} slots apply" + (f"; not {named}" if named else "")

"""The daemon: epochs with back-off between them, each with the configuration that holds then, and the exit code."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from parapply import __version__, logs, retention
from parapply.applylog import ApplyLog, Retention
from parapply.connect import SHOW_LIMIT_S, show_state
from parapply.driver import refusal_hint
from parapply.errors import (
    ApplyFailed,
    ConfigError,
    LeaseHeld,
    LocksExhausted,
    ParapplyError,
    Retry,
    SlotGone,
    SlotLost,
    SourceLost,
    SourceRefused,
    SpillFailed,
    StateClosed,
    StateGone,
    StreamLeft,
    TargetLost,
    TargetRefused,
    WalLimitReached,
)
from parapply.login import PasswordUnknown
from parapply.metrics.figures import Figures
from parapply.model import Until, format_lsn, format_time
from parapply.runtime.observe.applylog_writer import ApplyLogWriter
from parapply.runtime.observe.gauges import Gauges
from parapply.runtime.observe.health import Health
from parapply.runtime.observe.systemd import Notifier
from parapply.runtime.observe.view import SlotView
from parapply.runtime.reload import Reloader
from parapply.runtime.sessions import Connector, log_wait
from parapply.runtime.shares import share_of
from parapply.runtime.signals import Signals
from parapply.source.waits import PublisherWaits
from parapply.tasks import end_tasks, load_modules, sleep_to_beat
from parapply.vocabulary import DaemonState

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from parapply.blocked import BlockedSession
    from parapply.config import Config
    from parapply.engine.shares import Share
    from parapply.login import Login
    from parapply.runtime.first_sessions import FirstSessions
    from parapply.runtime.observe.http import Endpoint
    from parapply.spill import SpillRoom

_T = TypeVar("_T")
#: Heals a lost slot, and returns where the new one begins and the rows that were copied; None: it is not lost any more.
#: Given by the command line, because the daemon imports no command.
Heal: TypeAlias = "Callable[[Config], Coroutine[Any, Any, tuple[int, int] | None]]"

#: Objects made and not freed between two searches for cycles: a few full batches.
_GC_ALLOCATIONS = 200_000
#: Seconds between two checks whether the leader makes progress; less if systemd's watchdog is less patient than four of
#: them.
_LOOK_S = 1.0
#: The same without systemd, where nothing but the endpoint shows it.
_UNHEARD_LOOK_S = 5.0
#: An epoch that lasted this many seconds was a success, so the next attempt comes at once.
_GOOD_EPOCH_S = 10.0
#: Messages of a server that will serve in a moment.
_STARTING = ("starting up", "shutting down", "in recovery", "not yet accepting")
#: Seconds at most before a server that answers so is asked again, because it is running, and ready in a moment.
_STARTING_DELAY_S = 1.0
#: Modules of an epoch, in steps of a millisecond or two: each with those that it imports and the ones before did not.
#: The last one is the epoch's own.
_EPOCH_MODULES = (
    "conflict.skips",
    "engine.durability",
    "engine.flight",
    "engine.workers",
    "target.state.commands",
    "runtime.apply.conflicts",
    "target.sql.commands",
    "runtime.apply.transaction",
    "runtime.apply.ddl",
    "runtime.control.requests",
    "runtime.control.sequence_carrier",
    "runtime.pool.pool",
    "runtime.intake.special",
    "runtime.observe.monitor",
    "runtime.tables.plans",
    "runtime.apply.repair",
    "runtime.apply.streamed",
    "runtime.worker_tasks",
    "runtime.intake.batcher",
    "runtime.intake.intake",
    "runtime.observe.applylog_intervals",
    "wire.assembler",
    "runtime.epoch",
)
#: Seconds for the last word of a daemon that was asked to end: a target that does not answer must not hold it up.
_FAREWELL_S = 1.0


async def run(  # noqa: PLR0913  as the command line has them
    config: Config, load: Callable[[], Config], until: Until, *, takeover: bool, heal: Heal, first: FirstSessions
) -> int:
    """Run until stopped.

    SIGTERM and SIGINT drain, a second one aborts. Both leave the target consistent: uncommitted changes are rolled
    back and will be sent again. SIGHUP reads the configuration again; SIGUSR1 logs what every task waits for.

    Args:
        config: to begin with.
        load: reads the layers of the configuration again, for SIGHUP; raises ConfigError.
        until: where to end.
        takeover: end another daemon's sessions on the target.
        heal: for source.on_lost_slot = "heal".
        first: of this configuration, closed by the caller.

    Returns:
        0, or the exit code of an error that no retry helps, if the log is for programs and so has it already.

    Raises:
        ParapplyError: such an error, if the log is for people; its exit code is the command's.
    """
    logs.configure(config.log.level, config.log.format)
    calm_garbage_collector()
    reloader = Reloader(config, load)
    connector = partial(Connector, takeover=takeover, first=first)
    host = Host(Signals(), Notifier(), connector=connector, heal=heal)
    host.signals.listen(stopping=lambda: host.notifier.stopping("draining"), reload=reloader.reload)
    try:
        return await Leader(reloader, until, host, takeover=takeover).run()
    except ParapplyError as error:
        if config.log.format == "console":
            raise
        # It is the log's last line. A copy in words is none that a reader of the format could parse.
        return error.exit_code


def calm_garbage_collector() -> None:
    """Search for reference cycles seldom, because the hot path makes none, and each search walks every row in hand.

    Rows and transactions are freed by their reference counts; with Python's own thresholds the searches cost the leader
    a third of its time. Cycles come only from rare objects like exceptions, and are still found. An epoch's cycles are
    found when it has ended.
    """
    gc.freeze()
    gc.set_threshold(_GC_ALLOCATIONS)
    gc.enable()


def _log_waiting(one: BlockedSession) -> None:
    one.log("source")


class Host(NamedTuple):
    """All that a process gives to a leader."""

    signals: Signals  # that the process listens for
    notifier: Notifier
    share: Share | None = None  # None: all that the configuration allows
    spill_room: SpillRoom | None = None  # the same
    connector: Callable[[Config, Share], Connector] | None = None  # None: of a publisher
    heal: Heal | None = None  # None: a lost slot ends the leader
    figures: Figures | None = None  # None: the leader's own


class Leader:
    """Owns the apply log of one slot; everything else belongs to the process or to an epoch."""

    def __init__(self, reloader: Reloader, until: Until, host: Host, *, takeover: bool) -> None:
        """Start nothing; `takeover` ends another daemon's sessions on the target."""
        self._reloader = reloader
        #: Written between two epochs only.
        self._config = config = reloader.config
        self._until = until
        self._fixed_share = host.share
        self._spill_room = host.spill_room
        self._share = host.share or share_of(config.apply)
        connector = host.connector or partial(Connector, takeover=takeover)
        self._opener = connector(config, self._share)
        self._signals = host.signals
        self._heal = host.heal
        self._delay_s = config.source.reconnect_min_s
        self._low_lsn: int | None = None
        self._has_served = False
        #: The configuration was reloaded, and no epoch has begun with it.
        self._is_untried = False
        #: State and reason that this object showed last; an epoch shows its own end.
        self._shown = ("", "")
        self._is_epoch_shown = False
        self._notifier = host.notifier
        #: For the endpoint; None before `run` has begun.
        self.view: SlotView | None = None
        self._figures = Figures() if host.figures is None else host.figures
        self._waits = PublisherWaits(self._source_login, _log_waiting)
        self._log = logs.get_logger()

    async def run(self) -> int:
        """Run epoch after epoch until stopped; return 0; raises as `run` of this module."""
        config = self._config
        self._log.info(
            "daemon_started",
            version=__version__,
            pid=os.getpid(),
            slot=config.source.slot,
            workers=config.apply.workers,
            until_lsn=None if self._until.lsn is None else format_lsn(self._until.lsn),
            until_time=None if self._until.time_us is None else format_time(self._until.time_us),
        )
        async with AsyncExitStack() as stack:
            try:
                reason = await self._serve(stack)
                await self._show(DaemonState.STOPPED, reason, limit_s=_FAREWELL_S)
            except ParapplyError as error:
                self._log.error("daemon_failed", error=str(error), hint=error.hint)
                shown = DaemonState.LOST if isinstance(error, SlotLost) else DaemonState.STOPPED
                await self._show(shown, error.line(), error)
                raise
        self._log.info("daemon_stopped", reason=reason)
        return 0

    async def _serve(self, stack: AsyncExitStack) -> str:
        """Open what outlives an epoch, in a stack that closes it, and run epochs; return why they ended."""
        config = self._config
        applylog_writer = self._open_scribe()
        # First of all: a slot whose apply log is refused is shown.
        self._gauges = Gauges(config, self._share, applylog_writer, self._waits)
        self._health = Health(config.source.slot, self._gauges, self._notifier)
        self.view = SlotView(config.source.slot, self._figures, self._gauges, self._health)
        if applylog_writer is not None:
            # Not in the event loop, which other slots' leaders share.
            stack.push_async_callback(asyncio.to_thread, applylog_writer.close)
            await applylog_writer.opened()
        endpoint: Endpoint | None = None
        if config.metrics.listen is not None:
            # Its modules are a thirtieth of what a start imports.
            from parapply.runtime.observe.http import endpoint_of  # noqa: PLC0415

            endpoint = endpoint_of(self.view)
            stack.push_async_callback(endpoint.close)
        looking = [
            asyncio.create_task(self._look(), name="health"),
            asyncio.create_task(self._waits.run(), name="publisher-waits"),
        ]
        stack.push_async_callback(end_tasks, looking)
        stack.callback(self._notifier.stopping, "stopping")
        if endpoint is not None and config.metrics.listen is not None:
            await endpoint.open(config.metrics.listen)
        epochs = asyncio.create_task(self._epochs(applylog_writer), name="epochs")
        stack.push_async_callback(end_tasks, [epochs])
        await asyncio.wait([epochs, *looking], return_when=asyncio.FIRST_COMPLETED)
        for task in looking:
            if task.done():
                task.result()  # raises a mistake of ours
        return await epochs

    @property
    def low_lsn(self) -> int:
        """Return the LSN up to which everything was applied when the last epoch began or ended; 0 before the first."""
        return self._low_lsn or 0

    def _source_login(self) -> Login:
        return self._config.source.login

    def _open_scribe(self) -> ApplyLogWriter | None:
        config = self._config.applylog
        if config.directory is None:
            return None
        return ApplyLogWriter(
            partial(
                ApplyLog,
                config.directory,
                config.rotate_bytes,
                config.rotate_s,
                slot=self._config.source.slot,
                retention=Retention(config.retention_s, config.retention_bytes),
            )
        )

    async def _epochs(self, applylog_writer: ApplyLogWriter | None) -> str:
        while True:
            # Of the attempt before: sessions, cancelled tasks and tracebacks of its error hold each other, and buffers.
            gc.collect()
            self._renew()
            started_s = time.monotonic()
            try:
                reason = await self._epoch(applylog_writer)
                if self._signals.is_stop:
                    # The epoch may have said before that another one follows.
                    self._is_epoch_shown = self._is_epoch_shown and reason == self._signals.why
                    return self._signals.why
                if not self._signals.end.is_set():
                    return reason
                self._health.left(DaemonState.RECONNECTING, reason)
                continue
            except ParapplyError as raised:
                if self._signals.is_stop and raised.retry is Retry.RECONNECT:
                    return "stopped by a signal while an end was lost"
                error = await self._verdict(raised)
                if error is None:
                    continue
                if not self._may_retry(error):
                    raise error from raised.__cause__
                wait_s = self._next_wait_s(error, time.monotonic() - started_s)
                await self._tell_of_another_try(error, wait_s)
                del error  # its traceback holds the whole epoch, and this name would outlive the clause
            if await self._unless_ended(asyncio.sleep(wait_s, result=True)) is None and self._signals.is_stop:
                return "stopped by a signal while reconnecting"

    async def _verdict(self, raised: ParapplyError) -> ParapplyError | None:
        """Do what the configuration says about the slot, and return the error to act on; None: it is healed."""
        error = await self._given_up(raised) if isinstance(raised, WalLimitReached) else raised
        return await self._healed(error) if isinstance(error, SlotGone) else error

    async def _given_up(self, reached: WalLimitReached) -> ParapplyError:
        """Drop the slot if it still keeps too much WAL, and return the error to act on; all sessions are closed."""

        def is_asked() -> bool:
            return not (self._signals.is_stop or self._reloader.differs_from(self._config))

        try:
            lost = await self._unless_ended(retention.give_up(self._config, log_wait, is_asked))
        except ParapplyError as error:
            return error
        if lost is None:
            return reached
        self._log.error("slot_dropped", slot=self._config.source.slot, reason=str(lost))
        return lost

    async def _healed(self, lost: SlotGone) -> ParapplyError | None:
        """Heal the slot if that is configured; return None if the next epoch may begin, else the error to act on."""
        if self._heal is None or self._config.source.on_lost_slot != "heal":
            return lost
        if self._until.lsn is not None or self._until.time_us is not None:
            return SlotLost(f"{lost}. With --until it is not healed: that would go beyond", hint=lost.hint)
        self._log.warning("heal_started", slot=self._config.source.slot, reason=str(lost))
        self._health.left(DaemonState.HEALING, str(lost))
        self._is_epoch_shown = False
        await self._show(DaemonState.HEALING, str(lost))
        try:
            healed = await self._unless_ended(self._heal(self._config))
        except ParapplyError as error:
            self._log.error("heal_failed", error=str(error), hint=error.hint)
            return error
        if healed is not None:
            start_lsn, n_rows = healed
            self._figures.heals += 1
            self._log.warning("heal_done", start_lsn=format_lsn(start_lsn), n_rows=n_rows)
        return None

    def _next_wait_s(self, error: ParapplyError, lasted_s: float) -> float:
        if isinstance(error, StreamLeft):
            return 0.0
        if lasted_s >= _GOOD_EPOCH_S:
            self._delay_s = self._config.source.reconnect_min_s
        if any(words in str(error) for words in _STARTING):
            return min(self._delay_s, _STARTING_DELAY_S)
        wait_s, self._delay_s = self._delay_s, min(self._delay_s * 2, self._config.source.reconnect_max_s)
        return wait_s

    async def _show(
        self, shown: str, reason: str, error: ParapplyError | None = None, *, limit_s: float = SHOW_LIMIT_S
    ) -> None:
        """Show people state and reason, unless an epoch did, the slot is another daemon's, or the target is away."""
        if self._is_epoch_shown or isinstance(error, TargetLost | LeaseHeld) or self._shown == (shown, reason):
            return
        self._shown = (shown, reason)
        await show_state(self._config, shown, reason, limit_s)

    async def _tell_of_another_try(self, error: ParapplyError, wait_s: float) -> None:
        if isinstance(error, StreamLeft):
            shown = DaemonState.RECONNECTING
            self._log.info("stream_left", reason=error.line())
        elif error.retry is Retry.RECONNECT:
            shown, end = DaemonState.RECONNECTING, "source" if isinstance(error, SourceLost) else "target"
            self._log.warning(f"{end}_lost", error=error.line(), wait_s=round(wait_s, 3))
            self._figures.reconnects[end] += 1
        elif self._is_untried:
            shown = DaemonState.RETRYING
            self._log.error("config_refused", error=str(error), hint=error.hint, wait_s=round(wait_s, 3))
        else:
            # The target answers and refuses. With apply.on_error = "retry" it is asked until the operator has mended
            # it.
            shown = DaemonState.RETRYING
            self._log.error("target_refused", error=str(error), hint=error.hint, wait_s=round(wait_s, 3))
        self._health.left(shown, error.line())
        self._is_epoch_shown = False
        await self._show(shown, error.line(), error)

    def _renew(self) -> None:
        """Continue with the configuration that was read last; nothing is open that knows the old one."""
        self._signals.renew()
        if self._config is not self._reloader.config:
            if self._reloader.differs_from(self._config):
                self._is_untried = self._has_served
            self._config = self._reloader.config
            self._delay_s = self._config.source.reconnect_min_s
            self._share = self._fixed_share or share_of(self._config.apply)
            self._opener.use(self._config, self._share)
            self._gauges.use(self._config, self._share)

    async def _epoch(self, applylog_writer: ApplyLogWriter | None) -> str:
        self._is_epoch_shown = False
        async with AsyncExitStack() as stack:
            loading = asyncio.create_task(load_modules(_EPOCH_MODULES), name="modules")
            stack.push_async_callback(end_tasks, [loading])
            ends = await self._unless_ended(self._opener.open(stack))
            if ends is None:
                return self._signals.why
            await loading
            from parapply.runtime.epoch import Epoch  # noqa: PLC0415  loaded by then

            self._has_served = True
            epoch = Epoch(
                self._config, ends, applylog_writer, self._until,
                share=self._share, spill_room=self._spill_room, figures=self._figures, health=self._health,
            )  # fmt: skip
            self._is_untried = False
            self._look_for_progress(epoch.low_lsn)
            self._shown = ("", "")
            self._is_epoch_shown = True
            try:
                return await epoch.serve(self._signals)
            except (SourceLost, TargetLost) as error:
                # Not the end of the daemon; if the target was lost, the epoch could show nothing.
                self._is_epoch_shown = False
                self._shown = (DaemonState.RECONNECTING, error.line()) if isinstance(error, SourceLost) else ("", "")
                if isinstance(error, SpillFailed):
                    self._opener.take_whole(error.end_lsn)
                elif isinstance(error, LocksExhausted):
                    self._opener.take_fewer_tables()
                raise
            finally:
                self._look_for_progress(epoch.low_lsn)

    def _look_for_progress(self, low_lsn: int) -> None:
        """Reset the delay to its minimum if something was applied since the last check.

        Called at the end of an epoch and at the start of the next, because its last commit is in doubt until then, and
        only the state on the target shows whether it took effect (trap T-14).
        """
        if self._low_lsn is not None and low_lsn > self._low_lsn:
            self._delay_s = self._config.source.reconnect_min_s
        self._low_lsn = low_lsn

    def _may_retry(self, error: ParapplyError) -> bool:
        if error.retry is Retry.RECONNECT:
            # If a server refuses for a known reason, or TLS does not trust it, before anything ever worked, a setting
            # is wrong: say so at once. Any other may pass, since servers speak many languages. Where no server was
            # asked, the text may quote the command for the password, with whatever words.
            is_refusal = bool(refusal_hint(str(error))) and not isinstance(error.__cause__, PasswordUnknown)
            return self._has_served or not is_refusal
        if isinstance(error, StateGone) and self._until == Until():
            # A supervisor would start a process that does not know that there was one.
            return True
        is_refused = isinstance(error, ConfigError | TargetRefused | SourceRefused)
        if self._is_untried and is_refused and not isinstance(error, SlotLost | StateClosed):
            # A reload never ends the service, unless only a command helps with slot or state.
            return True
        is_data = isinstance(error, ApplyFailed | TargetRefused | SourceRefused) and self._has_served
        return is_data and not isinstance(error, SourceRefused) and self._config.apply.on_error == "retry"

    async def _unless_ended(self, work: Coroutine[None, None, _T]) -> _T | None:
        """Do some work; give it up and return None as soon as a signal asks for an end, or for another beginning."""
        task = asyncio.create_task(work, name="connect")
        stopping = asyncio.create_task(self._signals.end.wait(), name="stop")
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            return None
        finally:
            await end_tasks([task, stopping])

    async def _look(self) -> None:
        """Check in intervals whether the leader makes progress; systemd's watchdog is fed only if it does."""
        watchdog_s = self._notifier.watchdog_s
        interval_s = _LOOK_S if self._notifier.is_heard else _UNHEARD_LOOK_S
        interval_s = min(interval_s, watchdog_s / 4) if watchdog_s else interval_s
        while True:
            self._health.look(interval_s)
            await sleep_to_beat(interval_s)

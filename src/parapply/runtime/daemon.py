"""The daemon: epochs with back-off between them, each with the configuration that holds then, and the exit code."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, TypeVar

from parapply import __version__, logs
from parapply.applylog import ApplyLog, Retention
from parapply.driver import refusal_hint
from parapply.errors import ApplyFailed, ParapplyError, Retry, SourceLost, SourceRefused, TargetLost, TargetRefused
from parapply.metrics.figures import Figures
from parapply.model import format_lsn
from parapply.runtime.endpoint import Endpoint
from parapply.runtime.ends import Opener
from parapply.runtime.gauges import Gauges
from parapply.runtime.health import Health
from parapply.runtime.notify import Notifier
from parapply.runtime.reload import Reloader
from parapply.runtime.scribe import Scribe
from parapply.runtime.signals import Signals
from parapply.runtime.tasks import end_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from parapply.config import Config

_T = TypeVar("_T")

#: Objects made and not freed between two looks for cycles: some full batches.
_GC_ALLOCATIONS = 200_000
#: Seconds between two looks whether the leader gets on; less if systemd's watchdog is less patient than four of them.
_LOOK_S = 1.0
#: An epoch that lasted this many seconds was a success: the next attempt comes at once.
_GOOD_EPOCH_S = 10.0
#: What a server says when it will serve in a moment; any other FATAL at the very first attempt is a wrong setting.
_LATER = ("starting up", "shutting down", "in recovery", "too many", "remaining connection slots", "not yet accepting")


def run(config: Config, load: Callable[[], Config], until_lsn: int | None, *, takeover: bool) -> int:
    """Run until stopped; return 0.

    SIGTERM and SIGINT drain, a second one aborts. Both leave the target consistent: what is not committed is rolled
    back and will be sent again. SIGHUP reads the configuration again; SIGUSR1 logs what every task waits for.

    Args:
        config: to begin with.
        load: reads the layers of the configuration again, for SIGHUP; raises ConfigError.
        until_lsn: end once all up to there is durable.
        takeover: end another daemon's sessions on the target.

    Raises:
        ParapplyError: what no retry helps; its exit code is the command's.
    """
    logs.configure(config.log.level, config.log.format)
    _calm_garbage_collector()
    return asyncio.run(_Daemon(Reloader(config, load), until_lsn, takeover=takeover).run())


def _calm_garbage_collector() -> None:
    """Look for reference cycles seldom: the hot path makes none, and each look walks every row in hand.

    Rows and transactions are freed by their reference counts; with Python's own thresholds the looks cost the leader a
    third of its time. Cycles come only from rare things like exceptions, and are still found.
    """
    gc.freeze()
    gc.set_threshold(_GC_ALLOCATIONS)
    gc.enable()


class _Daemon:
    """Owns the signals and the apply log; everything else belongs to an epoch."""

    def __init__(self, reloader: Reloader, until_lsn: int | None, *, takeover: bool) -> None:
        self._reloader = reloader
        #: Written between two epochs only.
        self._config = config = reloader.config
        self._until_lsn = until_lsn
        self._opener = Opener(config, takeover=takeover)
        self._signals = Signals()
        self._delay_s = config.source.reconnect_min_s
        self._low_lsn: int | None = None
        self._has_served = False
        self._notifier = Notifier()
        self._figures = Figures()
        self._log = logs.get_logger()

    async def run(self) -> int:
        self._signals.listen(stopping=lambda: self._notifier.stopping("draining"), reload=self._reloader.reload)
        config = self._config
        self._log.info(
            "daemon_started",
            version=__version__,
            pid=os.getpid(),
            slot=config.source.slot,
            workers=config.apply.workers,
            until_lsn=None if self._until_lsn is None else format_lsn(self._until_lsn),
        )
        scribe = self._open_scribe()
        self._gauges = Gauges(config, scribe)
        self._health = Health(config.source.slot, self._gauges, self._notifier)
        endpoint = Endpoint(config.source.slot, self._figures, self._gauges, self._health)
        looking = asyncio.create_task(self._look(), name="health")
        try:
            if config.metrics.listen is not None:
                await endpoint.open(config.metrics.listen)
            reason = await self._epochs(scribe)
        except ParapplyError as error:
            self._log.error("daemon_failed", error=str(error), hint=error.hint)
            raise
        finally:
            self._notifier.stopping("stopping")
            await end_tasks([looking])
            await endpoint.close()
            if scribe is not None:
                scribe.close()
        self._log.info("daemon_stopped", reason=reason)
        return 0

    def _open_scribe(self) -> Scribe | None:
        config = self._config.applylog
        if config.directory is None:
            return None
        retention = Retention(config.retention_s, config.retention_bytes)
        log = ApplyLog(
            config.directory, config.rotate_bytes, config.rotate_s, slot=self._config.source.slot, retention=retention
        )
        return Scribe(log)

    async def _epochs(self, scribe: Scribe | None) -> str:
        while True:
            self._renew()
            started_s = time.monotonic()
            try:
                reason = await self._epoch(scribe)
                if self._signals.is_stop:
                    return self._signals.why
                if not self._signals.end.is_set():
                    return reason
                self._health.left("reconnecting", reason)
                continue
            except ParapplyError as error:
                if self._signals.is_stop and error.retry is Retry.RECONNECT:
                    return "stopped by a signal while an end was lost"
                if not self._may_retry(error):
                    raise
                if time.monotonic() - started_s >= _GOOD_EPOCH_S:
                    self._delay_s = self._config.source.reconnect_min_s
                end = "source" if isinstance(error, SourceLost) else "target"
                self._log.warning(f"{end}_lost", error=error.line(), wait_s=round(self._delay_s, 3))
                self._health.left("reconnecting", error.line())
            self._figures.reconnects[end] += 1
            if await self._unless_ended(asyncio.sleep(self._delay_s, result=True)) is None and self._signals.is_stop:
                return "stopped by a signal while reconnecting"
            self._delay_s = min(self._delay_s * 2, self._config.source.reconnect_max_s)

    def _renew(self) -> None:
        """Go on with the configuration that was read last: nothing is open that knows the old one."""
        self._signals.renew()
        if self._config is not self._reloader.config:
            self._config = self._reloader.config
            self._delay_s = self._config.source.reconnect_min_s
            self._opener.use(self._config)
            self._gauges.use(self._config)

    async def _epoch(self, scribe: Scribe | None) -> str:
        async with AsyncExitStack() as stack:
            ends = await self._unless_ended(self._opener.open(stack))
            if ends is None:
                return self._signals.why
            # Behind the start of the stream: the publisher decodes meanwhile.
            from parapply.runtime.epoch import Epoch  # noqa: PLC0415

            self._has_served = True
            epoch = Epoch(self._config, ends, scribe, self._until_lsn, figures=self._figures, health=self._health)
            self._look_for_progress(epoch.low_lsn)
            try:
                return await epoch.serve(self._signals)
            finally:
                self._look_for_progress(epoch.low_lsn)

    def _look_for_progress(self, low_lsn: int) -> None:
        """Forget the growth of the delay if something was applied since the last look.

        At the end of an epoch and at the start of the next: what its last commit did, in doubt until then, only the
        state on the target tells (trap T-14).
        """
        if self._low_lsn is not None and low_lsn > self._low_lsn:
            self._delay_s = self._config.source.reconnect_min_s
        self._low_lsn = low_lsn

    def _may_retry(self, error: ParapplyError) -> bool:
        if error.retry is Retry.RECONNECT:
            # A server that answers and refuses, or that TLS does not trust, before anything ever worked, means a wrong
            # setting: say so at once.
            text = str(error)
            is_refusal = isinstance(error, SourceLost | TargetLost) and ("FATAL:" in text or bool(refusal_hint(text)))
            return self._has_served or not is_refusal or any(words in text for words in _LATER)
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
        """See in intervals whether the leader gets on; systemd's watchdog is fed only if it does."""
        watchdog_s = self._notifier.watchdog_s
        interval_s = min(_LOOK_S, watchdog_s / 4) if watchdog_s else _LOOK_S
        while True:
            self._health.look(interval_s)
            await asyncio.sleep(interval_s)

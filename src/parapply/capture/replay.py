"""`parapply replay`: the ordinary daemon applies a capture to a scratch database, once for each group of settings.

The state of the daemon in the scratch database says how far a run has come, so a run that was stopped goes on there,
exactly once, as after any stop. Results are kept beside it. After each run the tables are compared with the run before.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from psycopg import sql

from parapply import connect, logs
from parapply.capture import folder as folders
from parapply.capture import server_settings
from parapply.capture.connector import CapturedConnector
from parapply.capture.lateness import Late, Lateness
from parapply.capture.scratch import MARK, Scratch, left_out, shapes_of
from parapply.capture.stream import Read
from parapply.config import DdlConfig, MetricsConfig, SequencesConfig
from parapply.config_mapping import MappingConfig
from parapply.errors import CaptureRefused, ConfigError, ParapplyError
from parapply.model import Until
from parapply.runtime.daemon import Host, Leader, calm_garbage_collector
from parapply.runtime.observe.systemd import Notifier
from parapply.runtime.reload import Reloader
from parapply.runtime.signals import Signals
from parapply.source import slot
from parapply.source.options import check_slot_name
from parapply.target.session.settings import rows, target_errors
from parapply.target.state.schema import in_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from parapply.capture.folder import CaptureFound
    from parapply.capture.records import Shapes
    from parapply.config import Config
    from parapply.login import Login
    from parapply.target.session import settings

#: Policy of conflicts about rows from before the capture, which the scratch database lacks.
_MISSING = "skip"
_STREAMINGS = frozenset({"off", "on", "parallel"})
_ORIGINS = frozenset({"any", "none"})


class ReplayOptions(NamedTuple):
    """How to replay."""

    folder: Path
    copy_of: Login | None
    speed: float  # 1.0: at the pace of the day; infinity: as fast as it goes
    is_despite_torn: bool
    is_again: bool
    log: Path | None = None  # for the apply log of the first group; the others do not run then


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One group of settings."""

    settings: str
    is_done: bool = False
    seconds: float = 0.0
    late: Late = Late()
    limit: str = ""  # the verdict of the daemon's last minutes, as `status` shows it; empty: too short for one
    sums: dict[str, tuple[int, str]] = {}  # rows and checksum, by table
    failure: str = ""


class ReplayOutcome(NamedTuple):
    """All runs."""

    runs: list[RunResult]  # of each group of settings, in order; less where it was stopped
    log: Path | None  # folder of the apply log of the first group's run
    lines: list[str]  # about what is not as it was
    is_stopped: bool
    different: list[str]  # tables that are not equal after all runs


def replay(
    load: Callable[[Sequence[str]], Config], groups: Sequence[Sequence[str]], options: ReplayOptions
) -> ReplayOutcome:
    """Apply a capture once for each group of settings.

    Args:
        load: returns the configuration with further settings ``key=value``.
        groups: of settings.
        options: how.

    Raises:
        CaptureRefused: the capture is damaged, or has what a replay cannot apply.
        ConfigError: a setting is wrong.
        TargetRefused, TargetLost: the scratch database cannot take it.
    """
    found = folders.look(options.folder)
    if found.torn is not None and not options.is_despite_torn:
        raise found.torn
    if options.copy_of is not None and found.start.redaction is not None:
        raise CaptureRefused(
            "the capture is redacted, so its rows do not meet the rows of another database",
            hint="leave --copy-of out, or replay a capture that is not redacted",
        )
    places = found.places[: found.last_between() + 1]
    if not places[-1].header.end_lsn:
        raise CaptureRefused("the capture ended before its slot was made", hint="delete the folder, and begin again")
    _check_options(found)
    runs = [_group(load, pairs, found, has_rows=options.copy_of is not None) for pairs in groups]
    logs.configure(runs[0].config.log.level, runs[0].config.log.format)
    calm_garbage_collector()
    if len({run.name for run in runs}) < len(runs):
        raise ConfigError("--run: two groups of settings are the same")
    read = Read(options.folder, places, found.start.options.get("streaming") == "parallel", options.speed)
    every = _Replay(found, read, options)
    if options.log is not None:
        config = runs[0].config
        log = msgspec.structs.replace(config.applylog, directory=every.log_of(runs[0].name, options.log))
        runs[0] = runs[0]._replace(config=msgspec.structs.replace(config, applylog=log))
    return asyncio.run(every.all(runs))


def _group(
    load: Callable[[Sequence[str]], Config], pairs: Sequence[str], found: CaptureFound, *, has_rows: bool
) -> _Group:
    own, server = server_settings.divided(pairs)
    return _Group(" ".join(pairs) or "as configured", _of_capture(load(own), found, has_rows=has_rows), server)


def _check_options(found: CaptureFound) -> None:
    """Refuse a stream that was asked for in a way that no capture asks for.

    Raises:
        CaptureRefused: it was.
    """
    given = found.start.options
    if given.get("streaming", "off") not in _STREAMINGS or given.get("origin", "any") not in _ORIGINS:
        raise CaptureRefused(
            f"{found.places[0].file}: the options of its stream are not known",
            hint="replay it with the version of parapply that has written it",
        )
    check_slot_name(found.start.slot)


def _of_capture(config: Config, found: CaptureFound, *, has_rows: bool) -> Config:
    """Return a configuration with the capture's own settings, and nothing that only a publisher could answer."""
    start, replace = found.start, msgspec.structs.replace
    streaming: Any = start.options.get("streaming", "off")
    origin: Any = start.options.get("origin", "any")
    source = replace(
        config.source, slot=start.slot, publications=start.publications, streaming=streaming, origin=origin,
        two_phase="two_phase" in start.options, failover="off", catch_up="off", retained_wal_limit_bytes=0,
    )  # fmt: skip
    conflict = config.conflict
    if not has_rows:
        update: Any = _MISSING if conflict.update_missing == "error" else conflict.update_missing
        delete: Any = _MISSING if conflict.delete_missing == "error" else conflict.delete_missing
        conflict = replace(conflict, update_missing=update, delete_missing=delete)
    return replace(
        config, source=source, conflict=conflict, ddl=DdlConfig(), mapping=MappingConfig(),
        sequences=SequencesConfig(), metrics=MetricsConfig(),
    )  # fmt: skip


class _Group(NamedTuple):
    """A run that is asked for."""

    name: str
    config: Config
    server: dict[str, str]  # settings of the target's server


class _Replay:
    """All runs of one command."""

    def __init__(self, found: CaptureFound, read: Read, options: ReplayOptions) -> None:
        self._found = found
        self._read = read
        self._options = options
        self._end_lsn = read.places[-1].header.end_lsn
        self._is_stopped = False

    async def all(self, runs: Sequence[_Group]) -> ReplayOutcome:
        results: list[RunResult] = []
        first = runs[0].config
        shapes = shapes_of(self._options.folder, self._read.places, without=first.target.state_schema)
        n_applied = len(runs) if self._options.log is None else 1
        runs = [await self._checked(run, shapes) if number < n_applied else run for number, run in enumerate(runs)]
        for number, run in enumerate(runs):
            if self._is_stopped:
                break
            conn = await connect.open_target(run.config, "replay")
            async with conn:
                if number >= n_applied:
                    results.append(await self._load(conn, run.name) or RunResult(settings=run.name))
                    continue
                scratch = Scratch(conn, run.config.target.state_schema, shapes)
                results.append(await self._one(run.name, run.config, scratch, conn))
        done = [run for run in results if run.is_done]
        different = sorted({table for run in done for table, found in run.sums.items() if done[0].sums[table] != found})
        return ReplayOutcome(results, first.applylog.directory, left_out(shapes), self._is_stopped, different)

    async def _checked(self, run: _Group, shapes: Shapes) -> _Group:
        """Return a run with the server's settings for its sessions, unless it is done already."""
        if not run.server:
            return run
        async with await connect.open_target(run.config, "replay") as conn:
            await Scratch(conn, run.config.target.state_schema, shapes).mark()
            before = await self._before(conn, run.name)
            if before is not None and before.is_done:
                return run
            return run._replace(config=await server_settings.for_sessions(conn, run.config, run.server))

    async def _before(self, conn: settings.Connection, name: str) -> RunResult | None:
        return None if self._options.is_again else await self._load(conn, name)

    async def _one(self, name: str, config: Config, scratch: Scratch, conn: settings.Connection) -> RunResult:
        await scratch.mark()
        before = await self._before(conn, name)
        if before is not None and before.is_done:
            return before
        if before is None:
            await scratch.empty()
            await self._forget_unfinished(conn)
            await scratch.make()
            if self._options.copy_of is not None:
                async with await slot.connect(self._options.copy_of, application_name="parapply replay") as there:
                    await scratch.copy_from(there)
            before = RunResult(settings=name)
            await self._keep(conn, before)
        lateness = Lateness(is_paced=self._read.speed < float("inf"))
        began_s = time.monotonic()
        failure = await self._run(config, lateness, scratch.tables)
        result = msgspec.structs.replace(
            before,
            is_done=not self._is_stopped and not failure,
            seconds=round(before.seconds + time.monotonic() - began_s, 3),
            late=before.late.joined(lateness.result),
            limit=await self._limit(conn, config),
            failure=failure,
        )
        if result.is_done:
            result = msgspec.structs.replace(result, sums=await scratch.sums())
        await self._keep(conn, result)
        return result

    async def _run(self, config: Config, lateness: Lateness, tables: Sequence[tuple[str, str]]) -> str:
        """Apply all that is not applied yet; return the error that ended it, empty if it was asked to, or is done."""
        signals = Signals()
        signals.listen(stopping=lambda: None, reload=lambda: False)
        connector = partial(
            CapturedConnector, start=self._found.start, read=self._read, lateness=lateness, tables=tables
        )
        host = Host(signals, Notifier(), connector=connector)
        leader = Leader(Reloader(config, lambda: config), Until(lsn=self._end_lsn), host, takeover=False)
        try:
            await leader.run()
        except ParapplyError as error:
            return error.line()
        finally:
            self._is_stopped = signals.is_stop
        return ""

    async def _limit(self, conn: settings.Connection, config: Config) -> str:
        query = in_schema("SELECT limits FROM {s}.slots WHERE slot_name = $1", config.target.state_schema)
        with target_errors("reading the verdict"):
            found = await rows(conn, query, [config.source.slot])
        limits = found[0][0] if found else None
        return str(limits.get("words", "")) if isinstance(limits, dict) else ""

    async def _load(self, conn: settings.Connection, name: str) -> RunResult | None:
        query = sql.SQL("SELECT result::text FROM {}.runs WHERE capture = $1 AND settings = $2").format(
            sql.Identifier(MARK)
        )
        with target_errors("reading the results"):
            found = await rows(conn, query, [self._found.capture, self._key(name)])
        return msgspec.json.decode(found[0][0], type=RunResult) if found else None

    async def _forget_unfinished(self, conn: settings.Connection) -> None:
        """Forget runs that have not ended: their tables are gone."""
        with target_errors("writing the results"):
            await conn.execute(sql.SQL("DELETE FROM {}.runs WHERE NOT is_done").format(sql.Identifier(MARK)))

    async def _keep(self, conn: settings.Connection, result: RunResult) -> None:
        query = sql.SQL(
            "INSERT INTO {}.runs (capture, settings, is_done, result) VALUES ($1, $2, $3, $4::jsonb)"
            " ON CONFLICT (capture, settings) DO UPDATE SET is_done = excluded.is_done, result = excluded.result"
        ).format(sql.Identifier(MARK))
        text = msgspec.json.encode(result).decode()
        with target_errors("writing the results"):
            await rows(conn, query, [self._found.capture, self._key(result.settings), result.is_done, text])

    def log_of(self, name: str, folder: Path) -> Path:
        """Return the folder of a run's apply log: no other run is in it, but for repetitions of the same one."""
        key = f"{self._found.capture} {self._key(name)}"
        return folder / hashlib.blake2b(key.encode(), digest_size=8).hexdigest()

    def _key(self, name: str) -> str:
        """Return what a result is of: the settings, the speed, and how far the capture went."""
        return f"{name} | speed {self._read.speed:g} | up to {self._end_lsn} | rows {self._options.copy_of is not None}"

"""`parapply replay`: the ordinary daemon applies a capture to a scratch database, once for each group of settings.

The state of the daemon in the scratch database says how far a run has come, so a run that was stopped goes on there,
exactly once, as after any stop. Results are kept beside it. After each run the tables are compared with the run before.
The apply log of a run gives its verdict, and predictions of other settings.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
import stat
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import psycopg
from psycopg import sql

from parapply import connect, logs
from parapply.capture import folder as folders
from parapply.capture import server_settings
from parapply.capture.arrivals import Arrivals, arrivals
from parapply.capture.lateness import Late, Lateness
from parapply.capture.scratch import MARK, Scratch, left_out, shapes_of
from parapply.capture.stream import CapturedStream, Read
from parapply.config import DdlConfig, MetricsConfig, SequencesConfig
from parapply.config_mapping import MappingConfig
from parapply.config_values import Secret
from parapply.driver import parameters_of
from parapply.errors import CaptureRefused, ConfigError, ParapplyError, TargetRefused
from parapply.model import Until
from parapply.runtime.daemon import Host, Leader, calm_garbage_collector
from parapply.runtime.first_sessions import FirstSessions, Look
from parapply.runtime.observe.systemd import Notifier
from parapply.runtime.reload import Reloader
from parapply.runtime.sessions import Connector
from parapply.runtime.signals import Signals
from parapply.source import slot
from parapply.source.options import check_slot_name
from parapply.target.session.settings import rows, target_errors
from parapply.target.state import slots as state
from parapply.target.state.schema import in_schema

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AsyncExitStack

    from parapply.capture.blocks import CaptureStart, Shapes
    from parapply.capture.folder import CaptureFound
    from parapply.config import Config
    from parapply.engine.shares import Share
    from parapply.login import Login
    from parapply.source.slot_stream import SlotStream
    from parapply.target.session import settings

#: Policy of conflicts about rows from before the capture, which the scratch database lacks.
_MISSING = "skip"
#: Seconds of a trial, about, and the part of the capture that it takes at most, so that none is a whole run.
_TRIAL_S, _TRIAL_PART = 20.0, 0.5
_STREAMINGS = frozenset({"off", "on", "parallel"})
_ORIGINS = frozenset({"any", "none"})


# A capture has no catalogue. The scratch target's, which has no publications, stands for it, so that every table is
# taken as the stream announces it.


class _CapturedFirst(FirstSessions):
    def __init__(self, config: Config, facts: slot.SourceFacts, tables: Sequence[tuple[str, str]]) -> None:
        self._facts = facts
        self._tables = tables
        super().__init__(config)

    async def _look(self) -> Look:
        conn = await slot.connect(self.config.target.login, application_name="parapply replay")
        return await self._stack.enter_async_context(conn), self._facts

    async def _published_tables(self) -> Sequence[tuple[str, str]]:
        return self._tables


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
        #: Up to where all was applied when a stream began.
        self._low_lsn = 0
        #: Of transactions that found no room in `apply.spill_dir`: their end, and the LSN of above.
        self._without_room: set[tuple[int, int]] = set()

    def take_whole(self, end_lsn: int) -> None:
        """Let it come again, with fewer streams beside it; raise CaptureRefused if it has, and nothing was applied."""
        failed = end_lsn, self._low_lsn
        # Without an end it failed otherwise, such as by a damaged block.
        if end_lsn and failed in self._without_room:
            raise CaptureRefused(
                "a streamed transaction finds no room on disk, over and over",
                hint="make room in apply.spill_dir, or set a larger apply.spill_limit_bytes",
            )
        self._without_room.add(failed)

    def _facts(self) -> slot.SourceFacts:
        start = self._start_record
        return slot.SourceFacts(
            system_identifier=start.system_identifier, timeline=start.timeline, database=start.database,
            server_version_num=start.server_version_num, wal_level="logical", is_in_recovery=False,
            wal_sender_timeout_s=0.0, decoding_memory_bytes=0, flush_lsn=self._read.places[-1].header.end_lsn,
            slot=None,
        )  # fmt: skip

    def _begin_first(self) -> FirstSessions:
        return _CapturedFirst(self._config, self._facts(), self._tables)

    async def _adopt(self, source: slot.Connection, control: settings.Connection) -> state.SlotState:  # noqa: ARG002
        schema, facts = self._config.target.state_schema, self._facts()
        await state.ensure_schema(control, schema)
        await state.create(control, schema, connect.new_slot(self._config, facts, self._read.begin_lsn))
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
        found = await self._known(control)
        self._low_lsn = found.low_lsn
        return first_look, found, frozenset(self._start_record.operations)

    async def _connect_stream(
        self,
        stack: AsyncExitStack,
        asked: slot.Connection,  # noqa: ARG002
        facts: slot.SourceFacts,  # noqa: ARG002
    ) -> SlotStream:
        stream = CapturedStream(self._read, self._lateness)
        stack.push_async_callback(stream.close)
        return stream

    async def _claimed(
        self,
        connecting: asyncio.Task[SlotStream],
        source_conn: slot.Connection,  # noqa: ARG002
        facts: slot.SourceFacts,  # noqa: ARG002
        found: state.SlotState,  # noqa: ARG002
    ) -> SlotStream:
        return await connecting

    async def _start(
        self,
        claimed: asyncio.Task[SlotStream],
        facts: slot.SourceFacts,  # noqa: ARG002
        found: state.SlotState,
        streaming: str,  # noqa: ARG002
        *,
        two_phase: bool,  # noqa: ARG002
    ) -> SlotStream:
        stream = await claimed
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


class ReplayOptions(NamedTuple):
    """How to replay."""

    folder: Path
    copy_of: Login | None
    speed: float  # 1.0: at the pace of the day; infinity: as fast as it goes
    is_despite_torn: bool
    is_again: bool
    verdict: Callable[[Path], str] | None  # of a run by its apply log; None: as `status` shows it
    log: Path | None = None  # for the apply log of the first group; the others do not run then
    learn_changes: int = 0  # of the first group's run; 0: all of them
    trials: Sequence[Sequence[str]] = ()  # settings of short runs after that one, which show the error of predictions


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One group of settings."""

    settings: str
    is_done: bool = False
    seconds: float = 0.0
    late: Late = Late()
    limit: str = ""  # the verdict; empty: too short for one
    log: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")] = ""  # name of the folder of its apply log
    sums: dict[str, tuple[int, str]] = {}  # rows and checksum, by table
    failure: str = ""
    lost_parts: int = 0  # parts that ended without a word, so that their time and lateness are not known


class Learnt(NamedTuple):
    """A run that predictions are learnt from."""

    run: RunResult
    log: Path  # folder of its apply log
    arrivals: Arrivals  # of the whole capture
    is_part: bool  # the run ended before the capture
    trials: Sequence[RunResult] = ()  # of its first part; their logs are beside its own


class ReplayOutcome(NamedTuple):
    """All runs."""

    runs: list[RunResult]  # of each group of settings, in order; less where it was stopped
    learnt: Learnt | None  # None: nothing is to be predicted
    lines: list[str]  # about what is not as it was
    is_stopped: bool
    different: list[str]  # tables that are not equal after all runs


def replay(
    load: Callable[[Sequence[str]], Config], groups: Sequence[Sequence[str]], options: ReplayOptions
) -> ReplayOutcome:
    """Apply a capture once for each group of settings.

    Raises:
        CaptureRefused: the capture is damaged, or has what a replay cannot apply.
        ConfigError: a setting is wrong.
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
    runs, tried = (
        [_group(load, pairs, found, has_rows=options.copy_of is not None) for pairs in some]
        for some in (groups, options.trials)
    )
    logs.configure(runs[0].config.log.level, runs[0].config.log.format)
    calm_garbage_collector()
    if len({run.name for run in runs}) < len(runs):
        raise ConfigError("--run: two groups of settings are the same")
    is_parallel = found.start.options.get("streaming") == "parallel"
    read = Read(options.folder, places, is_parallel, options.speed, places[-1].header.end_lsn)
    return asyncio.run(_all(found, read, options, runs, tried))


async def _all(
    found: CaptureFound, read: Read, options: ReplayOptions, runs: Sequence[_Group], tried: Sequence[_Group]
) -> ReplayOutcome:
    shapes = shapes_of(options.folder, read.places, without=runs[0].config.target.state_schema)
    every = _Replay(found, read, options, shapes)
    if options.log is None:
        return every.outcome(await every.all(runs), None)
    came = arrivals(read, options.learn_changes or sys.maxsize)
    learning = _Replay(found, read._replace(until_lsn=came.part_lsn), options, shapes)
    (run,) = await learning.all(runs[:1])
    trying = _Replay(found, read._replace(until_lsn=_trial_lsn(came, run)), options, shapes)
    trials = await trying.all(tried) if run.is_done else []
    is_part = came.part_lsn < read.until_lsn
    learnt = Learnt(run, options.log / run.log, came, is_part, trials)
    every.is_stopped = learning.is_stopped or trying.is_stopped
    return every.outcome(await every.known(runs), learnt)


def _trial_lsn(came: Arrivals, run: RunResult) -> int:
    """Return where trials end: what the first group's run applied in some seconds, at most a part of the capture."""
    part = min(came.n_part * _TRIAL_S / max(run.seconds, _TRIAL_S), came.n_changes * _TRIAL_PART)
    return min(came.lsn_of(int(part)), came.part_lsn)


def _group(
    load: Callable[[Sequence[str]], Config], pairs: Sequence[str], found: CaptureFound, *, has_rows: bool
) -> _Group:
    own, server = server_settings.divided(pairs)
    return _Group(" ".join(pairs) or "as configured", _of_capture(load(own), found, has_rows=has_rows), server)


def _check_options(found: CaptureFound) -> None:
    """Refuse a stream that was asked for in a way that no capture asks for."""
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
    # Nothing would be late enough, because the clock of a capture stands still at its end.
    apply = replace(config.apply, delay_s=0.0)
    return replace(
        config, source=source, apply=apply, conflict=conflict, ddl=DdlConfig(), mapping=MappingConfig(),
        sequences=SequencesConfig(), metrics=MetricsConfig(),
    )  # fmt: skip


def _folder_of_logs() -> Path:
    """Return the folder for logs of a run; raise ConfigError if it cannot be made, or may be another user's."""
    folder = Path(tempfile.gettempdir()) / f"parapply-replay-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}", hint="set TMPDIR to a folder of your own") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{folder} may be another user's", hint="set TMPDIR to a folder of your own")
    return folder


class _Group(NamedTuple):
    name: str
    config: Config
    server: dict[str, str]  # settings of the target's server


class _Replay:
    """Runs of one command, up to one end."""

    def __init__(self, found: CaptureFound, read: Read, options: ReplayOptions, shapes: Shapes) -> None:
        self._found = found
        self._read = read
        self._options = options
        self._shapes = shapes
        self.is_stopped = False

    async def all(self, runs: Sequence[_Group]) -> list[RunResult]:
        results: list[RunResult] = []
        for run in [await self._checked(run) for run in runs]:
            if self.is_stopped:
                break
            results.append(await self._one(run))
        return results

    async def known(self, runs: Sequence[_Group]) -> list[RunResult]:
        async with await connect.open_target(runs[0].config, "replay") as conn:
            return [await self._load(conn, run) or RunResult(settings=run.name) for run in runs]

    def outcome(self, results: list[RunResult], learnt: Learnt | None) -> ReplayOutcome:
        done = [run for run in results if run.is_done]
        different = sorted({table for run in done for table, found in run.sums.items() if done[0].sums[table] != found})
        return ReplayOutcome(results, learnt, left_out(self._shapes), self.is_stopped, different)

    def _scratch(self, conn: settings.Connection, config: Config) -> Scratch:
        return Scratch(conn, config.target.state_schema, self._shapes)

    async def _checked(self, run: _Group) -> _Group:
        """Return a run with the server's settings for its sessions, unless it is done already."""
        if not run.server:
            return run
        async with await connect.open_target(run.config, "replay") as conn:
            await self._scratch(conn, run.config).mark()
            before = await self._before(conn, run)
            if before is not None and before.is_done:
                return run
            return run._replace(config=await server_settings.for_sessions(conn, run.config, run.server))

    async def _before(self, conn: settings.Connection, run: _Group) -> RunResult | None:
        """Return the result of a run that goes on, or is done; None: it is to begin."""
        found = None if self._options.is_again else await self._load(conn, run)
        if found is None or self._options.log is None or (self._options.log / found.log).is_dir():
            return found
        # Nothing can be learnt from a run without its log.
        return None

    async def _one(self, run: _Group) -> RunResult:
        async with await connect.open_target(run.config, "replay") as conn:
            scratch = self._scratch(conn, run.config)
            await scratch.mark()
            before = await self._before(conn, run)
            if before is not None and before.is_done:
                return before
            if before is None:
                before = await self._begin(run.name, scratch, conn)
            # A process that is killed writes no more.
            await self._keep(conn, run, msgspec.structs.replace(before, lost_parts=before.lost_parts + 1))
        own = self._options.log or run.config.applylog.directory
        log = (own or _folder_of_logs()) / before.log
        applylog = msgspec.structs.replace(run.config.applylog, directory=log)
        config = msgspec.structs.replace(run.config, applylog=applylog)
        lateness = Lateness(is_paced=self._read.speed < float("inf"))
        began_s = time.monotonic()
        failure = await self._run(config, lateness, scratch.tables)
        result = msgspec.structs.replace(
            before,
            seconds=round(before.seconds + time.monotonic() - began_s, 3),
            late=before.late.joined(lateness.result),
            failure=failure,
        )
        # A session of before may have ended with the server.
        async with await connect.open_target(run.config, "replay") as conn:
            await self._keep(conn, run, result)
            is_done = not self.is_stopped and not failure
            if not self.is_stopped:
                result = msgspec.structs.replace(result, limit=await self._limit(conn, config, log))
            if is_done:
                sums = await self._scratch(conn, run.config).sums()
                result = msgspec.structs.replace(result, is_done=True, sums=sums)
            await self._keep(conn, run, result)
        if is_done and own is None:
            shutil.rmtree(log, ignore_errors=True)
        return result

    async def _begin(self, name: str, scratch: Scratch, conn: settings.Connection) -> RunResult:
        # In this order: without its state, but with some of its tables, none of them may go on.
        await self._forget_unfinished(conn)
        await scratch.empty()
        await scratch.make()
        if self._options.copy_of is not None:
            async with await slot.connect(self._options.copy_of, application_name="parapply replay") as there:
                await scratch.copy_from(there)
        return RunResult(settings=name, log=secrets.token_hex(8))

    async def _run(self, config: Config, lateness: Lateness, tables: Sequence[tuple[str, str]]) -> str:
        """Apply all that is not applied yet; return the error that ended it, empty if it was asked to, or is done."""
        signals = Signals()
        signals.listen(stopping=lambda: None, reload=lambda: False)
        connector = partial(
            CapturedConnector, start=self._found.start, read=self._read, lateness=lateness, tables=tables
        )
        host = Host(signals, Notifier(), connector=connector)
        leader = Leader(Reloader(config, lambda: config), Until(lsn=self._read.until_lsn), host, takeover=False)
        try:
            await leader.run()
        except ParapplyError as error:
            return error.line()
        finally:
            self.is_stopped = signals.is_stop
            # Between two runs a signal ends the command, as before the first one.
            signals.leave()
        return ""

    async def _limit(self, conn: settings.Connection, config: Config, log: Path) -> str:
        if self._options.verdict is not None:
            try:
                return self._options.verdict(log)
            except ParapplyError as error:
                return f"no verdict: {error.line()}"
        query = in_schema("SELECT limits FROM {s}.slots WHERE slot_name = $1", config.target.state_schema)
        with target_errors("reading the verdict"):
            found = await rows(conn, query, [config.source.slot])
        limits = found[0][0] if found else None
        return f"Of its last minutes: {limits.get('words', '')}" if isinstance(limits, dict) else ""

    async def _load(self, conn: settings.Connection, run: _Group) -> RunResult | None:
        query = sql.SQL("SELECT result::text FROM {}.runs WHERE capture = $1 AND settings = $2").format(
            sql.Identifier(MARK)
        )
        with target_errors("reading the results"):
            found = await rows(conn, query, [self._found.capture, self._key(run)])
        return msgspec.json.decode(found[0][0], type=RunResult) if found else None

    async def _forget_unfinished(self, conn: settings.Connection) -> None:
        """Forget runs that have not ended: their tables will be gone."""
        with target_errors("writing the results"):
            await conn.execute(sql.SQL("DELETE FROM {}.runs WHERE NOT is_done").format(sql.Identifier(MARK)))

    async def _keep(self, conn: settings.Connection, run: _Group, result: RunResult) -> None:
        query = sql.SQL(
            "INSERT INTO {}.runs (capture, settings, is_done, result) VALUES ($1, $2, $3, $4::jsonb)"
            " ON CONFLICT (capture, settings) DO UPDATE SET is_done = excluded.is_done, result = excluded.result"
        ).format(sql.Identifier(MARK))
        text = msgspec.json.encode(result).decode()
        with target_errors("writing the results"):
            await rows(conn, query, [self._found.capture, self._key(run), result.is_done, text])

    def _key(self, run: _Group) -> str:
        """Return what a result is of: all settings, the speed, how far the capture went, and the rows of before."""
        target = msgspec.structs.replace(run.config.target, dsn=Secret(""), password_command=None)
        given: list[object] = [run.config.apply, run.config.conflict, target]
        if self._options.copy_of is not None:
            # Any other text is refused where the connection is opened.
            with suppress(psycopg.ProgrammingError):
                there = parameters_of(self._options.copy_of.dsn)
                given.append([there.get(name) for name in ("host", "hostaddr", "port", "dbname")])
        mark = hashlib.sha256(msgspec.json.encode(given, enc_hook=str, order="sorted")).hexdigest()[:16]
        return f"{run.name} | speed {self._read.speed:g} | up to {self._read.until_lsn} | {mark}"

"""`parapply capture`: the stream of a slot into files, exact to the LSN, until it is stopped or the room is used up.

A temporary slot lives as long as the command. A kept one outlives it: the publisher keeps WAL for it, and the same
command goes on without a gap and without a double, because nothing is reported to the publisher before it is synced.

1. The start is noted in the folder, with the name of a slot that does not exist yet. Another reader's slot is never
   touched, because what is read from it would be missing there.
2. The slot is made, and its position is noted. A kill between the two leaves a slot of that name, and the next run
   takes its position.
3. Frames are kept as they came, and synced once a second or when they fill a block. The end of the last whole
   transaction is reported then.
4. The next run cuts off what is torn or inside a transaction, checks that the slot was moved by no other reader and
   that the publisher was not put back, and asks for all that ends later.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from parapply import __version__, failpoints
from parapply.amounts import size
from parapply.capture.blocks import OPERATIONS, BlockKind, CaptureEnd, CaptureStart, CaptureTimeline, Redaction, encode
from parapply.capture.folder import CaptureLimits, CaptureWriter, last_end, last_timeline, look, names
from parapply.capture.permute import Permutation
from parapply.capture.recorder import Recorder
from parapply.capture.redact import FrameReplacement
from parapply.capture.shapes import oids_of, settings
from parapply.errors import CaptureRefused, ConfigError, NoPublication, SourceRefused
from parapply.model import format_lsn, parse_lsn
from parapply.printable import printable
from parapply.source import history, refusals, slot
from parapply.source.catch_up_stream import CatchUpStream
from parapply.source.options import check_slot_name, start_options, start_replication_sql, streaming_of

if TYPE_CHECKING:
    from pathlib import Path

    from parapply.capture.folder import CaptureFound
    from parapply.config import Config

#: Variable with the key of `--redact`, which nothing keeps.
KEY_VARIABLE: Final = "PARAPPLY_REDACT_KEY"
_KEY_BYTES: Final = (32, 64)
#: Seconds between two syncs, and between two positions of a publisher that sends nothing.
_SYNC_S: Final = 1.0
_POSITION_S: Final = 10.0
_DRAIN_BYTES: Final = 1 << 20
_ANOTHER: Final = "it can be replayed; to capture more name another folder and another --kept-slot"


class CaptureOptions(NamedTuple):
    """How to capture."""

    folder: Path
    is_redacted: bool
    limits: CaptureLimits
    for_s: float  # infinity: until it is stopped
    kept_slot: str | None = None  # None: a temporary one
    until_lsn: int | None = None


async def capture(config: Config, options: CaptureOptions) -> None:
    """Capture until stopped, or up to a limit.

    Raises:
        CaptureFull: the room is used up; all that was reported to the publisher is in the folder.
        CaptureRefused: the folder is no capture of this slot, or is damaged.
        SourceRefused, SourceLost: the publisher cannot serve, or went away; whole blocks stay in the folder.
    """
    async with AsyncExitStack() as stack:
        # Before the look: another capture that ends after it has reported more than was seen, and the publisher does
        # not send that again.
        writer = CaptureWriter(options.folder, options.limits)
        stack.callback(writer.close)
        found = look(options.folder) if names(options.folder) else None
        failpoints.probe(failpoints.CAPTURE_LOOKED)
        key = _key(options, found)
        source, name = config.source, _slot_name(options, found)
        conn = await slot.connect(source.login, application_name=f"parapply capture {name}")
        await stack.enter_async_context(conn)
        facts = await refusals.with_timeline(conn, await slot.inspect(conn, name), source.login)
        is_less = source.decoding_memory_bytes < facts.decoding_memory_bytes
        reader = await slot.connect(
            source.login, application_name=name, is_replication=True,
            decoding_memory_bytes=source.decoding_memory_bytes if is_less else 0,
        )  # fmt: skip
        stream = CatchUpStream(reader, partial(slot.read_slot, conn, name))
        stack.push_async_callback(stream.close)
        await stream.check_same(facts)
        await stream.claim(name)
        run = _Run(config, options, writer, conn, reader, key)
        open_xids = await (run.begin(name, facts) if found is None else run.go_on(found, facts))
        try:
            await run.record(stream, name, open_xids)
        except NoPublication as error:
            raise run.cannot_go_on(error) from error


def _slot_name(options: CaptureOptions, found: CaptureFound | None) -> str:
    """Return the slot to read; raise if none can be called so, or the folder is of another, or of one that is gone."""
    name = options.kept_slot or f"parapply_capture_{secrets.token_hex(6)}"
    check_slot_name(name)
    if found is None:
        return name
    shown = options.folder
    if not found.start.is_kept:
        raise CaptureRefused(
            f"{shown}: the slot of this capture was temporary, and is gone", hint="name another folder"
        )
    if options.kept_slot != found.start.slot:
        raise CaptureRefused(
            f"{shown} is of the kept slot {found.start.slot!r}",
            hint="give --kept-slot with this name, or name another folder",
        )
    return name


def _key(options: CaptureOptions, found: CaptureFound | None) -> Permutation | None:
    """Return the replacements of `--redact`; raise if the variable holds no key, or not the capture's."""
    if found is not None and options.is_redacted != (found.start.redaction is not None):
        is_what = "is not redacted" if options.is_redacted else "is redacted"
        raise CaptureRefused(f"{options.folder} {is_what}", hint="go on with the same options, or name another folder")
    if not options.is_redacted:
        return None
    text = os.environ.get(KEY_VARIABLE, "").encode()
    if text and not _KEY_BYTES[0] <= len(text) <= _KEY_BYTES[1]:
        raise ConfigError(
            f"{KEY_VARIABLE}: a key has {_KEY_BYTES[0]} to {_KEY_BYTES[1]} bytes", hint="take `openssl rand -hex 32`"
        )
    permutation = Permutation(text or secrets.token_bytes(_KEY_BYTES[0]))
    if found is not None and found.start.redaction is not None and found.start.redaction.check != permutation.check:
        raise CaptureRefused(
            f"{options.folder} was redacted with another key, so its keys would not meet",
            hint=f"set {KEY_VARIABLE} to the key that it was begun with; without that it cannot go on",
        )
    return permutation


def _now_us() -> int:
    return time.time_ns() // 1000


class _Run:
    def __init__(  # noqa: PLR0913, PLR0917  what a capture is made of
        self,
        config: Config,
        options: CaptureOptions,
        writer: CaptureWriter,
        conn: slot.Connection,
        reader: slot.Connection,
        key: Permutation | None,
    ) -> None:
        self.writer = writer
        self._config = config
        self._options = options
        self._conn = conn
        self._reader = reader
        self._key = key
        self._stopped = asyncio.Event()
        self._reason = ""
        self._n_frames = 0

    async def begin(self, name: str, facts: slot.SourceFacts) -> list[int]:
        source = self._config.source
        refusals.check_server(facts)
        operations = await slot.check_publications(self._conn, source.publications)
        if facts.slot is not None:
            raise SourceRefused(
                f"slot {name!r} exists, and this folder has no capture of it: what is read from it would be missing"
                " where it is applied",
                hint="name another slot with --kept-slot, or the folder of its capture",
            )
        start = CaptureStart(
            version=__version__, server_version_num=facts.server_version_num,
            system_identifier=facts.system_identifier, timeline=facts.timeline, database=facts.database,
            slot=name, is_kept=self._options.kept_slot is not None, publications=tuple(source.publications),
            operations=tuple([one for one in OPERATIONS if one in operations]),
            options=self._pgoutput(facts.server_version_num),
            settings=await settings(self._conn),
            redaction=Redaction(check=self._key.check) if self._key is not None else None,
        )  # fmt: skip
        self.writer.write(BlockKind.START, encode(start), time_us=_now_us())
        failpoints.probe(failpoints.CAPTURE_BEGUN)
        await self._make_slot(start)
        return []

    async def _make_slot(self, start: CaptureStart) -> None:
        kind = "" if start.is_kept else "TEMPORARY "
        two_phase = " TWO_PHASE" if "two_phase" in start.options else ""
        with slot.source_errors(f"creating the slot {start.slot!r}"):
            # The form that all versions take.
            cursor = await self._reader.execute(
                f'CREATE_REPLICATION_SLOT "{start.slot}" {kind}LOGICAL "pgoutput" NOEXPORT_SNAPSHOT{two_phase}'.encode()
            )
            row = await cursor.fetchone()
        assert row is not None, "the command returns a row"
        failpoints.probe(failpoints.CAPTURE_SLOT)
        self._note(parse_lsn(str(row[1])))

    async def go_on(self, found: CaptureFound, facts: slot.SourceFacts) -> list[int]:
        """Check that the slot can give all that comes behind the folder's last whole place, and cut the rest off."""
        source, start = self._config.source, found.start
        if self._pgoutput(facts.server_version_num) != found.start.options:
            raise CaptureRefused(
                f"{self._options.folder} was begun with other options of the stream",
                hint="go on with the same publications, source.streaming, source.two_phase and source.origin",
            )
        await slot.check_publications(self._conn, source.publications)
        whole_lsn = found.places[found.last_between()].header.end_lsn
        # Killed before the position was noted: no other session has read the slot.
        if not whole_lsn and facts.slot is None:
            if (facts.system_identifier, facts.database) != (start.system_identifier, start.database):
                raise CaptureRefused(
                    f"{self._options.folder} was begun in database {start.database!r} of cluster"
                    f" {start.system_identifier}, and --source leads to another one",
                    hint="correct --source, or name another folder",
                )
            open_xids = self.writer.go_on(found)
            await self._make_slot(start)
            return open_xids
        if not whole_lsn and facts.slot is not None:
            whole_lsn = facts.slot.confirmed_flush_lsn or 0
        timeline = last_timeline(self._options.folder, found)
        known = refusals.KnownPosition(
            system_identifier=start.system_identifier, timeline=timeline,
            low_lsn=whole_lsn, high_lsn=whole_lsn,
        )  # fmt: skip
        try:
            await refusals.check(self._conn, facts, source.login, found.start.slot, known, two_phase=source.two_phase)
            await self._check_history(found, whole_lsn)
        except SourceRefused as error:
            raise self.cannot_go_on(error, known.low_lsn) from error
        open_xids = self.writer.go_on(found)
        if facts.timeline != timeline:
            body = encode(CaptureTimeline(timeline=facts.timeline))
            self.writer.write(BlockKind.POSITION, body, time_us=_now_us(), end_lsn=whole_lsn)
        self._note(whole_lsn)
        return open_xids

    def cannot_go_on(self, error: SourceRefused, end_lsn: int = 0) -> CaptureRefused:
        """Return a refusal of the publisher as one of this capture, with a hint that is about it."""
        end = format_lsn(end_lsn or self.writer.end_lsn)
        return CaptureRefused(f"{self._options.folder} cannot go on, and is whole up to {end}: {error}", hint=_ANOTHER)

    async def _check_history(self, found: CaptureFound, end_lsn: int) -> None:
        """Refuse a publisher that was put back to an older state, and has written since, where its slot is behind.

        The slot is read again, because the process that sent its stream before may have taken one more report.
        """
        source, name = self._config.source, found.start.slot
        facts = await slot.read_slot(self._conn, name)
        slot_lsn = (facts.confirmed_flush_lsn if facts else None) or 0
        if slot_lsn >= end_lsn:
            return
        is_two_phase = facts is not None and facts.is_two_phase
        why = await history.check(
            self._conn, name, slot_lsn,
            start_options(
                self._conn.info.server_version, source.publications, source.origin, two_phase=is_two_phase
            ),
            begin_lsn=0, low_lsn=end_lsn, recorded=last_end(self._options.folder, found),
        )  # fmt: skip
        if why:
            click.echo(
                f"warning: it is not proved that the publisher was not put back to an older state: {why}", err=True
            )

    def _pgoutput(self, server_version_num: int) -> dict[str, str]:
        source = self._config.source
        streaming = streaming_of(server_version_num, source.streaming)
        found = start_options(
            server_version_num, source.publications, source.origin, streaming=streaming, two_phase=source.two_phase
        )
        return dict(found)

    async def record(self, stream: CatchUpStream, name: str, open_xids: list[int]) -> None:
        """Read the stream until the end is asked for."""
        options = self._pgoutput(self._conn.info.server_version)
        recorder = Recorder(
            self.writer, self._conn, FrameReplacement(self._key) if self._key is not None else None,
            is_parallel=options.get("streaming") == "parallel",
        )  # fmt: skip
        tables = await slot.tables_to_expect(self._conn, self._config.source.publications)
        await recorder.begin(await oids_of(self._conn, tables), _now_us())
        if open_xids:
            recorder.resume(open_xids, _now_us())
        start_lsn = self.writer.end_lsn
        await stream.start(start_replication_sql(name, start_lsn, tuple(options.items())), start_lsn)
        click.echo(
            f"capturing slot {name} from {format_lsn(start_lsn)} into {printable(str(self._options.folder))}", err=True
        )
        self._listen()
        self._report(stream)
        try:
            await self._follow(stream, recorder)
            self._sync(stream, recorder, is_end=True)
            self.writer.write(BlockKind.END, encode(CaptureEnd(reason=self._reason)), time_us=_now_us())
            if stream.gap_lsn is not None:
                raise CaptureRefused(
                    f"{self._options.folder} ends at {format_lsn(self.writer.end_lsn)}: {self._reason}", hint=_ANOTHER
                )
        finally:
            click.echo(
                f"captured {self._n_frames:,} messages up to {format_lsn(self.writer.end_lsn)}, "
                f"{size(self.writer.n_bytes)} in all",
                err=True,
            )

    def _listen(self) -> None:
        def stop() -> None:
            self._end("stopped by a signal")

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        if self._options.for_s < float("inf"):
            loop.call_later(self._options.for_s, self._end, "--for is over")

    def _end(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._stopped.set()

    async def _follow(self, stream: CatchUpStream, recorder: Recorder) -> None:
        readable = asyncio.Event()
        stream.resume_reading(readable.set)
        clock = asyncio.get_running_loop().time
        synced_s = noted_s = clock()
        while not self._stopped.is_set():
            await self._news(readable, synced_s + _SYNC_S - clock())
            readable.clear()
            frames = stream.drain(_DRAIN_BYTES)
            if stream.gap_lsn is not None:
                # None of these frames is taken: which of them came before is not known.
                self._end("a publication was missing on the publisher, and changes of its tables were left out")
                return
            if frames:
                self._n_frames += len(frames)
                await recorder.take(frames, _now_us())
            if recorder.is_full or clock() - synced_s >= _SYNC_S:
                synced_s = clock()
                self._sync(stream, recorder)
            keepalive, stream.keepalive = stream.keepalive, None
            if keepalive is None:
                continue
            is_reached = self._options.until_lsn is not None and keepalive.end_lsn >= self._options.until_lsn
            if is_reached:
                self._sync(stream, recorder)
            if recorder.is_idle and (is_reached or clock() - noted_s >= _POSITION_S):
                noted_s = clock()
                self._note(keepalive.end_lsn)
            if is_reached and self.writer.end_lsn >= (self._options.until_lsn or 0):
                self._end("--until is reached")
            if keepalive.reply_requested:
                self._report(stream)

    async def _news(self, readable: asyncio.Event, wait_s: float) -> None:
        """Wait until bytes have come, the end is asked for, or the time is over."""
        waiting = [asyncio.ensure_future(readable.wait()), asyncio.ensure_future(self._stopped.wait())]
        try:
            await asyncio.wait(waiting, timeout=max(0.0, wait_s), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()

    def _sync(self, stream: CatchUpStream, recorder: Recorder, *, is_end: bool = False) -> None:
        recorder.write(is_end=is_end)
        self._report(stream)

    def _note(self, end_lsn: int) -> None:
        if end_lsn > self.writer.end_lsn:
            self.writer.write(BlockKind.POSITION, b"", time_us=_now_us(), end_lsn=end_lsn)

    def _report(self, stream: CatchUpStream) -> None:
        """Report what is synced; the publisher keeps everything behind it."""
        lsn = self.writer.end_lsn
        is_asking = self._options.until_lsn is not None and lsn < self._options.until_lsn
        stream.send_status(lsn, lsn, lsn, reply_requested=is_asking)
        failpoints.probe(failpoints.CAPTURE_REPORTED)

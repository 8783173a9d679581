"""A folder of captured files: written block by block, cut where it is torn, read in order. Blocking.

Nothing counts before it is synced, and nothing that counts is changed. A file is named by its number, so no name in a
file leads anywhere.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from parapply import failpoints
from parapply.capture.blocks import (
    CHANGES,
    FILE_MARK,
    KIND,
    START_BYTES,
    BlockKind,
    CapturedBlock,
    CaptureStart,
    CaptureTimeline,
    FileHead,
    FrameGroup,
    Header,
    block,
    body_of,
    decode,
    encode,
    frames_body,
    groups_of,
    place_of,
)
from parapply.errors import CaptureFull, CaptureRefused, CaptureTorn, ConfigError
from parapply.source.history import end_of
from parapply.wire.partitions import FramedPartitions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_NAME: Final = re.compile(r"[0-9]{8}\.capture")
#: First bytes of a file of any version, but for the number of this one.
_VERSION: Final = re.compile(rb"parapply capture (?:[02-9]|1[0-9])")
#: Kinds of the messages that end a transaction.
_ENDS: Final = frozenset({b"C", b"c", b"P", b"p", b"K", b"r"})
#: Times the size at which a file ends although a streamed transaction reaches into the next one.
_LATE_PARTS: Final = 4


class CaptureFound(NamedTuple):
    """A folder as it was looked through."""

    start: CaptureStart
    places: list[CapturedBlock]  # of all blocks that are whole, in order
    torn: CaptureTorn | None  # where the last file is not
    capture: str

    @property
    def end_lsn(self) -> int:
        """Return the LSN up to which everything is kept; 0: the slot has no position yet."""
        return self.places[-1].header.end_lsn

    def last_between(self) -> int:
        """Return the index of the last block behind which no transaction is open, but for streamed ones."""
        return max(index for index, place in enumerate(self.places) if place.header.is_between)


def begin_lsn(places: Sequence[CapturedBlock]) -> int:
    """Return where the slot of a capture's blocks began; 0: it has no position yet."""
    return next((place.header.end_lsn for place in places if place.header.end_lsn), 0)


def names(folder: Path) -> list[str]:
    """Return the names of a folder's files, in order; raise CaptureRefused if the folder cannot be read."""
    try:
        return sorted(entry.name for entry in folder.iterdir() if _NAME.fullmatch(entry.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(folder, error) from error


def look(folder: Path) -> CaptureFound:
    """Look through all headers, and check the last file's blocks.

    Raises:
        CaptureRefused: it holds no capture, or a file or block is missing or damaged before the end of the last file.
    """
    files = names(folder)
    if not files:
        raise CaptureRefused(f"{folder} holds no capture", hint="name a folder that `parapply capture` has written")
    places: list[CapturedBlock] = []
    torn: CaptureTorn | None = None
    capture = ""
    for number, name in enumerate(files, 1):
        is_last = number == len(files)
        try:
            for place, body in _blocks(folder / name, checks=is_last):
                capture = _check_next(place, body, len(places), FileHead(capture=capture, file=number))
                places.append(place)
        except CaptureTorn as error:
            if not is_last:
                raise
            torn = error
    begun = next((place for place in places if place.header.kind is BlockKind.START), None)
    if begun is None:
        raise CaptureRefused(f"{folder}: the capture ended before it began", hint="delete the folder, and begin again")
    return CaptureFound(decode(begun, read(folder, begun), CaptureStart), places, torn, capture)


def _check_next(place: CapturedBlock, body: bytes, number: int, head: FileHead) -> str:
    """Refuse a block that does not follow the ones before; return the mark of the capture."""
    if place.header.number != number:
        raise place.refused(f"block {number} is expected, so a file or a part of one is missing")
    if place.header.kind is not BlockKind.HEAD:
        if place.offset == len(FILE_MARK):
            raise place.refused("a file begins with another block")
        return head.capture
    found = decode(place, body, FileHead)
    if found.file != head.file or (head.capture and found.capture != head.capture):
        raise place.refused(f"it is not file {head.file} of this capture")
    return found.capture


def read(folder: Path, place: CapturedBlock) -> bytes:
    """Return the body of a block; raise CaptureRefused if it is not what was written."""
    try:
        with (folder / place.file).open("rb") as file:
            file.seek(place.offset)
            data = file.read(place.end - place.offset)
    except OSError as error:
        raise _unreadable(folder / place.file, error) from error
    if len(data) != place.end - place.offset:
        raise CaptureTorn(place.file, place.offset, "the file became shorter")
    return body_of(place, data)


def groups(folder: Path, place: CapturedBlock) -> tuple[list[int], list[FrameGroup]]:
    """Return open streamed transactions and groups of a block of frames; errors as `read`."""
    return groups_of(place, read(folder, place))


def last_timeline(folder: Path, found: CaptureFound) -> int:
    """Return the publisher's timeline behind the last moment between two transactions; errors as `read`."""
    for place in reversed(found.places[: found.last_between() + 1]):
        if place.header.kind is BlockKind.POSITION and place.header.body_bytes:
            return decode(place, read(folder, place), CaptureTimeline).timeline
    return found.start.timeline


def last_end(folder: Path, found: CaptureFound) -> list[tuple[int, int]]:
    """Return end LSN and time (microseconds since 2000-01-01 UTC) of the last whole transaction; empty: it has none.

    Streamed ones of which no change is left do not count: the publisher sends nothing of them unless it streams.
    """
    ends: list[tuple[int, tuple[int, int]]] = []  # the last one first, with its xid while it may be without a change
    aborted: set[int] = set()
    changed: set[int] = set()
    for message in _messages_back(folder, found):
        kind = message[:1]
        if kind in CHANGES:
            changed.add(int.from_bytes(message[1:5]))
        elif kind == b"E":
            changed = set()
        elif kind == b"A":
            aborted.add(int.from_bytes(message[5:9]))
        elif kind in _ENDS and (not ends or ends[-1][0]):
            ends.append((int.from_bytes(message[1:5]) if kind == b"c" else 0, end_of(message)))
        elif kind == b"S":
            xid, is_first = int.from_bytes(message[1:5]), message[5] == 1
            at = next((index for index, end in enumerate(ends) if end[0] == xid), None)
            if at is not None and changed - aborted:
                ends[at:] = [(0, ends[at][1])]
            elif at is not None and is_first:
                del ends[at]
        if ends and not ends[0][0]:
            return [ends[0][1]]
    return []


def _messages_back(folder: Path, found: CaptureFound) -> Iterator[bytes]:
    """Yield the messages of all whole transactions, the last one first."""
    for place in reversed(found.places[: found.last_between() + 1]):
        if place.header.kind is BlockKind.FRAMES:
            for group in reversed(groups(folder, place)[1]):
                for frame in reversed(group.frames):
                    yield frame[KIND.start :]


def _blocks(path: Path, *, checks: bool) -> Iterator[tuple[CapturedBlock, bytes]]:
    """Yield each block's place, with its body if it is the first one or if all are to be checked."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            mark = file.read(len(FILE_MARK))
            if mark != FILE_MARK:
                raise _other_version(path) if _VERSION.match(mark) else CaptureTorn(path.name, 0, "no file begins so")
            offset = len(FILE_MARK)
            while offset < size:
                place = place_of(path.name, offset, file.read(START_BYTES), size - offset)
                body = b""
                if checks or place.header.kind is BlockKind.HEAD:
                    file.seek(offset)
                    body = body_of(place, file.read(place.end - offset))
                yield place, body
                offset = place.end
                file.seek(offset)
    except OSError as error:
        raise _unreadable(path, error) from error


def _other_version(path: Path) -> CaptureRefused:
    return CaptureRefused(
        f"{path.name} has another version of the format than this parapply reads",
        hint="use the version of parapply that has written it, and leave the file as it is",
    )


def _unreadable(path: Path, error: OSError) -> CaptureRefused:
    return CaptureRefused(f"{path} cannot be read: {error.strerror or error}")


class CaptureLimits(NamedTuple):
    """How large a capture may become."""

    most_bytes: int  # of all files; 0: as much as the disk holds
    file_bytes: int  # after which another file is begun


class CaptureWriter:
    """Appends blocks. Used by one thread."""

    def __init__(self, folder: Path, limits: CaptureLimits) -> None:
        """Make the folder if it is missing, and keep every other capture off it.

        Raises:
            ConfigError: it cannot be written.
            CaptureRefused: another process writes in it.
        """
        self._folder = folder
        self.limits = limits
        self._fd = -1
        self._file = 0
        self._file_bytes = 0
        self._capture = secrets.token_hex(16)
        self._number = 0
        #: Everything up to there is synced.
        self.end_lsn = 0
        #: Where the slot began; 0: it has no position yet.
        self.begin_lsn = 0
        self._is_between = True
        #: Streamed transactions that are open behind the last block.
        self._open: tuple[int, ...] = ()
        #: Announcements that hold, by OID, whole frames outside of any stream. Written by the caller.
        self.relations: dict[int, bytes] = {}
        self.partitions = FramedPartitions()
        try:
            made = [one for one in (folder, *folder.parents) if not one.exists()]
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for one in made:
                _sync_entry(one)
            self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot write there: {error.strerror}") from error
        try:
            fcntl.flock(self._folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._folder_fd)
            raise CaptureRefused(f"another process captures into {folder}", hint="name another folder") from error
        #: Of all files.
        self.n_bytes = sum((folder / name).stat().st_size for name in names(folder))

    def go_on(self, found: CaptureFound) -> list[int]:
        """Cut off all behind the last moment between two transactions; return the streamed ones that were open then.

        The part that is cut off was reported to no publisher, because it does not end a transaction.
        """
        last = found.last_between()
        place = found.places[last]
        for name in reversed([name for name in names(self._folder) if name > place.file]):
            (self._folder / name).unlink()
        os.fsync(self._folder_fd)
        with (self._folder / place.file).open("rb+") as file:
            file.truncate(place.end)
            os.fsync(file.fileno())
        failpoints.probe(failpoints.CAPTURE_CUT)
        self.n_bytes = sum((self._folder / name).stat().st_size for name in names(self._folder))
        self._capture, self._number = found.capture, last + 1
        self.end_lsn, self.begin_lsn = place.header.end_lsn, begin_lsn(found.places[: last + 1])
        self._file = int(place.file.partition(".")[0])
        self._file_bytes = place.end
        self._fd = os.open(self._folder / place.file, os.O_WRONLY | os.O_APPEND)
        if not place.header.n_open:
            return []
        with_frames = [
            one for one in found.places[: last + 1] if one.header.kind in (BlockKind.FRAMES, BlockKind.RESUMED)
        ]
        open_xids, _ = groups(self._folder, with_frames[-1])
        self._open = tuple(open_xids)
        return open_xids

    def write(  # noqa: PLR0913  the fields of a block
        self,
        kind: BlockKind,
        body: bytes,
        *,
        time_us: int,
        end_lsn: int = 0,
        is_between: bool | None = None,
        open_xids: Sequence[int] | None = None,
    ) -> None:
        """Append a block and sync it.

        Args:
            kind: of the block.
            body: its content.
            time_us: since 1970-01-01 UTC.
            end_lsn: where the last transaction in it ends; 0: none ends in it.
            is_between: it ends between transactions; None: as the block before.
            open_xids: streamed transactions that are open behind it; None: the same as before.

        Raises:
            CaptureFull: there is no room for it; nothing of it counts.
        """
        if self._fd < 0 or self._is_file_full():
            self._next_file(time_us)
        self._append(
            Header(
                kind,
                self._is_between if is_between is None else is_between,
                len(self._open if open_xids is None else open_xids),
                self._number,
                max(end_lsn, self.end_lsn),
                time_us,
                0,
                0,
            ),
            body,
        )
        if open_xids is not None:
            self._open = tuple(open_xids)

    def write_frames(
        self, groups: Sequence[FrameGroup], *, open_xids: Sequence[int], end_lsn: int, is_between: bool,
        kind: BlockKind = BlockKind.FRAMES,
    ) -> None:  # fmt: skip
        """Append a block of frames and sync it; errors as `write`."""
        body, time_us = frames_body(open_xids, groups), groups[0].arrival_us
        self.write(kind, body, time_us=time_us, end_lsn=end_lsn, is_between=is_between, open_xids=open_xids)

    def close(self) -> None:
        """Let go of the folder; closing twice is fine."""
        for fd in (self._fd, self._folder_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._folder_fd = -1

    def _is_file_full(self) -> bool:
        # A replay may begin at each file that no streamed transaction reaches into.
        limit_bytes = self.limits.file_bytes * (_LATE_PARTS if self._open else 1)
        return self._is_between and self._file_bytes >= limit_bytes

    def _next_file(self, time_us: int) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._file += 1
        try:
            path = self._folder / f"{self._file:08d}.capture"
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            _write_all(self._fd, FILE_MARK)
            os.fsync(self._folder_fd)
        except OSError as error:
            raise _full(str(error.strerror)) from error
        self._file_bytes = len(FILE_MARK)
        self.n_bytes += len(FILE_MARK)
        self._append_head(BlockKind.HEAD, encode(FileHead(capture=self._capture, file=self._file)), time_us)
        if self.relations:
            known = frames_body(self._open, [FrameGroup(time_us, self.partitions.in_order(self.relations))])
            self._append_head(BlockKind.RELATIONS, known, time_us)

    def _append_head(self, kind: BlockKind, body: bytes, time_us: int) -> None:
        is_between, n_open = self._is_between, len(self._open)
        self._append(Header(kind, is_between, n_open, self._number, self.end_lsn, time_us, 0, 0), body)

    def _append(self, header: Header, body: bytes) -> None:
        data = block(header, body)
        most = self.limits.most_bytes
        if most and self.n_bytes + len(data) > most:
            raise _full(f"--max-bytes = {most} is reached")
        try:
            _write_all(self._fd, data)
            failpoints.probe(failpoints.CAPTURE_WRITTEN)
            os.fsync(self._fd)
        except OSError as error:
            # The next run would find it whole in memory, and its sync would not fail again.
            with suppress(OSError):
                os.ftruncate(self._fd, self._file_bytes)
            raise _full(str(error.strerror)) from error
        failpoints.probe(failpoints.CAPTURE_SYNCED)
        self._file_bytes += len(data)
        self.n_bytes += len(data)
        self._number += 1
        self.end_lsn, self._is_between = header.end_lsn, header.is_between
        self.begin_lsn = self.begin_lsn or self.end_lsn


def _sync_entry(path: Path) -> None:
    # In a folder that may be written but not read only this cannot be done.
    with suppress(PermissionError):
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _full(why: str) -> CaptureFull:
    return CaptureFull(
        f"the capture ends, because {why}; all that was reported to the publisher is in it.",
        hint="with more room (--max-bytes) the same command goes on if its slot is kept",
    )

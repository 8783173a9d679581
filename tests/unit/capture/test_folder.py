"""Files of a capture: what is read is what was written, and whatever else is in them is refused by its place."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parapply.capture.blocks import (
    FILE_MARK,
    START_BYTES,
    BlockKind,
    CaptureStart,
    FrameGroup,
    Header,
    block,
    body_of,
    encode,
    frames_body,
    groups_of,
    place_of,
)
from parapply.capture.folder import CaptureLimits, CaptureWriter, groups, last_end, look, names
from parapply.errors import CaptureFull, CaptureRefused, CaptureTorn
from tests import build

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.capture.blocks import CapturedBlock

_ROOM = CaptureLimits(0, 1 << 30)
_START = CaptureStart(
    version="1", server_version_num=180000, system_identifier="7", timeline=1, database="app", slot="day", is_kept=True,
    publications=("pub",), operations=("insert",), options={}, settings={},
)  # fmt: skip


def _written(folder: Path, limits: CaptureLimits = _ROOM, n_blocks: int = 3) -> None:
    """Write a capture of a few blocks, of which the last but one ends within a transaction."""
    writer = CaptureWriter(folder, limits)
    writer.write(BlockKind.START, encode(_START), time_us=1)
    for number in range(1, n_blocks + 1):
        frames = [b"frame %d" % number, b"", bytes(100)]
        is_between = number != n_blocks - 1
        writer.write_frames(
            [FrameGroup(number, frames[:1]), FrameGroup(number + 1, frames[1:])],
            open_xids=[7] if number == 1 else [], end_lsn=100 * number, is_between=is_between,
        )  # fmt: skip
    writer.close()


def test_a_folder_gives_back_what_was_written(tmp_path: Path) -> None:
    """Groups, arrivals and open transactions come back, over as many files as there are."""
    _written(tmp_path / "one")
    _written(tmp_path / "many", CaptureLimits(0, 1))
    one, many = look(tmp_path / "one"), look(tmp_path / "many")
    assert (len(names(tmp_path / "one")), len(names(tmp_path / "many"))) == (1, 3)
    for folder, found in (("one", one), ("many", many)):
        assert (found.start, found.torn, found.end_lsn) == (_START, None, 300)
        frames = [groups(tmp_path / folder, place) for place in found.places if place.header.kind is BlockKind.FRAMES]
        assert [open_xids for open_xids, _ in frames] == [[7], [], []]
        assert frames[1][1] == [FrameGroup(2, [b"frame 2"]), FrameGroup(3, [b"", bytes(100)])]


def test_a_torn_end_is_named_and_cut(tmp_path: Path) -> None:
    """Whatever the last file lacks, its place is named; going on keeps all up to the last moment between transactions.

    The block before the last ends within a transaction, so both are cut.
    """
    _written(tmp_path / "whole")
    whole = tmp_path / "whole" / "00000001.capture"
    data = whole.read_bytes()
    last = look(tmp_path / "whole").places[-1]
    between = [place for place in look(tmp_path / "whole").places if place.header.is_between]
    for length in range(last.offset + 1, len(data)):
        folder = tmp_path / f"cut{length}"
        folder.mkdir()
        (folder / whole.name).write_bytes(data[:length])
        found = look(folder)
        assert found.torn is not None
        assert (found.torn.file, found.torn.offset) == (whole.name, last.offset)
        assert found.end_lsn == 200
        writer = CaptureWriter(folder, _ROOM)
        assert writer.go_on(found) == [7]
        assert writer.end_lsn == 100
        writer.close()
        after = look(folder)
        assert (after.torn, after.places) == (None, between[: len(after.places)])


@given(data=st.data())
def test_no_changed_byte_is_taken(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A file with one byte changed is refused, or torn there: nothing behind the place is used, and no other error."""
    folder = tmp_path_factory.mktemp("changed")
    _written(folder)
    path = folder / "00000001.capture"
    before = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, 1 << 16)) % len(before)
    before[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(before)
    whole = [place for place in (look_or_none(folder) or []) if place.end > at]
    assert whole == []


def look_or_none(folder: Path) -> list[CapturedBlock] | None:
    """Return the places of a folder's blocks, None if it is refused."""
    try:
        return list(look(folder).places)
    except CaptureRefused:
        return None


@given(st.binary(max_size=200), st.sampled_from([BlockKind.FRAMES, BlockKind.HEAD]))
def test_a_hostile_body_is_refused_by_name(body: bytes, kind: BlockKind) -> None:
    """Lists whose lengths lie are refused with the block's place, whatever they say."""
    text = block(Header(kind, True, 0, 3, 0, 0, 0, 0), body)
    place = place_of("00000001.capture", 19, text[:START_BYTES], len(text))
    try:
        open_xids, found = groups_of(place, body_of(place, text))
    except CaptureRefused as error:
        assert "00000001.capture, block 3 at byte 19" in str(error)  # noqa: PT017
    else:
        assert frames_body(open_xids, found) == body


def test_a_body_never_becomes_larger_than_it_says() -> None:
    """A small block that would decompress to far more is refused without doing so."""
    body = bytes(1 << 24)
    text = bytearray(block(Header(BlockKind.FRAMES, True, 0, 0, 0, 0, 0, 0), body))
    text[START_BYTES - 12 : START_BYTES - 8] = (10).to_bytes(4)
    stored = bytes(text[START_BYTES:])
    text[START_BYTES - 4 : START_BYTES] = zlib.crc32(stored, zlib.crc32(text[: START_BYTES - 4])).to_bytes(4)
    place = place_of("00000001.capture", 0, bytes(text[:START_BYTES]), len(text))
    with pytest.raises(CaptureRefused, match="its length is not"):
        body_of(place, bytes(text))


def test_a_file_that_is_missing_or_another_captures_is_refused(tmp_path: Path) -> None:
    """Files that do not follow each other, or are of two captures, are no capture."""
    for name in ("one", "two"):
        _written(tmp_path / name, CaptureLimits(0, 1))
    second = tmp_path / "one" / "00000002.capture"
    second.write_bytes((tmp_path / "two" / "00000002.capture").read_bytes())
    with pytest.raises(CaptureRefused, match=r"00000002.capture.*not file 2 of this capture"):
        look(tmp_path / "one")
    second.unlink()
    with pytest.raises(CaptureRefused, match="is expected, so a file"):
        look(tmp_path / "one")
    (tmp_path / "two" / "00000001.capture").write_bytes(FILE_MARK[1:])
    with pytest.raises(CaptureTorn, match="no file begins so"):
        look(tmp_path / "two")


@pytest.mark.parametrize("version", [b"2", b"10"])
def test_a_file_of_another_version_is_refused_and_never_cut(tmp_path: Path, version: bytes) -> None:
    """No torn end is seen in it, which a capture that goes on would cut off."""
    _written(tmp_path)
    path = tmp_path / "00000001.capture"
    path.write_bytes(path.read_bytes().replace(FILE_MARK, b"parapply capture " + version + b"\n"))
    with pytest.raises(CaptureRefused, match=r"00000001.capture has another version") as refused:
        look(tmp_path)
    assert not isinstance(refused.value, CaptureTorn)


def test_a_capture_never_uses_more_room_than_allowed(tmp_path: Path) -> None:
    """A block that has no room is not written at all, and what was before stays whole."""
    with pytest.raises(CaptureFull, match="--max-bytes = 700"):
        _written(tmp_path, CaptureLimits(700, 1 << 30), n_blocks=30)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 700
    assert look(tmp_path).torn is None


def test_a_block_that_was_not_synced_is_not_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run would find it whole in memory, sync it with success, and report it, while the disk lacks it.

    The entries of the folder and of its files are synced before anything in them counts.
    """
    synced: list[str] = []
    real, fails = os.fsync, False

    def fsync(fd: int) -> None:
        if fails:
            raise OSError(errno.EIO, "Input/output error")
        real(fd)
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))

    monkeypatch.setattr(os, "fsync", fsync)
    folder = tmp_path / "captures" / "day"
    _written(folder)
    assert {str(tmp_path), str(tmp_path / "captures"), str(folder)} <= set(synced)
    before = look(folder)
    writer = CaptureWriter(folder, _ROOM)
    synced.clear()
    writer.go_on(before)
    assert str(folder) in synced
    fails = True
    with pytest.raises(CaptureFull, match="Input/output error"):
        writer.write(BlockKind.POSITION, b"", time_us=9, end_lsn=900)
    writer.close()
    assert look(folder) == before


def _streamed(xid: int, end_lsn: int, *, aborted: int = 0, more: Sequence[bytes] = ()) -> list[bytes]:
    """Return a streamed transaction of two chunks with an insert in its first one, which may be rolled back."""
    insert = build.insert(build.row(), xid=xid + 1)
    return [
        *(build.stream_start(xid=xid), insert, build.stream_stop(), *more),
        *(build.stream_start(xid=xid, first_segment=0), build.stream_stop()),
        *[build.stream_abort(xid=xid, subxid=xid + 1)] * aborted,
        build.stream_commit(xid=xid, end_lsn=end_lsn),
    ]


@pytest.mark.parametrize(
    ("messages", "end_lsn"),
    [
        ([build.commit(end_lsn=1), *_streamed(700, 2)], 2),
        ([build.commit(end_lsn=1), *_streamed(700, 2, aborted=1)], 1),
        ([*_streamed(800, 1), *_streamed(700, 2, aborted=1)], 1),
        (_streamed(700, 2, aborted=1), None),
        (_streamed(700, 3, aborted=1, more=[*_streamed(800, 1), build.commit(end_lsn=2)]), 2),
        (_streamed(700, 3, aborted=1, more=_streamed(800, 1)), 1),
        (_streamed(700, 3, more=[build.commit(end_lsn=2)]), 3),
    ],
)
def test_a_streamed_transaction_without_a_change_is_not_the_last_one(
    tmp_path: Path, messages: Sequence[bytes], end_lsn: int | None
) -> None:
    """A publisher that does not stream sends nothing of it, and a capture that goes on would look for it in vain."""
    writer = CaptureWriter(tmp_path, _ROOM)
    writer.write(BlockKind.START, encode(_START), time_us=1)
    for message in messages:
        writer.write_frames([FrameGroup(1, [build.xlog_data(message)])], open_xids=[], end_lsn=1, is_between=True)
    writer.close()
    assert [end for end, _ in last_end(tmp_path, look(tmp_path))] == ([end_lsn] if end_lsn else [])


@pytest.mark.parametrize(("was", "now"), [(b'["insert"]', b'["\\"; x"]'), (b'"is_kept":true', b'"is_kept":{}')])
def test_a_start_that_no_capture_writes_is_refused(tmp_path: Path, was: bytes, now: bytes) -> None:
    """Other values than a capture writes are refused with the block's place, before anything is made of them."""
    writer = CaptureWriter(tmp_path, _ROOM)
    writer.write(BlockKind.START, encode(_START).replace(was, now), time_us=1)
    writer.close()
    with pytest.raises(CaptureRefused, match=r"00000001.capture, block 1 at byte \d+: it is no CaptureStart"):
        look(tmp_path)


def test_a_folder_is_made_where_the_parent_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entry cannot be synced then, and a first start that fails for it leaves the folder behind."""
    plain = os.open

    def opened(path: Path, flags: int, *more: int) -> int:
        if path == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return plain(path, flags, *more)

    monkeypatch.setattr(os, "open", opened)
    _written(tmp_path / "day")
    assert len(look(tmp_path / "day").places) > 3


def test_two_captures_do_not_share_a_folder(tmp_path: Path) -> None:
    """The second one is refused while the first one writes."""
    writer = CaptureWriter(tmp_path, _ROOM)
    with pytest.raises(CaptureRefused, match="another process captures"):
        CaptureWriter(tmp_path, _ROOM)
    writer.close()
    CaptureWriter(tmp_path, _ROOM).close()

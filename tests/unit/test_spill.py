"""Changes on disk: what comes back is what was put in, or an error."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parapply.errors import ConfigError, SpillFailed
from parapply.model import Column, Relation
from parapply.spill import BlockPlace, Spill, SpillFile, SpillRoom

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT_BYTES = 100_000
RELATION = Relation(
    oid=2**32 - 1,
    schema='s"p',
    name="täble",
    replica_identity="d",
    columns=(Column(name="a", type_oid=23, type_modifier=-1, is_key=True),),
)


@pytest.fixture
def spill(tmp_path: Path) -> Spill:
    """Return a directory that takes little."""
    return Spill(tmp_path / "spill", LIMIT_BYTES)


@pytest.fixture
def file(spill: Spill) -> Iterator[SpillFile]:
    """Return an empty file of transaction 7."""
    file = spill.open(7)
    yield file
    file.close()


CHANGES = st.lists(st.binary(max_size=50) | st.just(RELATION), max_size=20)


@given(blocks=st.lists(CHANGES, max_size=6))
def test_what_comes_back_is_what_was_put_in(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[list[bytes]]
) -> None:
    """Frames and relations come back equal, in any order of reading, the empty block too."""
    file = Spill(tmp_path_factory.getbasetemp(), LIMIT_BYTES).open(7)
    places = [file.append(block) for block in blocks]
    assert [file.read(place) for place in reversed(places)] == blocks[::-1]
    file.close()


@pytest.mark.parametrize("most_bytes", [1, 7, 24, 1000])
def test_a_write_that_is_taken_in_parts_goes_on(
    file: SpillFile, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    """The system may take any part of what it is given; the rest follows at its place."""
    whole = os.pwritev

    def part(fd: int, views: list[memoryview], offset: int) -> int:
        taken = b"".join(views)[:most_bytes]
        return whole(fd, [taken], offset)

    monkeypatch.setattr(os, "pwritev", part)
    blocks: list[list[bytes | Relation]] = [[b"x" * 50, RELATION, b""], [], [b"y" * 30]]
    places = [file.append(block) for block in blocks]
    assert [file.read(place) for place in places] == blocks


def test_a_file_has_no_name_and_gives_its_room_back(spill: Spill, file: SpillFile, tmp_path: Path) -> None:
    """Nothing can be found of it afterwards (trap T-55), and what is cut or closed does not count."""
    first = file.append([b"x" * 1000])
    file.append([b"y" * 1000])
    assert list((tmp_path / "spill").iterdir()) == []
    assert spill.used_bytes == file.size_bytes == first.n_bytes * 2
    file.cut(first.n_bytes)
    assert spill.used_bytes == first.n_bytes
    again = file.append([b"z"])
    assert (file.read(first), file.read(again)) == ([b"x" * 1000], [b"z"])
    file.close()
    file.close()
    assert spill.used_bytes == 0


def test_no_file_is_left_by_an_opening_that_outlived_its_end(spill: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that the disk kept waiting finds all closed: its file would stay as long as the process."""
    opened: list[int] = []
    real = os.dup

    def dup(fd: int) -> int:
        spill.close()
        opened.append(real(fd))
        return opened[0]

    monkeypatch.setattr(os, "dup", dup)
    with pytest.raises(SpillFailed, match="given up"):
        spill.open(7)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_the_limit_holds_for_all_files_together(spill: Spill, file: SpillFile) -> None:
    """Beyond the limit a block is refused, with what to do; what was kept before stays."""
    other = spill.open(8)
    other.append([b"x" * (LIMIT_BYTES - 1000)])
    place = file.append([b"kept"])
    with pytest.raises(SpillFailed, match="spill_limit_bytes") as error:
        file.append([b"y" * 1000])
    assert "transaction 7" in str(error.value)
    assert error.value.hint
    assert file.read(place) == [b"kept"]
    other.close()
    assert file.read(file.append([b"y" * 1000])) == [b"y" * 1000]


def test_a_full_disk_is_told_and_counts_nothing(spill: Spill) -> None:
    """A disk that takes no more refuses the block; the file before it stays as it was (fault F21)."""
    full = SpillFile(spill, os.open("/dev/full", os.O_RDWR), 7)
    with pytest.raises(SpillFailed, match="No space left"):
        full.append([b"x"])
    assert spill.used_bytes == full.size_bytes == 0
    full.close()


@pytest.mark.parametrize("at", [0, 5, 9, 20, 30])
def test_damage_is_found(file: SpillFile, at: int) -> None:
    """A byte that has changed on disk, wherever it is, is an error and never another change."""
    place = file.append([b"some", b"bytes"])
    os.pwrite(file._fd, b"\xff", at)
    with pytest.raises(SpillFailed, match="damaged"):
        file.read(place)


def test_a_cut_file_is_found(file: SpillFile) -> None:
    """A block that is not there, or not whole, is an error."""
    place = file.append([b"some"])
    with pytest.raises(SpillFailed, match="cut"):
        file.read(BlockPlace(place.n_bytes, place.n_bytes))
    with pytest.raises(SpillFailed, match="damaged"):
        file.read(BlockPlace(0, place.n_bytes - 1))


def test_a_directory_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    """The operator learns it when the daemon starts, not with the first large transaction."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="spill_dir"):
        Spill(tmp_path / "file", LIMIT_BYTES)


def test_slots_share_their_room(tmp_path: Path) -> None:
    """A slot may have all but the own parts of the others, which each of them can have at any time."""
    change = b"x" * 100
    block_bytes = Spill(tmp_path, 1 << 30).open(1).append([change]).n_bytes
    room = SpillRoom(100 * block_bytes, n_slots=2)
    one, other = (Spill(tmp_path, 1 << 30, room) for _ in range(2))
    first, second = one.open(1), other.open(2)
    for _ in range(75):
        first.append([change])
    with pytest.raises(SpillFailed, match=r"fleet\.spill_limit_bytes = \d+ is reached"):
        first.append([change])
    for _ in range(25):
        second.append([change])
    with pytest.raises(SpillFailed, match="fleet"):
        second.append([change])
    one.close()
    for _ in range(50):
        second.append([change])
    with pytest.raises(SpillFailed, match="fleet"):
        second.append([change])

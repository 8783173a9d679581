"""Apply log: whole lines in finished files, recovery after a crash, and never an error for the apply path."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from parapply import applylog, logs
from parapply.applylog import ApplyLog, Retention, recover, utc_text, wire_time_text
from parapply.applylog_schema import BatchRecord, RowCounts, WaitedFor
from parapply.errors import ConfigError
from parapply.runtime.observe.applylog_writer import ApplyLogWriter

NAME = re.compile(r"apply-[a-z0-9_]*-\d{8}T\d{6}Z-\d+-\d+\.jsonl")


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        """Start in November 2026."""
        self.now_s = 1_795_000_000.0

    def __call__(self) -> float:
        """Return seconds since 1970."""
        return self.now_s


def record(seq: int = 1) -> BatchRecord:
    """Return a record with every field set."""
    return BatchRecord(
        slot="app",
        seq=seq,
        worker=0,
        first_end_lsn="0/1",
        end_lsn="16/B374D848",
        n_transactions=2,
        xids=(700, 4_294_967_295),
        commit_time_first=utc_text(0.0),
        commit_time_last=utc_text(0.5),
        received_at=utc_text(1.0),
        started_at=utc_text(1.1),
        committed_at=utc_text(1.2),
        queued_s=0.1,
        wait_dependency_s=0.0,
        execute_s=0.05,
        wait_turn_s=0.01,
        commit_s=0.001,
        attempts=1,
        mode="set",
        rows={"public.t": RowCounts(insert=3)},
        size_bytes=120,
        late_keys=2,
        waited_for=WaitedFor(seq=1, table="public.t", kind="key"),
    )


def line(seq: int) -> bytes:
    """Return an encoded record."""
    return msgspec.json.encode(record(seq)) + b"\n"


def lines_in(directory: Path) -> list[int]:
    """Return the seq of every record in the finished files; fails on a torn line."""
    paths = sorted(directory.glob("*.jsonl"), key=lambda path: int(path.stem.rpartition("-")[2]))
    assert all(NAME.fullmatch(path.name) for path in paths)
    return [json.loads(line)["seq"] for path in paths for line in path.read_bytes().splitlines()]


def test_a_record_reads_back_with_its_version(tmp_path: Path) -> None:
    """The written record equals the schema, including version and kind of record."""
    log = ApplyLogWriter(lambda: ApplyLog(tmp_path, 1 << 20, 60))
    log.write([record()])
    log.close()
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    assert msgspec.json.decode(data, type=BatchRecord) == record()
    assert (json.loads(data)["schema_version"], json.loads(data)["record"]) == (1, "batch")


def test_times_are_utc_texts_of_one_width() -> None:
    """Times sort as text, and the wire's epoch is 2000."""
    assert utc_text(0.0) == "1970-01-01T00:00:00.000000+00:00"
    assert wire_time_text(0) == "2000-01-01T00:00:00.000000+00:00"


def test_open_files_have_a_temporary_name(tmp_path: Path) -> None:
    """A reader of *.jsonl sees closed files only; an empty one leaves nothing behind."""
    log = ApplyLog(tmp_path / "made", 1 << 20, 60)
    log.append(line(1), 1)
    assert [path.suffix for path in (tmp_path / "made").iterdir()] == [".open"]
    log.close()
    log.close()
    assert lines_in(tmp_path / "made") == [1]
    ApplyLog(tmp_path / "made", 1 << 20, 60).close()
    assert len(list((tmp_path / "made").iterdir())) == 1


def test_rotation_by_age_and_size(tmp_path: Path) -> None:
    """A file is closed at its age if it holds anything, and at its size; no record is lost between files."""
    clock = Clock()
    log = ApplyLog(tmp_path, 4096, 60, clock=clock)
    clock.now_s += 60
    log.tick()
    assert lines_in(tmp_path) == []
    log.append(line(0), 1)
    log.tick()
    assert lines_in(tmp_path) == [0]
    for seq in range(1, 50):
        log.append(line(seq), 1)
        clock.now_s += 1
        log.tick()
    assert len(list(tmp_path.glob("*.jsonl"))) > 3
    log.close()
    assert lines_in(tmp_path) == list(range(50))
    assert log.dropped == 0


def test_a_killed_writer_is_recovered(tmp_path: Path) -> None:
    """A file that a dead process left open is cut to whole lines and closed; an empty rest goes away."""
    script = (
        "import os,sys; from pathlib import Path; from parapply.applylog import ApplyLog; d=Path(sys.argv[1]);"
        'log=ApplyLog(d,1<<20,60); p,=d.iterdir(); p.write_bytes(b\'{"seq":1}\\n{"seq":2}\\n{"se\');'
        "ApplyLog(d,1<<20,60); os._exit(9)"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(applylog.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environ, check=False, timeout=60)
    assert done.returncode == 9
    assert len(list(tmp_path.glob("*.open"))) == 2
    ApplyLog(tmp_path, 1 << 20, 60).close()
    assert lines_in(tmp_path) == [1, 2]
    assert not list(tmp_path.glob("*.open"))


def test_a_torn_line_longer_than_a_block_is_cut(tmp_path: Path) -> None:
    """The last newline is found however long the torn line is; a file of only a torn line is removed."""
    (tmp_path / "apply-x-1-0.jsonl.open").write_bytes(b'{"seq":1}\n' + b"x" * 200_000)
    (tmp_path / "apply-x-1-1.jsonl.open").write_bytes(b"x" * 200_000)
    (path,) = recover(tmp_path)
    assert path.read_bytes() == b'{"seq":1}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    """Several daemons may share a directory: an open file whose writer lives is not recovered."""
    first = ApplyLog(tmp_path, 1 << 20, 60)
    second = ApplyLog(tmp_path, 1 << 20, 60)
    first.append(line(1), 1)
    second.append(line(2), 1)
    first.close()
    assert recover(tmp_path) == []
    second.close()
    assert sorted(lines_in(tmp_path)) == [1, 2]


def test_a_full_disk_drops_records_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk records are counted and dropped, told once, no torn line stays, and writing resumes by itself."""
    stream = io.BytesIO()
    logs.configure("info", "json", stream)
    clock = Clock()
    log = ApplyLog(tmp_path, 1 << 20, 3600, clock=clock)

    def flush(seq: int) -> None:
        log.append(line(seq), 1)
        log.tick()

    flush(1)
    real_write = os.write
    calls = []

    def full(fd: int, data: bytes) -> int:
        calls.append(fd)
        if len(calls) % 2:
            return real_write(fd, data[:10])  # as a disk does that has ten bytes left
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        flush(2)
        flush(3)
    assert log.dropped == 2
    flush(4)
    log.close()
    assert lines_in(tmp_path) == [1, 4]
    events = [json.loads(line)["event"] for line in stream.getvalue().splitlines()]
    assert events == ["applylog_dropping", "applylog_resumed"]


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_file_server_that_refuses_at_the_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_torn: bool
) -> None:
    """Records that it had taken may be lost: they count, and the next ones go to another file."""
    log = ApplyLog(tmp_path, 1 << 20, 3600)
    log.append(line(1), 1)
    log.append(line(2), 1)

    def refuse(_fd: int, *_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", refuse)
        if is_torn:
            patched.setattr(os, "write", refuse)
            patched.setattr(os, "ftruncate", refuse)
            log.append(line(3), 1)
        else:
            log.close()
    assert log.dropped == 2 + is_torn
    log.append(line(4), 1)
    log.close()
    assert 4 in lines_in(tmp_path)


def test_records_of_a_file_that_was_removed_count_as_dropped(tmp_path: Path) -> None:
    """The removal of the open file is seen by the number, and the next records go to another one."""
    log = ApplyLog(tmp_path, 100, 3600)
    log.append(line(1)[:20] + b"\n", 1)
    next(tmp_path.iterdir()).unlink()
    log.append(line(2), 1)
    assert log.dropped == 2
    log.append(line(3), 1)
    log.close()
    assert lines_in(tmp_path) == [3]


def test_a_neighbours_file_ends_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed since the directory was read, of another role, or no file: left alone; what can be recovered is."""
    notes = tmp_path / "notes"
    notes.write_bytes(b"kept")
    (tmp_path / "apply-a-20261121T000000Z-1-0.jsonl.open").symlink_to(notes)
    (tmp_path / "apply-b-20261121T000000Z-1-0.jsonl.open").mkdir()
    os.mkfifo(tmp_path / "apply-c-20261121T000000Z-1-0.jsonl.open")
    for name in ("gone", "kept", "other"):
        (tmp_path / f"apply-{name}-20261121T000000Z-1-0.jsonl.open").write_bytes(line(1))
    open_file = os.open

    def opened(path: Path, *arguments: int) -> int:
        if "gone" in path.name:
            path.unlink()
        if "other" in path.name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_file(path, *arguments)

    monkeypatch.setattr(os, "open", opened)
    assert [path.name.split("-")[1] for path in recover(tmp_path)] == ["kept"]
    assert notes.read_bytes() == b"kept"


def test_an_unusable_directory_is_a_configuration_error(tmp_path: Path) -> None:
    """A directory that cannot be made is reported at the start, with its key."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^applylog\.directory: "):
        ApplyLog(tmp_path / "file" / "log", 1 << 20, 60)


def _finish(directory: Path, slot: str, hour: int, size_bytes: int, written_s: float) -> Path:
    """Make a finished file of a slot."""
    path = directory / f"apply-{slot}-20261121T{hour:02d}0000Z-1-0.jsonl"
    path.write_bytes(b"x" * size_bytes)
    os.utime(path, (written_s, written_s))
    return path


def test_retention_by_age_and_size(tmp_path: Path) -> None:
    """At the start, at each rotation and once a minute old files go, and the oldest above the size; no others do."""
    clock = Clock()
    files = [_finish(tmp_path, "app", hour, 1000, clock.now_s - 3600 * (9 - hour)) for hour in range(9)]
    others = [_finish(tmp_path, "app_2", 1, 1000, 0.0), _finish(tmp_path, "ap", 1, 1000, 0.0)]
    strange = tmp_path / "apply-app-20261121T010000Z-1-0.jsonl.bak"
    strange.write_bytes(b"mine")
    os.utime(strange, (0, 0))
    log = ApplyLog(tmp_path, 4096, 60, slot="app", retention=Retention(age_s=6.5 * 3600, size_bytes=4000), clock=clock)
    assert [path.exists() for path in files] == [False] * 5 + [True] * 4
    clock.now_s += 4 * 3600
    log.tick()
    # Files of five to eight o'clock: eight, seven, six and five hours old.
    assert [path.exists() for path in files] == [False] * 7 + [True] * 2
    log.append(line(1) * 8, 8)
    log.close()
    assert all(path.exists() for path in (*others, strange))
    assert len(list(tmp_path.glob("apply-app-*.jsonl"))) == 1, "the latest stays, however large"


def test_retention_never_takes_an_open_file(tmp_path: Path) -> None:
    """Neither its own open file nor the open file of another living daemon, of whatever slot and size."""
    other = ApplyLog(tmp_path, 1 << 20, 60, slot="app")
    other.append(line(1) * 100, 100)
    log = ApplyLog(tmp_path, 4096, 60, slot="app", retention=Retention(age_s=0.001, size_bytes=1))
    log.append(line(2), 1)
    assert len(list(tmp_path.glob("*.open"))) == 2
    other.close()
    log.close()


def test_retention_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that may not remove files goes on writing, and says so."""
    stream = io.BytesIO()
    logs.configure("info", "json", stream)
    _finish(tmp_path, "app", 1, 10, 0.0)

    def refuse(_path: Path, *, missing_ok: bool) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        log = ApplyLog(tmp_path, 4096, 60, slot="app", retention=Retention(age_s=1))
        log.append(line(1), 1)
    log.close()
    assert [json.loads(text)["event"] for text in stream.getvalue().splitlines()] == ["applylog_not_removed"]
    assert len(list(tmp_path.glob("*.jsonl"))) == 2


def test_a_name_that_is_taken_is_passed_over(tmp_path: Path) -> None:
    """Two files that are opened in one second get different names, also after a restart with the same process id."""
    clock = Clock()
    for seq in range(3):
        log = ApplyLog(tmp_path, 1 << 20, 60, slot="app", clock=clock)
        log.append(line(seq), 1)
        log.close()
    assert sorted(lines_in(tmp_path)) == [0, 1, 2]

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

from parapply import applylog, applylog_schema, logs
from parapply.applylog import ApplyLog, recover, utc_text, wire_time_text
from parapply.applylog_schema import BatchRecord, RowCounts, WaitedFor
from parapply.errors import ConfigError

NAME = re.compile(r"apply-\d{8}T\d{6}Z-\d+-\d+\.jsonl")


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


def lines_in(directory: Path) -> list[int]:
    """Return the seq of every record in the finished files; fails on a torn line."""
    paths = sorted(directory.glob("*.jsonl"), key=lambda path: int(path.stem.rpartition("-")[2]))
    assert all(NAME.fullmatch(path.name) for path in paths)
    return [json.loads(line)["seq"] for path in paths for line in path.read_bytes().splitlines()]


def test_a_record_reads_back_with_its_version(tmp_path: Path) -> None:
    """What is written is what the schema says, version and kind of record included."""
    log = ApplyLog(tmp_path, 1 << 20, 60)
    log.write(record())
    log.close()
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    assert msgspec.json.decode(data, type=BatchRecord) == record()
    assert (json.loads(data)["schema_version"], json.loads(data)["record"]) == (1, "batch")


def test_the_schema_changes_only_with_its_version() -> None:
    """Version 1 has these fields; another set needs another SCHEMA_VERSION and a change of the report."""
    assert applylog_schema.SCHEMA_VERSION == 1
    assert BatchRecord.__struct_fields__ == (
        "schema_version",
        "slot",
        "seq",
        "worker",
        "first_end_lsn",
        "end_lsn",
        "n_transactions",
        "xids",
        "commit_time_first",
        "commit_time_last",
        "received_at",
        "started_at",
        "committed_at",
        "queued_s",
        "wait_dependency_s",
        "execute_s",
        "wait_turn_s",
        "commit_s",
        "attempts",
        "mode",
        "rows",
        "size_bytes",
        "late_keys",
        "waited_for",
        "run",
        "retry_reason",
        "conflicts",
    )


def test_times_are_utc_texts_of_one_width() -> None:
    """Times sort as text, and the wire's epoch is 2000."""
    assert utc_text(0.0) == "1970-01-01T00:00:00.000000+00:00"
    assert wire_time_text(0) == "2000-01-01T00:00:00.000000+00:00"


def test_open_files_have_a_temporary_name(tmp_path: Path) -> None:
    """A reader of *.jsonl sees closed files only; an empty one leaves nothing behind."""
    log = ApplyLog(tmp_path / "made", 1 << 20, 60)
    log.write(record())
    assert [path.suffix for path in (tmp_path / "made").iterdir()] == [".open"]
    log.close()
    log.close()
    assert lines_in(tmp_path / "made") == [1]
    ApplyLog(tmp_path / "made", 1 << 20, 60).close()
    assert len(list((tmp_path / "made").iterdir())) == 1


def test_tick_flushes_after_a_second(tmp_path: Path) -> None:
    """A record stays in memory for at most a second of ticks."""
    clock = Clock()
    log = ApplyLog(tmp_path, 1 << 20, 60, clock)
    (path,) = tmp_path.iterdir()
    log.write(record())
    log.tick()
    assert path.read_bytes() == b""
    clock.now_s += 1.0
    log.tick()
    assert path.read_bytes().endswith(b"\n")
    log.close()


def test_rotation_by_age_and_size(tmp_path: Path) -> None:
    """A file is closed at its age if it holds anything, and at its size; no record is lost between files."""
    clock = Clock()
    log = ApplyLog(tmp_path, 4096, 60, clock)
    clock.now_s += 60
    log.tick()
    assert lines_in(tmp_path) == []
    log.write(record(0))
    log.tick()
    assert lines_in(tmp_path) == [0]
    for seq in range(1, 50):
        log.write(record(seq))
        clock.now_s += 1
        log.tick()
    assert len(list(tmp_path.glob("*.jsonl"))) > 3
    log.close()
    assert lines_in(tmp_path) == list(range(50))
    assert log.dropped == 0


def test_a_killed_writer_is_recovered(tmp_path: Path) -> None:
    """What a dead process left open is cut to whole lines and closed; an empty rest goes away."""
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
    first.write(record(1))
    second.write(record(2))
    first.close()
    assert recover(tmp_path) == []
    second.close()
    assert sorted(lines_in(tmp_path)) == [1, 2]


def test_a_full_disk_drops_records_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk records are counted and dropped, told once, no torn line stays, and writing resumes by itself."""
    stream = io.BytesIO()
    logs.configure("info", "json", stream)
    clock = Clock()
    log = ApplyLog(tmp_path, 1 << 20, 3600, clock)

    def flush(seq: int) -> None:
        log.write(record(seq))
        clock.now_s += 1
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


def test_an_unusable_directory_is_a_configuration_error(tmp_path: Path) -> None:
    """A directory that cannot be made is told at the start, with its key."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^applylog\.directory: "):
        ApplyLog(tmp_path / "file" / "log", 1 << 20, 60)

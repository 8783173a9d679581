"""The records' schema: fixed by its version, read with care, and told in the manual."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from parapply import applylog_schema
from parapply.applylog_schema import (
    RECORDS,
    BackendSample,
    BatchRecord,
    ConflictRecord,
    IntervalRecord,
    LockHolder,
    Record,
    RowCounts,
    TransactionRecord,
    UnreadableRecordError,
    WaitedFor,
    read_record,
)
from parapply.vocabulary import WaitKind
from tests.unit.test_applylog import record

_MANUAL = Path(__file__).parents[2] / "docs" / "APPLYLOG.md"


def transaction() -> TransactionRecord:
    """Return a record with every field set."""
    return TransactionRecord(
        slot="app",
        run="20261121T000000Z-1",
        seq=7,
        batch_seq=3,
        worker=2,
        xid=700,
        commit_lsn="0/1",
        end_lsn="0/2",
        commit_time="2026-11-21T00:00:00.000000+00:00",
        received_at="2026-11-21T00:00:00.000000+00:00",
        committed_at="2026-11-21T00:00:00.000000+00:00",
        size_bytes=120,
        n_changes=2,
        rows={"public.t": RowCounts(insert=2)},
        conflicts=(ConflictRecord(type="update_missing", table="public.t", policy="skip", outcome="skipped"),),
    )


def _plain(one: BatchRecord | TransactionRecord) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(one))
    return plain


def test_the_schema_changes_only_with_its_version() -> None:
    """Version 1 cannot do without these fields; another set needs another version, and a change of the report."""
    assert (applylog_schema.SCHEMA_VERSION, applylog_schema.READABLE_VERSIONS) == (1, (1,))
    required = {
        tag: [field.name for field in msgspec.structs.fields(kind) if field.required] for tag, kind in RECORDS.items()
    }
    assert required == {
        "batch": [
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
        ],
        "transaction": [
            "slot",
            "run",
            "seq",
            "batch_seq",
            "worker",
            "xid",
            "commit_lsn",
            "end_lsn",
            "commit_time",
            "received_at",
            "committed_at",
            "size_bytes",
            "n_changes",
            "rows",
        ],
        "interval": [
            "slot",
            "run",
            "ended_at",
            "length_s",
            "workers",
            "leader_cpu_s",
            "publisher_s",
            "paused_s",
            "behind_bytes",
        ],
    }


def interval() -> IntervalRecord:
    """Return a record with every field set."""
    return IntervalRecord(
        slot="app",
        run="20261121T000000Z-1",
        ended_at="2026-11-21T00:00:00.000000+00:00",
        length_s=1.0,
        workers=4,
        leader_cpu_s=0.25,
        publisher_s=0.5,
        paused_s=0.125,
        behind_bytes=1000,
        backends=(BackendSample(wait="IO:WALSync", samples=3),),
        commit_order="relaxed",
        max_batch_transactions=100,
        max_batch_changes=200,
        max_batch_bytes=4096,
        processors=2,
        busy_cpu_s=1.5,
        sessions_cpu_s=0.75,
        sender_cpu_s=0.25,
        locks=(LockHolder(pid=4711, role="app", relation="public.t", mode="ShareLock"),),
        throttled_s=0.0625,
    )


@pytest.mark.parametrize("one", [record(), transaction(), interval()], ids=lambda one: type(one).__name__)
def test_a_record_comes_back_as_it_was(one: Record) -> None:
    """Of each kind, with all that is inside."""
    assert read_record(msgspec.json.encode(one)) == one


def test_a_line_of_before_takes_the_defaults() -> None:
    """Fields that were added later may be missing: a log of the first daemon is read like any other."""
    old = _plain(record())
    for name in ("run", "retry_reason", "conflicts", "late_keys", "waited_for"):
        del old[name]
    found = read_record(msgspec.json.encode(old))
    assert isinstance(found, BatchRecord)
    assert (found.run, found.retry_reason, found.conflicts, found.late_keys, found.waited_for) == ("", "", (), 0, None)


def test_a_field_of_later_is_passed_over() -> None:
    """A reader of today reads what a daemon of tomorrow adds to this version."""
    assert read_record(msgspec.json.encode({**_plain(transaction()), "new": [1, {"x": 2}]})) == transaction()


@pytest.mark.parametrize(
    "line",
    [
        b'{"record":"batch","schema_version":1,"slo',
        b"",
        b"\x00\x00\x00",
        b"\xff\xfe{}",
        b"[]",
        msgspec.json.encode({**_plain(record()), "schema_version": 2}),
        msgspec.json.encode({**_plain(record()), "record": "of tomorrow"}),
        msgspec.json.encode({**_plain(record()), "seq": "one"}),
        msgspec.json.encode({name: value for name, value in _plain(record()).items() if name != "seq"}),
    ],
)
def test_other_lines_are_refused_one_by_one(line: bytes) -> None:
    """A torn line, zeros of a crashed machine, another version or kind: an error for the reader to count."""
    with pytest.raises(UnreadableRecordError):
        read_record(line)


def test_the_manual_names_every_field() -> None:
    """Each field of each record stands in the table of its kind, and each kind of dependency is explained."""
    manual = _MANUAL.read_text(encoding="utf-8")
    _, batch, transaction_, interval_ = manual.split("\n### ")[:4]
    for tag, section in (("batch", batch), ("transaction", transaction_), ("interval", interval_)):
        for name in RECORDS[tag].__struct_fields__:
            assert f"`{name}`" in section or name == "schema_version", f"{tag}: {name}"
    for kind in (BackendSample, ConflictRecord, LockHolder, RowCounts, WaitedFor):
        for name in kind.__struct_fields__:
            assert f"`{name}`" in manual, f"{kind.__name__}: {name}"
    for kind_of in WaitKind:
        assert f"| `{kind_of}` |" in manual

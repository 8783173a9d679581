"""The apply log says what was applied: compared with the same stream as another slot of the publisher saw it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec
import pytest

from parapply.applylog_schema import (
    RECORDS,
    XIDS_LIMIT,
    BatchRecord,
    IntervalRecord,
    Record,
    RowCounts,
    TransactionRecord,
    read_record,
)
from parapply.model import parse_lsn
from parapply.runtime.observe import machine
from parapply.wire.decode import decode
from parapply.wire.messages import Begin, Commit, Delete, Insert, RelationMessage, Truncate, Update
from tests.fixtures.plain import check_equal, slot_route

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.fixtures.daemon import Daemon, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.route import Route

# Values in keys and in other columns, which no reader of the log may find.
_VALUE = "very-private-value"
_OBSERVER = "observer"
#: Two of the kernel's ticks.
_COUNTED_S = 0.02
_TABLES = """
CREATE TABLE item (id text PRIMARY KEY, v int NOT NULL);
CREATE TABLE evt (n int NOT NULL, note text);
CREATE SCHEMA "Other";
CREATE TABLE "Other"."t%s" (id int PRIMARY KEY);
"""
_KINDS = {Insert: "insert", Update: "update", Delete: "delete"}


@pytest.fixture
def route(source_db: Database, target_db: Database, new_slot: Callable[[Route], None]) -> Route:
    """Three tables, and a second slot that sees the same."""
    for database in (source_db, target_db):
        database.execute(_TABLES)
    source_db.execute('CREATE PUBLICATION pub FOR TABLE item, evt, "Other"."t%s"')
    source_db.execute(f"SELECT pg_create_logical_replication_slot('{_OBSERVER}_' || current_database(), 'pgoutput')")
    return slot_route(source_db, target_db, new_slot, apply__max_batch_transactions=20)


def _load(source: Database) -> None:
    """Commit some 300 transactions of every kind; one in ten changes one key several times."""
    source.execute("TRUNCATE item, evt")
    source.execute(
        f"DO $$ BEGIN FOR i IN 1..300 LOOP INSERT INTO item VALUES ('{_VALUE}-' || i, 0);"
        f" INSERT INTO evt SELECT i, '{_VALUE}' FROM generate_series(1, i % 3);"
        f" IF i % 10 = 0 THEN UPDATE item SET v = v + 1 WHERE id = '{_VALUE}-' || i;"
        f" UPDATE item SET id = id || 'x' WHERE id = '{_VALUE}-' || i - 1;"
        f" DELETE FROM item WHERE id = '{_VALUE}-' || i;"
        " END IF; COMMIT; END LOOP; END $$"
    )
    source.execute('INSERT INTO "Other"."t%s" SELECT generate_series(1, 3000)')
    source.execute('TRUNCATE "Other"."t%s"')


def _sessions_s(route: Route) -> float:
    """Return the CPU time of the sessions of workers."""
    name = "application_name LIKE 'parapply worker%'"
    query = f"SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND {name}"
    return sum(machine.taken_s(pid) for (pid,) in route.target.rows(query))


def _load_and_count(route: Route, daemon: Daemon) -> None:
    """Load until the workers' sessions have taken time that the kernel counts: a fast machine may be done before."""
    before_s = _sessions_s(route)
    _load(route.source)
    daemon.wait_caught_up()
    while _sessions_s(route) < before_s + _COUNTED_S:
        _load(route.source)
        daemon.wait_caught_up()


class _Seen:
    """The publisher's transactions: end LSNs with transaction ids in commit order, rows by table, of each and all."""

    def __init__(self, payloads: Sequence[bytes]) -> None:
        self.ends: dict[int, int] = {}
        self.rows: dict[str, dict[str, int]] = {}
        self.rows_of: dict[int, dict[str, dict[str, int]]] = {}
        self._open: dict[str, dict[str, int]] = {}
        names: dict[int, str] = {}
        xid = 0
        for payload in payloads:
            message = decode(payload)
            if isinstance(message, Begin):
                xid = message.xid
            elif isinstance(message, Commit):
                self.ends[message.end_lsn] = xid
                self.rows_of[message.end_lsn], self._open = self._open, {}
            elif isinstance(message, RelationMessage):
                names[message.relation.oid] = message.relation.qualified_name
            elif isinstance(message, Truncate):
                for oid in message.relation_oids:
                    self._count(names[oid], "truncate")
            elif isinstance(message, Insert | Update | Delete):
                self._count(names[message.relation_oid], _KINDS[type(message)])

    def _count(self, table: str, kind: str) -> None:
        for rows in (self.rows, self._open):
            counts = rows.setdefault(table, msgspec.to_builtins(RowCounts()))
            counts[kind] += 1


def _seen(source: Database) -> _Seen:
    query = (
        "SELECT data FROM pg_logical_slot_get_binary_changes("
        f"'{_OBSERVER}_' || current_database(), NULL, NULL, 'proto_version', '1', 'publication_names', 'pub')"
    )
    return _Seen([bytes(data) for (data,) in source.rows(query)])


def _records(directory: Path) -> list[Record]:
    """Read every closed file strictly, the oldest first, and check that no other file exists."""
    # Two files of one process may be written last at what the kernel's clock takes for the same time.
    paths = sorted(directory.iterdir(), key=lambda path: (path.stat().st_mtime_ns, int(path.stem.split("-")[-1])))
    assert all(path.name.endswith(".jsonl") for path in paths), paths
    lines = [line for path in paths for line in path.read_bytes().splitlines()]
    fields = {tag: {"record", *kind.__struct_fields__} for tag, kind in RECORDS.items()}
    for line in lines:
        plain = msgspec.json.decode(line)
        assert set(plain) == fields[plain["record"]]
    return [read_record(line) for line in lines]


def _check_transactions(records: list[Record], seen: _Seen, slot: str) -> None:
    """Check that each source transaction has its own record behind its batch's record, and check the content."""
    found = [record for record in records if isinstance(record, TransactionRecord)]
    assert [(parse_lsn(one.end_lsn), one.xid) for one in found] == list(seen.ends.items())
    assert [msgspec.to_builtins(one.rows) for one in found] == list(seen.rows_of.values())
    batch = None
    for record in records:
        if isinstance(record, BatchRecord):
            batch = record
            continue
        if isinstance(record, IntervalRecord):
            continue
        assert batch is not None
        assert (record.batch_seq, record.run, record.worker) == (batch.seq, batch.run, batch.worker)
        assert (record.slot, record.committed_at) == (slot, batch.committed_at)
        assert record.received_at <= batch.received_at
        assert parse_lsn(record.commit_lsn) < parse_lsn(record.end_lsn)
        if not any(counts.truncate for counts in record.rows.values()):
            assert record.n_changes == sum(one.insert + one.update + one.delete for one in record.rows.values())
    for run in {one.run for one in found}:
        seqs = [one.seq for one in found if one.run == run]
        assert seqs == list(range(1, len(seqs) + 1))


@pytest.mark.in_turn("settings")
@pytest.mark.parametrize(
    "settings",
    [{"apply.workers": 1, "applylog.detail": "transaction"}, {"apply.workers": 4, "applylog.rotate_bytes": 4096}],
)
def test_the_log_adds_up(
    route: Route, start_daemon: StartDaemon, tmp_path: Path, settings: dict[str, int | str]
) -> None:
    """Valid records, each source transaction in exactly one, rows as sent, LSNs ascending, no value of any row.

    This holds over an orderly restart, several files, and a log of the operation beside it.
    """
    directory = tmp_path / "log"
    lines: list[str] = []
    for _ in range(2):
        daemon = start_daemon(route, settings={**settings, "applylog.directory": str(directory), "log.level": "debug"})
        _load_and_count(route, daemon)
        pids = dict(route.source.rows("SELECT slot_name, active_pid FROM pg_replication_slots"))
        assert machine.is_sender(pids[route.slot])
        assert not machine.is_sender(os.getpid())
        daemon.stop()
        lines += daemon.lines
    seen, every = _seen(route.source), _records(directory)
    records = [record for record in every if isinstance(record, BatchRecord)]
    assert len({record.run for record in records}) == 2, "one for each start"
    if "applylog.detail" in settings:
        _check_transactions(every, seen, route.slot)
    else:
        assert not any(isinstance(record, TransactionRecord) for record in every)
    intervals = [record for record in every if isinstance(record, IntervalRecord)]
    assert {one.run for one in intervals} == {record.run for record in records}
    assert {(one.slot, one.workers) for one in intervals} == {(route.slot, int(settings["apply.workers"]))}
    assert all(one.leader_cpu_s > 0 and one.length_s > 0 and one.behind_bytes >= 0 for one in intervals)
    assert any(one.publisher_s > 0 for one in intervals)
    assert {(one.commit_order, one.max_batch_transactions) for one in intervals} == {("preserve", 20)}
    # The servers of the tests are on this machine.
    assert {one.processors for one in intervals} == {os.cpu_count()}
    assert any(one.sessions_cpu_s > 0 for one in intervals)
    assert all(one.sender_cpu_s >= 0 for one in intervals)
    timed = [record.seq for record in records if record.flight_commit_s]
    assert timed == [record.seq for record in records if record.is_one_flight and record.seq % 16 == 0]
    rows: dict[str, dict[str, int]] = {}
    ends = list(seen.ends)
    at = 0
    for record in records:
        members = ends[at : at + record.n_transactions]
        assert (parse_lsn(record.first_end_lsn), parse_lsn(record.end_lsn)) == (members[0], members[-1])
        assert list(record.xids) == [seen.ends[end] for end in members][:XIDS_LIMIT]
        at += record.n_transactions
        for table, counts in record.rows.items():
            total = rows.setdefault(table, msgspec.to_builtins(RowCounts()))
            for kind, count in msgspec.to_builtins(counts).items():
                total[kind] += count
        times = (record.received_at, record.started_at, record.committed_at)
        assert times == tuple(sorted(times))
        assert (
            min(record.queued_s, record.wait_dependency_s, record.execute_s, record.wait_turn_s, record.commit_s) >= 0
        )
        assert (record.slot, record.attempts) == (route.slot, 1)
        assert 1 <= record.worker <= int(settings["apply.workers"])
    assert at == len(ends)
    assert rows == seen.rows
    written = b"".join(path.read_bytes() for path in directory.iterdir())
    assert _VALUE.encode() not in written
    assert _VALUE not in "\n".join(lines)
    check_equal(route, "item", "evt", '"Other"."t%s"')

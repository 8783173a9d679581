"""Rules that must hold after a fault: the oracles O1 to O9, each a list of findings with the damage they mean.

In go a route and the samples taken during it; out come findings, none when all is well.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import psycopg

from tests.faults.side_load import SECRET, SIDE_RULES, TABLES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.daemon import Daemon
    from tests.fixtures.databases import Database
    from tests.fixtures.route import Route

_SAMPLE_PACE_S = 0.05
_JOIN_TIMEOUT_S = 60.0
# Records above the watermark, and those not pruned yet: some advances' worth, whatever the load was.
_APPLIED_ROWS_LIMIT = 5000
# A daemon that retries without pause writes thousands of lines a minute.
_LINES_A_FAULT = 2000
_SESSIONS = (
    "SELECT application_name, state FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'parapply%'"
)
_LOCKS = (
    "SELECT locktype, mode FROM pg_locks JOIN pg_database AS d ON d.oid = pg_locks.database"
    " WHERE locktype = 'advisory' AND datname = current_database()"
)
# `target_xid` is the number of the target transaction that wrote a row, whatever savepoint it was behind.
_SPLIT = (
    "SELECT {id} FROM (SELECT {id}, target_xid FROM {parent} UNION SELECT txid, target_xid FROM {child}) AS rows"
    " GROUP BY {id} HAVING count(*) > 1"
)
_COLUMNS = (
    "SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) FROM pg_attribute"
    " WHERE attrelid = '{}'::regclass AND attnum > 0 AND NOT attisdropped"
)


@dataclass(kw_only=True)
class Findings:
    """Damage that was found.

    Attributes:
        lost: transactions that are on the source, or were promised, and not on the target.
        duplicated: transactions whose rows are present more than once, or that came from nowhere.
        torn: transactions that are present in part, and states that never were.
        other: everything else: a leak, a hang, a value in a log.
        texts: for a person.
    """

    lost: int = 0
    duplicated: int = 0
    torn: int = 0
    other: int = 0
    texts: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return whether anything is wrong."""
        return bool(self.lost or self.duplicated or self.torn or self.other)

    def add(self, kind: str, count: int, text: str) -> None:
        """Note `count` cases of one kind; nothing if there are none."""
        if count:
            setattr(self, kind, getattr(self, kind) + count)
            self.texts.append(text[:500])

    def take(self, more: Findings) -> None:
        """Add what another one holds."""
        for kind in ("lost", "duplicated", "torn", "other"):
            setattr(self, kind, getattr(self, kind) + getattr(more, kind))
        self.texts += more.texts


class Sampler:
    """Reads what the publisher was told and how far the target says it is; as a context manager it starts and stops.

    Attributes:
        told_lsn: the largest LSN ever confirmed to the publisher, a number. Written by the thread.
        went_back: texts of each time the target's watermark was seen to go back although its server had not crashed.
    """

    def __init__(self, route: Route) -> None:
        """Sample nothing yet."""
        self.told_lsn = 0
        self.went_back: list[str] = []
        self._route = route
        self._low_lsn = 0
        self._may_go_back = False
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._sample, args=(route.source, self._told), name="told", daemon=True),
            threading.Thread(target=self._sample, args=(route.target, self._shown), name="shown", daemon=True),
        ]

    def __enter__(self) -> Self:
        """Start."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(_JOIN_TIMEOUT_S)

    def forgive(self) -> None:
        """Let the watermark that readers see go back once: the target crashed, and forgot what was not on disk."""
        with self._lock:
            self._low_lsn = 0

    @contextmanager
    def crash(self) -> Iterator[None]:
        """Let it go back from before a crash until the server answers again, which may be between two looks."""
        with self._lock:
            self._may_go_back = True
        yield
        with self._lock:
            self._may_go_back, self._low_lsn = False, 0

    def _sample(self, database: Database, look: object) -> None:
        while not self._stopping.is_set():
            try:
                with database.connect(connect_timeout=5) as connection:
                    while not self._stopping.wait(_SAMPLE_PACE_S):
                        look(connection)  # type: ignore[operator]
            except psycopg.OperationalError:
                self._stopping.wait(_SAMPLE_PACE_S)

    def _told(self, connection: psycopg.Connection) -> None:
        query = b"SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots WHERE slot_name = %s"
        row = connection.execute(query, [self._route.slot]).fetchone()
        if row and row[0] is not None:
            self.told_lsn = max(self.told_lsn, int(row[0]))

    def _shown(self, connection: psycopg.Connection) -> None:
        query = b"SELECT lowest_remote_lsn - '0/0' FROM parapply.progress WHERE slot_name = %s"
        with self._lock:
            try:
                row = connection.execute(query, [self._route.slot]).fetchone()
            except psycopg.errors.UndefinedTable:
                return  # The daemon has not made it yet.
            if not row or row[0] is None:
                return
            if int(row[0]) < self._low_lsn and not self._may_go_back:
                self.went_back.append(f"O8: the watermark went back from {self._low_lsn} to {row[0]}")
            self._low_lsn = int(row[0])


def check_transactions(source: Database, target: Database) -> Findings:
    """Compare what both sides hold when nothing is written any more and the target has caught up (O1, O2, O4, O5')."""
    found = Findings()
    for table, name in (("xfer", "id"), ("bulk_txn", "txid")):
        query = f"SELECT {name} FROM {table}"
        sent, applied = Counter(source.rows(query)), Counter(target.rows(query))
        found.add("lost", len(sent - applied), f"O1 {table}: missing {list(sent - applied)[:3]}")
        found.add("duplicated", len(applied - sent), f"O1 {table}: from nowhere or twice {list(applied - sent)[:3]}")
    for table in ("evt", "bulk", "single"):
        query = f"SELECT txid, n, count(*) FROM {table} GROUP BY 1, 2"
        rows, there = ({(a, b): n for a, b, n in side.rows(query)} for side in (source, target))
        double = [key for key, n in there.items() if n > rows.get(key, 0)]
        part = [key for key, n in rows.items() if n > there.get(key, 0)]
        found.add("duplicated", len({key[0] for key in double}), f"O2 {table}: twice {double[:3]}")
        found.add("torn", len({key[0] for key in part}), f"O2 {table}: rows missing of {part[:3]}")
    for table in TABLES:
        # A column that the load could not add on the source, its lock timed out, is on the target only.
        ((columns,),) = source.rows(_COLUMNS.format(table))
        query = f"SELECT md5(row::text), count(*) FROM (SELECT {columns} FROM {table}) AS row GROUP BY 1"
        wanted_rows, found_rows = Counter(dict(source.rows(query))), Counter(dict(target.rows(query)))
        missing, foreign = (wanted_rows - found_rows).total(), (found_rows - wanted_rows).total()
        found.add(
            "other", missing + foreign, f"O5: {table}: {missing} rows missing, {foreign} that should not be there"
        )
    for parent, name, child in (("xfer", "id", "evt"), ("bulk_txn", "txid", "bulk")):
        split = target.rows(_SPLIT.format(id=name, parent=parent, child=child))
        found.add("torn", len(split), f"O4 {parent}: applied in more than one target transaction: {split[:3]}")
    return found


def check_live(target: Database) -> Findings:
    """Look at the target while it is written to: markers, and rows that belong together (O2, O5)."""
    found = Findings()
    wrong = target.rows("SELECT n, here, there FROM marker_seen WHERE NOT is_ok ORDER BY n")
    found.add("torn", len(wrong), f"O5: {len(wrong)} markers found other rows, first {wrong[:1]}")
    twice = target.rows("SELECT n FROM marker_seen GROUP BY n HAVING count(*) > 1")
    found.add("duplicated", len(twice), f"O2: markers applied twice: {twice[:3]}")
    for meaning, query in SIDE_RULES.items():
        rows = target.rows(query)
        found.add("duplicated", len(rows), f"{meaning}: {rows[:3]}")
    return found


def check_state(target: Database) -> Findings:
    """Look at the state tables: bounded, nothing kept below the watermark for long, no conflict declared (O8)."""
    found = Findings()
    ((n_applied,),) = target.rows("SELECT count(*) FROM parapply.applied")
    found.add("other", int(n_applied > _APPLIED_ROWS_LIMIT), f"O8: {n_applied} record rows")
    ((n_conflicts,),) = target.rows("SELECT count(*) FROM parapply.conflicts")
    found.add("other", n_conflicts, f"T-69: {n_conflicts} conflicts declared on a load without any")
    return found


def check_log(daemon: Daemon) -> Findings:
    """Look at what a daemon wrote: no row values, no stack traces, no endless retries (O9)."""
    found = Findings()
    lines = list(daemon.lines)
    found.add("other", len([one for one in lines if SECRET in one]), "O9: the log shows a row's value")
    traces = [one for one in lines if "Traceback" in one]
    found.add("other", len(traces), "O9: a stack trace in the log: " + " / ".join(lines[-12:]))
    found.add("other", int(len(lines) > _LINES_A_FAULT), f"O9: {len(lines)} lines of log: a hot loop")
    return found


def check_nothing_left(source: Database, target: Database) -> Findings:
    """Look for what a daemon that has ended left behind (O9)."""
    found = Findings()
    for side, database in (("source", source), ("target", target)):
        try:
            database.wait_until(f"SELECT NOT EXISTS ({_SESSIONS})", 60)
        except AssertionError:
            found.add("other", 1, f"O9: sessions left on the {side}: {database.rows(_SESSIONS)[:3]}")
    locks = target.rows(_LOCKS)
    found.add("other", len(locks), f"O9: locks left: {locks[:3]}")
    prepared = target.rows("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
    found.add("other", len(prepared), f"O9: prepared transactions left: {prepared[:3]}")
    return found

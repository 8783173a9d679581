"""The example of Amit Kapila's proposal, word for word: transactions 501 to 504, the last two done first, then a crash.

Source: pgsql-hackers, "Parallel Apply", 2025-08-11, section "Replication Progress Tracking".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from parapply.applylog_schema import BatchRecord, read_record
from parapply.model import format_lsn
from tests.fixtures.fan import make_slot
from tests.fixtures.pair import Pair, pair
from tests.fixtures.plain import foreign_transaction
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["pair"]

# The first daemon's last session ends when the lock it waits for is gone, and the second waits for that.
_SETTINGS: Mapping[str, str | float] = {
    "apply.commit_order": "relaxed",
    "apply.max_batch_transactions": 1,
    "target.lease_wait_s": 20,
}
#: `item` is changed by 501 and 502, which are held; without a key, a second application leaves twins in `evt`.
_TABLES = "CREATE TABLE item (id int PRIMARY KEY, v int); CREATE TABLE evt (n int);"
_TRANSACTIONS = {
    501: "UPDATE item SET v = 501 WHERE id = 1",
    502: "UPDATE item SET v = 502 WHERE id = 2",
    503: "INSERT INTO evt VALUES (503)",
    504: "INSERT INTO evt VALUES (504)",
}
_LOCK = "SELECT FROM item WHERE id = {} FOR UPDATE"
_BLOCKED = (
    "SELECT count(*) = {} FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'parapply worker%' AND wait_event_type = 'Lock'"
)
_END_WORKERS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'parapply worker%'"
)
_NO_WORKER = (
    "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'parapply worker%')"
)
_PROGRESS = "SELECT lowest_remote_lsn::text, list_remote_lsn::text[], highest_remote_lsn::text FROM parapply.progress"
# Source: manual, "Logical Replication Message Formats", Commit: flags, LSN of the commit, end LSN, time.
_COMMIT = struct.Struct(">cBQQq")


@dataclass(frozen=True, kw_only=True)
class Ends:
    """LSNs of a transaction, as texts."""

    commit_lsn: str
    end_lsn: str


def _ends(slot_owner: Pair, slot: str) -> dict[int, Ends]:
    """Return the LSNs of the four transactions, from the messages that a slot of their own holds."""
    query = (
        "SELECT data FROM pg_logical_slot_peek_binary_changes"
        f"('{slot}', NULL, NULL, 'proto_version', '1', 'publication_names', 'pub')"
    )
    commits = [_COMMIT.unpack_from(data) for (data,) in slot_owner.source.rows(query) if data[:1] == b"C"]
    pairs = [Ends(commit_lsn=format_lsn(commit), end_lsn=format_lsn(end)) for _, _, commit, end, _ in commits]
    return dict(zip(_TRANSACTIONS, pairs, strict=True))


def _is_at_or_before(pair: Pair, one_lsn: str, other_lsn: str) -> bool:
    return bool(pair.target.rows(f"SELECT '{one_lsn}'::pg_lsn <= '{other_lsn}'::pg_lsn")[0][0])


def _rows(pair: Pair) -> tuple[list[int], list[int]]:
    """Return the values of `item`, and `evt` with its twins."""
    items = [value for (value,) in pair.target.rows("SELECT v FROM item ORDER BY id")]
    return items, [n for (n,) in pair.target.rows("SELECT n FROM evt ORDER BY n")]


def _applied(directory: Path) -> list[str]:
    """Return the end LSNs of the target transactions in an apply log."""
    records = [read_record(line) for path in directory.glob("*.jsonl") for line in path.read_bytes().splitlines()]
    return sorted(record.end_lsn for record in records if isinstance(record, BatchRecord))


def _check_step_2(pair: Pair, ends: Mapping[int, Ends]) -> None:
    """503 and 504 are done, 501 and 502 are in progress."""
    ((lowest, done, highest),) = pair.target.rows(_PROGRESS)
    assert _is_at_or_before(pair, lowest, ends[501].commit_lsn)
    assert done == [ends[503].end_lsn, ends[504].end_lsn]
    assert highest == ends[504].end_lsn
    assert _rows(pair) == ([0, 0], [0, 503, 504])


@pytest.mark.pg_majors(15, 18)
def test_seed_transactions_501_to_504(pair: Pair, tmp_path: Path) -> None:
    """503 and 504 commit while 501 and 502 are held; after a crash 502 is applied, 503 and 504 are skipped.

    At each step lowest, list and highest are as in the proposal, with the end LSNs of the transactions.
    """
    pair.create(_TABLES)
    daemon = pair.start(workers=4, settings=_SETTINGS)
    pair.write("INSERT INTO item VALUES (1, 0), (2, 0)", "INSERT INTO evt VALUES (0)")
    daemon.wait_caught_up()
    watching = Route(source=pair.source, target=pair.target)
    make_slot(watching)
    with foreign_transaction(pair.target, _LOCK.format(2)) as holds_502:
        with foreign_transaction(pair.target, _LOCK.format(1)):
            pair.write(*_TRANSACTIONS.values())
            ends = _ends(pair, watching.slot)
            pair.target.wait_until(_BLOCKED.format(2))
            pair.target.wait_until("SELECT count(*) = 3 FROM evt")
            _check_step_2(pair, ends)
        pair.target.wait_until("SELECT v = 501 FROM item WHERE id = 1")
        step_3 = (ends[501].end_lsn, [ends[503].end_lsn, ends[504].end_lsn], ends[504].end_lsn)
        assert pair.target.rows(_PROGRESS) == [step_3]
        daemon.kill()
        # The COMMIT of 502 is on its way with its statement: it would take effect if the lock went first.
        holds_502.execute(_END_WORKERS)
        pair.target.wait_until(_NO_WORKER)
        assert pair.target.rows(_PROGRESS) == [step_3]
        assert _rows(pair) == ([501, 0], [0, 503, 504])
    daemon = pair.start(workers=4, settings={**_SETTINGS, "applylog.directory": str(tmp_path)})
    daemon.wait_caught_up()
    assert _rows(pair) == ([501, 502], [0, 503, 504])
    ((lowest, done, highest),) = pair.target.rows(_PROGRESS)
    assert done == []
    assert _is_at_or_before(pair, ends[504].end_lsn, lowest)
    assert _is_at_or_before(pair, lowest, highest)
    daemon.stop()
    assert _applied(tmp_path) == [ends[502].end_lsn]
    pair.check_equal()


def test_t2_the_publisher_is_told_no_more_than_the_state_says(pair: Pair) -> None:
    """Two that commit beside each other do not know of each other in their records: the next start must know both.

    With synchronous commits the daemon could report to the publisher at once; a crash before the state is written would
    find a slot that is ahead of the target (trap T-2).
    """
    pair.create(_TABLES)
    settings = {**_SETTINGS, "target.synchronous_commit": "on", "apply.advance_interval_s": 3600,
                "source.status_interval_s": 0.05}  # fmt: skip
    daemon = pair.start(workers=4, settings=settings)
    pair.write("INSERT INTO item VALUES (1, 0), (2, 0)", "INSERT INTO evt VALUES (0)")
    daemon.wait_caught_up()
    with foreign_transaction(pair.target, _LOCK.format(2)) as holds_502:
        with foreign_transaction(pair.target, _LOCK.format(1)):
            pair.write(_TRANSACTIONS[501], _TRANSACTIONS[503], _TRANSACTIONS[502])
            pair.target.wait_until(_BLOCKED.format(2))
            pair.target.wait_until("SELECT count(*) = 2 FROM evt")
        pair.target.wait_until("SELECT v = 501 FROM item WHERE id = 1")
        ((seen_at,),) = pair.source.rows("SELECT clock_timestamp()::text")
        # Some reports later.
        pair.source.wait_until(
            f"SELECT reply_time > '{seen_at}'::timestamptz + interval '0.3 s' FROM pg_stat_replication"
            f" WHERE application_name = '{pair.route.slot}'"
        )
        daemon.kill()
        holds_502.execute(_END_WORKERS)
        pair.target.wait_until(_NO_WORKER)
        told = format_lsn(pair.route.confirmed_flush_lsn())
        assert _is_at_or_before(pair, told, pair.target.rows(_PROGRESS)[0][0])
    daemon = pair.start(workers=4, settings=settings)
    daemon.wait_caught_up()
    assert _rows(pair) == ([501, 502], [0, 503])
    daemon.stop()
    pair.check_equal()


@pytest.mark.parametrize("behind", [(), (_TRANSACTIONS[504],)], ids=["alone", "first-of-two"])
@pytest.mark.parametrize(
    ("n_rows", "then"),
    [
        pytest.param(2000, {"apply.max_changes_per_s": 1_000_000}, id="throttle"),
        pytest.param(12_000, {"apply.memory_limit_bytes": 16 << 20}, id="less-memory"),
    ],
)
def test_lower_limits_make_no_pieces_of_what_lies_above_the_watermark(
    pair: Pair, n_rows: int, then: Mapping[str, str | float], behind: tuple[str, ...]
) -> None:
    """A transaction that was whole, and is larger than a piece now, comes whole again and is left out."""
    pair.create(_TABLES)
    pair.write("INSERT INTO item VALUES (1, 0)", "INSERT INTO evt VALUES (1)")
    pair.drain()
    settings = {**_SETTINGS, "apply.max_batch_transactions": 1 + len(behind), "apply.max_batch_bytes": 16 << 20}
    held = [_TRANSACTIONS[501], "UPDATE item SET v = 7 WHERE id = 1"]
    with foreign_transaction(pair.target, _LOCK.format(1)):
        pair.write(*held, f"INSERT INTO evt SELECT generate_series(1, {n_rows})", *behind)
        first = pair.start(settings={**settings, "apply.memory_limit_bytes": 256 << 20})
        pair.target.wait_until(f"SELECT count(*) = {1 + n_rows + len(behind)} FROM evt")
        first.kill()
        second = pair.start_only(settings={**settings, **then})
        second.wait_for_event("daemon_started")
        pair.target.execute(_END_WORKERS)
    second.finish()
    pair.check_equal()


def test_what_lies_above_the_watermark_and_comes_in_pieces_is_left_out_at_its_end(pair: Pair) -> None:
    """With another publication a transaction that was whole is larger than any piece. Its end says so."""
    tables = f"{_TABLES} CREATE TABLE more (n int);"
    pair.create(f"{tables} CREATE PUBLICATION more FOR TABLE more", tables, published="TABLE item, evt")
    pair.write("INSERT INTO item VALUES (1, 0)")
    pair.drain()
    settings = {**_SETTINGS, "source.streaming": "off"}
    with foreign_transaction(pair.target, _LOCK.format(1)):
        pair.write(
            _TRANSACTIONS[501],
            "INSERT INTO evt SELECT generate_series(1, 2000); INSERT INTO more SELECT generate_series(1, 20000)",
        )
        first = pair.start(settings=settings)
        pair.target.wait_until("SELECT count(*) = 2000 FROM evt")
        first.kill()
        second = pair.start_only("--publication", "more", settings=settings)
        second.wait_for_event("daemon_started")
        pair.target.execute(_END_WORKERS)
    second.finish()
    assert pair.target.rows("SELECT count(*), count(DISTINCT n) FROM evt") == [(2000, 2000)]

"""What `parapply top` makes of several looks, and whether its screen fits the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from parapply.runtime.status import duration, render
from parapply.top.history import History
from parapply.top.layout import screen

if TYPE_CHECKING:
    from rich.console import RenderableType


def _table(name: str, counted_s: float, *, inserts: int = 0, updates: int = 0, waits: int = 0) -> dict[str, Any]:
    schema, table = name.split(".")
    return {
        "schema_name": schema, "table_name": table, "lane": "set-based", "is_table_exclusive": False,
        "reason": "serial: x", "key_columns": ["id"], "retries": 0, "transactions": 1, "inserts": inserts,
        "updates": updates, "deletes": 0, "truncates": 0, "waits": waits, "wait_s": 0.0,
        "waits_mostly_for": "key" if waits else "", "counted_s": counted_s,
    }  # fmt: skip


def _worker(number: int, state: str = "idle", waits_for: str | None = None, transactions: int = 0) -> dict[str, Any]:
    return {
        "worker": number, "pid": 1, "state": state, "batch_seq": 1, "end_lsn": "FFFFFFFF/FFFFFFFF",
        "waits_for": waits_for, "since": "2026-11-21 22:00:00", "since_s": 12.3, "transactions": transactions,
        "changes": 10**9,
    }  # fmt: skip


def _report(**more: object) -> dict[str, Any]:
    return {
        "slot_name": "app", "database_name": "app", "lowest_remote_lsn": "FFFFFFFF/FFFFFFFF",
        "highest_remote_lsn": "FFFFFFFF/FFFFFFFF", "confirmed_flush_lsn": "0/1", "lag_bytes": 10**12, "lag_s": 0.5,
        "commit_order": "preserve", "worker_count": 4, "state": "running", "reason": "", "two_phase": "disabled",
        "updated_at": "2026-11-21 22:00:00", "silent_s": 0.3, "host": "h", "pid": 7, "version": "1",
        "started_at": "2026-11-21 21:00:00", "workers": [], "tables": [], "copies": [], "prepared": [], "conflicts": [],
        "is_daemon_connected": True, "source": {"is_reachable": False, "error": "no route to host " * 9}, **more,
    }  # fmt: skip


def _lines(shown: RenderableType, width: int) -> list[str]:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(shown)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_rates_are_of_the_last_seconds() -> None:
    """Rows, waits and transactions a second: what came between two writes of the daemon, by the time between these."""
    history = History()
    for second in range(41):
        tables = [_table("public.t", 100 + second * 1.02, inserts=51 * second, waits=102 * second)]
        history.add(_report(tables=tables, workers=[_worker(1, transactions=204 * second)]), float(second))
    (found,) = history.tables()
    assert found.rows_s == pytest.approx(50)
    assert found.inserts_s == pytest.approx(50)
    assert found.waits_s == pytest.approx(100)
    assert history.transactions_s == pytest.approx(200)


def test_an_idle_table_goes_to_zero_and_wakes_up() -> None:
    """A burst after an hour of silence counts for the seconds that were looked at, not for the hour."""
    history = History()
    for second in range(20):
        history.add(_report(tables=[_table("public.t", 100, inserts=7)]), float(second))
    assert history.tables()[0].is_quiet
    history.add(_report(tables=[_table("public.t", 4000, inserts=1007)]), 20.0)
    assert history.tables()[0].rows_s == pytest.approx(100)


def test_a_restart_of_the_daemon_makes_no_negative_rates() -> None:
    """Its counts begin at 0 again; the lag's course goes on."""
    history = History()
    history.add(_report(tables=[_table("public.t", 100, inserts=1000)], workers=[_worker(1, transactions=9)]), 0)
    after = _report(tables=[_table("public.t", 101, inserts=3)], workers=[_worker(1)], started_at="later")
    history.add(after, 1)
    history.add(after, 2)
    assert history.tables()[0].rows_s == 0
    assert history.transactions_s == 0
    assert len(history.lag_s) == 3


def test_orders_of_the_tables() -> None:
    """Rows: the hottest first; waits: whose keys make most others wait; name: by name."""
    history = History()
    for second in (0, 5):
        tables = [
            _table("public.b", 100 + second, inserts=5 * second),
            _table("public.a", 100 + second, inserts=9 * second),
            _table("public.c", 100 + second, inserts=second, waits=second),
        ]
        history.add(_report(tables=tables), float(second))
    names = {order: [one.name[-1] for one in history.tables(order)] for order in ("rows", "waits", "name")}
    assert names == {"rows": ["a", "b", "c"], "waits": ["c", "a", "b"], "name": ["a", "b", "c"]}


def test_silence_counts_as_lag() -> None:
    """A daemon that stands still or is gone writes no lag any more: the time since then is added."""
    history = History()
    history.add(_report(lag_s=2.0, silent_s=60.0), 0)
    assert history.lag_s[-1] == 62
    assert "nothing heard for 60 s" in _lines(screen(history, 80, 24, "rows"), 80)[0]


@pytest.mark.parametrize(("width", "height"), [(80, 23), (60, 16), (132, 50)])
def test_the_screen_fits(width: int, height: int) -> None:
    """Sixty-four workers, hundreds of tables with long names, long reasons: no line is too wide, and not too many."""
    history = History()
    waits = "its turn to commit, after batch 123456789; part of it for batch 123456788: key in public.a_long_name"
    for second in (0, 10):
        tables = [_table(f"public.{'x' * 60}{n}", 100 + second, updates=n * 10**8 * second) for n in range(300)]
        workers = [_worker(n, "retrying", waits) for n in range(1, 65)]
        conflicts = [
            {"type": "update_missing", "table": "public.t", "outcome": "skipped", "latest": "2026", "count": 9}
        ]
        report = _report(tables=tables, workers=workers, conflicts=conflicts, reason="because " * 40, state="retrying")
        history.add(report, float(second))
    lines = _lines(screen(history, width, height, "rows", notice="target: " + "gone " * 50), width)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert any("1 conflicts" in line or "9 conflicts" in line for line in lines)


def test_what_a_worker_waits_for_is_told_in_full_where_there_is_room() -> None:
    """Four workers on 24 lines: the reason is wrapped, not cut."""
    history = History()
    waits = "its turn to commit, after batch 8113; part of it for batch 8112: key in public.pgbench_branches"
    workers = [_worker(n, "waiting", waits) for n in range(1, 5)]
    history.add(_report(workers=workers, tables=[_table("public.t", 1)]), 0)
    text = " ".join(" ".join(_lines(screen(history, 80, 23, "rows"), 80)).split())
    assert text.count("turn, after batch 8113; partly batch 8112:") == 4
    assert text.count("pgbench_branches") == 4


def test_status_fits_80_columns() -> None:
    """The same for `parapply status`, which wraps what is long instead of cutting it."""
    report = _report(
        tables=[_table("public.a_table_with_a_rather_long_name", 1)],
        workers=[
            _worker(n, "committing", "its turn to commit, after batch 123; part of it for x") for n in range(1, 5)
        ],
        source={"is_reachable": False, "error": "no"},
    )
    lines = _lines(render(report), 80)
    assert max(map(len, lines)) <= 80
    assert any("a_table_with_a_rather_long_name: serial: x" in line for line in lines)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (0.25, "250 ms"), (1, "1.0 s"), (99, "99 s"), (120, "2.0 min"), (7200, "2.0 h"), (864000, "10 d")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    """At most seven characters, in the unit that tells most."""
    assert duration(seconds) == text

"""`parapply top`: its conclusions from several looks, and the fit of its screen to the terminal."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from parapply.amounts import brief
from parapply.commands.state_reader import is_present, lag_s
from parapply.commands.status import render
from parapply.config import load_config
from parapply.errors import TargetLost
from parapply.top.history import ReadingHistory
from parapply.top.layout import screen
from parapply.top.overview import Watched, in_order, overview

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


_LIMITS = {
    "limit": "target", "detail": "CPU", "share": 0.97, "window_s": 120.0,
    "words": "The target: all workers executed statements, on its processors, 97 % of the time.",
    "advice": "more workers while the target has idle processors; fewer indexes and triggers on the busiest tables",
    "evidence": ["Of the last 120 s: target CPU 97 %, source 3 %."],
}  # fmt: skip


def _report(**more: object) -> dict[str, Any]:
    return {
        "slot_name": "app", "database_name": "app", "system_identifier": "1", "lowest_remote_lsn": "FFFFFFFF/FFFFFFFF",
        "highest_remote_lsn": "FFFFFFFF/FFFFFFFF", "confirmed_flush_lsn": "0/1", "lag_bytes": 10**12, "lag_s": 0.5,
        "commit_order": "preserve", "worker_count": 4, "state": "running", "reason": "", "two_phase": "disabled",
        "reading": "stream", "limits": _LIMITS,
        "updated_at": "2026-11-21 22:00:00", "silent_s": 0.3, "shown_every_s": 1.0,
        "host": "h", "pid": 7, "version": "1",
        "started_at": "2026-11-21 21:00:00", "workers": [], "tables": [], "copies": [], "ddl": [],
        "prepared": [], "blocked": [], "conflicts": [], "migration": [], "cutover": None,
        "is_daemon_connected": True, "source": {"is_reachable": False, "error": "no route to host " * 9}, **more,
    }  # fmt: skip


def _lines(shown: RenderableType, width: int) -> list[str]:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(shown)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_rates_are_of_the_last_seconds() -> None:
    """Rows, waits and transactions a second: what came between two writes of the daemon, by the time between these."""
    history = ReadingHistory()
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
    history = ReadingHistory()
    for second in range(20):
        history.add(_report(tables=[_table("public.t", 100, inserts=7)]), float(second))
    assert history.tables()[0].is_quiet
    history.add(_report(tables=[_table("public.t", 4000, inserts=1007)]), 20.0)
    assert history.tables()[0].rows_s == pytest.approx(100)


def test_a_restart_of_the_daemon_makes_no_negative_rates() -> None:
    """Its counts begin at 0 again; the lag's course goes on."""
    history = ReadingHistory()
    history.add(_report(tables=[_table("public.t", 100, inserts=1000)], workers=[_worker(1, transactions=9)]), 0)
    after = _report(tables=[_table("public.t", 101, inserts=3)], workers=[_worker(1)], started_at="later")
    history.add(after, 1)
    history.add(after, 2)
    assert history.tables()[0].rows_s == 0
    assert history.transactions_s == 0
    assert len(history.lag_s) == 3


def test_orders_of_the_tables() -> None:
    """Rows: the hottest first; waits: whose keys make most others wait; name: by name."""
    history = ReadingHistory()
    for second in (0, 5):
        tables = [
            _table("public.b", 100 + second, inserts=5 * second),
            _table("public.a", 100 + second, inserts=9 * second),
            _table("public.c", 100 + second, inserts=second, waits=second),
        ]
        history.add(_report(tables=tables), float(second))
    names = {order: [one.name[-1] for one in history.tables(order)] for order in ("rows", "waits", "name")}
    assert names == {"rows": ["a", "b", "c"], "waits": ["c", "a", "b"], "name": ["a", "b", "c"]}


_BEHIND = {"is_reachable": True, "lag_bytes": 5}
_AT_THE_END = {"is_reachable": True, "lag_bytes": 0}


@pytest.mark.parametrize(
    ("written_s", "silent_s", "is_daemon_connected", "source", "now_s"),
    [
        (0.0, 0.3, True, _BEHIND, 0.0),
        (2.0, 0.3, True, _AT_THE_END, 2.0),
        (2.0, 60.0, True, _BEHIND, 62.0),
        (0.0, 0.5, False, _BEHIND, 0.5),
        (0.0, 3600.0, False, {"is_reachable": False}, 3600.0),
        (9.0, 3600.0, False, _AT_THE_END, 0.0),
        (None, 3600.0, False, _BEHIND, None),
        (None, 0.3, True, _BEHIND, None),
    ],
)
def test_the_lag_without_a_daemon(
    *, written_s: float | None, silent_s: float, is_daemon_connected: bool, source: dict[str, Any], now_s: float | None
) -> None:
    """The written lag counts while a daemon writes; later the time since then is added: never 0 for not known."""
    report = _report(lag_s=written_s, silent_s=silent_s, is_daemon_connected=is_daemon_connected, source=source)
    assert lag_s(report) == now_s


@pytest.mark.parametrize("shown_every_s", [1.0, 30.0])
def test_the_row_says_when_silence_counts(shown_every_s: float) -> None:
    """A daemon at rest writes seldom, and is current for as long."""
    report = _report(lag_s=0.0, shown_every_s=shown_every_s, silent_s=shown_every_s + 3.9)
    assert is_present(report)
    assert not is_present({**report, "silent_s": shown_every_s + 4.1})


def test_a_lag_that_is_not_known_is_not_shown_as_none() -> None:
    """Before a daemon has looked at the publisher for the first time there is no figure."""
    history = ReadingHistory()
    history.add(_report(lag_s=None, lag_bytes=None), 0)
    assert _lines(screen(history, 80, 24, "rows"), 80)[1].split() == ["lag", "?", "?", "max", "?"]
    history.add(_report(lag_s=4.0), 1)
    history.add(_report(lag_s=None), 2)
    history.add(_report(lag_s=2.0), 3)
    # The course has gaps there, and no end of the lag.
    assert "  █ ▄" in _lines(screen(history, 80, 24, "rows"), 80)[1]


def test_a_wait_for_a_lock_is_told_with_its_holder() -> None:
    """The wait of a session that is no worker's is shown on either end, and 60 columns are enough for the holder."""
    one = {"session": "parapply app", "wait_s": 75.0, "pid": 4711, "gid": None, "line": "parapply app: waits " * 9}
    history = ReadingHistory()
    source = {"is_reachable": False, "error": "no", "blocked": [one]}
    history.add(_report(source=source, blocked=[{**one, "pid": None, "gid": "p 1"}]), 0)
    lines = _lines(screen(history, 60, 24, "rows"), 60)
    assert [line[:42] for line in lines if line.startswith(("source:", "target:"))] == [
        "source: waits for pid 4711, 75 s so far: p", "target: waits for p 1, 75 s so far: parapp",
    ]  # fmt: skip


def test_silence_is_told() -> None:
    """A daemon that is stuck writes nothing any more."""
    history = ReadingHistory()
    history.add(_report(lag_s=62.0, silent_s=60.0), 0)
    assert "nothing heard for 60 s" in _lines(screen(history, 80, 24, "rows"), 80)[0]


@pytest.mark.parametrize(("width", "height"), [(80, 23), (60, 16), (132, 50)])
def test_the_screen_fits(width: int, height: int) -> None:
    """Sixty-four workers, hundreds of tables with long names, long reasons: no line is too wide, and not too many."""
    history = ReadingHistory()
    waits = "its turn, after batch 123456789; partly batch 123456788: key in public.a_long_name"
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


@pytest.mark.parametrize(("width", "is_split"), [(58, False), (78, True)])
def test_a_narrow_screen_has_names(width: int, is_split: bool) -> None:  # noqa: FBT001  a case
    """At 60 columns the tables have their names, and the rates of the sorts of changes give way to them."""
    history = ReadingHistory()
    for second in (0, 10):
        report = _report(tables=[_table("public.pgbench_accounts", 100 + second, updates=9 * second)])
        history.add(report, float(second))
    lines = _lines(screen(history, width, 23, "rows"), width)
    (row,) = [line for line in lines if "pgbench_accounts" in line]
    assert row.split()[-1] == "sets"
    assert any(" upd " in line for line in lines) == is_split


def test_what_a_worker_waits_for_is_told_in_full_where_there_is_room() -> None:
    """Four workers on 24 lines: the reason is wrapped, not cut."""
    history = ReadingHistory()
    waits = "its turn, after batch 8113; partly batch 8112: key in public.pgbench_branches"
    workers = [_worker(n, "waiting", waits) for n in range(1, 5)]
    history.add(_report(workers=workers, tables=[_table("public.t", 1)]), 0)
    text = " ".join(" ".join(_lines(screen(history, 80, 23, "rows"), 80)).split())
    assert text.count("its turn, after batch 8113; partly batch 8112:") == 4
    assert text.count("pgbench_branches") == 4


def test_status_fits_80_columns() -> None:
    """The same for `parapply status`, which wraps what is long instead of cutting it."""
    report = _report(
        tables=[_table("public.a_table_with_a_rather_long_name", 1)],
        workers=[_worker(n, "committing", "its turn, after batch 123; partly x") for n in range(1, 5)],
        source={"is_reachable": False, "error": "no"},
    )
    lines = _lines(render(report), 80)
    assert max(map(len, lines)) <= 80
    assert any("a_table_with_a_rather_long_name: serial: x" in line for line in lines)


@pytest.mark.parametrize(("n_workers", "n_tables"), [(4, 3), (32, 2), (3, 300), (64, 300)])
def test_status_on_24_lines_loses_no_part(n_workers: int, n_tables: int) -> None:
    """`--watch` shows workers and tables however many there are, those with work and rows first, and how many more."""
    report = _report(
        tables=[_table(f"public.t{n}", 1, inserts=n) for n in range(n_tables)],
        workers=[_worker(n, "executing" if n == n_workers else "idle") for n in range(1, n_workers + 1)],
    )
    lines = _lines(render(report, 80, 24), 80)
    assert len(lines) <= 24
    text = "\n".join(lines)
    assert "executing" in text
    assert f"public.t{n_tables - 1} " in text
    n_shown = len([line for line in lines if re.match(r"public\.t|\d+ +(?:idle|executing) ", line)])
    assert n_shown + sum(map(int, re.findall(r"^and (\d+) more$", text, re.MULTILINE))) == n_workers + n_tables
    everything = "\n".join(_lines(render(report), 80))
    assert all(f"public.t{n} " in everything for n in range(n_tables))


def test_top_on_a_wide_screen() -> None:
    """The figures of a table stand next to its name, and no span of time is cut."""
    history = ReadingHistory()
    for second in (0, 10):
        heap = {**_table("public.heap", 100 + second, updates=second), "reason": "set-based: inserts only"}
        worker = {**_worker(1, "waiting", "its turn, after batch 1"), "since_s": 156.0}
        history.add(_report(tables=[_table("public.t", 100 + second), heap], workers=[worker]), float(second))
    for width in (80, 200):
        lines = _lines(screen(history, width, 50, "name"), width)
        (row,) = [line for line in lines if line.lstrip().startswith("heap")]
        assert len(row) < 80
        assert row.endswith("ins sets")
        assert " 2.6 min " in next(line for line in lines if "waiting" in line)


_SOURCE = {
    "is_reachable": True, "error": None, "system_identifier": "1", "flush_lsn": "FFFFFFFF/FFFFFFFF",
    "slot_exists": True, "slot_active_pid": None, "lag_bytes": 4,
    "slot_wal_status": "extended", "slot_invalidation_reason": None, "slot_retained_wal_bytes": 5_000_000_000,
    "slot_safe_wal_bytes": None, "slot_retained_wal_limit_bytes": None,
}  # fmt: skip


def test_status_tells_what_is_kept_and_what_is_not_known() -> None:
    """WAL kept for the slot, with its limit if there is one; a lag without a daemon as the most that it can be."""
    stopped = {"is_daemon_connected": False, "silent_s": 12.0, "lag_bytes": 4, "source": _SOURCE}
    text = "\n".join(_lines(render(_report(**stopped, lag_s=12.5)), 80))
    assert "4 bytes of WAL, at most 12 s" in text
    assert "5,000,000,000 bytes, extended\n" in text
    limited = {**_SOURCE, "slot_safe_wal_bytes": 1000, "slot_wal_status": "reserved"}
    text = " ".join("\n".join(_lines(render(_report(**{**stopped, "lag_s": None, "source": limited})), 80)).split())
    assert "4 bytes of WAL, age unknown" in text
    assert "reserved; 1,000 more may be written before the slot can be lost" in text
    for limit_bytes, is_named in ((4_000_000_000, True), (6_000_000_000, False)):
        guarded = {**_SOURCE, "slot_retained_wal_limit_bytes": limit_bytes}
        text = " ".join("\n".join(_lines(render(_report(**{**stopped, "lag_s": 1.0, "source": guarded})), 120)).split())
        assert ("extended; MORE than source.retained_wal_limit_bytes, 4,000,000,000" in text) is is_named
    lost = {**_SOURCE, "slot_retained_wal_bytes": None, "slot_wal_status": "lost"}
    assert "the slot is INVALIDATED: wal_removed" in "\n".join(_lines(render(_report(source=lost)), 80))


_STEPS = [
    {"step": "schema", "state": "done", "done": 0, "total": 0, "unit": "", "size_bytes": 0, "left_s": None,
     "detail": "", "seconds": 1.0, "is_worked_on": True},
    {"step": "copy", "state": "running", "done": 2000, "total": 8000, "unit": "rows", "size_bytes": 4 * 10**8,
     "left_s": 12.0, "detail": "", "seconds": 4.0, "is_worked_on": True},
]  # fmt: skip
_CUTOVER = {
    "step": "draining", "step_s": 2.0, "is_fenced": True, "gap_s": 2.5, "opened_at": None, "reverse_slot": "app_back",
    "is_worked_on": True, "paused": ["shop at port=6432"],
}  # fmt: skip


def test_a_migration_and_a_cut_over_are_seen() -> None:
    """Each step that is not done: how far, how fast, how long still; a cut-over: where, and how long writers wait."""
    report = _report(migration=_STEPS, cutover=_CUTOVER)
    shown = " ".join(" ".join(_lines(render(report), 200)).split())
    for text in (
        "copy running 4.0 s 2,000 of about 8,000 rows, 400 MB, 100 MB/s 12 s",
        "done: schema",
        (
            "cut-over draining for 2.0 s; no client can write on the source since 2.5 s;"
            " clients wait at the poolers: shop at port=6432; way back: slot app_back"
        ),
    ):
        assert text in shown
    history = ReadingHistory()
    history.add(report, 0.0)
    shown = " ".join(" ".join(_lines(screen(history, 200, 0, "rows"), 200)).split())
    assert "migration: copy running for 4.0 s, 12 s left; 2,000 of about 8,000 rows" in shown
    assert "cut-over: draining for 2.0 s" in shown
    dead = [{**one, "is_worked_on": False} for one in _STEPS]
    done = {**_CUTOVER, "step": "done", "opened_at": "2026-11-21 22:00:00", "is_worked_on": False}
    # Before the copy no slot exists.
    shown = " ".join(_lines(render({**_report(), "state": None, "migration": dead}), 200))
    assert "slot app is not made yet" in shown
    assert "interrupted" in shown
    shown = " ".join(_lines(render(_report(cutover=done)), 200))
    assert "done; no client could write for 2.5 s" in shown
    shown = " ".join(_lines(render(_report(cutover={**_CUTOVER, "step": "undoing", "is_worked_on": False})), 200))
    assert "no client can write on the source since 2.5 s" in shown
    assert "interrupted: `parapply cutover --undo` goes on with it" in shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (0.25, "250 ms"), (1, "1.0 s"), (99, "99 s"), (120, "2.0 min"), (7200, "2.0 h"), (864000, "10 d")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    """At most seven characters, in the unit that fits."""
    assert brief(seconds) == text


def test_many_slots_fit_the_terminal() -> None:
    """A line for each slot, the highest lag first, one that was never read above all; the chosen one is shown."""
    config = load_config(None, [], {"target.dsn": "host=x", "source.slot": "s"}, {}, required=("target.dsn",))
    slots = [Watched(f"data\nbase {number:02d} of a long name", config) for number in range(50)]
    for number, one in enumerate(slots[1:], 1):
        for second in (0, 3):
            tables = [_table("public.t", 100 + second, inserts=number * second)]
            one.history.add(_report(tables=tables, lag_s=float(number)), float(second))
    slots[0].error = TargetLost("no route to host", hint="see there")
    slots[7].history.add(_report(is_daemon_connected=False), 4.0)
    shown = in_order(slots, "lag")
    assert [one.name[10:12] for one in shown[:3]] == ["00", "49", "48"]
    assert [one.name[10:12] for one in in_order(slots, "rows")[:2]] == ["49", "48"]
    lines = _lines(overview(shown, 24, chosen=slots[3].name, notice="paused"), 80)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    (line,) = [line for line in lines if line.startswith(">")]
    assert "data\\x0abase 03" in line
    every = _lines(overview(shown, 0), 100)
    assert len(every) == 51
    assert "not read" in every[1]
    assert "no route to host. Hint: see there" in every[1]
    assert sum("no daemon runs" in line for line in every) == 1

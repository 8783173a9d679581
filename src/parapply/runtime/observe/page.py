"""The daemon's own page for people: what `status` and the metrics show, read from its parts when a browser asks.

It is made once a second at most, however many ask, and not at all while none does. Lists are cut, so a page takes a few
milliseconds of the event loop whatever the number of tables.
"""

from __future__ import annotations

import time
from heapq import nlargest
from typing import TYPE_CHECKING, Any, Final

from parapply import __version__
from parapply.amounts import brief
from parapply.model import format_lsn
from parapply.runtime.observe import page_html
from parapply.runtime.observe.page_html import Number
from parapply.vocabulary import CopyState, DaemonState, WorkerState
from parapply.wording import cutover_line, how_far, step_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from parapply.metrics.figures import Figures, TableFigures
    from parapply.runtime.observe.gauges import Gauges, Parts
    from parapply.runtime.observe.health import Health

#: Seconds for which a page is the same for everyone who asks.
_KEPT_S: Final = 1.0
#: Lines of a list.
_MOST: Final = 50
_BAD: Final = (DaemonState.RETRYING, DaemonState.RECONNECTING, DaemonState.HEALING)


class StatusPage:
    """Asked by the endpoint; reads the others' fields."""

    def __init__(
        self, slot: str, figures: Figures, gauges: Gauges, health: Health, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._slot = slot
        self._figures = figures
        self._gauges = gauges
        self._health = health
        self._clock = clock
        self._made = b""
        self._made_s = -_KEPT_S

    def html(self) -> bytes:
        """Return the page as of now, or as of at most a second ago."""
        now_s = self._clock()
        if now_s - self._made_s >= _KEPT_S:
            self._made_s = now_s
            self._made = page_html.document(f"{self._slot}: {self._health.state[0]}", filter(None, self._parts()))
        return self._made

    def _parts(self) -> Iterator[str]:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        yield page_html.heading(f"slot {self._slot}", f"as of {at} UTC, parapply {__version__}")
        parts = self._gauges.parts
        state, reason = self._health.state
        is_good = state is DaemonState.RUNNING and not reason
        mood = "bad" if state in _BAD or self._health.stuck else "good" if is_good else ""
        yield page_html.facts(self._facts(parts), mood=mood)
        if parts is not None:
            if said := parts.monitor.limits:
                advice = f"Advice: {said['advice']}."
                yield page_html.sentences("Limit", said["words"], advice, said["evidence"])
            yield _migration(parts)
            yield _workers(parts)
            yield _copies(parts)
        yield self._conflicts()
        yield self._tables()

    def _facts(self, parts: Parts | None) -> Iterator[tuple[str, str]]:
        report, lag = self._health.report(), self._gauges.lag()
        yield "state", f"{report['state']}{': ' if report['reason'] else ''}{report['reason']}"
        if lag is not None:
            yield "lag", f"{report['lag_s']:.1f} s, {max(0, lag.source_lsn - lag.low_lsn):,} bytes of WAL"
            yield "complete up to", f"{format_lsn(lag.low_lsn)}; the publisher is at {format_lsn(lag.source_lsn)}"
        if parts is None:
            return
        yield "confirmed", format_lsn(parts.batcher.reader.stream.confirmed_flush_lsn)
        seen = parts.monitor.slot
        if seen is not None and (kept_bytes := seen.facts.retained_bytes(seen.source_lsn)) is not None:
            safe_bytes = seen.facts.safe_wal_bytes
            limit = "" if safe_bytes is None else f"; {max(0, safe_bytes):,} more before the slot can be lost"
            yield "WAL kept", f"{kept_bytes:,} bytes, {seen.facts.wal_status}{limit}"
        held_bytes = parts.engine.held_bytes + parts.batcher.open_bytes
        paused = ", reading is paused" if parts.batcher.reader.is_paused else ""
        n = len(parts.engine.jobs)
        yield "in hand", f"{n:,} batch{'' if n == 1 else 'es'}, {held_bytes:,} bytes{paused}"
        if parts.admission.two_phase.n_pending:
            yield "prepared", f"{parts.admission.two_phase.n_pending:,} transactions wait for their outcome"
        if cutover := parts.monitor.moves.cutover:
            yield "cut-over", cutover_line(cutover)

    def _conflicts(self) -> str:
        found = [(kind, outcome, n) for (kind, outcome), n in self._figures.conflicts.items() if n]
        rows = [(kind, outcome, Number(f"{n:,}")) for kind, outcome, n in found]
        return page_html.table("Conflicts since the daemon started", ("type", "outcome", "count"), rows)

    def _tables(self) -> str:
        tables = self._figures.tables
        rows = [_table(*one) for one in nlargest(_MOST, tables.items(), key=_rank)]
        names = ("table", "rows", "transactions", "waits", "waited", "mostly for", "conflicts")
        return page_html.table("Tables since the daemon started", names, rows, _more(len(tables)))


def _rank(item: tuple[str, TableFigures]) -> tuple[float, int]:
    """Return the sort key of a table: seconds that others waited for it, then its rows."""
    figures = item[1]
    return sum(figures.wait_s.values()), _n_rows(figures)


def _n_rows(figures: TableFigures) -> int:
    rows = figures.rows
    return rows.insert + rows.update + rows.delete


def _table(name: str, figures: TableFigures) -> tuple[str | Number, ...]:
    waited_s = figures.wait_s
    mostly = max(waited_s, key=lambda kind: waited_s[kind], default="")
    numbers = (_n_rows(figures), figures.transactions, sum(figures.waits.values()))
    rows, transactions, waits = [Number(f"{n:,}") for n in numbers]
    waited = Number(brief(sum(waited_s.values())) if waited_s else "")
    n_conflicts = sum(figures.conflicts.values())
    return name, rows, transactions, waits, waited, mostly, Number(f"{n_conflicts:,}" if n_conflicts else "")


def _more(n: int) -> str:
    return f"and {n - _MOST:,} more" if n > _MOST else ""


def _workers(parts: Parts) -> str:
    now_s = parts.monitor.now_s
    rows = [
        (
            Number(str(row.worker)),
            row.state,
            Number("" if row.state == WorkerState.IDLE else brief(now_s - since_s)),
            "" if row.end_lsn is None else format_lsn(row.end_lsn),
            Number(f"{row.changes:,}"),
            row.waits_for or "",
        )
        for row, since_s in parts.monitor.worker_rows().values()
    ]
    return page_html.table("Workers", ("worker", "state", "for", "end LSN", "changes", "waits for"), rows)


def _copies(parts: Parts) -> str:
    left = [row for row in parts.admission.copied.known.tables if row.state != CopyState.COPIED]
    rows = [
        (
            ".".join(row.name),
            row.state,
            Number("" if row.rows is None else f"{row.rows:,}"),
            Number("" if row.size_bytes is None else f"{row.size_bytes / 1e6:,.1f} MB"),
            row.reason,
        )
        for row in left[:_MOST]
    ]
    names = ("table", "state", "rows so far", "size so far", "because")
    return page_html.table("Not applied", names, rows, _more(len(left)))


def _migration(parts: Parts) -> str:
    """Return the steps that are not done, with the names of those that are; nothing once all are."""
    steps: list[dict[str, Any]] = parts.monitor.moves.migration
    rows = [
        (one["step"], step_state(one), Number(brief(one["seconds"])), how_far(one), Number(brief(one["left_s"])))
        for one in steps
        if one["state"] != "done"
    ]
    done = ", ".join([one["step"] for one in steps if one["state"] == "done"])
    names = ("step", "state", "for", "how far", "left")
    return page_html.table("Migration", names, rows, f"done: {done}" if done else "") if rows else ""

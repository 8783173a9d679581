"""The daemon's own page for people: what `status` and the metrics show, read from its parts when a browser asks.

It is made once a second at most, however many ask, and not at all while none does. Lists are cut, so a page takes a few
milliseconds of the event loop whatever the number of tables.
"""

from __future__ import annotations

import time
from base64 import b64encode
from hashlib import sha256
from heapq import nlargest
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from parapply import __version__
from parapply.amounts import brief
from parapply.model import format_lsn
from parapply.quoting import html
from parapply.vocabulary import CopyState, DaemonState, WorkerState
from parapply.wording import cutover_line, how_far, step_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from parapply.metrics.figures import Figures, TableFigures
    from parapply.runtime.observe.gauges import Gauges, Parts
    from parapply.runtime.observe.health import Health

#: Seconds for which a page is the same for everyone who asks.
_KEPT_S: Final = 1.0
#: Lines of a list.
_MOST: Final = 50
_BAD: Final = (DaemonState.RETRYING, DaemonState.RECONNECTING, DaemonState.HEALING)
_HERE: Final = files(__package__)
_STYLE: Final = (_HERE / "page.css").read_text(encoding="utf-8")
_SCRIPT: Final = (_HERE / "page.js").read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


#: Content-Security-Policy: our style and our script and no other, and nothing is asked of another address.
POLICY: Final = (
    f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Number(NamedTuple):
    """A cell that stands on the right."""

    text: str


class Link(NamedTuple):
    """A cell that leads to another page."""

    text: str
    path: str


#: A cell of a table.
Cell = str | Number | Link


def document(title: str, parts: Iterable[str]) -> bytes:
    """Return the page: parts of HTML under a title."""
    body = "\n".join(parts)
    # The icon is empty, so that no browser asks for one.
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{html(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        '<p id="silent" class="bad" role="alert" hidden>The daemon does not answer. This is what it said last.</p>\n'
        f"{body}\n</main>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    ).encode()


def heading(text: str, below: str) -> str:
    """Return the page's heading, and a line below it."""
    return f'<h1>{html(text)}</h1>\n<p class="soft">{html(below)}</p>'


def facts(rows: Iterable[tuple[str, str]], *, mood: str) -> str:
    """Return names with their facts; empty ones are left out.

    Args:
        rows: names and texts.
        mood: good, bad or nothing: of the first.
    """
    lines = [(html(name), html(text)) for name, text in rows if text]
    marks = [f' class="{mood}"' if mood else "", *[""] * len(lines)]
    body = "\n".join(
        [f"<dt>{name}</dt><dd{mark}>{text}</dd>" for (name, text), mark in zip(lines, marks, strict=False)]
    )
    return f"<section><dl>\n{body}\n</dl></section>"


def sentences(title: str, first: str, second: str, others: Iterable[str]) -> str:
    """Return a section of sentences, the first two of which matter most."""
    rest = "\n".join([f'<p class="soft">{html(text)}</p>' for text in others])
    return f"<section><h2>{html(title)}</h2>\n<p><b>{html(first)}</b></p>\n<p>{html(second)}</p>\n{rest}</section>"


def table(title: str, names: Sequence[str], rows: Sequence[Sequence[Cell]], more: str = "") -> str:
    """Return a section with a table, and a line below it; nothing where there is neither a row nor that line."""
    if not rows and not more:
        return ""
    numeric = [bool(rows) and isinstance(cell, Number) for cell in (rows[0] if rows else [""] * len(names))]
    head = "".join([_cell("th", Number(name) if right else name) for name, right in zip(names, numeric, strict=True)])
    body = "\n".join([f"<tr>{''.join([_cell('td', cell) for cell in row])}</tr>" for row in rows])
    shown = (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
        if rows
        else ""
    )
    below = f'<p class="soft">{html(more)}</p>' if more else ""
    return f"<section><h2>{html(title)}</h2>\n{shown}{below}</section>"


def _cell(element: str, cell: Cell) -> str:
    if isinstance(cell, Number):
        return f'<{element} class="number">{html(cell.text)}</{element}>'
    if isinstance(cell, Link):
        return f'<{element}><a href="{html(cell.path)}">{html(cell.text)}</a></{element}>'
    return f"<{element}>{html(cell)}</{element}>"


class StatusPage:
    """Asked by the endpoint; reads the others' fields."""

    def __init__(
        self,
        slot: str,
        figures: Figures,
        gauges: Gauges,
        health: Health,
        clock: Callable[[], float] = time.monotonic,
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
            self._made = document(f"{self._slot}: {self._health.state[0]}", filter(None, self._parts()))
        return self._made

    def _parts(self) -> Iterator[str]:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        yield heading(f"slot {self._slot}", f"as of {at} UTC, parapply {__version__}")
        parts = self._gauges.parts
        state, reason = self._health.state
        is_good = state is DaemonState.RUNNING and not reason
        mood = "bad" if state in _BAD or self._health.stuck else "good" if is_good else ""
        yield facts(self._facts(parts), mood=mood)
        if parts is not None:
            if said := parts.monitor.limits:
                advice = f"Advice: {said['advice']}."
                yield sentences("Limit", said["words"], advice, said["evidence"])
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
        return table("Conflicts since the daemon started", ("type", "outcome", "count"), rows)

    def _tables(self) -> str:
        tables = self._figures.tables
        rows = [_table(*one) for one in nlargest(_MOST, tables.items(), key=_rank)]
        names = ("table", "rows", "transactions", "waits", "waited", "mostly for", "conflicts")
        return table("Tables since the daemon started", names, rows, _more(len(tables)))


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
    return table("Workers", ("worker", "state", "for", "end LSN", "changes", "waits for"), rows)


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
    return table("Not applied", names, rows, _more(len(left)))


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
    return table("Migration", names, rows, f"done: {done}" if done else "") if rows else ""

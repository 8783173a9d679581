"""The report as one HTML page: sentences, plots and tables, the plotting library inlined. Nothing is fetched.

In go the tables of all slots; out comes a text. Every text from the log is escaped: names of tables are the users'.
"""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from parapply.analysis import words
from parapply.analysis.figures import FIGURES
from parapply.analysis.sections import sections

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from parapply.analysis.compute import Tables
    from parapply.analysis.plots import Plot
    from parapply.analysis.sections import Section

_LISTED_FILES: Final = 200
_NOTHING: Final = (
    "<section><h2>Nothing to show</h2><p>No closed file of this log has a record in this scope.</p></section>"
)
_NUMBERS: Final = frozenset("0123456789")


@dataclass(frozen=True, kw_only=True)
class Made:
    """How a report came about.

    Attributes:
        log: folder of the log, as it was given.
        at: when it was made.
        version: of parapply.
        interval_s: length of an interval; 0 where there was nothing to show.
        changed_files: names of files that are not what they were when they were read.
        refresh_s: the page reloads itself so often, 0 never.
    """

    log: str
    at: datetime
    version: str
    interval_s: int
    changed_files: tuple[str, ...] = ()
    refresh_s: int = 0


def render(tables: Tables, made: Made) -> str:
    """Return the page."""
    from plotly.offline import get_plotlyjs  # noqa: PLC0415  4 MB

    drawn: dict[str, Any] = {}
    slots = [row["slot"] for row in tables.get("summary", [])]
    body = [_head(slots, made)]
    for number, slot in enumerate(slots):
        body.append(_slot(number, of_slot(tables, slot), made.interval_s, drawn))
    if not slots:
        body.append(
            "<section><h2>Nothing to show</h2><p>No closed file of this log has a record in this scope.</p></section>"
        )
    body += [_files(tables, made), _definitions()]
    refresh = f'<meta http-equiv="refresh" content="{made.refresh_s}">' if made.refresh_s else ""
    # A "<" inside a script could end it: "</script>" in a table's name.
    plots_json = json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page = resources.files("parapply.analysis").joinpath("page.html").read_text()
    # The library last: it could contain a mark of ours, and nothing of ours contains it.
    for mark, text in (
        ("REFRESH", refresh),
        ("BODY", "\n".join(body)),
        ("PLOTS", plots_json),
        ("PLOTLY", get_plotlyjs()),
    ):
        before, _, after = page.partition(f"@@{mark}@@")
        page = before + text + after
    return page


def of_slot(tables: Tables, slot: str) -> Tables:
    """Return the rows of one slot, and those that belong to none."""
    return {name: [row for row in rows if row.get("slot", slot) == slot] for name, rows in tables.items()}


def _head(slots: Sequence[str], made: Made) -> str:
    choice = ""
    if len(slots) > 1:
        options = "".join(f'<option value="{n}">{_text(slot)}</option>' for n, slot in enumerate(slots))
        choice = f'<p>Slot <select id="slot">{options}</select></p>'
    return (
        f"<h1>parapply: what was applied, and where the time went</h1>"
        f'<p class="soft">Log {_text(made.log)} · made {made.at:%Y-%m-%d %H:%M:%S} UTC'
        f" by parapply {_text(made.version)}</p>{choice}"
    )


def _slot(number: int, tables: Tables, interval_s: int, drawn: dict[str, Any]) -> str:
    (summary,) = tables["summary"]
    what = f"Slot <b>{_text(summary['slot'])}</b>, {_text(words.period(summary['first_at'], summary['last_at']))}"
    parts = [
        f"<p>{what}; the last transaction in it ends at LSN {_text(summary['highest_end_lsn'])}</p>",
        _tiles(tables),
        "<section><h2>In short</h2><ul class=short>"
        + "".join(f"<li>{_text(text)}</li>" for text in words.in_short(tables, interval_s))
        + "</ul></section>",
    ]
    parts += [_section(f"s{number}-{n}", one, drawn) for n, one in enumerate(sections(tables, interval_s))]
    hidden = " hidden" if number else ""
    return f'<div data-slot="{number}"{hidden}>{"".join(parts)}</div>'


def _tiles(tables: Tables) -> str:
    (summary,) = tables["summary"]
    stages = {row["stage"]: row for row in tables["latency"]}
    delay = stages.get("each transaction", stages["oldest transaction of a batch"])
    best = max(row["transactions_per_s"] for row in tables["over_time"])
    n_bad = sum(row["lines"] for row in tables["bad_lines"])
    tiles = [
        (words.number(summary["transactions"]), "source transactions", False),
        (words.number(summary["row_changes"]), f"rows, {words.size(summary['size_bytes'])}", False),
        (words.number(best), "transactions a second, best interval", False),
        (words.duration(delay["p50_s"]), "delay of half of them", False),
        (words.duration(delay["p99_s"]), "delay of 99 %", False),
        (words.number(summary["repeated_batches"]), f"of {words.number(summary['batches'])} batches repeated", False),
        (words.number(summary["conflicts"]), "conflicts", bool(summary["conflicts"])),
        (words.number(n_bad), "lines not readable (all slots)", bool(n_bad)),
    ]
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile{" bad" if is_bad else ""}"><b>{_text(value)}</b><span>{_text(name)}</span></div>'
            for value, name, is_bad in tiles
        )
        + "</div>"
    )


def _section(name: str, section: Section, drawn: dict[str, Any]) -> str:
    figures = []
    for n, plot in enumerate(section.plots):
        identifier = f"{name}-{n}"
        drawn[identifier] = {"data": plot.data, "layout": plot.layout, "height": plot.height}
        figures.append(_figure(identifier, plot))
    table = _table(section.header, section.rows) if section.rows else ""
    if table and section.plots:
        table = f"<details><summary>In numbers</summary>{table}</details>"
    lead = f"<p>{_text(section.lead)}</p>" if section.lead else ""
    plots = f'<div class="plots">{"".join(figures)}</div>' if figures else ""
    return f"<section><h2>{_text(section.title)}</h2>{lead}{plots}{table}</section>"


def _figure(identifier: str, plot: Plot) -> str:
    return (
        f"<figure><h3>{_text(plot.title)}</h3><figcaption>{_text(plot.caption)}</figcaption>"
        f'<div class="plot" id="{identifier}" style="height:{plot.height}px"></div></figure>'
    )


def _files(tables: Tables, made: Made) -> str:
    files, bad = tables["files"], tables.get("bad_lines", [])
    n_records = sum(file["records"] for file in files)
    lead = f"{words.number(n_records)} records from {words.number(len(files))} closed files were read."
    parts = [f"<h2>The log itself</h2><p>{lead}</p>"]
    if made.changed_files:
        names = ", ".join(made.changed_files)
        parts.append(f"<p>These files have changed since they were read, and were not read again: {_text(names)}</p>")
    if bad:
        parts.append("<h3>Lines that could not be read</h3><p>They are counted here and in no other figure.</p>")
        rows = [
            (row["file"], row["reason"], words.number(row["lines"]), row["example"] or "")
            for row in bad[:_LISTED_FILES]
        ]
        parts.append(_table(("file", "reason", "lines", "example"), rows))
    listed = [
        (file["file"], words.size(file["size_bytes"]), words.number(file["records"]), words.number(file["bad"]))
        for file in files[-_LISTED_FILES:]
    ]
    table = _table(("file", "size", "records", "not readable"), listed)
    latest = f" (the latest {_LISTED_FILES})" if len(files) > _LISTED_FILES else ""
    parts.append(f"<details><summary>Files{latest}</summary>{table}</details>")
    return f"<section>{''.join(parts)}</section>"


def _definitions() -> str:
    items = []
    for figure in FIGURES:
        columns = "; ".join(f"<code>{_text(name)}</code> {_text(meaning)}" for name, meaning in figure.columns.items())
        items.append(
            f"<dt>{_text(figure.title)} (<code>tables/{figure.name}</code>)</dt>"
            f"<dd>{_text(figure.meaning)}<br>{columns}</dd>"
        )
    return (
        "<section><h2>What each figure means</h2><details><summary>Definitions</summary>"
        f"<dl>{''.join(items)}</dl></details></section>"
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    listed = list(rows)
    is_number = [
        bool(listed) and all(row[n][:1] in _NUMBERS or row[n][:1] == "-" for row in listed) for n in range(len(header))
    ]
    kinds = [' class="number"' if one else "" for one in is_number]
    head = "".join(f"<th{kind}>{_text(name)}</th>" for kind, name in zip(kinds, header, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{_text(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in listed
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _text(words_: str) -> str:
    return html.escape(words_)

"""The report as one HTML page: sentences, plots and tables, the plotting library inlined. Nothing is fetched.

In go the tables of all slots; out comes a text. `page.html` is the template; it escapes every text, because names of
tables are the users'.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from parapply import amounts
from parapply.analysis import words
from parapply.analysis.figures import FIGURES
from parapply.analysis.sections import sections
from parapply.analysis.sections_culprit import texts
from parapply.analysis.verdict import verdict
from parapply.analysis.words import HEADER, cells

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from parapply.analysis.engine import Rows, Tables
    from parapply.limits import LimitVerdict

_LISTED_FILES: Final = 200
_NUMBERS: Final = frozenset("0123456789")


@dataclass(frozen=True, kw_only=True)
class Made:
    """How a report came about."""

    log: str  # folder of the log, as it was given
    at: datetime  # when it was made
    version: str  # of parapply
    interval_s: int  # length of an interval; 0 where there was nothing to show
    changed_files: tuple[str, ...] = ()  # names of files that are not what they were when they were read
    refresh_s: int = 0  # the page reloads itself so often, 0 never
    compared: str = ""  # the span that the report's is compared with; empty: none
    n_files: int = 0  # that were read so far
    n_records: int = 0  # that they have


def render(tables: Tables, made: Made) -> str:
    """Return the page."""
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415  of the extra, as the next
    from plotly.offline import get_plotlyjs  # noqa: PLC0415  4 MB

    slots = [_slot(mine, made) for mine in by_slot(tables).values()]
    files = tables["files"]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["number"] = amounts.number
    environment.globals["numeric_columns"] = _numeric_columns
    # Filter `tojson` escapes what could end the script: "</script>" in a table's name.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    template = environment.from_string(resources.files("parapply.analysis").joinpath("page.html").read_text())
    return template.render(
        made=made,
        slots=slots,
        overview_header=HEADER,
        overview=cells(tables.get("slots", [])),
        drawn={
            f"s{n}-{m}-{k}": {"data": plot.data, "layout": plot.layout, "height": plot.height}
            for n, slot in enumerate(slots)
            for m, section in enumerate(slot["sections"])
            for k, plot in enumerate(section.plots)
        },
        files=files,
        listed_files=texts(files[-_LISTED_FILES:], "file size_bytes records bad"),
        bad_lines=texts(tables.get("bad_lines", [])[:_LISTED_FILES], "file reason lines example"),
        ignored_files=texts(tables.get("ignored_files", [])[:_LISTED_FILES], "file size_bytes reason"),
        gaps=texts(tables.get("gaps", [])[:_LISTED_FILES], "slot run after_seq before_seq missing at"),
        definitions=FIGURES,
        plotly=get_plotlyjs(),
    )


def by_slot(tables: Tables) -> dict[str, Tables]:
    """Return the tables of each slot of `summary`: its rows, and the tables that belong to no slot."""
    slots = [row["slot"] for row in tables.get("summary", [])]
    found: dict[str, Tables] = {slot: {} for slot in slots}
    for name, rows in tables.items():
        has_slots = bool(rows) and "slot" in rows[0]
        mine: dict[str, Rows] = {slot: [] if has_slots else rows for slot in slots}
        for row in rows if has_slots else ():
            if row["slot"] in mine:
                mine[row["slot"]].append(row)
        for slot in slots:
            found[slot][name] = mine[slot]
    return found


def verdicts(tables: Tables) -> dict[str, LimitVerdict]:
    """Return the limits, by slot."""
    found = {}
    for slot, mine in by_slot(tables).items():
        said = verdict(mine["limits"], mine)
        if said is not None:
            found[slot] = said
    return found


def _slot(tables: Tables, made: Made) -> dict[str, Any]:
    (summary,) = tables["summary"]
    return {
        "name": summary["slot"],
        "period": words.period(summary["first_at"], summary["last_at"]),
        "highest_end_lsn": summary["highest_end_lsn"],
        "tiles": _tiles(tables),
        "in_short": words.in_short(tables),
        "verdict": verdict(tables["limits"], tables),
        "sections": sections(tables, made.interval_s, made.compared),
    }


def _tiles(tables: Tables) -> list[tuple[str, str, bool]]:
    """Return the figures in large type: value, name, and whether it is bad."""
    (summary,) = tables["summary"]
    delay = words.delay_of(tables["latency"], summary)
    best = max(row["transactions_per_s"] for row in tables["over_time"])
    n_bad = sum(row["lines"] for row in tables["bad_lines"])
    batches = amounts.number(summary["batches"])
    return [
        (amounts.number(summary["transactions"]), "source transactions", False),
        (amounts.number(summary["row_changes"]), f"rows, {amounts.size(summary['size_bytes'])}", False),
        (amounts.number(best), "transactions a second, best interval", False),
        (amounts.duration(delay["p50_s"]), "delay of half of them", False),
        (amounts.duration(delay["p99_s"]), "delay of 99 %", False),
        (amounts.number(summary["repeated_batches"]), f"of {batches} batches repeated", False),
        (amounts.number(summary["conflicts"]), "conflicts", bool(summary["conflicts"])),
        (amounts.number(n_bad), "lines not readable (all slots)", bool(n_bad)),
    ]


def _numeric_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """Return for each column whether all its cells are numbers, which stand to the right."""
    return [bool(rows) and all(row[n][:1] in _NUMBERS or row[n][:1] == "-" for row in rows) for n in range(len(header))]

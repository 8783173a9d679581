"""The report as one HTML page: sentences, plots and tables, the plotting library inlined. Nothing is fetched.

In go the tables of all slots; out comes a text. `page.html` is the template; it escapes every text, because names of
tables are the users'.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Final

from parapply import amounts
from parapply.analysis import words
from parapply.analysis.figures import FIGURES
from parapply.analysis.sections import sections
from parapply.analysis.verdict import verdict
from parapply.analysis.words import HEADER, cells

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from parapply.analysis.engine import Rows, Tables
    from parapply.analysis.plots import Section
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


@dataclass(frozen=True, kw_only=True)
class _Tile:
    """A figure in large type."""

    value: str
    name: str
    is_bad: bool = False


@dataclass(frozen=True, kw_only=True)
class _Slot:
    """One slot on the page."""

    name: str  # of the slot
    period: str  # from the first record to the last
    highest_end_lsn: str  # of the last transaction
    tiles: list[_Tile]  # the figures at the top
    in_short: list[str]  # sentences
    verdict: LimitVerdict | None  # what limits; None where nothing was measured
    sections: list[Section]  # in order


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
            for m, section in enumerate(slot.sections)
            for k, plot in enumerate(section.plots)
        },
        files=files,
        listed_files=[
            (
                file["file"],
                amounts.size(file["size_bytes"]),
                amounts.number(file["records"]),
                amounts.number(file["bad"]),
            )
            for file in files[-_LISTED_FILES:]
        ],
        bad_lines=[
            (row["file"], row["reason"], amounts.number(row["lines"]), row["example"] or "")
            for row in tables.get("bad_lines", [])[:_LISTED_FILES]
        ],
        ignored_files=[
            (row["file"], amounts.size(row["size_bytes"]), row["reason"])
            for row in tables.get("ignored_files", [])[:_LISTED_FILES]
        ],
        gaps=[
            (
                row["slot"],
                row["run"],
                amounts.number(row["after_seq"]),
                amounts.number(row["before_seq"]),
                amounts.number(row["missing"]),
                f"{row['at']:%Y-%m-%d %H:%M:%S}",
            )
            for row in tables.get("gaps", [])[:_LISTED_FILES]
        ],
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


def _slot(tables: Tables, made: Made) -> _Slot:
    (summary,) = tables["summary"]
    return _Slot(
        name=summary["slot"],
        period=words.period(summary["first_at"], summary["last_at"]),
        highest_end_lsn=summary["highest_end_lsn"],
        tiles=_tiles(tables),
        in_short=list(words.in_short(tables)),
        verdict=verdict(tables["limits"], tables),
        sections=sections(tables, made.interval_s, made.compared),
    )


def _tiles(tables: Tables) -> list[_Tile]:
    (summary,) = tables["summary"]
    delay = words.delay_of(tables["latency"], summary)
    best = max(row["transactions_per_s"] for row in tables["over_time"])
    n_bad = sum(row["lines"] for row in tables["bad_lines"])
    batches = amounts.number(summary["batches"])
    return [
        _Tile(value=amounts.number(summary["transactions"]), name="source transactions"),
        _Tile(value=amounts.number(summary["row_changes"]), name=f"rows, {amounts.size(summary['size_bytes'])}"),
        _Tile(value=amounts.number(best), name="transactions a second, best interval"),
        _Tile(value=amounts.duration(delay["p50_s"]), name="delay of half of them"),
        _Tile(value=amounts.duration(delay["p99_s"]), name="delay of 99 %"),
        _Tile(value=amounts.number(summary["repeated_batches"]), name=f"of {batches} batches repeated"),
        _Tile(value=amounts.number(summary["conflicts"]), name="conflicts", is_bad=bool(summary["conflicts"])),
        _Tile(value=amounts.number(n_bad), name="lines not readable (all slots)", is_bad=bool(n_bad)),
    ]


def _numeric_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """Return for each column whether all its cells are numbers, which stand to the right."""
    return [bool(rows) and all(row[n][:1] in _NUMBERS or row[n][:1] == "-" for row in rows) for n in range(len(header))]

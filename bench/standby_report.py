"""Transactions a second with a synchronous standby, for people and for programs.

In go turns; out come a table and a document for JSON. Figures are medians of the rounds.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from bench.runners import BUILT_IN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.standby import Level, StandbyTurn

# A figure belongs to a standby, its synchronous_commit, the publisher's, and a number of clients.
_Row = tuple[str, str, "Level"]
_HEADINGS: Final = ("standby", "its sync", "publisher's")


def summary(turns: Sequence[StandbyTurn]) -> Table:
    """Return a table: transactions a second, and how many times the built-in subscription's, for each set-up."""
    found = _medians(turns)
    clients = sorted({turn.clients for turn in turns})
    grid = Table(box=None, pad_edge=False, show_edge=False)
    for heading in _HEADINGS:
        grid.add_column(heading, no_wrap=True)
    for number in clients:
        grid.add_column(f"{number} client{'s' * (number > 1)}", justify="right", no_wrap=True)
    for row, figures in found.items():
        best = _built_in(found, row)
        cells = [_cell(figures[number], best.get(number) if row[0] != BUILT_IN else None) for number in clients]
        grid.add_row(*row, *cells)
    return grid


def document(turns: Sequence[StandbyTurn]) -> dict[str, Any]:
    """Return what goes into the JSON file: every turn, and the median of each set-up."""
    return {
        "unit": "transactions a second",
        "turns": [
            {
                "round_number": turn.round_number,
                **_named((turn.standby, turn.sync, turn.level), turn.clients),
                "per_s": round(turn.per_s, 1),
                "cpu_us": {role: round(used_us, 1) for role, used_us in turn.cpu_us.items()},
            }
            for turn in turns
        ],
        "medians": [
            {**_named(row, clients), "per_s": round(per_s, 1)}
            for row, figures in _medians(turns).items()
            for clients, per_s in figures.items()
        ],
    }


def _named(row: _Row, clients: int) -> dict[str, str | int]:
    standby, sync, level = row
    return {"standby": standby, "sync": sync, "level": level, "clients": clients}


def _medians(turns: Sequence[StandbyTurn]) -> dict[_Row, dict[int, float]]:
    """Return the median of each set-up by clients, in the order in which they first came."""
    groups: dict[_Row, dict[int, list[float]]] = {}
    for turn in turns:
        row = groups.setdefault((turn.standby, turn.sync, turn.level), {})
        row.setdefault(turn.clients, []).append(turn.per_s)
    return {row: {clients: median(all_per_s) for clients, all_per_s in its.items()} for row, its in groups.items()}


def _built_in(found: dict[_Row, dict[int, float]], row: _Row) -> dict[int, float]:
    """Return the figures of the built-in subscription at the same level: the better of its two for each number."""
    rows = [figures for (standby, _, level), figures in found.items() if (standby, level) == (BUILT_IN, row[2])]
    return {clients: max(figures[clients] for figures in rows) for figures in rows for clients in figures}


def _cell(per_s: float, built_in_per_s: float | None) -> str:
    return f"{per_s:,.0f}" + (f" ({per_s / built_in_per_s:.2f})" if built_in_per_s else "")

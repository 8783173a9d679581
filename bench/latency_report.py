"""Latencies for people and for programs: percentiles of the probes, a table, a document for JSON.

In go turns; out come figures. Percentiles are measured values, never values between two: p99 is the smallest latency
that 99 of 100 probes did not exceed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.latency import LatencyTurn


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Of a number of probes, in milliseconds."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


def percentiles(latencies_ms: Sequence[float]) -> Percentiles:
    """Return the percentiles of at least one latency."""
    in_order = sorted(latencies_ms)

    def at(percent: int) -> float:
        return in_order[math.ceil(percent * len(in_order) / 100) - 1]

    return Percentiles(p50_ms=at(50), p95_ms=at(95), p99_ms=at(99), max_ms=in_order[-1])


def summary(turns: Sequence[LatencyTurn]) -> Table:
    """Return a table: from COMMIT's answer to being visible, for each system and load, the probes of all its rounds."""
    grid = Table(box=None, pad_edge=False, show_edge=False)
    for heading in ("system", "load"):
        grid.add_column(heading, no_wrap=True)
    for heading in ("tx/s", "probes", "p50", "p95", "p99", "max", "COMMIT p50"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for (system, load), its in _groups(turns).items():
        all_ms = _visible_ms(its)
        found = percentiles(all_ms)
        grid.add_row(
            system,
            load,
            f"{mean(turn.load_per_s for turn in its):,.0f}",
            f"{len(all_ms):,}",
            *(f"{ms:.2f} ms" for ms in (found.p50_ms, found.p95_ms, found.p99_ms, found.max_ms)),
            f"{median(_commit_ms(its)):.2f} ms",
        )
    return grid


def document(turns: Sequence[LatencyTurn]) -> dict[str, Any]:
    """Return what goes into the JSON file: every turn, and each system and load over all its rounds."""
    return {
        "unit": "ms",
        "visible": "from COMMIT's answer on the publisher until a reader on the subscriber saw the row",
        "commit": "from sending COMMIT until its answer",
        "whole": "from sending COMMIT until a reader on the subscriber saw the row",
        "turns": [
            {
                "round_number": turn.round_number,
                "system": turn.system,
                "load": turn.load,
                "wanted_per_s": round(turn.wanted_per_s, 1),
                "load_per_s": round(turn.load_per_s, 1),
                "look_ms": round(turn.look_ms, 3),
                **_figures([turn]),
            }
            for turn in turns
        ],
        "all_rounds": [
            {"system": system, "load": load, **_figures(its)} for (system, load), its in _groups(turns).items()
        ],
    }


def _figures(turns: Sequence[LatencyTurn]) -> dict[str, Any]:
    visible_ms, commit_ms = _visible_ms(turns), _commit_ms(turns)
    return {
        "probes": len(visible_ms),
        "visible": _rounded(percentiles(visible_ms)),
        "commit": _rounded(percentiles(commit_ms)),
        "whole": _rounded(percentiles([sum(parts) for parts in zip(visible_ms, commit_ms, strict=True)])),
    }


def _rounded(found: Percentiles) -> dict[str, float]:
    return {name: round(ms, 3) for name, ms in vars(found).items()}


def _groups(turns: Sequence[LatencyTurn]) -> dict[tuple[str, str], list[LatencyTurn]]:
    """Return the turns of each system and load, in the order in which they first came."""
    groups: dict[tuple[str, str], list[LatencyTurn]] = {}
    for turn in turns:
        groups.setdefault((turn.system, turn.load), []).append(turn)
    return groups


def _visible_ms(turns: Sequence[LatencyTurn]) -> list[float]:
    return [ms for turn in turns for ms in turn.visible_ms]


def _commit_ms(turns: Sequence[LatencyTurn]) -> list[float]:
    return [ms for turn in turns for ms in turn.commit_ms]

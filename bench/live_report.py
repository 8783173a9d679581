"""Huge transactions alongside small ones, for people and for programs: medians, tables, a document for JSON.

In go turns; out come figures. Seconds are reported as the median of the rounds, with the best and the worst;
percentiles are of the small transactions of all rounds together; gaps and memory are the largest met.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

from bench.latency_report import percentiles
from bench.runners import BUILT_IN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.latency_report import Percentiles
    from bench.live import LiveOptions, LiveTurn

#: Version of the document. Raised when a field changes its meaning or goes.
SCHEMA_VERSION = 1

_MB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LiveFigures:
    """One system and one time of being held open, all rounds together.

    Attributes:
        system: its name.
        hold_s: for which the huge transaction was held open.
        is_equal: whether all tables were equal after every turn.
        own_s: median of the seconds that the huge transaction took on the publisher, the hold left out.
        visible_s: median from its COMMIT's answer until it was seen.
        best_s: the least of these.
        worst_s: the most of these.
        visible_per_own: the one median divided by the other.
        times_built_in: how many times as soon visible as with the built-in subscription; `None` without one.
        before: small transactions committed before the huge one's COMMIT, from their own COMMIT until seen; `None` if
            the huge one was too quick for any.
        gap_s: longest time after the huge one's COMMIT in which no small one became visible.
        leader_peak_bytes: the daemon's largest resident memory; `None` where there is no daemon.
        target_peak_bytes: largest private memory of a process that applies.
        modes: how it was applied, with how often and why; empty for the built-in subscription.
    """

    system: str
    hold_s: float
    is_equal: bool
    own_s: float
    visible_s: float
    best_s: float
    worst_s: float
    visible_per_own: float
    times_built_in: float | None
    before: Percentiles | None
    gap_s: float
    leader_peak_bytes: int | None
    target_peak_bytes: int | None
    modes: dict[str, int]


def figures(turns: Sequence[LiveTurn]) -> list[LiveFigures]:
    """Return the figures of every hold and system, in the order in which they first came."""
    groups: dict[tuple[float, str], list[LiveTurn]] = {}
    for turn in turns:
        groups.setdefault((turn.hold_s, turn.system), []).append(turn)
    visible_s = {key: median(turn.flow.visible_s for turn in its) for key, its in groups.items()}
    return [_figures(its, visible_s.get((hold_s, BUILT_IN))) for (hold_s, _), its in groups.items()]


def _figures(turns: Sequence[LiveTurn], built_in_s: float | None) -> LiveFigures:
    visibles_s = [turn.flow.visible_s for turn in turns]
    own_s, visible_s = median(turn.flow.own_s for turn in turns), median(visibles_s)
    before_ms = [ms for turn in turns for ms in turn.flow.before_ms]
    return LiveFigures(
        system=turns[0].system,
        hold_s=turns[0].hold_s,
        is_equal=all(turn.is_equal for turn in turns),
        own_s=own_s,
        visible_s=visible_s,
        best_s=min(visibles_s),
        worst_s=max(visibles_s),
        visible_per_own=visible_s / own_s,
        times_built_in=built_in_s / visible_s if built_in_s is not None and visible_s > 0 else None,
        before=percentiles(before_ms) if before_ms else None,
        gap_s=max(turn.flow.gap_s for turn in turns),
        leader_peak_bytes=_peak_bytes(turns, "leader"),
        target_peak_bytes=_peak_bytes(turns, "target"),
        modes=dict(Counter(_mode(turn) for turn in turns if turn.applying)),
    )


def _peak_bytes(turns: Sequence[LiveTurn], role: str) -> int | None:
    return max((turn.usage[role].peak_bytes for turn in turns if role in turn.usage), default=None)


def _mode(turn: LiveTurn) -> str:
    if turn.applying is None:
        return ""
    because = turn.applying.spilled_because
    return f"{turn.applying.mode}: {because}" if because else turn.applying.mode


def visible_table(every: Sequence[LiveFigures]) -> Table:
    """Return a table: the huge transaction, from its COMMIT until it is visible, and how it was applied."""
    grid = _grid("hold", "own time", "visible after", "best", "worst", "x own time", "x built-in", "applied")
    for one in every:
        grid.add_row(
            one.system,
            f"{one.hold_s:g} s",
            *(f"{seconds:.2f} s" for seconds in (one.own_s, one.visible_s, one.best_s, one.worst_s)),
            f"{one.visible_per_own:.2f}",
            "" if one.times_built_in is None else f"{one.times_built_in:.2f}",
            ", ".join(one.modes) if one.is_equal else "TABLES DIFFER",
        )
    return grid


def small_table(every: Sequence[LiveFigures]) -> Table:
    """Return a table: how small transactions fared before and after the huge one's COMMIT, and memory."""
    grid = _grid("hold", "small p50", "p95", "p99", "max", "gap", "leader MB", "target MB")
    for one in every:
        grid.add_row(
            one.system,
            f"{one.hold_s:g} s",
            *([f"{ms:,.1f} ms" for ms in vars(one.before).values()] if one.before else [""] * 4),
            f"{one.gap_s:.2f} s",
            *("" if peak is None else f"{peak / _MB:,.0f}" for peak in (one.leader_peak_bytes, one.target_peak_bytes)),
        )
    return grid


def _grid(*headings: str) -> Table:
    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column("system", no_wrap=True)
    for heading in headings:
        grid.add_column(heading, justify="right", no_wrap=True)
    return grid


def document(options: LiveOptions, turns: Sequence[LiveTurn]) -> dict[str, Any]:
    """Return what goes into the JSON file: what was asked, every turn, and the figures of all rounds."""
    return {
        "schema_version": SCHEMA_VERSION,
        "rows": options.rows,
        "small_interval_s": options.interval_s,
        "logical_decoding_work_mem_kb": options.work_mem_kb,
        "rounds": options.rounds,
        "turns": [_turn(turn) for turn in turns],
        "figures": [asdict(one) for one in figures(turns)],
    }


def _turn(turn: LiveTurn) -> dict[str, Any]:
    flow = turn.flow
    return {
        "round_number": turn.round_number,
        "system": turn.system,
        "hold_s": turn.hold_s,
        "is_equal": turn.is_equal,
        "write_s": round(flow.write_s, 3),
        "commit_s": round(flow.commit_s, 3),
        "visible_s": round(flow.visible_s, 3),
        "gap_s": round(flow.gap_s, 3),
        "small_before": _small(flow.before_ms),
        "small_after": _small(flow.after_ms),
        "usage": {role: asdict(used) for role, used in turn.usage.items()},
        "applying": asdict(turn.applying) if turn.applying else None,
    }


def _small(latencies_ms: Sequence[float]) -> dict[str, float]:
    """Return number and percentiles of small transactions; the number alone if it is 0."""
    if not latencies_ms:
        return {"transactions": 0}
    found = {name: round(ms, 3) for name, ms in vars(percentiles(latencies_ms)).items()}
    return {"transactions": len(latencies_ms), **found}

"""Figures of the turns: medians, rates, ratios and budgets, a line a runner. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

from bench.applied import total
from bench.observe import LEADER_STREAM
from bench.runners import BUILT_IN, BULK, BY_QUERY, CEILING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.applied import Applied
    from bench.catchup import Turn
    from bench.filling import Backlog

_US = 1e6


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One runner, all its turns together. `None`: there is nothing to say it of, or nothing to compare with.

    Attributes:
        runner: its name.
        turns: how many.
        is_equal: whether all tables were equal after every turn; `None` without a target.
        median_s: until the backlog was drained.
        best_s: the fastest turn.
        worst_s: the slowest.
        first_s: median until the first row was visible.
        transactions_per_s: source transactions, at the median.
        changes_per_s: row changes, at the median.
        times_built_in: how many times as fast as the built-in subscription with the same disk.
        times_ceiling: the same of the faster of both readers that apply nothing.
        cpu_s: median of CPU seconds, by role.
        peak_bytes: largest resident memory of any turn, by role.
        leader_us_per_change: the leader's CPU from the begin of the stream on, in microseconds.
        target_us_per_change: the target's CPU.
        times_bulk: the target's CPU, as a multiple of what bulk statements need.
        wal_bytes_per_change: median of the target's WAL.
        wal_image_bytes_per_change: the images of pages in it.
        wal_records_per_change: its records.
        times_built_in_wal: its bytes without images, as a multiple of the built-in subscription's.
    """

    runner: str
    turns: int
    is_equal: bool | None
    median_s: float
    best_s: float
    worst_s: float
    first_s: float | None
    transactions_per_s: float
    changes_per_s: float
    times_built_in: float | None
    times_ceiling: float | None
    cpu_s: dict[str, float]
    peak_bytes: dict[str, int]
    leader_us_per_change: float | None
    target_us_per_change: float | None
    times_bulk: float | None
    wal_bytes_per_change: float | None
    wal_image_bytes_per_change: float | None
    wal_records_per_change: float | None
    times_built_in_wal: float | None


def figures(turns: Sequence[Turn], backlog: Backlog) -> list[Figures]:
    """Return the figures of every runner, in the order of the first round."""
    by_runner: dict[str, list[Turn]] = {}
    for turn in turns:
        by_runner.setdefault(turn.runner, []).append(turn)
    medians_s = {runner: median(turn.total_s for turn in each) for runner, each in by_runner.items()}
    return [
        _figures(
            runner, each, backlog, medians_s,
            bulk_cpu_s=_cpu_s(by_runner.get(BULK + each[0].disk, [])).get("target"),
            built_in=by_runner.get(BUILT_IN + each[0].disk, []),
        )
        for runner, each in by_runner.items()
    ]  # fmt: skip


def _figures(  # noqa: PLR0913  what a runner is compared with
    runner: str, turns: list[Turn], backlog: Backlog, medians_s: dict[str, float], *, bulk_cpu_s: float | None,
    built_in: list[Turn],
) -> Figures:  # fmt: skip
    median_s = medians_s[runner]
    totals_s = [turn.total_s for turn in turns]
    firsts_s = [turn.first_s for turn in turns if turn.first_s is not None]
    verdicts = [turn.is_equal for turn in turns if turn.is_equal is not None]
    cpu_s = _cpu_s(turns)
    return Figures(
        runner=runner,
        turns=len(turns),
        is_equal=all(verdicts) if verdicts else None,
        median_s=median_s,
        best_s=min(totals_s),
        worst_s=max(totals_s),
        first_s=median(firsts_s) if firsts_s else None,
        transactions_per_s=backlog.transactions / median_s,
        changes_per_s=backlog.changes / median_s,
        times_built_in=_ratio(medians_s.get(BUILT_IN + turns[0].disk), median_s),
        times_ceiling=_ratio(_ceiling_s(medians_s), median_s),
        cpu_s=cpu_s,
        peak_bytes=_peak_bytes(turns),
        leader_us_per_change=_ratio(cpu_s.get(LEADER_STREAM), backlog.changes / _US),
        target_us_per_change=_ratio(cpu_s.get("target"), backlog.changes / _US),
        times_bulk=_ratio(cpu_s.get("target"), bulk_cpu_s),
        wal_bytes_per_change=_ratio(_wal(turns, "written_bytes"), backlog.changes),
        wal_image_bytes_per_change=_ratio(_wal(turns, "image_bytes"), backlog.changes),
        wal_records_per_change=_ratio(_wal(turns, "records"), backlog.changes),
        times_built_in_wal=_ratio(_wal(turns, "own_bytes"), _wal(built_in, "own_bytes")),
    )


def _ceiling_s(medians_s: dict[str, float]) -> float | None:
    return min((medians_s[reader] for reader in (CEILING, BY_QUERY) if reader in medians_s), default=None)


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def _cpu_s(turns: Sequence[Turn]) -> dict[str, float]:
    roles = dict.fromkeys(role for turn in turns for role in turn.usage)
    return {role: median(turn.usage[role].cpu_s for turn in turns if role in turn.usage) for role in roles}


def _peak_bytes(turns: Sequence[Turn]) -> dict[str, int]:
    roles = dict.fromkeys(role for turn in turns for role in turn.usage)
    return {role: max(turn.usage[role].peak_bytes for turn in turns if role in turn.usage) for role in roles}


def _wal(turns: Sequence[Turn], name: Literal["written_bytes", "image_bytes", "own_bytes", "records"]) -> float | None:
    """Return the median of one figure of the WAL; None if a turn lacks it."""
    found: list[int] = [value for turn in turns if (value := getattr(turn.wal, name, None)) is not None]
    return median(found) if found and len(found) == len(turns) else None


def applied_totals(turns: Sequence[Turn]) -> dict[str, Applied]:
    """Return what each parapply did, all its turns together."""
    by_runner: dict[str, list[Applied]] = {}
    for turn in turns:
        if turn.applied is not None:
            by_runner.setdefault(turn.runner, []).append(turn.applied)
    return {runner: total(each) for runner, each in by_runner.items()}

"""Time spans, sizes, counts and lists for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_PERIODS: Final = ((86_400, "days"), (3600, "hours"), (60, "minutes"))
_MILLION: Final = 1_000_000


def brief(seconds: float | None) -> str:
    """Return a time span in at most six characters, for a cell of a table; None is empty."""
    if seconds is None:
        return ""
    for limit, length, unit in ((1, 0.001, "ms"), (100, 1, "s"), (6000, 60, "min"), (360_000, 3600, "h")):
        if seconds < limit:
            amount = seconds / length
            return f"{amount:.1f} {unit}" if amount < 10 and unit != "ms" else f"{amount:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def duration(seconds: float | None) -> str:
    """Return a time span as a sentence has it: ``0.4 ms``, ``12 ms``, ``3.2 s``, ``5.0 minutes``."""
    if seconds is None:
        return "unknown"
    amount = abs(seconds)
    if amount < 0.001:
        return f"{seconds * 1000:.2g} ms"
    if amount < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    for length, name in _PERIODS:
        if amount >= 2 * length:
            return f"{seconds / length:.1f} {name}"
    return f"{seconds:.3g} s"


def number(value: float) -> str:
    """Return a count: ``12,345``, ``12.3 million``."""
    if abs(value) >= 10 * _MILLION:
        return f"{value / _MILLION:,.1f} million"
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.2g}"


def size(size_bytes: float) -> str:
    """Return bytes: ``12.3 MB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:,.0f} {unit}" if unit == "bytes" else f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:,.1f} TB"


def percent(share: float) -> str:
    """Return a share: ``12 %``, ``0.3 %``; never broken between the two."""
    digits = f"{share * 100:.0f}" if share >= 0.1 or share == 0 else f"{share * 100:.2g}"
    return f"{digits}\N{NO-BREAK SPACE}%"


def few(texts: Sequence[str], most: int = 5) -> str:
    """Return the first of them, and the number of the others."""
    return ", ".join(texts[:most]) + (f" and {len(texts) - most:,} more" if len(texts) > most else "")

"""Differing rows, found by keys and hashes of some ranges from both ends. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: Values of a row's key as texts; of all columns where there is no key.
Key: TypeAlias = "tuple[str | None, ...]"
#: Number of rows and sum of their hashes, by range.
Summary: TypeAlias = "dict[int, tuple[int, int]]"

#: Characters of a value that are shown.
_SHOWN = 60


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One key whose rows are not the same on both ends."""

    kind: str  # missing: on the source only. extra: on the target only. different: on both
    key: Key
    count: int = 1  # rows, where one key has several


def add(total: Summary, part: Iterable[tuple[int, int, int]]) -> None:
    """Add a part's (range, rows, sum of hashes) to a summary."""
    for number, rows, hashes in part:
        before = total.get(number, (0, 0))
        total[number] = (before[0] + rows, before[1] + hashes)


def differing_ranges(source: Mapping[int, tuple[int, int]], target: Mapping[int, tuple[int, int]]) -> list[int]:
    """Return the ranges that are not equal, in their order."""
    return sorted(number for number in source.keys() | target.keys() if source.get(number) != target.get(number))


def differences(source: Iterable[tuple[Key, int]], target: Iterable[tuple[Key, int]]) -> list[Difference]:
    """Compare the rows of some ranges, each as key and hash; the result is ordered by key.

    Without a key, or where one exists twice, rows count: three equal ones against two are one missing.
    """
    by_key: dict[Key, tuple[Counter[int], Counter[int]]] = defaultdict(lambda: (Counter(), Counter()))
    for key, hashed in source:
        by_key[key][0][hashed] += 1
    for key, hashed in target:
        by_key[key][1][hashed] += 1
    found = []
    for key in sorted(by_key, key=_order):
        here, there = by_key[key]
        missing, extra = (here - there).total(), (there - here).total()
        both = min(missing, extra)
        for kind, count in (("different", both), ("missing", missing - both), ("extra", extra - both)):
            if count:
                found.append(Difference(kind=kind, key=key, count=count))
    return found


def _order(key: Key) -> tuple[tuple[bool, int, str], ...]:
    """Return the sort key: numbers before other texts and by their size, as far as that is easy to decide."""
    return tuple(
        (
            value is None,
            int(value) if value and value.removeprefix("-").isdecimal() and len(value) < 40 else 1 << 200,
            value or "",
        )
        for value in key
    )


def shown(columns: Iterable[str], key: Key) -> str:
    """Return a key for people: column=value, long values cut."""
    return ", ".join(
        f"{column}={'NULL' if value is None else value if len(value) <= _SHOWN else value[:_SHOWN] + '...'}"
        for column, value in zip(columns, key, strict=True)
    )

"""One span of time beside another: the same figures of both, and how they differ. Pure.

In go the tables of both spans; out come the rows of `comparison`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from parapply.analysis.engine import Rows, Tables

#: Figures that are compared, with those that they are made from.
COMPARED: Final = frozenset(
    {"summary", "latency", "waits", "parallelism", "moments", "reading", "backends", "blockers"}
)
_PERCENTILES: Final = (("half", "p50_s"), ("99 %", "p99_s"))


def comparison(then: Tables, now: Tables) -> Rows:
    """Return what is known of both spans, of each slot that has a record in either."""
    slots = dict.fromkeys(row["slot"] for tables in (now, then) for row in tables["summary"])
    rows = []
    for slot in slots:
        values = [dict(_values(tables, slot)) for tables in (then, now)]
        for what in dict.fromkeys([*values[1], *values[0]]):
            unit, (before, after) = what[1], (one.get(what) for one in values)
            change = after / before - 1 if before and after is not None else None
            rows.append({"slot": slot, "what": what[0], "unit": unit, "then": before, "now": after, "change": change})
    return rows


def _values(tables: Tables, slot: str) -> Iterator[tuple[tuple[str, str], float]]:
    mine: dict[str, list[dict[str, Any]]] = {
        name: [row for row in rows if row.get("slot") == slot] for name, rows in tables.items()
    }
    for summary in mine["summary"]:
        busy_s = sum(row["seconds"] for row in mine["parallelism"])
        yield ("transactions", "number"), summary["transactions"]
        yield ("batches", "number"), summary["batches"]
        yield ("time with a batch under way", "s"), busy_s
        if busy_s:
            yield ("transactions a second, of that time", "number"), summary["transactions"] / busy_s
            yield ("rows a second, of that time", "number"), summary["row_changes"] / busy_s
            held = sum(row["held"] * row["seconds"] for row in mine["parallelism"])
            yield ("batches with a worker at a time", "number"), held / busy_s
        yield ("repeated batches", "number"), summary["repeated_batches"]
        yield ("conflicts", "number"), summary["conflicts"]
    for row in mine["latency"]:
        for words, column in _PERCENTILES:
            yield (f"{row['stage']}: {words}", "s"), row[column]
    for row in mine["limits"]:
        cause = " ".join((row["cause"], row["detail"])).strip()
        yield (f"limited by {cause}", "share"), row["share"]

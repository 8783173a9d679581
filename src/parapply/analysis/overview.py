"""All slots at a glance: one row for each, the latest of them with the limit that it has. Pure.

In go the tables of all slots and their verdicts; out come the rows of `slots`, and their cells as texts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from parapply.amounts import duration, number, percent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parapply.analysis.engine import Rows, Tables
    from parapply.limits import LimitVerdict

#: Titles of the cells.
HEADER: Final = (
    "slot",
    "last commit (UTC)",
    "transactions",
    "half within",
    "99 % within",
    "conflicts",
    "waits",
    "limit",
)


def overview(tables: Tables, verdicts: Mapping[str, LimitVerdict]) -> Rows:
    """Return one row a slot, in the order of `summary`, then slots with days before it only.

    Args:
        tables: `summary`, `latency`, `waits` and `days` of all slots.
        verdicts: by slot; one without is not limited by anything that was measured.
    """
    rows = []
    for summary in tables["summary"]:
        slot = summary["slot"]
        stages = {row["stage"]: row for row in tables["latency"] if row["slot"] == slot}
        delay = stages.get("each transaction", stages["oldest transaction of a batch"])
        waits = max((row for row in tables["waits"] if row["slot"] == slot), key=lambda row: row["share"], default=None)
        said = verdicts.get(slot)
        rows.append(
            {
                "slot": slot,
                "last_at": summary["last_at"],
                "transactions": summary["transactions"],
                "delay_p50_s": delay["p50_s"],
                "delay_p99_s": delay["p99_s"],
                "conflicts": summary["conflicts"],
                "wait": waits["part"] if waits else None,
                "wait_share": waits["share"] if waits else None,
                "limit": said.limit if said else None,
                "limit_words": said.words if said else None,
            }
        )
    last_days = {row["slot"]: row["day"] for row in tables["days"]}
    for slot in sorted(last_days.keys() - {row["slot"] for row in rows}):
        said_of_it = f"no batch in this time, the last on {last_days[slot]}"
        rows.append(
            dict.fromkeys(rows[0]) | {"slot": slot, "transactions": 0, "conflicts": 0, "limit_words": said_of_it}
        )
    return rows


def cells(rows: Rows) -> list[tuple[str, ...]]:
    """Return the rows as texts, as `HEADER` names them."""
    return [
        (
            row["slot"],
            f"{row['last_at']:%Y-%m-%d %H:%M:%S}" if row["last_at"] else "",
            number(row["transactions"]),
            *("" if row[name] is None else duration(row[name]) for name in ("delay_p50_s", "delay_p99_s")),
            number(row["conflicts"]),
            f"{row['wait']} {percent(row['wait_share'])}" if row["wait"] else "",
            row["limit_words"] or "",
        )
        for row in rows
    ]

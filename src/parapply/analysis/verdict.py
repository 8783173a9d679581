"""The limit of a slot by its apply log: the rule of `parapply.limits`, with rows and batches as evidence. Pure."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from parapply import limits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from parapply.limits import LimitVerdict, Rows


def verdict(rows: Rows, tables: dict[str, Rows]) -> LimitVerdict | None:
    """Return the verdict of one slot, by its rows of `limits` and its tables; None where too little was under way."""
    if not rows:
        return None
    span = "time from the first batch to the last"
    more = chain(limits.held_by(tables["locks"]), _evidence(tables, rows[0]["cause"]))
    found = limits.said(rows, tables["reading"], tables["backends"], span, _named(tables), more)
    if found is None or found.limit in {"source", limits.THROTTLE} or not _keeps_up(tables):
        return found
    return replace(
        found, advice=f"nothing for throughput: the daemon keeps up with the source. For shorter delays: {found.advice}"
    )


def _keeps_up(tables: dict[str, Rows]) -> bool:
    """Return whether twice as many workers would apply no more, because the source has no more, by `what_if`."""
    now = int((tables["reading"] or tables["summary"])[0]["workers"])
    rows = [row for row in tables["what_if"] if not row["question"]]
    limit_names = {row["limit"] for row in rows if row["workers"] in {now, 2 * now}}
    return limit_names == {"source"}


def _named(tables: dict[str, Rows]) -> str:
    blockers, dependencies = tables["blockers"], tables["dependencies"]
    row = blockers[0] if blockers else dependencies[0] if dependencies else None
    if row is None:
        return ""
    return limits.named(row)


def _evidence(tables: dict[str, Rows], limit: str) -> Iterable[str]:
    if limit == "dependency":
        for row in tables["hot_keys"][:3]:
            yield f"Row {row['key']} of {row['table']} had to follow an earlier batch in {row['batches']:,} batches."
        for row in tables["blockers"][:3]:
            yield (
                f"Batch {row['seq']} (transaction {row['xid']}, {row['end_lsn']}) waited {row['wait_s']:.3f} s for "
                f"batch {row['holder_seq']} (transaction {row['holder_xid']}, {row['holder_end_lsn']})."
            )
    if not tables["reading"]:
        yield "The log is of an older version, or shorter than a second: what the target waited for is not known."

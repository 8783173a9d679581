"""Days of each slot with their sums: computed again only where batches have come, and kept.

In go the store; out come the rows of `days`. The sums of a month are a file beside the manifest, each slot's day with
the number of batches that it is of. A day whose number is another one by now, and one of a file that is gone or torn,
is computed again; its rows are all that is opened.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from parapply.analysis.views import Scope, make_views

if TYPE_CHECKING:
    from parapply.analysis.engine import Rows
    from parapply.analysis.progress import Steps
    from parapply.analysis.store import Store

_FOLDER: Final = "records/_folded"
_DAYS: Final = """
SELECT slot, CAST(CAST(committed_at AS date) AS string) AS day, count(*) AS batches,
       sum(n_transactions) AS transactions, sum(n_rows) AS row_changes, sum(size_bytes) AS size_bytes,
       percentile_approx(oldest_s, 0.5) AS oldest_p50_s, percentile_approx(oldest_s, 0.99) AS oldest_p99_s,
       max(oldest_s) AS oldest_max_s, sum(executing_s) AS execute_s, count_if(attempts > 1) AS repeated_batches,
       sum(n_conflicts) AS conflicts
  FROM batches GROUP BY slot, CAST(committed_at AS date) ORDER BY slot, day
"""
_MONTH: Final = len("2026-11")
#: A slot's day: the number of batches that were converted, and the row of `_DAYS`.
_Folded = dict[tuple[str, str], tuple[int, dict[str, Any]]]


def fold(store: Store, folder: str, steps: Steps) -> Rows:
    """Return one row for each slot and day, sorted.

    Raises:
        ReportRefused: rows of a day that is computed are missing.
    """
    place = f"{folder.rstrip('/')}/{_FOLDER}"
    converted, (kept, torn) = store.batches(), _read(store, place)
    folded = {key: kept[key] for key, n in converted.items() if key in kept and kept[key][0] == n}
    stale = converted.keys() - folded.keys()
    if stale:
        steps.expect(1)
        why = f", because {' and '.join(torn)} is torn" if torn else ""
        steps.begin(f"Folding days of slots: {len(stale)}{why}")
        make_views(store, Scope(), days={day for _, day in stale})
        for row in store.engine.rows(_DAYS):
            key = row["slot"], row["day"]
            if key in stale:
                folded[key] = converted[key], row
    _write(store, place, folded, {day[:_MONTH] for _, day in stale | (kept.keys() - folded.keys())})
    return [row for _, (_, row) in sorted(folded.items())]


def _read(store: Store, place: str) -> tuple[_Folded, list[str]]:
    kept: _Folded = {}
    torn = []
    for file in store.engine.storage.files(place, ".json"):
        try:
            month = json.loads(store.engine.storage.read_text(file.path))
            if month["query"] == _DAYS:
                for n, *values in month["rows"]:
                    row = dict(zip(month["columns"], values, strict=True))
                    kept[row["slot"], row["day"]] = n, row
        except (ValueError, TypeError, KeyError):
            torn.append(file.name)
    return kept, torn


def _write(store: Store, place: str, folded: _Folded, months: set[str]) -> None:
    rows: dict[str, list[list[Any]]] = defaultdict(list)
    columns: list[str] = []
    for (_, day), (n, row) in sorted(folded.items()):
        if day[:_MONTH] in months:
            columns = list(row)
            rows[day[:_MONTH]].append([n, *row.values()])
    for month in months:
        content = {"query": _DAYS, "columns": columns, "rows": rows[month]}
        store.engine.storage.write(f"{place}/{month}.json", json.dumps(content, separators=(",", ":")).encode())

"""Days of the log, each with its sums: computed again only for days of which records have come, and kept.

In go the store; out come the rows of `days`. The sums are kept in a file next to the manifest; without it all days are
computed again.
"""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time, timedelta
from typing import TYPE_CHECKING, Final

from parapply.analysis.views import Scope, make_views

if TYPE_CHECKING:
    from parapply.analysis.engine import Rows
    from parapply.analysis.store import Store

_FOLDER: Final = "records/_folded"
_FILE: Final = "days.json"
_DAYS: Final = """
SELECT slot, CAST(CAST(committed_at AS date) AS string) AS day, count(*) AS batches,
       sum(n_transactions) AS transactions, sum(n_rows) AS row_changes, sum(size_bytes) AS size_bytes,
       percentile_approx(oldest_s, 0.5) AS oldest_p50_s, percentile_approx(oldest_s, 0.99) AS oldest_p99_s,
       max(oldest_s) AS oldest_max_s, sum(executing_s) AS execute_s, count_if(attempts > 1) AS repeated_batches,
       sum(n_conflicts) AS conflicts
  FROM batches GROUP BY slot, CAST(committed_at AS date) ORDER BY slot, day
"""


def fold(store: Store, folder: str) -> Rows:
    """Return one row for each slot and day, the oldest first.

    Args:
        store: all of it.
        folder: of the report.
    """
    storage, place = store.engine.storage, f"{folder.rstrip('/')}/{_FOLDER}"
    path = f"{place}/{_FILE}"
    folded = json.loads(storage.read_text(path)) if storage.files(place, _FILE) else {}
    if folded.get("query") != _DAYS:
        folded = {"number": 0, "rows": []}
    days = store.days_since(folded["number"])
    rows: Rows = folded["rows"]
    if days is None or days:
        rows = sorted(
            [*[row for row in rows if days is not None and row["day"] not in days], *_computed(store, days)],
            key=lambda row: (row["slot"], row["day"]),
        )
        storage.write(path, json.dumps({"query": _DAYS, "number": store.number, "rows": rows}).encode())
    return rows


def _computed(store: Store, days: set[str] | None) -> Rows:
    """Return the rows of some days, None: of all, by reading those from the first to the last of them."""
    if days is None:
        make_views(store, Scope())
        return store.engine.rows(_DAYS)
    since = datetime.combine(date.fromisoformat(min(days)), time(), UTC)
    until = datetime.combine(date.fromisoformat(max(days)), time(), UTC) + timedelta(days=1)
    make_views(store, Scope(since=since, until=until), is_cut=True)
    return [row for row in store.engine.rows(_DAYS) if row["day"] in days]

"""docs/METRICS.md, made from the table: ``python -m parapply.metrics.document > docs/METRICS.md``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from parapply.metrics import table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from parapply.metrics.table import Metric

_BEFORE: Final = f"""\
# Metrics

The daemon's endpoint (`metrics.listen`) answers `/metrics` with the series below. This page is made from
`src/parapply/metrics/table.py`, the one place for names and help, by `python -m parapply.metrics.document`.

Every `parapply_` series has the label `slot`. Counters begin at 0 with the daemon and survive a reconnect. Those with
the label `table`, and retries by SQLSTATE, begin with their first event, which `increase` does not count. Gauges that
need both ends, also the slot's, are absent while one is away; `parapply_lag_seconds` grows then. `table` is
`schema.table` as published: the first {table.TABLES_LIMIT:,} tables with changes have series of their own, later ones
share `{table.OTHER_TABLES}`.

`parapply_migration_` and `parapply_cutover_` series exist once a migration or a cut-over has begun; they are read from
the target. `parapply migrate` serves its series at the same address while no daemon of its slot does, and nothing else
there. Probes get 404, and a daemon that is started then finds the port taken.
A cut-over stops the daemon, so `parapply status` shows it from then on.
"""

_AFTER: Final = """
## Questions and expressions

| question | expression |
|---|---|
| how far behind | `parapply_lag_seconds`, `parapply_lag_bytes` |
| rows a second, by table | `sum by (table) (rate(parapply_rows_total[1m]))` |
| the same by the names on the target, with `[mapping]` | `sum by (target) (rate(parapply_rows_total[1m]) \
* on (slot, table) group_left (target) parapply_table_target or on (slot, table) \
label_replace(rate(parapply_rows_total[1m]), "target", "$1", "table", "(.*)"))` |
| source transactions merged into one | `rate(parapply_transactions_total[5m]) / rate(parapply_batches_total[5m])` |
| from received to committed, 99 % | `histogram_quantile(0.99, rate(parapply_batch_seconds_bucket[5m]))` |
| where the time goes | `sum by (stage) (rate(parapply_stage_seconds_total[5m]))` |
| whose keys make others wait | `topk(5, rate(parapply_dependency_waits_total[5m]))` |
| workers at work | `sum(parapply_workers{state!="idle"})` |
| the publisher's WAL, bytes a second | `rate(parapply_lsn_bytes{position="source"}[1m])` |
| confirmed to the publisher, less than the target has | `parapply_lsn_bytes{position="highest"} - ignoring(position) \
parapply_lsn_bytes{position="confirmed"}` |
| bytes a second of a copy | `deriv(parapply_migration_bytes{step="copy"}[1m])` |
| a step of a migration has failed | `parapply_migration_step{state="failed"} == 1` |
| alarm: nothing is applied | `parapply_ready == 0 or absent(parapply_ready)` |
| alarm: lag | `parapply_lag_seconds > 60` |
| alarm: the publisher's disk | `parapply_slot_retained_wal_bytes > 10e9` |
| alarm: the slot may be lost | `parapply_slot_safe_wal_bytes / (parapply_slot_safe_wal_bytes + \
parapply_slot_retained_wal_bytes) < 0.2`, `parapply_slot_wal_status{status=~"unreserved|lost"} == 1` |
| alarm: a conflict stops the daemon or was settled | `increase(parapply_conflicts_total[10m]) > 0 or \
(parapply_conflicts_total > 0 unless parapply_conflicts_total offset 10m)` |
| where the conflicts are | `sum by (type, table, outcome) (parapply_table_conflicts_total)` |

The second half of the alarm for conflicts is for conflicts before a daemon's first scrape. With `on_error = "stop"`
a conflict ends the daemon, mostly before the next scrape. `up == 0` shows that, or
`changes(process_start_time_seconds[15m])` where it is started again. All alarms: `config/docker/prometheus/alerts.yml`.
"""


def document() -> str:
    """Return the page."""
    own = _rows(table.METRICS)
    process = _rows(table.PROCESS_METRICS)
    return "\n".join(
        [_BEFORE, *own, "", "Of the process, as every Prometheus client names them:", "", *process, _AFTER]
    )


def _rows(metrics: Sequence[Metric]) -> Iterator[str]:
    yield "| name | kind | labels | help |"
    yield "|---|---|---|---|"
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        yield f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |"


if __name__ == "__main__":
    sys.stdout.write(document())

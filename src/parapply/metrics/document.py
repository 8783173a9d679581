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

The daemon's endpoint (`metrics.listen`) answers `/metrics` with what follows. This page is made from
`src/parapply/metrics/table.py`, the one place for names and help, by `python -m parapply.metrics.document`.

Every `parapply_` series has the label `slot`. Counters begin at 0 with the daemon and survive a reconnect. Gauges that
need both ends are absent while one is away; `parapply_lag_seconds` grows then. `table` is `schema.table` as published:
the first {table.TABLES_LIMIT:,} tables with changes have series of their own, later ones share `{table.OTHER_TABLES}`.
"""

_AFTER: Final = """
## Questions and expressions

| question | expression |
|---|---|
| how far behind | `parapply_lag_seconds`, `parapply_lag_bytes` |
| rows a second, by table | `sum by (table) (rate(parapply_rows_total[1m]))` |
| source transactions merged into one | `rate(parapply_transactions_total[5m]) / rate(parapply_batches_total[5m])` |
| from received to committed, 99 % | `histogram_quantile(0.99, rate(parapply_batch_seconds_bucket[5m]))` |
| where the time goes | `sum by (stage) (rate(parapply_stage_seconds_total[5m]))` |
| whose keys make others wait | `topk(5, rate(parapply_dependency_waits_total[5m]))` |
| workers at work | `sum(parapply_workers{state!="idle"})` |
| the publisher's WAL, bytes a second | `rate(parapply_lsn_bytes{position="source"}[1m])` |
| told to the publisher, behind the target | `parapply_lsn_bytes{position="highest"} - ignoring(position) \
parapply_lsn_bytes{position="confirmed"}` |
| alarm: nothing is applied | `parapply_ready == 0 or absent(parapply_ready)` |
| alarm: behind | `parapply_lag_seconds > 60` |
| alarm: somebody must look | `increase(parapply_conflicts_total{outcome="stopped"}[5m]) > 0` |
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

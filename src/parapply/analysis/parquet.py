"""The table of a figure as one Parquet file. Small tables only; records are Spark's to write.

In go rows and the name of the figure; out come bytes. Types follow from the names of columns, as the definitions say:
``_s`` and shares are fractions, texts and times are listed here, everything else is counted.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyarrow import parquet

from parapply.analysis.figures import FIGURES

if TYPE_CHECKING:
    from parapply.analysis.engine import Rows

_TIMES: Final = frozenset({"at", "first_at", "last_at", "until"})
_TEXTS: Final = frozenset({
    "slot", "table", "target", "kind", "name", "type", "policy", "outcome", "mode", "reason", "stage", "part", "unit",
    "commit_order", "limit", "link", "file", "example", "highest_end_lsn", "run",
    "state", "wait", "key", "tables", "commit_lsn", "what", "day", "end_lsn", "holder_end_lsn", "detail", "cause",
    "role", "relation", "question", "limit_words",
})  # fmt: skip
_FRACTIONS: Final = frozenset({"seconds", "share", "wait_share", "speed_up", "mean_bytes", "then", "now", "change"})


def as_parquet(name: str, rows: Rows) -> bytes:
    """Return the table of a figure, with its columns in the definition's order.

    Raises:
        KeyError: there is no such figure.
    """
    columns = {figure.name: figure.columns for figure in FIGURES}[name]
    schema = pa.schema([pa.field(column, _type(column), metadata={"meaning": columns[column]}) for column in columns])
    sink = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows, schema), sink, compression="zstd")
    return sink.getvalue()


def _type(column: str) -> pa.DataType:
    if column in _TIMES:
        return pa.timestamp("us", tz="UTC")
    if column in _TEXTS:
        return pa.string()
    return pa.float64() if column in _FRACTIONS or column.endswith("_s") else pa.int64()

"""The engine that computes: DuckDB on this machine, or Spark anywhere, over the same queries.

The queries are Spark's SQL. `duck` says which part of it they keep to, and how it reads in DuckDB's.

Files lie in a `Storage`. Their names below a folder have the escapes of a URI with every one, so that a report's folder
can go from one to the other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

#: View of the lines that `Engine.read_lines` has opened.
LINES: Final = "lines"
#: View of the rows that `Engine.open_stored` has opened.
STORED: Final = "stored"

#: Hint where converted rows are missing or torn.
LOST_HINT: Final = "bring it back from a backup, or name another folder with --out to convert the log from the start"
#: Hint where a report's engine stopped at a Parquet file, which another report may have replaced.
TORN_HINT: Final = f"run it again; if it stops at the same file, {LOST_HINT}"

#: A row by column; times are aware, in UTC.
Rows = list[dict[str, Any]]
#: All tables of a report by the name of the figure.
Tables = dict[str, Rows]
_BEGUN: Final = re.compile(r"\d{8}T\d{6}Z")


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file below a folder."""

    name: str  # its path below the folder, with the escapes of a URI (as Spark's ``_metadata.file_path`` has it)
    path: str  # for the engine
    size_bytes: int  # as listed


def begun_of(name: str) -> str:
    """Return when a file of the log was begun, as its name says it (``20261121T100000Z``); empty: it does not."""
    found = _BEGUN.search(name)
    return found[0] if found else ""

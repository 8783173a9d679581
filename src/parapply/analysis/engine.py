"""The engine that computes: DuckDB on this machine, or Spark anywhere, over the same queries.

The queries are Spark's SQL. `duck` says which part of it they keep to, and how it reads in DuckDB's.

Files lie in a `Storage`. Their names below a folder have the escapes of a URI with every one, so that a report's folder
can go from one to the other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from parapply.analysis.schema import TypeWords
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


class Storage(Protocol):
    """Folders and small files."""

    def qualified(self, text: str) -> str:
        """Return a path with its scheme, for example ``file:/logs``."""

    def raw_path(self, text: str) -> str:
        """Return the path without scheme and host, with the escapes of a URI."""

    def is_folder(self, text: str) -> bool:
        """Return whether a folder of this name exists."""

    def files(self, folder: str, suffix: str | tuple[str, ...] = "") -> list[StoredFile]:
        """Return the files below a folder, at any depth, whose name ends so, sorted; none if it is missing."""

    def why_unreadable(self, text: str) -> str:
        """Return why a file cannot be read, as the file system says it; empty if it can."""

    def why_no_gzip(self, text: str) -> str:
        """Return why a file cannot be unpacked, after reading all of it; empty if it can."""

    def read_text(self, text: str) -> str:
        """Return a small file in UTF-8."""

    def write(self, text: str, content: bytes, *, is_new: bool = False) -> bool:
        """Write a small file whole or not at all.

        Returns:
            False if the file existed and had to be new.
        """

    def remove(self, text: str) -> None:
        """Remove a file or a folder with all in it; nothing happens if it does not exist."""

    def folders(self, pattern: str) -> list[str]:
        """Return the folders that a pattern with ``*`` names."""


class Engine(Protocol):
    """An engine with its session: views and tables are seen by its queries only."""

    storage: Storage
    words: TypeWords

    def errors(self) -> AbstractContextManager[None]:
        """Turn what the engine raises within the block into `ReportFailed` and `ReportRefused`."""

    def done(self) -> float | None:
        """Return how much of the query under way is done, from 0 to 1; None: not known."""

    def rows(self, query: str, **arguments: Any) -> Rows:  # noqa: ANN401  values of SQL
        """Return all rows of a query; ``:name`` in it is an argument's value."""

    def stream(self, query: str, **arguments: Any) -> Iterator[tuple[Any, ...]]:  # noqa: ANN401  values of SQL
        """Yield the rows of a query a few at a time; what is a struct or an array in it is a sequence."""

    def make_view(self, name: str, query: str) -> None:
        """Make a view, or replace it."""

    def make_table(self, name: str, columns: dict[str, str], rows: Sequence[Sequence[Any]]) -> None:
        """Make a small table, or replace it; types of columns by `words`."""

    def read_lines(self, files: Sequence[StoredFile], log: str) -> None:
        """Open files of the log as the view `LINES`: columns of `schema.wide_columns`, and the name of the file."""

    def write(self, query: str, folder: str) -> None:
        """Write rows as Parquet below a folder that does not exist, by kind of record and day."""

    def open_stored(self, root: str, folders: Sequence[str]) -> None:
        """Open what `write` has written as the view `STORED`, with `schema.stored_columns`.

        Only these existing folders below the root are looked at, of whole loads or of a kind and day.
        """

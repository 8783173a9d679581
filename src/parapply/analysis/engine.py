"""The engine that computes: DuckDB on this machine, or Spark anywhere, over the same queries.

The queries are Spark's SQL. `duck` says which part of it they keep to, and how it reads in DuckDB's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from parapply.analysis.schema import TypeWords
    from parapply.analysis.storage import Storage, StoredFile

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
        """Open what `write` has written as the view `STORED`: `schema.stored_columns`.

        Args:
            root: of all folders.
            folders: existing ones below it, of whole loads or of a kind and day; others are not even looked at.
        """

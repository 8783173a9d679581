"""DuckDB as the report's engine: in this process, on this machine, within the memory that it is given.

In go queries in Spark's SQL, and local paths; out come rows and Parquet files as `spark` writes them. Lines that DuckDB
cannot read are looked for only where there is one: by this process, line by line.
"""

from __future__ import annotations

import gzip
import re
import shutil
import tempfile
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import duckdb
import msgspec

from parapply.analysis import schema
from parapply.analysis.engine import LINES, STORED, TORN_HINT, Rows
from parapply.analysis.local import LocalStorage
from parapply.analysis.schema import DAY, FILE, KIND, LOAD, TORN
from parapply.applylog_schema import RECORDS
from parapply.errors import ReportFailed, ReportRefused
from parapply.quoting import identifier, plain_literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from parapply.analysis.engine import StoredFile

#: Rows that are fetched at once.
_FETCHED: Final = 4096
#: Rows that are written at once.
_WRITTEN: Final = 16_384
#: Lines that are sifted at once.
_SIFTED: Final = 1024
_PATTERN_SIGNS: Final = str.maketrans({"[": "[[]", "*": "[*]", "?": "[?]"})
_PARQUET: Final = ".parquet"
#: Errors of DuckDB that concern a line, not the machine.
_OF_A_LINE: Final = (duckdb.InvalidInputException, duckdb.ConversionException)


class DuckEngine:
    """A session of DuckDB.

    Args:
        memory: at most, for example ``2g``; what is larger goes to a folder for temporary files.
        cores: None takes all.
    """

    words = schema.DUCK

    def __init__(self, memory: str, cores: int | None) -> None:
        self.storage = LocalStorage()
        self._scratch = Path(tempfile.mkdtemp(prefix="parapply-report-"))
        self._files: dict[str, str] = {}
        self._decoder = msgspec.json.Decoder(_any_record())
        settings: dict[str, Any] = {
            "memory_limit": f"{memory.upper()}B",
            "temp_directory": str(self._scratch / "spilled"),
            "preserve_insertion_order": "false",
            # Rows that wait to be written are beyond the limit: by default half a million for each processor.
            "partitioned_write_flush_threshold": _WRITTEN,
            "write_buffer_row_group_count": 1,
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            **({"threads": cores} if cores else {}),
        }
        self._session = duckdb.connect(config=settings)
        self._session.execute("SET TimeZone = 'UTC'")

    def close(self) -> None:
        """End the session and remove what it has spilled."""
        self._session.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn what the engine raises within the block into `ReportFailed` and `ReportRefused`."""
        try:
            yield
        except PermissionError as error:
            raise ReportRefused(
                f"The report cannot go on: {error.filename}: {error.strerror}.",
                hint="run it as a user who may read the log's folders and files, and write into --out",
            ) from error
        except (duckdb.Error, OSError) as error:
            text = str(error).strip().splitlines()[0].rstrip(".")
            hint = "run it again: what was converted is kept; for 'Out of Memory' see --memory, or --engine spark"
            raise ReportFailed(f"DuckDB stopped: {text}.", hint=TORN_HINT if _PARQUET in text else hint) from error

    def done(self) -> float | None:
        """Return how much of the query under way is done, from 0 to 1; None: not known."""
        return None

    def rows(self, query: str, **arguments: Any) -> Rows:  # noqa: ANN401  values of SQL
        """Return all rows of a query; ``:name`` in it is an argument's value."""
        found = self._session.execute(in_duckdb(query), arguments or None)
        names = [column[0] for column in found.description or ()]
        return [dict(zip(names, map(_in_utc, row), strict=True)) for row in found.fetchall()]

    def stream(self, query: str, **arguments: Any) -> Iterator[tuple[Any, ...]]:  # noqa: ANN401  values of SQL
        """Yield the rows of a query a few at a time; what is a struct or an array in it is a sequence."""
        # In a separate session, other queries may run between two rows.
        with self._session.cursor() as cursor:
            found = cursor.execute(in_duckdb(query), arguments or None)
            while rows := found.fetchmany(_FETCHED):
                for row in rows:
                    yield tuple(_as_sequence(value) for value in row)

    def make_view(self, name: str, query: str) -> None:
        """Make a view, or replace it."""
        # Not a temporary one: cursors see it, too, and the whole database is in memory.
        self._session.execute(f"CREATE OR REPLACE VIEW {name} AS {in_duckdb(query)}")

    def make_table(self, name: str, columns: dict[str, str], rows: Sequence[Sequence[Any]]) -> None:
        """Make a small table, or replace it; types of columns by `words`."""
        self._session.execute(f"CREATE OR REPLACE TABLE {name} ({_columns(columns)})")
        values = [list(column) for column in zip(*rows, strict=True)]
        if values:
            unnested = ", ".join(f"unnest(CAST(? AS {type_}[]))" for type_ in columns.values())
            self._session.execute(f"INSERT INTO {name} SELECT {unnested}", values)

    def read_lines(self, files: Sequence[StoredFile], log: str) -> None:  # noqa: ARG002  named by their paths
        """Open files of the log as the view `LINES`: columns of `schema.wide_columns`, and the name of the file."""
        self._files = {file.path: file.name for file in files}
        self._open_lines(self._files, ())

    def write(self, query: str, folder: str) -> None:
        """Write rows as Parquet below a folder that does not exist, by kind of record and day."""
        target = Path(folder.removeprefix("file:"))
        target.mkdir(parents=True)
        copy = (
            f"COPY ({in_duckdb(query)}) TO {plain_literal(str(target))} (FORMAT parquet, COMPRESSION zstd,"
            f" PARTITION_BY ({KIND}, {DAY}), APPEND, FILENAME_PATTERN 'part-{{uuid}}')"
        )
        # Lines are left out by their types, which is quick, and then by what DuckDB itself refuses.
        sifts = [self._are_records, self._are_read]
        while True:
            try:
                self._session.execute(copy)
            except _OF_A_LINE:
                if not sifts:
                    raise
                for part in self.storage.folders(f"{target}/*"):
                    self.storage.remove(part)
                self._leave_torn_lines_out(sifts.pop(0))
            else:
                return

    def open_stored(self, root: str, folders: Sequence[str]) -> None:  # noqa: ARG002  Spark's
        """Open what `write` has written as the view `STORED`, with `schema.stored_columns`.

        Only these existing folders below the root are looked at, of whole loads or of a kind and day.
        """
        paths = [str(path) for folder in folders for path in Path(folder.removeprefix("file:")).rglob(f"*{_PARQUET}")]
        columns = schema.stored_columns(self.words)
        nothing = ", ".join(f'CAST(NULL AS {type_}) AS "{name}"' for name, type_ in columns.items())
        query = f"SELECT {nothing} WHERE false"
        if paths:
            query += (
                f" UNION ALL BY NAME SELECT * FROM read_parquet({_paths(paths)}, hive_partitioning = true,"
                f" hive_types = {{'{KIND}': VARCHAR, '{DAY}': DATE, '{LOAD}': VARCHAR}}, union_by_name = true)"
            )
        self._session.execute(f"CREATE OR REPLACE VIEW {STORED} AS {query}")

    def _open_lines(self, files: dict[str, str], torn: Sequence[tuple[str, str]]) -> None:
        """Make the view of lines: path and name of each file, and name and text of lines that are not read there."""
        text = self.words.text
        self.make_table("line_files", {"path": text, FILE: text}, list(files.items()))
        self.make_table("torn_lines", {FILE: text, TORN: text}, torn)
        query = f"SELECT CAST(NULL AS {text}) AS path, CAST(NULL AS {text}) AS {KIND} WHERE false"
        if files:
            query = f"SELECT * RENAME (filename AS path) FROM {self._lines_of(files)}"
        self._session.execute(
            f"CREATE OR REPLACE VIEW {LINES} AS SELECT * EXCLUDE (path) FROM ({query}) JOIN line_files USING (path)"
            f" UNION ALL BY NAME SELECT * FROM torn_lines"
        )

    def _lines_of(self, paths: Iterable[str]) -> str:
        columns = schema.wide_columns(self.words)
        del columns[TORN]
        types = ", ".join(f"'{name}': {plain_literal(type_)}" for name, type_ in columns.items())
        return f"read_json({_paths(paths)}, columns = {{{types}}}, format = 'newline_delimited', filename = true)"

    def _leave_torn_lines_out(self, are_good: Callable[[list[bytes]], list[bool]]) -> None:
        """Open the lines again, those that are no JSON of the records' types as texts."""
        torn: list[tuple[str, str]] = []
        files: dict[str, str] = {}
        for number, (path, name) in enumerate(self._files.items()):
            n_before = len(torn)
            sifted = self._scratch / f"sifted-{number}.jsonl"
            with (gzip.open if path.endswith(".gz") else open)(path, "rb") as opened, sifted.open("wb") as good:
                lines = (line.rstrip(b"\n") + b"\n" for line in opened if not line.isspace())
                while some := list(islice(lines, _SIFTED)):
                    for line, is_good in zip(some, are_good(some), strict=True):
                        if is_good:
                            good.write(line)
                        else:
                            torn.append((name, line.decode(errors="replace").rstrip("\r\n").replace("\0", "\ufffd")))
            if len(torn) == n_before:
                sifted.unlink()
            files[path if len(torn) == n_before else str(sifted)] = name
        self._open_lines(files, torn)

    def _are_records(self, lines: list[bytes]) -> list[bool]:
        found = []
        for line in lines:
            try:
                self._decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                found.append(False)
            else:
                found.append(True)
        return found

    def _are_read(self, lines: list[bytes]) -> list[bool]:
        """Also leave out a key that comes twice, a number that no type holds, and what else DuckDB refuses."""
        found = self._are_records(lines)
        for number in self._refused(lines, [number for number, is_record in enumerate(found) if is_record]):
            found[number] = False
        return found

    def _refused(self, lines: list[bytes], numbers: list[int]) -> list[int]:
        """Return which of some lines DuckDB refuses: of a part that it does not read, both halves are tried."""
        path = self._scratch / "tried.jsonl"
        path.write_bytes(b"".join([lines[number] for number in numbers]))
        try:
            self._session.execute(f"SELECT count(COLUMNS(*)) FROM {self._lines_of([str(path)])}").fetchall()
        except _OF_A_LINE:
            half = len(numbers) // 2
            return self._refused(lines, numbers[:half]) + self._refused(lines, numbers[half:]) if half else numbers
        return []


def _any_record() -> type[msgspec.Struct]:
    """Return a struct with the fields of every record, none of them required."""
    fields: dict[str, Any] = {KIND: str}
    for struct in RECORDS.values():
        # Two records with one name of a field have equal types, as `schema.wide_columns` ensures.
        fields |= {
            field.name: datetime if schema.is_time(field.name) else field.type
            for field in msgspec.structs.fields(struct)
        }
    return msgspec.defstruct("AnyRecord", [(name, type_ | None, None) for name, type_ in fields.items()])


def _columns(columns: dict[str, str]) -> str:
    return ", ".join(f"{identifier(name)} {type_}" for name, type_ in columns.items())


def _paths(paths: Iterable[str]) -> str:
    """Return paths as a list; their signs are no patterns."""
    return f"[{', '.join(plain_literal(path.translate(_PATTERN_SIGNS)) for path in paths)}]"


def _in_utc(value: Any) -> Any:  # noqa: ANN401  of a row
    return value.astimezone(UTC) if isinstance(value, datetime) else value


def _as_sequence(value: Any) -> Any:  # noqa: ANN401  of a row
    if isinstance(value, list):
        return [_as_sequence(one) for one in value]
    return tuple(value.values()) if isinstance(value, dict) else value


# Queries are written once, in Spark's SQL, and keep to a part of it that this can say: the figures of both engines are
# compared by `tests/analysis`.
_FUNCTIONS: Final = {
    "unix_micros": "epoch_us",
    "timestamp_micros": "make_timestamptz",
    "percentile_approx": "quantile_disc",  # exact
    "explode": "unnest",
    "element_at": "list_extract",
    "size": "len",
    "sequence": "generate_series",
    "array": "list_value",
    "array_join": "array_to_string",
    "array_sort": "list_sort",
    "regexp_like": "regexp_matches",
}
_RESERVED: Final = frozenset({"table", "at"})
_TOKEN: Final = re.compile(
    r"""'[^']*'|"[^"]*"|(?<!:):(?P<argument>[a-z]\w*)|\b(?P<long>\d+)L\b|\b(?P<word>[A-Za-z_]\w*)\b(?P<call>\()?"""
)
_NAMED: Final = re.compile(r"(?P<value>.*)\sAS\s+(?P<name>\w+)", re.DOTALL)
_LAMBDA: Final = re.compile(r"\(?(?P<names>[\w, ]+?)\)?\s*->(?P<value>.*)", re.DOTALL)
_OPEN, _CLOSED = "([{", ")]}"


def in_duckdb(query: str) -> str:
    """Return the query in DuckDB's SQL."""
    for name, render in _CALLS.items():
        query = _rewritten(query, name, render)
    return _TOKEN.sub(_token, query)


def _token(found: re.Match[str]) -> str:
    if found["argument"]:
        return f"${found['argument']}"
    if found["long"]:
        return f"CAST({found['long']} AS bigint)"
    word = found["word"]
    if word is None:
        return found[0]
    if found["call"]:
        return f"{_FUNCTIONS.get(word, word)}("
    if word == "div":
        return "//"
    return f'"{word}"' if word in _RESERVED else word


def _rewritten(query: str, name: str, render: Callable[[list[str]], str]) -> str:
    """Return a query with each call of a function replaced, also within its arguments."""
    call = re.compile(rf"\b{name}\(")
    while found := call.search(query):
        arguments, end = _arguments(query, found.end())
        query = query[: found.start()] + render(arguments) + query[end:]
    return query


def _arguments(query: str, begin: int) -> tuple[list[str], int]:
    """Return the arguments of a call and where it ends."""
    depth, is_text, start = 0, False, begin
    arguments: list[str] = []
    for at in range(begin, len(query)):
        sign = query[at]
        if sign == "'":
            is_text = not is_text
        elif is_text:
            continue
        elif sign in _OPEN:
            depth += 1
        elif sign in _CLOSED and depth:
            depth -= 1
        elif sign in _CLOSED or (sign == "," and not depth):
            arguments.append(query[start:at].strip())
            start = at + 1
            if sign in _CLOSED:
                return arguments, at + 1
    raise ValueError(f"a call without an end: {query[begin:]}")


def _struct(fields: list[str]) -> str:
    pairs = []
    for field in fields:
        named = _NAMED.fullmatch(field)
        value, name = (named["value"], named["name"]) if named else (field, field.rpartition(".")[2])
        pairs.append(f"'{name}': {value}")
    return f"{{{', '.join(pairs)}}}"


def _lambda(text: str) -> str:
    found = _LAMBDA.fullmatch(text)
    if found is None:
        raise ValueError(f"no function of one line: {text}")
    return f"lambda {found['names']}:{found['value']}"


_CALLS: Final[dict[str, Callable[[list[str]], str]]] = {
    "struct": _struct,
    "transform": lambda of: f"list_transform({of[0]}, {_lambda(of[1])})",
    # The only one that there is: a sum.
    "aggregate": lambda of: f"coalesce(list_sum({of[0]}), 0)",
    "inline": lambda of: f"unnest({of[0]}, max_depth := 2)",
    "conv": lambda of: f"('0x' || {of[0]})",
}

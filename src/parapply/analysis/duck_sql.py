"""The queries in DuckDB's SQL. They are written once, in Spark's, and keep to a part of it that this can say.

In go queries of this program; out come queries that mean the same. They differ in the names of functions, structs
(``struct(a AS b)``), functions of one line (``x -> ...``), ``inline``, arguments (``:name``), and two names of columns
that DuckDB reserves. Not every query of Spark's can be said: `tests/analysis` compares the figures of both engines.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

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

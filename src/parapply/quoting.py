"""Texts of others as parts of a language: SQL, a role's setting, HTML, a shell's command. The only home of each rule.

Names, values, comments and settings come from databases whose owners are not ours. Text that is not quoted here is a
parameter, or composed by `psycopg.sql` (`Identifier`, `Literal`), which quotes by the same rules. Pure.

Source: PostgreSQL manual, "Lexical Structure"; `ruleutils.c`, quote_identifier; `dumputils.c`, makeAlterConfigCommand;
`varlena.c`, SplitGUCList; `repl_scanner.l`.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from parapply.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: Settings that are lists of names, each quoted separately. (guc_tables.c, GUC_LIST_QUOTE: extensions have none.) True:
#: names of objects, which fold to lower case where they stand without quotes.
_LISTS: Final = {
    "local_preload_libraries": False,
    "search_path": True,
    "session_preload_libraries": False,
    "shared_preload_libraries": False,
    "temp_tablespaces": True,
    "unix_socket_directories": False,
}
_SPACE: Final = r"[ \t\n\r\f\v]*"
_LISTED: Final = (
    rf'{_SPACE}(?:"(?P<quoted>(?:[^"]|"")*)"|(?P<plain>[^", \t\n\r\f\v][^, \t\n\r\f\v]*)){_SPACE}(?P<end>,|\Z)'
)
_QUOTED: Final = r"""(?s)(?P<escapes>\b[eE]'(?:[^'\\]|\\.|'')*')|(?P<text>'(?:[^']|'')*')|(?P<name>"(?:[^"]|"")*")"""
#: Largest number of a character for which four digits are enough.
_LAST_SHORT: Final = 0xFFFF
#: Signs that are no part of an option, unless a backslash is before them.
_BREAKS: Final = re.compile(r"[ \t\n\r\f\v\\]")
_TO_LOWER: Final = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz")


def literal(text: str) -> str:
    """Return a text as a literal of PostgreSQL, whatever standard_conforming_strings is.

    Raises:
        ValueError: it has a NUL, where C would cut the statement off.
    """
    _check(text)
    quoted = text.replace("'", "''")
    return "E'" + quoted.replace("\\", "\\\\") + "'" if "\\" in text else f"'{quoted}'"


def plain_literal(text: str) -> str:
    """Return a text as a literal of a language without escapes: replication commands, DuckDB.

    Raises:
        ValueError: it has a NUL.
    """
    _check(text)
    return "'" + text.replace("'", "''") + "'"


def identifier(name: str) -> str:
    """Return a name as a quoted identifier; nothing in it keeps a meaning (trap T-60).

    Texts are never formatted with `%` or `{}` afterwards.

    Raises:
        ValueError: it has a NUL.
    """
    _check(name)
    return '"' + name.replace('"', '""') + '"'


def qualified(*names: str) -> str:
    """Return a name that is qualified by the names before it, such as schema and table."""
    return ".".join(map(identifier, names))


def shown(*names: str) -> str:
    """Return a qualified name for a statement that people copy; raise ValueError if it has a NUL."""
    return copyable(qualified(*names))


def shown_list(names: Iterable[Sequence[str]]) -> str:
    """Return qualified names for a statement that people copy."""
    return ", ".join(shown(*name) for name in names)


def copyable(statements: str) -> str:
    """Return statements of ours that mean the same, and in which every character within quotes prints.

    A character that does not print acts on a terminal, or is lost on the way; SQL also knows it by its number.
    """
    return re.sub(_QUOTED, _by_number, statements)


def _by_number(found: re.Match[str]) -> str:
    piece, kind = found[0], found.lastgroup
    if piece.isprintable():
        return piece
    if kind != "escapes":
        piece = piece.replace("\\", "\\\\")
    short, long = ("\\{:04x}", "\\+{:06x}") if kind == "name" else ("\\u{:04x}", "\\U{:08x}")
    numbers = {ord(char) for char in piece if not char.isprintable()}
    signs = {number: (short if number <= _LAST_SHORT else long).format(number) for number in numbers}
    return {"name": "U&", "text": "E"}.get(kind or "", "") + piece.translate(signs)


def toml_string(text: str) -> str:
    """Return a text as a basic string of TOML, which JSON's are but for what JSON need not escape."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def html(text: str) -> str:
    """Return a text as content of an element of HTML, or as an attribute's value between quotes.

    People read it, so unprintable characters are shown by their escapes.
    """
    from html import escape  # noqa: PLC0415  it imports the names of all characters, and no start needs them

    return escape(printable(text))


def setting(name: str, value: str) -> str:
    """Return `name TO value` for ALTER ROLE ... SET, from a server's `setconfig`.

    The stored value of a list is no SQL: a role may have set any text with `set_config` and `FROM CURRENT`.

    Raises:
        ValueError: the value is no list where it has to be one, or has a NUL.
    """
    folds = _LISTS.get(name.lower())
    text = literal(value) if folds is None else ", ".join(map(literal, _listed(value, folds=folds))) or "''"
    return f"{qualified(*name.split('.'))} TO {text}"


def startup_option(name: str, value: str) -> str:
    """Return a setting as a part of `options` of a connection.

    Source: `postinit.c`, pg_split_opts.

    Raises:
        ValueError: it has a NUL.
    """
    _check(name + value)
    return "-c " + _BREAKS.sub(r"\\\g<0>", f"{name}={value}")


def _listed(value: str, *, folds: bool) -> Iterator[str]:
    listed = re.compile(_LISTED)
    position, is_over = 0, not value.strip(" \t\n\r\f\v")
    while not is_over:
        found = listed.match(value, position)
        if found is None:
            raise ValueError(f"no list of names: {value!r}")
        plain = found["plain"]
        if plain is None:
            yield found["quoted"].replace('""', '"')
        else:
            yield plain.translate(_TO_LOWER) if folds else plain
        position, is_over = found.end(), not found["end"]


def _check(text: str) -> None:
    if "\0" in text:
        raise ValueError("a text with a NUL")

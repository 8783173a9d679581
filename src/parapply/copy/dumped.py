"""A script of pg_dump as statements. Pure.

The cut is at semicolons that stand in no quotes and no parentheses, never at a line's form: a comment may hold any
text, the form of a dump's own lines included, and what it holds must not be run, and must come over as it is.

Source: PostgreSQL manual, "Lexical Structure".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class DumpedStatement(msgspec.Struct, frozen=True):
    """A statement of a script."""

    title: str  # from the dump's comment before it; empty: the statement goes on with what came before
    text: str
    skeleton: str  # with one space between words, and without what stands in quotes
    begin: int  # in the script
    end: int  # after its semicolon


def statements(text: str) -> Iterator[DumpedStatement]:
    """Yield a script's statements in their order; raise ValueError if it ends within a statement."""
    has_escapes = "\nSET standard_conforming_strings = off;" in text.partition("\n-- Name: ")[0]
    position = depth = begin = 0
    title = ""
    parts: list[str] = []
    skeleton: list[str] = []
    while position < len(text):
        found = _TOKEN.match(text, position)
        assert found is not None
        kind, piece = found.lastgroup, found[0]
        if has_escapes and kind == "string" and (old := _OLD_STRING.match(text, position)):
            piece = old[0]
        position += len(piece)
        if kind == "comment":
            if not parts and (header := _HEADER.match(piece)):
                title = f"{header['type'].lower()} {header['name']}"
            continue
        if kind == "other" and piece in "'\"":
            raise ValueError("a quote that does not end")
        depth += {"(": 1, ")": -1}.get(piece, 0)
        if piece == ";" and not depth:
            yield DumpedStatement(title, "".join(parts).strip(), "".join(skeleton).strip(), begin, position)
            title, parts, skeleton = "", [], []
        elif parts or kind != "space":
            begin = begin if parts else position - len(piece)
            parts.append(piece)
            skeleton.append(_SHOWN.get(kind or "", piece))
    if parts:
        raise ValueError("a statement that does not end")


def edited(text: str, edit: Callable[[DumpedStatement], str | None]) -> str:
    """Return a script in which some statements are replaced, and everything else is as it was.

    Raises:
        ValueError: the script ends within a statement.
    """
    kept, position = [], 0
    for one in statements(text):
        new = edit(one)
        if new is not None:
            kept += [text[position : one.begin], new]
            position = one.end
    return "".join([*kept, text[position:]])


#: Words are tokens, so that a dollar sign or an E within a name begins no quotes.
_TOKEN = re.compile(
    r"""(?P<comment>--[^\n]*|/\*.*?\*/)
      | (?P<escapes>[eE]'(?:[^'\\]|\\.|'')*')
      | (?P<word>[A-Za-z_\x80-\U0010ffff][\w$]*)
      | (?P<string>'(?:[^']|'')*')
      | (?P<name>"(?:[^"]|"")*")
      | (?P<dollars>\$(?P<tag>(?:[A-Za-z_\x80-\U0010ffff]\w*)?)\$.*?\$(?P=tag)\$)
      | (?P<space>\s+)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
#: As `_TOKEN`, for a database whose plain strings have escapes.
_OLD_STRING = re.compile(r"'(?:[^'\\]|\\.|'')*'", re.DOTALL)
#: Placeholder of each token in a skeleton.
_SHOWN = {"space": " ", "string": "''", "escapes": "''", "dollars": "''", "name": '"n"'}
_HEADER = re.compile(r"-- Name: (?P<name>.*); Type: (?P<type>[A-Z ]+); Schema: ")

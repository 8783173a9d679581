"""Text of others as a terminal may get it: names and values come from databases, and some bytes act on a terminal.

In: any text. Out: the same with every character that does not print, newlines and bidirectional marks included, as its
escape. For people only: text that programs read (JSON, SQL) is escaped by its own rules and must stay as it is.
"""

from __future__ import annotations

from typing import Any


def printable(text: str) -> str:
    r"""Return a text in which unprintable characters are written as `\x1b` or `\u202e`."""
    if text.isprintable():
        return text
    return "".join([char if char.isprintable() else _escape(ord(char)) for char in text])


def printable_tree(value: Any) -> Any:  # noqa: ANN401  what JSON can hold
    """Return a tree of dicts and lists with every text in it made printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {key: printable_tree(each) for key, each in value.items()}
    return [printable_tree(each) for each in value] if isinstance(value, list) else value


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

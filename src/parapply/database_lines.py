"""Lines of several databases that are worked on at the same time: each begins with the name of its database.

Lines come from all that works on a database, so a line's writer is known by the context of its task.
"""

from __future__ import annotations

import io
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from parapply.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

_database: ContextVar[str] = ContextVar("database", default="")


@contextmanager
def about(name: str) -> Iterator[None]:
    """Take lines as a database's until the block ends."""
    token = _database.set(name)
    try:
        yield
    finally:
        _database.reset(token)


class DatabaseLines(io.TextIOBase):
    """Passes lines on, each with the name of the database that it is about."""

    encoding = "utf-8"
    errors = "strict"

    def __init__(self, out: TextIO) -> None:
        self._out = out
        #: Begins of lines, by database.
        self._begun: dict[str, str] = {}

    def write(self, text: str) -> int:
        """Take a text; a line is written when it is whole, because several databases write at the same time."""
        name = _database.get()
        *lines, rest = (self._begun.pop(name, "") + text).split("\n")
        if rest:
            self._begun[name] = rest
        prefix = f"{printable(name)}: " if name else ""
        for line in lines:
            self._out.write(f"{prefix}{line}\n")
        return len(text)

    def flush(self) -> None:
        """Pass on what is whole."""
        self._out.flush()

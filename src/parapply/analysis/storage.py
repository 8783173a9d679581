"""Files below folders, as the report needs them: of Hadoop (`hadoop`) or of this machine (`local`).

Names of files below a folder have the escapes of a URI with both, so that a report's folder can go from one to the
other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Protocol

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

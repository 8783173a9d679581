"""Files of this machine, by the names that Hadoop has for them. Small files only; data is the engine's.

In go local paths, with or without the scheme ``file:``. Raises OSError, which `duck` turns into one line.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import uuid
import zlib
from pathlib import Path
from typing import Final

from parapply.analysis.engine import StoredFile

#: Characters that are no part of a path in a URI; others stand for themselves, also if they are not ASCII.
_ESCAPED: Final = re.compile(r"[\x00-\x20\x7f\"#%<>?\[\\\]^`{|}]")
_SCHEME: Final = re.compile(r"^file:(//)?(?=/)")
_ANY_SCHEME: Final = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*:")
_PIECE_BYTES: Final = 1 << 20


def is_local(text: str) -> bool:
    """Return whether a path is one of this machine: Hadoop knows others."""
    return _SCHEME.match(text) is not None or _ANY_SCHEME.match(text) is None


class LocalStorage:
    """The file systems that are mounted here."""

    def qualified(self, text: str) -> str:
        """Return a path with its scheme, for example ``file:/logs``."""
        return f"file:{self._path(text)}"

    def raw_path(self, text: str) -> str:
        """Return the path without scheme and host, with the escapes of a URI."""
        return _escaped(str(self._path(text)))

    def is_folder(self, text: str) -> bool:
        """Return whether a folder of this name exists."""
        return self._path(text).is_dir()

    def files(self, folder: str, suffix: str | tuple[str, ...] = "") -> list[StoredFile]:
        """Return the files below a folder, at any depth, whose name ends so, sorted; none if it is missing."""
        root = f"{self._path(folder)}/"
        found = []
        # As texts: a log may have many thousands of files, and they are listed again and again.
        for parent, _, names in os.walk(root, onerror=_refuse, followlinks=True):
            for name in names:
                if not name.endswith(suffix):
                    continue
                path = f"{parent.rstrip('/')}/{name}"
                try:
                    size_bytes = os.stat(path).st_size  # noqa: PTH116
                except FileNotFoundError:
                    continue  # retention, or the end of a link
                found.append(StoredFile(name=_escaped(path[len(root) :]), path=path, size_bytes=size_bytes))
        return sorted(found, key=lambda file: file.name)

    def why_unreadable(self, text: str) -> str:
        """Return why a file cannot be read, as the file system says it; empty if it can."""
        try:
            with self._path(text).open("rb"):
                return ""
        except OSError as error:
            return error.strerror or type(error).__name__

    def why_no_gzip(self, text: str) -> str:
        """Return why a file cannot be unpacked, after reading all of it; empty if it can."""
        try:
            with gzip.open(self._path(text)) as file:
                while file.read(_PIECE_BYTES):
                    pass
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            return str(error)
        return ""

    def read_text(self, text: str) -> str:
        """Return a small file in UTF-8."""
        return self._path(text).read_text(encoding="utf-8")

    def write(self, text: str, content: bytes, *, is_new: bool = False) -> bool:
        """Write a small file whole or not at all.

        Returns:
            False if the file existed and had to be new.
        """
        path = self._path(text)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
        part.write_bytes(content)
        if not is_new:
            part.replace(path)
            return True
        try:
            # Unlike a rename it never takes the place of another one.
            os.link(part, path)
        except FileExistsError:
            return False
        finally:
            part.unlink()
        return True

    def remove(self, text: str) -> None:
        """Remove a file or a folder with all in it; nothing happens if it does not exist."""
        path = self._path(text)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def folders(self, pattern: str) -> list[str]:
        """Return the folders that a pattern with ``*`` names."""
        folder, _, rest = pattern.partition("*")
        root, _, begin = folder.rpartition("/")
        return [str(path) for path in self._path(root).glob(f"{begin}*{rest}") if path.is_dir()]

    def _path(self, text: str) -> Path:
        return Path(os.path.abspath(_SCHEME.sub("", text)))  # noqa: PTH100  links stay as they are


def _escaped(path: str) -> str:
    return _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", path)


def _refuse(error: OSError) -> None:
    # A folder that may not be read holds files that no figure would have.
    if not isinstance(error, FileNotFoundError):
        raise error

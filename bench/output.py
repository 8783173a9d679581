"""Where results go: the terminal, standard output for programs, files in a directory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from parapply.demo.errors import DemoError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Where results lie in a checkout; elsewhere `OUTSIDE` is made.
IN_CHECKOUT: Final = Path("bench/results")
OUTSIDE: Final = Path("parapply-bench")

# A narrower terminal wraps the lines and loses nothing.
_COLUMNS = 120
_HINT = "choose another directory with --out, or write no files with --no-save"


class Output:
    """Takes what was measured.

    Attributes:
        console: progress and tables; standard error where the document alone is on standard output.
        is_saved: files are written.
        is_json: the document is printed instead of tables.
    """

    def __init__(self, *, directory: Path | None = None, is_saved: bool = True, is_json: bool = False) -> None:
        """Write nothing yet.

        Args:
            directory: for files; `None` takes bench/results if there is one, else parapply-bench.
            is_saved: write files.
            is_json: print the document instead of tables.
        """
        self.console = Console(highlight=False, soft_wrap=True, width=_COLUMNS, stderr=is_json)
        self.is_saved = is_saved
        self.is_json = is_json
        self._directory = directory or (IN_CHECKOUT if IN_CHECKOUT.is_dir() else OUTSIDE)

    def say(self, text: str = "") -> None:
        """Print a line; what programs print may look like markup."""
        self.console.print(text, markup=False)

    def print_document(self, content: Mapping[str, Any]) -> None:
        """Print a JSON document on standard output if it was asked for."""
        if self.is_json:
            print(json.dumps(content, indent=2))

    def prepare(self) -> None:
        """Make the directory if files are written: not after an hour shall it turn out that nothing can be.

        Raises:
            DemoError: it cannot be made or written.
        """
        if not self.is_saved:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DemoError(f"{self._directory} cannot be made: {error.strerror}.", hint=_HINT) from error
        if not os.access(self._directory, os.W_OK):
            raise DemoError(f"{self._directory} cannot be written.", hint=_HINT)

    def path(self, name: str) -> Path:
        """Return the place of a file."""
        return self._directory / name

    def save(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file if files are written.

        Raises:
            OSError: it cannot be written.
        """
        if self.is_saved:
            self.say_written(write_result(self.path(f"{name}.json"), content))

    def say_written(self, path: Path) -> None:
        """Print the place of a file."""
        self.say(f"written: {path}")


def write_result(path: Path, content: Mapping[str, Any]) -> Path:
    """Write a JSON file and return its place.

    Raises:
        OSError: it cannot be written.
    """
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path

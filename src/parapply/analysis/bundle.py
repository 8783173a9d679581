"""The job for spark-submit: this package as one zip file, and the script that starts it.

In goes a folder; out come ``parapply.zip`` and ``parapply_report.py`` in it. The executors need neither: all work on
records is Spark's own. The driver needs msgspec, click, rich, plotly and Jinja2 in its Python.
"""

from __future__ import annotations

import zipfile
from importlib import resources
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.resources.abc import Traversable
    from pathlib import Path

PACKAGE_FILE: Final = "parapply.zip"
SCRIPT_FILE: Final = "parapply_report.py"
_SUFFIXES: Final = (".py", ".html")
# Always the same file from the same sources.
_TIME: Final = (2026, 1, 1, 0, 0, 0)
_SCRIPT: Final = '''\
"""The report over parapply's apply log, for spark-submit (--py-files parapply.zip)."""

import sys

from parapply.analysis.command import submitted

sys.exit(submitted(sys.argv[1:]))
'''


def write_bundle(folder: Path) -> None:
    """Write both files, over existing ones."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / PACKAGE_FILE, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in _sources(resources.files("parapply"), "parapply"):
            archive.writestr(zipfile.ZipInfo(name, _TIME), file.read_bytes(), zipfile.ZIP_DEFLATED)
    (folder / SCRIPT_FILE).write_text(_SCRIPT)


def _sources(folder: Traversable, name: str) -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda one: one.name):
        path = f"{name}/{entry.name}"
        if entry.is_dir():
            yield from _sources(entry, path)
        elif entry.name.endswith(_SUFFIXES):
            yield path, entry

"""Chooses the twin of each hot module: compiled where a build of exactly these sources lies next to them, else the .py.

Runs when ``parapply`` is imported, before any module that it names. The build (``hatch_build.py`` in the repository)
leaves extension modules and a manifest; Python would take the extension modules whatever their age, so without a
manifest that fits, a finder placed first loads the sources.

``PARAPPLY_COMPILED``: ``auto`` (the default), ``require`` (importing fails without the compiled twin) or ``forbid``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

VARIABLE: Final = "PARAPPLY_COMPILED"
MANIFEST: Final = "_compiled.json"

#: Compiled all or none: they know each other's types.
MODULES: Final = (
    "model",
    "wire.copy",
    "wire.rows",
    "wire.assembler",
    "plan.keys",
    "plan.table_changes",
    "plan.scheduler",
    "plan.batch",
    "target.sql.whole_rows",
)

#: Types and functions in C that several of them use.
_SHARED: Final = ("collector.pxd", "wire/binary.pxd", "wire/walk.pxd", "plan/order.pxd")

_PACKAGE: Final = Path(__file__).parent


def module_file(package: Path, module: str, suffix: str) -> Path:
    """Return the file of a hot module, for example its ``.py``."""
    return package.joinpath(*module.split(".")).with_suffix(suffix)


def sources(package: Path) -> list[Path]:
    """Return the files that the compiled twins are made from; not every module has a .pxd."""
    files = [module_file(package, module, suffix) for module in MODULES for suffix in (".py", ".pxd")]
    return [*files, *[package / name for name in _SHARED]]


def source_digest(package: Path) -> str:
    """Return a digest of everything the compiled twins are made from."""
    digest = hashlib.sha256()
    for file in sources(package):
        content = file.read_bytes() if file.exists() else b""
        digest.update(b"%d " % len(content) + content)
    return digest.hexdigest()


def write_manifest(package: Path, reason: str) -> None:
    """Note that the extension modules are of the sources as they are, or the reason why none exist."""
    (package / MANIFEST).write_text(json.dumps({"digest": source_digest(package), "reason": reason}) + "\n")


def extensions(package: Path) -> list[Path]:
    """Return the extension modules that this Python would load, also those that a build of before has left."""
    # Not by `rglob`, which takes four times as long, in each start.
    found: list[Path] = []
    left = [str(package)] if package.is_dir() else []  # it may be in a zip file
    while left:
        with os.scandir(left.pop()) as entries:
            for entry in entries:
                if entry.name.endswith(EXTENSION_SUFFIXES[0]):
                    found.append(Path(entry.path))
                elif "." not in entry.name and entry.name != "__pycache__" and entry.is_dir():
                    left.append(entry.path)
    return sorted(found)


def why_not_compiled(package: Path) -> str:
    """Return why the compiled twins cannot be used, or nothing if they can."""
    try:
        manifest = json.loads((package / MANIFEST).read_text())
        digest, reason = str(manifest["digest"]), str(manifest["reason"])
    except FileNotFoundError:
        return "not built"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    if reason:
        return reason
    if digest != source_digest(package):
        return "built from other sources"
    expected = sorted([module_file(package, module, EXTENSION_SUFFIXES[0]) for module in MODULES])
    return "" if extensions(package) == expected else "not built, or not exactly these modules, for this Python"


class _Sources:
    """Finds the source of each module that has an extension module next to it."""

    def __init__(self, package: Path, name: str) -> None:
        modules = [file.relative_to(package).as_posix().partition(".")[0] for file in extensions(package)]
        self._files = {f"{name}.{module.replace('/', '.')}": package / f"{module}.py" for module in modules}

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the place of the source; None for every other module."""
        file = self._files.get(fullname)
        if file is None:
            return None
        return spec_from_file_location(fullname, file, loader=SourceFileLoader(fullname, str(file)))


def choose(environ: Mapping[str, str]) -> str:
    """Choose the twins for this process.

    Returns:
        Why the interpreted ones are used; nothing for the compiled ones.

    Raises:
        ImportError: the environment requires what is not there, or says something else than the three words.
    """
    wish = environ.get(VARIABLE) or "auto"
    if wish not in ("auto", "require", "forbid"):
        raise ImportError(f"{VARIABLE}={wish}: auto, require and forbid are possible")
    reason = f"{VARIABLE}=forbid" if wish == "forbid" else why_not_compiled(_PACKAGE)
    if reason and wish == "require":
        raise ImportError(f"{VARIABLE}=require, but the hot path is not compiled: {reason}; see `make venv`")
    if reason and extensions(_PACKAGE):
        sys.meta_path.insert(0, _Sources(_PACKAGE, __name__.rpartition(".")[0]))
    return reason

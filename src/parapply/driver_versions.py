"""psycopg's versions without importlib.metadata, for a sooner start.

When imported, psycopg and its parts each look up their own version in the metadata of what is installed. That reads a
file of mail headers, with Python's parser for mail: a tenth of what a start takes. The same version is part of the name
of the directory that holds the metadata. (Python Packaging User Guide, "Recording installed projects".)
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping

_PACKAGES: Final = ("psycopg", "psycopg_binary", "psycopg_pool")


def tell_versions(paths: Iterable[str], modules: MutableMapping[str, ModuleType]) -> None:
    """Put in the modules that hold psycopg's versions, before psycopg is imported.

    A package whose directory of metadata is not found once in exactly one place is left to find its version itself.
    """
    found: dict[str, set[str]] = {package: set() for package in _PACKAGES}
    for path in paths:
        if not path.endswith("-packages"):
            continue
        for metadata in Path(path).glob("psycopg*.dist-info"):
            package, _, version = metadata.name.removesuffix(".dist-info").partition("-")
            if package in found:
                found[package].add(version)
    for package, versions in found.items():
        name = f"{package}.version"
        if len(versions) == 1 and name not in modules:
            module = modules[name] = ModuleType(name)
            module.__dict__["__version__"] = versions.pop()


def tell_own() -> None:
    """Do it for this process."""
    tell_versions(sys.path, sys.modules)

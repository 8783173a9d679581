"""Rules of imports that the import linter, which passes over imports for types, cannot check."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PACKAGE = Path(__file__).parents[2] / "src" / "parapply"


def _modules() -> dict[str, Path]:
    """Return the file of each module."""
    found = {}
    for path in _PACKAGE.rglob("*.py"):
        parts = path.relative_to(_PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imported(path: Path) -> Iterator[str]:
    """Yield the imports anywhere in a module, also for types only: a module, or a name in one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from [f"{node.module}.{alias.name}" for alias in node.names]


def _reached(start: str, arrows: Mapping[str, set[str]]) -> set[str]:
    """Return the modules that one needs, directly or by others."""
    found: set[str] = set()
    todo = [start]
    while todo:
        for name in arrows[todo.pop()] - found:
            found.add(name)
            todo.append(name)
    return found


@pytest.mark.slow
def test_no_modules_import_each_other_in_a_circle() -> None:
    """A module can be read with what it imports and without what imports it; imports for types count like all others.

    A package's ``__init__`` is left out, because an import of its modules imports it first.
    """
    modules = _modules()
    inner = {name for name, path in modules.items() if path.name != "__init__.py"}
    arrows = {name: (set(_imported(modules[name])) & inner) - {name} for name in inner}
    reached = {name: _reached(name, arrows) for name in inner}
    circles = {frozenset(other for other in reached[name] if name in reached[other]) for name in inner}
    found = [sorted(circle) for circle in circles if circle]
    assert not found

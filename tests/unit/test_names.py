"""Names in the package: one name for one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

_PACKAGE = Path(__file__).parents[2] / "src" / "parapply"

#: Words of contracts (SQL columns) for what is called `low_lsn` and `high_lsn` in Python.
_CONTRACT_WORDS = {"lowest_lsn", "highest_lsn", "lowest_remote_lsn", "highest_remote_lsn", "reported_flush_lsn"}

# Every source file is read.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """Half a million objects: kept, they would be searched through by each later collection of garbage."""
    return {str(path.relative_to(_PACKAGE)): ast.parse(path.read_text()) for path in sorted(_PACKAGE.rglob("*.py"))}


def test_no_two_public_classes_have_one_name(trees: dict[str, ast.Module]) -> None:
    """A class is found by its name, and no module must import one under another name."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for file, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(file)
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_a_position_has_one_name_in_python(trees: dict[str, ast.Module]) -> None:
    """The watermark is `low_lsn`, and what was reported as flushed `confirmed_flush_lsn`; other words are SQL's.

    The document of `status --json` has SQL's words as keys.
    """
    found = []
    for file, tree in trees.items():
        if file == "commands/status_schema.py":
            continue
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name) if (
                    name in _CONTRACT_WORDS
                ):
                    found.append((file, node.lineno, name))
                case ast.arg(arg=name) | ast.keyword(arg=str(name)) if name in _CONTRACT_WORDS:
                    found.append((file, node.lineno, name))
    assert found == []

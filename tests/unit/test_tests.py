"""Where a test lies: a module's unit tests are found by its path, and a rule's tests by tests/README.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tests.fixtures.rotation import choose, waiting
from tests.readme import README, document, table

_UNIT: Final = Path(__file__).parent
_ROOT: Final = _UNIT.parents[1]
_PACKAGE: Final = _ROOT / "src" / "parapply"
#: Files that hold rules of more than one module, of the repository's other files, or of the tests themselves.
_OF_NO_MODULE: Final = {
    "again": "tests/again.py",
    "alerts": "config/docker/prometheus/alerts.yml",
    "containers": "Dockerfile, docker-compose.yml and what they start",
    "differential": "tests/differential",
    "documents": "README.md and docs",
    "hostile_stream": "from the wire to the parameters of statements",
    "imports": "which module of the package may know which",
    "language": "every text of the repository",
    "makefile": "Makefile",
    "mutants": "the properties of the planner, which catch broken ones",
    "names": "what the package calls things",
    "postgres": "tests/postgres.py",
    "reference": "docs/site",
    "site": "docs/site",
    "systemd": "config/systemd",
    "tests": "tests",
    "warm": "tests/fixtures/warm.py",
}


def _module_of(path: Path) -> str | None:
    """Return the module or package that a file of unit tests names: all of its name, or the words at its beginning."""
    folder = path.parent.relative_to(_UNIT)
    folder = (_ROOT if folder.parts[:1] == ("bench",) else _PACKAGE) / folder
    words = path.stem.removeprefix("test_").split("_")
    for count in range(len(words), 0, -1):
        name = "_".join(words[:count])
        if (folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists():
            return name
    return None


def test_the_unit_tests_of_a_module_lie_where_the_module_lies() -> None:
    """`tests/unit/wire/test_rows.py` and `test_rows_binary_values.py` hold the rules of `src/parapply/wire/rows.py`."""
    found = sorted(_UNIT.rglob("test_*.py"))
    named = {path: path.stem.removeprefix("test_") for path in found}
    astray = [path for path in found if _module_of(path) is None]
    assert {named[path] for path in astray if path.parent == _UNIT} == set(_OF_NO_MODULE)
    assert [path for path in astray if path.parent != _UNIT] == []


def test_every_module_of_the_engine_has_tests_of_its_name() -> None:
    """A rule that the engine decides is shown without a server, where its module's name leads."""
    modules = {path.stem for path in (_PACKAGE / "engine").glob("*.py")} - {"__init__"}
    assert modules <= {_module_of(path) for path in (_UNIT / "engine").glob("test_*.py")}


def test_the_table_of_rules_names_files_that_test_them() -> None:
    """tests/README.md has a row for each rule, files only that name it, and one at least if there are any.

    A further file for a rule comes in with the next `python -m tests.readme`.
    """
    text, there = README.read_text(), table()
    rows = re.finditer(r"^\| ([TF]-?\d+) \|.*\|(.*)\|$", text, re.MULTILINE)
    shown = {row[1]: set(re.findall(r"\]\(([^)]*)\)", row[2])) for row in rows}
    assert list(shown) == list(there), "run python -m tests.readme"
    assert {number: files - set(there[number]) for number, files in shown.items() if files - set(there[number])} == {}
    assert [number for number, files in there.items() if files and not shown[number]] == []
    assert text.partition("\n| rule ")[0] == document().partition("\n| rule ")[0]


def test_every_file_has_its_turn() -> None:
    """A file that waits in two sessions runs in the next, and the parts are as large as each other."""
    paths = {Path(f"test_{name}.py") for name in range(31)}
    parts = [paths - waiting(seed, paths) for seed in (7, 8, 9)]
    assert set().union(*parts) == paths
    assert sum(map(len, parts)) == len(paths)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_every_variant_has_its_turn() -> None:
    """Sessions of some seeds run all variants of a test that takes turns, and the choice is the same among fewer."""
    variants = [f"test_sets.py {name}" for name in ("live", "backlog", "one", "many")]
    chosen = [choose(seed, variants) for seed in range(60)]
    assert set(chosen) == set(variants)
    assert all(choose(seed, {variants[0], one}) == one for seed, one in enumerate(chosen))

"""Both twins of the hot path: which one runs is what the environment and the build say, never an old one silently."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import parapply
from parapply import hotpath

PACKAGE = Path(parapply.__file__).parent
SHOW = """
import importlib, parapply
from parapply.hotpath import MODULES
files = [importlib.import_module(f"parapply.{module}").__file__ for module in MODULES]
print(sum(not file.endswith(".py") for file in files), parapply.WHY_INTERPRETED)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a copy of the package without anything compiled."""
    return Path(
        shutil.copytree(PACKAGE, tmp_path / "parapply", ignore=shutil.ignore_patterns("*.so", "__pycache__", "_*.json"))
    )


def _run(package: Path, wish: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(package.parent), hotpath.VARIABLE: wish}
    return subprocess.run(
        [sys.executable, "-c", SHOW], env=environ, cwd=package.parent, capture_output=True, text=True, check=False
    )


def _break(package: Path) -> None:
    """Put extension modules in the package that cannot be loaded: an import of one fails."""
    for module in hotpath.MODULES:
        hotpath.module_file(package, module, EXTENSION_SUFFIXES[0]).write_bytes(b"no module")


def test_all_modules_are_of_the_twin_that_is_named() -> None:
    """The hot path is compiled as a whole or not at all, and `WHY_INTERPRETED` says which."""
    files = [importlib.import_module(f"parapply.{module}").__file__ or "" for module in hotpath.MODULES]
    assert {file.endswith(".py") for file in files} == {bool(parapply.WHY_INTERPRETED)}


@pytest.mark.slow
@pytest.mark.skipif(bool(hotpath.why_not_compiled(PACKAGE)), reason="no compiled build here: nothing to choose from")
def test_the_environment_chooses_the_twin() -> None:
    """With a build that fits, auto and require take it and forbid does not."""
    chosen = {wish: _run(PACKAGE, wish).stdout.strip() for wish in ("auto", "require", "forbid", "")}
    n_modules = str(len(hotpath.MODULES))
    assert chosen == {"auto": n_modules, "require": n_modules, "": n_modules, "forbid": "0 PARAPPLY_COMPILED=forbid"}


@pytest.mark.slow
@pytest.mark.parametrize("change", ["source", "types", "manifest", "no manifest", "extension", "stray", "other reason"])
def test_a_build_that_does_not_fit_is_never_loaded(package: Path, change: str) -> None:
    """Compiled modules of other sources, or without a manifest, or not all of them: the sources run."""
    _break(package)
    hotpath.write_manifest(package, "no compiler" if change == "other reason" else "")
    if change == "source":
        source = package / "wire" / "rows.py"
        source.write_text(source.read_text() + "\n")
    elif change == "types":
        (package / "collector.pxd").write_text("")
    elif change == "manifest":
        (package / hotpath.MANIFEST).write_text("{")
    elif change == "no manifest":
        (package / hotpath.MANIFEST).unlink()
    elif change == "extension":
        hotpath.module_file(package, "plan.batch", EXTENSION_SUFFIXES[0]).unlink()
    elif change == "stray":
        hotpath.module_file(package, "plan.table", EXTENSION_SUFFIXES[0]).write_bytes(b"no module")
    done = _run(package, "auto")
    assert done.stdout.startswith("0 "), done.stderr
    assert len(done.stdout.split()) > 1
    assert _run(package, "forbid").stdout.startswith("0 ")


def test_a_build_that_fits_is_what_is_loaded(package: Path) -> None:
    """The manifest of exactly these sources lets the extension modules through: broken ones then fail, loudly."""
    _break(package)
    hotpath.write_manifest(package, "")
    assert json.loads((package / hotpath.MANIFEST).read_text())["reason"] == ""
    assert hotpath.why_not_compiled(package) == ""
    done = _run(package, "auto")
    assert done.returncode != 0
    assert "ImportError" in done.stderr


def test_what_is_required_and_missing_is_named(package: Path) -> None:
    """`require` fails at import and says why; so does a word that does not exist."""
    for wish, words in (("require", "not built"), ("yes", "auto, require and forbid")):
        done = _run(package, wish)
        assert done.returncode != 0
        last = done.stderr.splitlines()[-1]
        assert last.startswith("ImportError: PARAPPLY_COMPILED=")
        assert words in last


def test_without_a_build_nothing_stands_in_the_way_of_imports(package: Path) -> None:
    """A plain installation runs the sources and says that it was not built."""
    assert _run(package, "auto").stdout == "0 not built\n"

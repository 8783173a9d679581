"""Versions of the driver, told before it is imported."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING

from parapply.driver_versions import tell_versions

if TYPE_CHECKING:
    from pathlib import Path


def _told(*paths: Path) -> dict[str, str]:
    modules: dict[str, ModuleType] = {}
    tell_versions([str(path) for path in paths], modules)
    return {name: module.__dict__["__version__"] for name, module in modules.items()}


def test_the_versions_are_those_of_the_metadata() -> None:
    """The versions equal the metadata's, and importing the driver no longer reads the metadata."""
    program = (
        "import sys; from parapply.driver_versions import tell_own; tell_own(); import psycopg, psycopg_pool\n"
        "print(psycopg.__version__, psycopg_pool.__version__, 'importlib.metadata' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [metadata.version("psycopg"), metadata.version("psycopg-pool"), "False"]


def test_what_is_not_plain_is_left_to_the_driver(tmp_path: Path) -> None:
    """Nothing is set for a package that is missing, or is present twice; other places are not looked at."""
    one, two, other = tmp_path / "site-packages", tmp_path / "dist-packages", tmp_path / "src"
    for directory in (
        one / "psycopg-3.3.9.dist-info",
        one / "psycopg_pool-3.2.dist-info",
        two / "psycopg_pool-3.3.dist-info",
        other / "psycopg_binary-3.3.9.dist-info",
    ):
        directory.mkdir(parents=True)
    assert _told(one, two, other) == {"psycopg.version": "3.3.9"}


def test_a_module_that_is_there_stays(tmp_path: Path) -> None:
    """The driver's own answer is not replaced."""
    (tmp_path / "site-packages" / "psycopg-9.9.dist-info").mkdir(parents=True)
    own = ModuleType("psycopg.version")
    modules = {own.__name__: own}
    tell_versions([str(tmp_path / "site-packages")], modules)
    assert modules == {own.__name__: own}

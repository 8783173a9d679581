"""Failed tests are repeated once: one that passes then is named, one that fails again fails the session."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.again import MOST, again

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

_TESTS = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("n", range({n}))
def test_once(n):
    mark = Path(__file__).with_name(f"mark-{{n}}")
    was = mark.exists()
    mark.touch()
    assert was and {passes}
"""


def _session(folder: Path, n: int, *, passes: bool) -> None:
    (folder / "test_it.py").write_text(_TESTS.format(n=n, passes=passes))
    first = subprocess.run(
        [sys.executable, "-m", "pytest", "--quiet", "test_it.py"], cwd=folder, check=False, capture_output=True
    )
    assert first.returncode == 1, first.stdout


def test_what_passes_alone_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The session counts as passed if each failed test passes the second time, and says which did."""
    _session(tmp_path, 1, passes=True)
    assert again(tmp_path) == 0
    assert "PASSED ALONE ONLY: test_it.py::test_once[0]" in capfd.readouterr().out


def test_what_fails_twice_has_failed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A test that fails again fails the session, and none is named as passed."""
    _session(tmp_path, 1, passes=False)
    assert again(tmp_path) == 1
    said = capfd.readouterr().out
    assert ("1 failed" in said, "PASSED" in said) == (True, False)


def test_many_failures_are_not_repeated(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """More failures than a few are no accident."""
    _session(tmp_path, MOST + 1, passes=True)
    assert again(tmp_path) == 1
    assert capfd.readouterr().out == ""


def test_a_session_without_failures_is_not_repeated(tmp_path: Path) -> None:
    """Where pytest itself failed there is nothing to repeat, and that is no success."""
    assert again(tmp_path) == 1

"""The Makefile as a newcomer meets it: help, one line where something is missing, a foreign environment untouched."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parapply import hotpath

ROOT = Path(__file__).parents[2]
MAKE = shutil.which("make")

pytestmark = pytest.mark.skipif(MAKE is None, reason="make is not installed: nothing to run the Makefile with")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a directory with what the Makefile reads, and no environment yet."""
    (tmp_path / "bench").mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "bench/requirements.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    return tmp_path


def run(directory: Path, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command with no make of the test's own around it; searching for a Python may start several."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        command, cwd=directory, env={"PYTHON": sys.executable, **kept, **environ}, capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip


def test_help_is_the_default_and_names_every_target(checkout: Path) -> None:
    """`make` alone prints each target with its purpose and makes nothing."""
    done = run(checkout, "make")
    phony = re.search(r"^\.PHONY: (.*)$", (checkout / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert [line.split()[1] for line in done.stdout.splitlines()] == phony.group(1).split()
    assert all(len(line.split()) > 3 for line in done.stdout.splitlines())
    assert not (checkout / ".venv").exists()


def test_a_foreign_environment_is_never_changed(checkout: Path) -> None:
    """An environment without our mark is used as it is: nothing is installed in it and no mark put there."""
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to("/bin/false")
    assert run(checkout, "make", "venv").returncode == 0
    assert [path.name for path in (checkout / ".venv").iterdir()] == ["bin"]
    (checkout / ".venv" / "bin" / "python").unlink()
    done = run(checkout, "make", "venv")
    assert done.returncode != 0
    assert "move it away" in done.stderr


def test_an_environment_up_to_date_costs_nothing(checkout: Path) -> None:
    """With a stamp newer than the pins nothing is run; newer pins renew it."""
    venv = checkout / ".venv"
    venv.mkdir()
    for name in (".made-by-make", ".up-to-date"):
        (venv / name).touch()
    assert run(checkout, "make", "venv", PYTHON="/bin/false").returncode == 0
    os.utime(checkout / "constraints.txt", (2**32, 2**32))
    assert run(checkout, "make", "venv", PYTHON="/bin/false").returncode != 0


def test_the_build_depends_on_all_that_the_hot_path_is_made_from() -> None:
    """Else a change of one of them leaves the hot path interpreted, without a word."""
    done = run(ROOT, "make", "--eval", "sources: ; @echo $(HOT_SOURCES)", "sources")
    made_from = {str(file.relative_to(ROOT)) for file in hotpath.sources(ROOT / "src" / "parapply") if file.exists()}
    assert made_from <= set(map(os.path.normpath, done.stdout.split()))


def test_the_demo_needs_no_more_than_the_demo(checkout: Path) -> None:
    """`make demo` alone installs its own extra, and says so; with an environment that has all it uses that one."""
    done = run(checkout, "make", "--dry-run", "demo")
    assert done.returncode == 0, done.stderr
    assert "-e '.[demo]'" in done.stdout
    assert "report" not in done.stdout
    assert "installing parapply with demo" in done.stdout
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / ".up-to-date").touch()
    assert run(checkout, "make", "--dry-run", "demo").stdout == ".venv/bin/parapply demo\n"


#: Stands for each program of the environment: says that it runs, and fails if it is the one that shall.
_PROGRAM = """#!/bin/bash
name=${0##*/}
[[ $* == *pytest* ]] && name=${PARAPPLY_COMPILED:+hot }tests
[[ $* == *WHY_INTERPRETED* ]] && exit "$IS_INTERPRETED"
echo "ran $name"
[[ $name != "$FAILS" ]]
"""


@pytest.mark.parametrize("fails", ["", "mypy", "tests", "hot tests"])
def test_every_part_of_the_tests_is_shown_and_its_failure_counts(checkout: Path, fails: str) -> None:
    """`make test` shows what tests, lint and interpreted pass print, one after the other, and fails if one does."""
    _fill(checkout / ".venv" / "bin")
    done = run(checkout, "make", "test", FAILS=fails, IS_INTERPRETED="0")
    lint = ["ran ruff", "ran ruff", "ran mypy", *([] if fails == "mypy" else ["ran lint-imports"])]
    *shown, times = [line for line in done.stdout.splitlines() if line != "ran python"]
    assert shown == [
        "ran tests",
        f"== lint: {'FAILED' if fails == 'mypy' else 'passed'}", *lint,
        f"== interpreted: {'FAILED' if fails == 'hot tests' else 'passed'}", "ran hot tests",
    ]  # fmt: skip
    seconds = re.findall(r"(\w+(?: in)?) \d+ s", times.removeprefix("== times: "))
    # A few failures are repeated, and these pass then.
    again = ["again"] if fails == "tests" else []
    assert sorted(seconds) == [*again, "interpreted", "lint", "prepared in", "tests"], times
    assert (done.returncode != 0) == bool(fails and not again), done.stderr


def test_what_is_interpreted_anyway_is_tested_once(checkout: Path) -> None:
    """Where the hot path is not compiled there is no second pass over its tests."""
    _fill(checkout / ".venv" / "bin")
    done = run(checkout, "make", "test", FAILS="", IS_INTERPRETED="1")
    assert done.returncode == 0, done.stderr
    assert "interpreted" not in done.stdout


def _fill(programs: Path) -> None:
    programs.mkdir(parents=True)
    for name in ("python", "ruff", "mypy", "lint-imports"):
        (programs / name).write_text(_PROGRAM)
        (programs / name).chmod(0o755)


@pytest.mark.parametrize(("python", "words"), [("", "install python3.11"), ("/bin/false", "install python3-venv")])
def test_what_is_missing_is_one_line(checkout: Path, python: str, words: str) -> None:
    """Without Python 3.11, or without its venv, one line says what to install, and nothing is left behind."""
    done = run(checkout, "make", "venv", f"PYTHON={python}")
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(lines) == 1
    assert words in lines[0]
    assert not (checkout / ".venv").exists()


def test_ci_runs_from_any_directory_and_names_a_missing_make(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """.ci/run works whatever the working directory, and without make says what to install."""
    programs = tmp_path_factory.mktemp("bin")
    for name in ("bash", "dirname", "env"):
        (programs / name).symlink_to(shutil.which(name) or name)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    done = run(elsewhere, str(checkout / ".ci" / "run"), PATH=str(programs))
    assert (done.returncode, done.stderr) == (1, "make is missing: install the package make\n")
    (programs / "make").write_text('#!/bin/bash\necho "$PWD $*"\n')
    (programs / "make").chmod(0o755)
    done = run(elsewhere, str(checkout / ".ci" / "run"), PATH=str(programs))
    assert done.stdout == f"{checkout} test\n"

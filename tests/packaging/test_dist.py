"""The archives of `make dist`: complete, of this checkout and no machine's, and each a program once it is installed.

`make dist-test` installs them with all that they depend on and runs the demo.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import parapply

ROOT = Path(__file__).parents[2]
# An installation must not see the checkout, nor a choice of the twin made for the tests.
_ENVIRON = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("MAKE", "PARAPPLY_")) and name != "PYTHONPATH"
}

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed: nothing to build with")


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return what `make dist` makes; the environment is as it is, so no registry is asked."""
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        ["make", "--old-file=venv", "dist", f"DIST={out}", f"VENV={sys.prefix}"],
        cwd=ROOT, env=_ENVIRON, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return sorted(out.iterdir())


def _wheels(archives: list[Path]) -> list[Path]:
    return [one for one in archives if one.suffix == ".whl"]


def _contents(archive: Path) -> dict[str, bytes]:
    """Return each file by its path in the archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(archive) as sdist:
        members = [one for one in sdist.getmembers() if one.isfile()]
        return {one.name: file.read() for one in members if (file := sdist.extractfile(one))}


def test_there_is_a_wheel_for_every_python_and_a_compiled_one_for_this(archives: list[Path]) -> None:
    """The interpreted wheel fits everywhere; the compiled one fits other machines too, where auditwheel can say so."""
    tags = [one.stem.split("-", 2)[2] for one in _wheels(archives)]
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    if not parapply.WHY_INTERPRETED:
        platform = tags.pop(0).removeprefix(f"{python}-{python}-")
        assert platform.startswith("manylinux" if importlib.util.find_spec("auditwheel") else "linux_")
    assert tags == ["py3-none-any"]
    assert [one.name for one in archives if one.suffix == ".gz"] == [f"parapply-{parapply.__version__}.tar.gz"]


def test_the_sdist_is_the_repository(archives: list[Path]) -> None:
    """A user of the sdist can build, test and operate: every tracked file is in it, and nothing that was compiled."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing says which files are tracked")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    (sdist,) = set(archives) - set(_wheels(archives))
    packed = {name.partition("/")[2] for name in _contents(sdist)}
    assert tracked - packed == set()
    assert [name for name in packed if name.endswith((".so", "_compiled.json", ".pyc"))] == []


def test_nothing_names_the_machine(archives: list[Path]) -> None:
    """No path of the checkout is in an archive, compiled modules included."""
    for archive in archives:
        named = [name for name, content in _contents(archive).items() if str(ROOT).encode() in content]
        assert named == [], archive.name


def test_each_wheel_is_a_program_in_an_empty_environment(archives: list[Path], tmp_path: Path) -> None:
    """Installed from its wheel alone, the command runs, from there, and `--version` says which twin it has."""
    for wheel in _wheels(archives):
        home = tmp_path / wheel.stem
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=60)
        install = [sys.executable, "-m", "pip", "--python", str(home), "install", "--quiet", "--no-deps", "--no-index"]
        subprocess.run([*install, "--no-compile", str(wheel)], check=True, timeout=60, env=_ENVIRON)
        # Its dependencies are the tests'; a .pth in there, which leads to the checkout, is not read this way.
        site = next(home.glob("lib/python*/site-packages"))
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        done = subprocess.run(
            [str(home / "bin" / "parapply"), "--version"],
            cwd=tmp_path, env=_ENVIRON, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        expected = "hot path interpreted (not built)" if "none-any" in wheel.name else "hot path compiled"
        assert done.stdout.startswith(f"parapply {parapply.__version__}\n"), done.stderr
        assert expected in done.stdout
        where = [str(home / "bin" / "python"), "-c", "import parapply; print(parapply.__file__)"]
        found = subprocess.run(where, cwd=tmp_path, env=_ENVIRON, capture_output=True, text=True, check=True)
        assert Path(found.stdout.strip()).is_relative_to(site)
        # Where `man` looks beside a program, and pipx puts it into the reader's own.
        assert (home / "share" / "man" / "man1" / "parapply.1").exists()

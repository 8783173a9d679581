"""``python -m tests.packaging [--pipx] dist``: install each archive in an empty environment and run its demo.

Then pipx installs the wheel that fits into an empty home; with `--pipx` only that. Pip gets from its registry what
parapply depends on, so this is a target of the Makefile and no test.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from parapply import __version__

_ROOT = Path(__file__).parents[2]
_CONSTRAINTS = str(_ROOT / "constraints.txt")
#: Neither the checkout nor the sources beside it may stand in for what is installed.
_ENVIRON = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _run(archive: Path, directory: Path, command: list[str], environ: dict[str, str] = _ENVIRON) -> str:
    """Run a command and return what it shows; one that fails ends the program."""
    print(f"== {archive.name}: {' '.join(command[:2])}", flush=True)  # noqa: T201  talks to a person
    shown = subprocess.run(command, check=True, cwd=directory, env=environ, stdout=subprocess.PIPE, text=True).stdout
    print(shown, end="", flush=True)  # noqa: T201  as above
    return shown


def _try(archive: Path, directory: Path) -> None:
    """Install an archive with pip and run its demo."""
    programs = directory / "environment" / "bin"
    _run(archive, directory, [sys.executable, "-m", "venv", str(programs.parent)])
    install = ["install", "--quiet", "-c", _CONSTRAINTS, f"{archive}[demo]"]
    _run(archive, directory, [str(programs / "pip"), *install])
    _run(archive, directory, [str(programs / "parapply"), "--version"])
    _run(archive, directory, [str(programs / "parapply"), "demo"])


def _try_pipx(wheel: Path, directory: Path) -> None:
    """Install a wheel with pipx into an empty home: its program, its page of the manual, and a short demo."""
    tools, home = directory / "tools" / "bin", directory / "home"
    home.mkdir()
    environ = {name: value for name, value in _ENVIRON.items() if not name.startswith(("PIPX_", "XDG_"))}
    environ["HOME"] = str(home)
    _run(wheel, directory, [sys.executable, "-m", "venv", str(tools.parent)])
    _run(wheel, directory, [str(tools / "pip"), "install", "--quiet", "pipx"])
    install = ["install", "--pip-args", f"-c {_CONSTRAINTS}", f"{wheel}[demo]"]
    _run(wheel, directory, [str(tools / "pipx"), *install], environ)
    parapply = str(home / ".local" / "bin" / "parapply")
    shown = _run(wheel, directory, [parapply, "--version"], environ)
    assert shown.startswith(f"parapply {__version__}\n"), shown
    assert (home / ".local" / "share" / "man" / "man1" / "parapply.1").exists()
    _run(wheel, directory, [parapply, "demo", "--duration-s", "5"], environ)


def main() -> None:
    """Try what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipx", action="store_true", help="only with pipx")
    parser.add_argument("dist", type=Path)
    options = parser.parse_args()
    archives = sorted(options.dist.resolve().glob("parapply-*"))
    # The compiled wheel sorts before the interpreted one.
    wheel = next(one for one in archives if one.suffix == ".whl")
    tried = [(_try_pipx, wheel)] if options.pipx else [*((_try, one) for one in archives), (_try_pipx, wheel)]
    for trying, archive in tried:
        with tempfile.TemporaryDirectory() as directory:
            # The demo's servers run as another user where root starts it.
            Path(directory).chmod(0o755)
            trying(archive, Path(directory))


if __name__ == "__main__":
    main()

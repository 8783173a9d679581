"""``python -m tests.packaging dist``: each archive is installed in an empty environment, and the demo runs there.

Pip gets from its registry what parapply depends on, so this is a target of the Makefile and no test.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def _try(archive: Path) -> None:
    """Install an archive and run its demo; the first command that fails ends the program."""
    # Neither the checkout nor the sources beside it may stand in for what is installed.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as directory:
        # The demo's servers run as another user where root starts it.
        Path(directory).chmod(0o755)
        programs = Path(directory) / "environment" / "bin"
        for command in (
            [sys.executable, "-m", "venv", str(programs.parent)],
            [str(programs / "pip"), "install", "--quiet", "-c", str(_ROOT / "constraints.txt"), f"{archive}[demo]"],
            [str(programs / "parapply"), "--version"],
            [str(programs / "parapply"), "demo"],
        ):
            print(f"== {archive.name}: {' '.join(command[:2])}", flush=True)  # noqa: T201  talks to a person
            subprocess.run(command, check=True, cwd=directory, env=environ)


if __name__ == "__main__":
    (dist,) = sys.argv[1:]
    for one in sorted(Path(dist).resolve().glob("parapply-*")):
        _try(one)

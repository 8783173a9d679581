"""The examples of docs/CONSISTENCY.md show what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 100


def test_the_examples_run() -> None:
    """What a reader sees at each level is what the document promises; the script checks it and says so."""
    script = _ROOT / "docs" / "examples" / "consistency.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S,
        env={"PYTHONPATH": str(_ROOT / "src"), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    document = (_ROOT / "docs" / "CONSISTENCY.md").read_text(encoding="utf-8")
    for line in done.stdout.splitlines():
        said = line.split(" at ")[0].split(" behind ")[0]
        assert said in document, line

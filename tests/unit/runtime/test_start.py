"""Modules that a start loads before both ends are being opened, and modules that it does without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import parapply

_ENVIRON = {**os.environ, "PYTHONPATH": str(Path(parapply.__file__).parents[1])}


def _exit_code(script: str) -> int:
    return subprocess.run([sys.executable, "-c", script], env=_ENVIRON, check=False, timeout=60).returncode


def test_few_modules_are_loaded_before_both_ends_are_being_opened() -> None:
    """The first sessions need a few modules of the daemon; all others are loaded while the servers answer."""
    script = (
        "import sys; import parapply.config_fleet; before = set(sys.modules); import parapply.runtime.start\n"
        "sys.exit('parapply.runtime.sessions' in sys.modules or len(set(sys.modules) - before) > 60)"
    )
    assert _exit_code(script) == 0


def test_an_epoch_is_loaded_while_servers_are_awaited() -> None:
    """A third of its modules is not needed before both ends are open."""
    script = (
        "import sys; import parapply.runtime.daemon; before = set(sys.modules); import parapply.runtime.epoch\n"
        "sys.exit('parapply.runtime.epoch' in before or len(set(sys.modules) - before) < 40)"
    )
    assert _exit_code(script) == 0

"""Failpoints: they do what is armed, at the hit that is armed, and nothing otherwise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from parapply import failpoints
from parapply.errors import ConfigError, SourceLost, TargetLost

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPT = """
import os
from parapply import failpoints
failpoints.arm(os.environ)
for n in range(1, 4):
    print("before", n, flush=True)
    failpoints.probe(failpoints.COMMIT_SENT)
    failpoints.probe(failpoints.DRAIN)
"""


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.arm({})


def run_armed(text: str) -> subprocess.CompletedProcess[str]:
    """Run a process that passes the points three times."""
    source = str(Path(failpoints.__file__).parents[1])
    environ = {**os.environ, "PYTHONPATH": source, "PARAPPLY_FAILPOINT": text}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=False, timeout=60
    )


def test_kill_at_the_nth_hit() -> None:
    """Kill is SIGKILL to the process itself, at the n-th passing of that point and no other."""
    done = run_armed("commit_sent:kill:2")
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["before", "1", "before", "2"]


def test_exit_at_the_first_hit() -> None:
    """Without a count the first passing counts; exit leaves with a status of its own."""
    done = run_armed("drain:exit")
    assert done.returncode == failpoints.EXIT_STATUS
    assert done.stdout.split() == ["before", "1"]


def test_hold_until_the_file_is_removed(tmp_path: Path) -> None:
    """Hold makes a file and goes on when it is removed."""
    failpoints.arm({"PARAPPLY_FAILPOINT": "advanced:hold", "PARAPPLY_FAILPOINT_DIR": str(tmp_path)})
    held = tmp_path / "advanced.held"
    passed = threading.Thread(target=failpoints.probe, args=(failpoints.ADVANCED,), daemon=True)
    passed.start()
    while not held.exists():
        assert passed.is_alive()
    held.unlink()
    passed.join(timeout=30)
    assert not passed.is_alive()
    failpoints.probe(failpoints.ADVANCED)  # only the first hit was armed


@pytest.mark.parametrize(("name", "lost"), [("feedback_sent", SourceLost), ("committed", TargetLost)])
def test_raise_lost_names_the_side(name: str, lost: type[Exception]) -> None:
    """Raise-lost fails as the connection of that side would, once."""
    failpoints.arm({"PARAPPLY_FAILPOINT": f"{name}:raise-lost"})
    with pytest.raises(lost, match=name):
        failpoints.probe(name)
    failpoints.probe(name)


def test_unarmed_points_do_nothing() -> None:
    """With no variable set every point is passed."""
    failpoints.arm({})
    for name in (*failpoints.NAMES, *failpoints.COPY_NAMES, *failpoints.MIGRATE_NAMES, *failpoints.LATER_NAMES):
        failpoints.probe(name)


@pytest.mark.parametrize("text", ["nowhere:kill", "drain", "drain:", "drain:fly", "drain:kill:0", "drain:kill:x"])
def test_mistakes_are_errors(text: str) -> None:
    """A point, action or count that does not exist would prove nothing, so it is an error."""
    with pytest.raises(ConfigError, match="PARAPPLY_FAILPOINT"):
        failpoints.arm({"PARAPPLY_FAILPOINT": text})


def test_hold_needs_a_directory() -> None:
    """Hold without a directory could never be seen or ended."""
    with pytest.raises(ConfigError, match="PARAPPLY_FAILPOINT_DIR"):
        failpoints.arm({"PARAPPLY_FAILPOINT": "drain:hold"})


def test_every_constant_is_a_known_name() -> None:
    """Each name the module defines can be armed."""
    constants = {value for key, value in vars(failpoints).items() if key.isupper() and isinstance(value, str)}
    names = {name for name in constants if not name.startswith("PARAPPLY")}
    listed = (
        failpoints.COPY_NAMES,
        failpoints.MIGRATE_NAMES,
        failpoints.LATER_NAMES,
        failpoints.HEAL_NAMES,
        failpoints.SEED_NAMES,
        failpoints.CAPTURE_NAMES,
    )
    assert names == failpoints.NAMES.union(*listed, {failpoints.MIGRATE_DATABASE})

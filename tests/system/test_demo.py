"""`parapply demo` as a user runs it, to the end and interrupted in the middle; and that its proof can fail."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from parapply.demo.stage import Interrupts
from tests.fixtures.documents import ROOT
from tests.fixtures.warm_program import PROGRAM_VARIABLE, WarmProgram

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SOURCE_TREE = ROOT / "src"
# Much longer than the few seconds that each needs: a hang is what ends here.
END_TIMEOUT_S = 300
# A line of the load's progress: servers, pgbench and the daemon run.
LOAD_LINE = re.compile(r"publisher +[\d,]+ tx/s +applied")
# The first line: both servers run.
SERVER_LINE = re.compile(r"publisher: PostgreSQL")

# The demonstration with copied servers and fifty transactions a second: as many as there can be keep the machine busy,
# and what is left behind does not depend on them.
SLOW = """
import sys
from functools import partialmethod
from parapply.demo.load import DemoLoad
from tests.fixtures.copied_command import main

DemoLoad.__init__ = partialmethod(DemoLoad.__init__, rate=50)
"""
MAIN = "sys.exit(main(sys.argv[1:]))"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory for temporary files that the account of the servers can enter; pytest's own it cannot."""
    with tempfile.TemporaryDirectory(prefix="demo-test-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


def start(
    scratch: Path, duration_s: int, program: Sequence[str] = ("-c", SLOW + MAIN), **environ: str
) -> subprocess.Popen[str]:
    """Start the demonstration in a process group of its own, as a shell does."""
    paths = [str(SOURCE_TREE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {"TMPDIR": str(scratch), "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", **environ}
    return subprocess.Popen(
        [sys.executable, *program, "demo", f"--duration-s={duration_s}", "--clients=2"], env={**os.environ, **more},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def run(scratch: Path, program: Sequence[str]) -> tuple[subprocess.Popen[str], str]:
    """Run a demonstration to its end, and return it with its output; only its daemons import the package again."""
    commands = scratch / "python"
    with (
        closing(WarmProgram(commands)),
        start(scratch, duration_s=1, program=program, **{PROGRAM_VARIABLE: str(commands)}) as demo,
    ):
        output, _ = demo.communicate(timeout=END_TIMEOUT_S)
    return demo, output


def left_behind(scratch: Path) -> list[str]:
    """Return the processes that belong to a demonstration, and its directories.

    A process is known by the directory in its command line or its environment; both are asked, for PostgreSQL
    overwrites its environment and pgbench has no path on its command line.
    """
    found = [str(path) for path in scratch.glob("parapply-demo-*")]
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if any(str(scratch) in word for word in [*words, process.environ().get("TMPDIR", "")]):
                found.append(f"{process.pid}: {words}")
        except psutil.Error:
            continue  # It has just ended, or is a process of the system's.
    return found


@pytest.mark.in_turn("number", "code", "moment")
@pytest.mark.parametrize(
    ("number", "code", "moment"), [(signal.SIGINT, 130, LOAD_LINE), (signal.SIGTERM, 143, SERVER_LINE)]
)
def test_an_interrupted_demonstration_cleans_up(
    scratch: Path, number: signal.Signals, code: int, moment: re.Pattern[str]
) -> None:
    """Ctrl-C, which reaches the whole process group, and SIGTERM end it, and nothing is left behind."""
    with start(scratch, duration_s=60) as demo:
        assert demo.stdout is not None
        seen = next((line for line in demo.stdout if moment.search(line)), "")
        os.killpg(demo.pid, number)
        rest, _ = demo.communicate(timeout=END_TIMEOUT_S)
    assert seen
    assert demo.returncode == code, rest
    assert "Traceback" not in rest
    assert left_behind(scratch) == []


def test_a_killed_demonstration_leaves_nothing_running(scratch: Path) -> None:
    """SIGKILL leaves no time to clean up: others end the daemon, pgbench and the servers and remove the files."""
    with start(scratch, duration_s=60) as demo:
        assert demo.stdout is not None
        seen = next((line for line in demo.stdout if LOAD_LINE.search(line)), "")
        family = psutil.Process(demo.pid).children(recursive=True)
        demo.kill()
        demo.communicate(timeout=END_TIMEOUT_S)
    _, alive = psutil.wait_procs(family, timeout=END_TIMEOUT_S)
    assert seen
    assert alive == []
    assert left_behind(scratch) == []


# And one row more on the subscriber once the load is over.
CHANGED = f"""{SLOW}
from parapply.demo.stage import BANK
from parapply.demo.show import View

follow = View.follow

def follow_and_change(view, goes_on):
    follow(view, goes_on)
    view._stage.target.execute("INSERT INTO pgbench_accounts VALUES (0, 1, 0, '')", dbname=BANK)

View.follow = follow_and_change
{MAIN}"""


@pytest.mark.in_turn("program", "code", "rows", "verdict")
@pytest.mark.parametrize(
    ("program", "code", "rows", "verdict"),
    [(SLOW + MAIN, 0, "100,000 +100,000 +", "equal"), (CHANGED, 1, "100,000 +100,001 +", "DIFFERS")],
    ids=["equal", "differs"],
)
def test_the_demonstration_says_what_is_so_and_leaves_nothing(
    scratch: Path, program: str, code: int, rows: str, verdict: str
) -> None:
    """It ends with 0, says of every table that it is equal, races, and leaves neither process nor directory.

    A row that only the subscriber has ends it with 1: named in the proof, and for both runners of the race.
    """
    demo, output = run(scratch, ("-c", program))
    assert demo.returncode == code, output
    assert ("Every comparison was equal." if code == 0 else "NOT EQUAL: see the tables above.") in output
    assert re.search(rf"public\.pgbench_accounts +{rows}.*{verdict}", output), output
    assert re.search(r"public\.pgbench_history +[1-9].* equal", output), output
    assert re.search(rf"built-in subscription .* s .* {verdict}", output), output
    assert re.search(rf"parapply, 4 workers .* s .* {verdict}", output), output
    assert ("DIFFERS" in output) == (code == 1)
    assert left_behind(scratch) == []


def test_a_signal_waits_for_the_end_of_a_held_block_and_comes_once() -> None:
    """Between the start of a process and the note of it nothing is raised; a second signal is ignored."""
    reached = []
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        with pytest.raises(SystemExit) as raised, interrupts.held():  # noqa: PT012  the end of the block is what raises
            signal.raise_signal(signal.SIGTERM)
            reached.append("held")
        signal.raise_signal(signal.SIGINT)
        reached.append("after")
    assert raised.value.code == 143
    assert reached == ["held", "after"]
    assert signal.getsignal(signal.SIGTERM) == before

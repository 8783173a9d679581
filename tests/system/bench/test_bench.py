"""`parapply bench` as a user runs it: tables, a JSON file, a plot, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

from tests.fixtures.documents import ROOT
from tests.fixtures.warm_program import PROGRAM_VARIABLE, WarmProgram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOURCE_TREE = ROOT / "src"
END_TIMEOUT_S = 300
RUNNERS = [
    "pg_recvlogical", "read by query", "built-in", "built-in parallel", "parapply preserve 2",
    "parapply preserve 2, 1 ms", "bulk statement",
]  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory for temporary files that the account of the servers can enter; pytest's own it cannot."""
    with tempfile.TemporaryDirectory(prefix="bench-test-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A program that runs the commands of the benchmark except `run`."""
    path = tmp_path_factory.mktemp("program") / "python"
    with closing(WarmProgram(path)):
        yield path


class Run(Protocol):
    """Run `parapply bench` with copied servers and temporary files in a directory of their own."""

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Return its exit code and what it printed."""


@pytest.fixture
def run(scratch: Path, program: Path) -> Run:
    """A process of its own; only the daemons that it starts import the package again."""
    paths = [str(SOURCE_TREE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {"TMPDIR": str(scratch), "PYTHONPATH": os.pathsep.join(paths), PROGRAM_VARIABLE: str(program)}

    def bench(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tests.fixtures.copied_command", "bench", *words],
            env={**os.environ, **environ}, capture_output=True, text=True, check=False, timeout=END_TIMEOUT_S,
        )  # fmt: skip

    return bench


def test_a_quick_run_measures_everybody_and_leaves_files_only(run: Run, scratch: Path, tmp_path: Path) -> None:
    """Every system takes its turn, ends with equal tables, and is in the tables, the JSON file and the plot."""
    systems = [
        f"--system={name}" for name in ("ceiling", "built-in", "built-in-parallel", "parapply", "bulk-statement")
    ]
    done = run(
        "--quick", "--transactions=300", "--workload=inserts", "--rounds=1", "--scale=1", "--workers=2",
        "--delay-ms=0", "--delay-ms=1", f"--out={tmp_path}", *systems,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DIFFER" not in done.stdout
    plot, document = sorted(tmp_path.iterdir(), key=lambda path: path.suffix, reverse=True)
    content = json.loads(document.read_text(encoding="utf-8"))
    assert [turn["runner"] for turn in content["turns"]] == RUNNERS
    assert [turn["is_equal"] for turn in content["turns"]] == [None, None, True, True, True, True, True]
    assert (content["workload"]["transactions"], content["workload"]["changes"]) == (300, 300)
    figures = content["figures"]
    for name in RUNNERS:
        assert f"\n{name} " in done.stdout
        assert f">{name}<" in plot.read_text(encoding="utf-8")
    ours = figures["parapply preserve 2"]
    # The interpreter alone takes more.
    assert ours["peak_bytes"]["leader"] > 10 << 20
    assert ours["cpu_s"]["leader"] > ours["cpu_s"]["leader_stream"]
    assert set(ours["cpu_s"]) == {"leader", "leader_stream", "target", "walsender"}
    assert set(figures["built-in"]["cpu_s"]) == {"target", "walsender"}
    # Its walsender may come and go between two looks of a busy machine.
    assert {"reader"} <= figures["pg_recvlogical"]["cpu_s"].keys() <= {"reader", "walsender"}
    # Its session holds the slot only while it decodes, which a look may miss in a backlog as small as this.
    assert "reader" in figures["read by query"]["cpu_s"]
    assert list(scratch.iterdir()) == [path for path in scratch.iterdir() if path.name.startswith("parapply-programs-")]


def _document(run: Run, _: Path) -> None:
    """With --json programs read standard output, and without files nothing is written."""
    done = run(
        "--transactions=200", "--workload=inserts", "--rounds=1", "--scale=1", "--system=built-in",
        "--sync=both", "--no-save", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)["results"]
    assert [first["sync"], second["sync"]] == ["off", "on"]
    assert "Making the backlog" in done.stderr


def _copies(run: Run, _: Path) -> None:
    """The tables are equal after every copy, by either system; time and CPU are in the document."""
    done = run("--copy", "--shape=wide", "--rounds=1", "--scale=1", "--workers=2", "--no-save", "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["results"]
    assert (found["shape"], found["tables"]) == ("wide", 2)
    assert [turn["runner"] for turn in found["turns"]] == ["built-in", "built-in, 4 workers", "parapply 2"]
    assert all(turn["is_equal"] and turn["cpu_s"] > 0 for turn in found["turns"])


def _huge_beside_small(run: Run, out: Path) -> None:
    """With --live both ways of parapply take a turn, and are in the tables, the JSON file and the plot."""
    done = run("--live", "--system=parapply", "--workers=2", "--large-rows=3000", "--rounds=1", f"--out={out}")
    assert done.returncode == 0, done.stdout + done.stderr
    plot, document = sorted(out.iterdir(), key=lambda path: path.suffix, reverse=True)
    content = json.loads(document.read_text(encoding="utf-8"))
    names = ["parapply preserve 2", "parapply preserve 2, streaming off"]
    assert [turn["system"] for turn in content["turns"]] == names
    assert [figures["is_equal"] for figures in content["figures"]] == [True, True]
    for name in names:
        assert done.stdout.count(f"\n{name} ") == 2
        assert f">{name}<" in plot.read_text(encoding="utf-8")


@pytest.mark.in_turn("check")
@pytest.mark.parametrize("check", [_document, _copies, _huge_beside_small])
def test_other_ways_to_measure(run: Run, tmp_path: Path, check: Callable[[Run, Path], None]) -> None:
    """A document for programs, copies in turn, and a huge transaction beside small ones end as each of them says."""
    check(run, tmp_path)

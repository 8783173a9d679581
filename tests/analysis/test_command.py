"""The command as a user runs it: a process of its own, with the Java that it finds, while files come."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.analysis.hand_log import batch, write
from tests.fixtures.spark import SMALL

if TYPE_CHECKING:
    from pathlib import Path

# Java starts once more here.
pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

_QUICK = ["--memory=1g", "--what-if=0", *(f"--spark={name}={value}" for name, value in SMALL.items())]


def test_following_until_sigterm(tmp_path: Path) -> None:
    """--follow prints a line for what is there and for each new file, and SIGTERM ends it with exit code 0.

    Nothing else is on standard output, and standard error has nothing of Java's. No record is of the slot that is asked
    for: what the figures are is tested where Java is warm.
    """
    log, out = tmp_path / "log", tmp_path / "out"
    log.mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "parapply", "report", log, "--out", out, "--follow", "--every", "1", "--json",
         "--slot", "none", *_QUICK],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout
        assert process.stderr
        try:
            pages = [json.loads(process.stdout.readline())]
            write(log, "apply-1.jsonl.open", [batch(1), batch(2), "torn"])
            (log / "apply-1.jsonl.open").rename(log / "apply-1.jsonl")
            pages.append(json.loads(process.stdout.readline()))
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()
    assert [(page["new_files"], page["records"], page["bad_lines"]) for page in pages] == [(0, 0, 0), (1, 2, 1)]
    assert pages[-1]["tables"]["summary"] == []
    assert 'http-equiv="refresh" content="1"' in (out / "report.html").read_text()

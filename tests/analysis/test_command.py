"""The command as a user runs it: a process of its own, while files come."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.analysis.hand_log import batch, write

if TYPE_CHECKING:
    from pathlib import Path


def test_following_until_sigterm(tmp_path: Path) -> None:
    """--follow prints a line for the present files and for each new one, and SIGTERM ends it with exit code 0.

    Nothing else is on standard output, and nothing on standard error. A log that is small is DuckDB's, without Java.
    """
    log, out = tmp_path / "log", tmp_path / "out"
    log.mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "parapply", "report", log, "--out", out, "--follow", "--every", "1", "--json"],
        env={**os.environ, "JAVA_HOME": "/nowhere", "PATH": "/nowhere"},
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
    assert [row["batches"] for row in pages[-1]["tables"]["summary"]] == [2]
    assert 'http-equiv="refresh" content="1"' in (out / "report.html").read_text()

"""Counts of processors."""

from __future__ import annotations

import os
import subprocess
import sys

from parapply.runtime.observe import machine


def test_processors_are_those_that_a_process_may_run_on() -> None:
    """A server that is bound to one has one, whatever the machine has; of one that has ended nothing is known."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert machine.processors(process.pid) == len(os.sched_getaffinity(0))
        os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
        assert machine.processors(process.pid) == 1
        process.communicate(b"\n")
    assert machine.processors(process.pid) == os.cpu_count()

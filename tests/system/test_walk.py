"""The way of one transaction through the files, from the read of its bytes to the report of its LSN as flushed.

A walk is what a reader opens who follows it: each function once, in the order of the first calls. A file is entered
whenever the next function is in another file than the one before. `pytest -s` prints the walk.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING, Final

from tests.fixtures import walk_program
from tests.fixtures.daemon import FEW_WORKERS, Daemon
from tests.fixtures.fan import QUICK
from tests.fixtures.pair import Pair, pair

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["pair"]

#: Another file in the walk is another file to open for everyone who follows it: not without a reason.
_MOST_FILES: Final = 30
_MOST_ENTRIES: Final = 134
_TRANSACTIONS: Final = 12


def _entered(calls: list[tuple[str, str]]) -> list[str]:
    """Return the files of a walk, each as often as it is entered."""
    functions = dict.fromkeys(map(tuple, calls))
    return [file for file, _ in groupby(file for file, _ in functions)]


def test_a_transaction_passes_few_files(pair: Pair, tmp_path: Path) -> None:
    """One insert and one update of a table that is known, in order; all that goes on beside it makes a walk longer."""
    pair.create("CREATE TABLE item (id int PRIMARY KEY, v int)")
    pair.write("INSERT INTO item VALUES (0, 0)")
    output = tmp_path / "walks"
    output.touch()
    words = ["run", *pair.route.arguments({**QUICK, "apply.workers": FEW_WORKERS})]
    command = [sys.executable, walk_program.__file__, str(output), *words]
    daemon = Daemon(pair.route, command=command, environ={"PARAPPLY_COMPILED": "forbid"})
    try:
        daemon.wait_caught_up()
        for number in range(1, 1 + _TRANSACTIONS):
            pair.write(
                f"BEGIN; INSERT INTO item VALUES ({number}, 0); UPDATE item SET v = {number} WHERE id = 0; COMMIT"
            )
            daemon.wait_caught_up()
        daemon.stop()
    finally:
        daemon.end()
    walks = [_entered(json.loads(line)) for line in output.read_text().splitlines()]
    assert walks
    entered = min(walks, key=lambda walk: (len(set(walk)), len(walk)))
    for file, count in Counter(entered).most_common():
        print(count, file)  # noqa: T201  the walk, for `pytest -s`
    assert len(set(entered)) <= _MOST_FILES
    assert len(entered) <= _MOST_ENTRIES

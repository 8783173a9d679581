"""The hand-over from the copy to the stream: `init --copy` while clients write, killed at every step and begun again.

The bank's checks see a row that is lost or there twice, and a transaction in part.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from parapply import probes
from tests.fixtures.plain import FAST
from tests.fixtures.route import Route
from tests.fixtures.workloads import BankLoad, check_bank, create_bank

if TYPE_CHECKING:
    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database

_COPIED = "SELECT state, count(*) FROM parapply.copies GROUP BY 1 ORDER BY 1"


@pytest.fixture
def bank(source_db: Database, target_db: Database) -> Route:
    """The bank with rows from before, on the source only."""
    create_bank(source_db, target_db)
    with BankLoad(source_db, seed=0, clients=1, pace_s=0) as load:
        load.wait_for_more(1)
    source_db.execute("TRUNCATE evt, xfer; UPDATE acct SET bal = 1000, v = 0")
    target_db.execute("TRUNCATE acct")
    return Route(source=source_db, target=target_db, settings={**FAST, "apply.workers": 2})


@pytest.mark.parametrize("point", [None, *probes.COPY_NAMES])
def test_the_hand_over_is_exact(
    bank: Route, run_command: RunCommand, start_daemon: StartDaemon, point: str | None
) -> None:
    """Clients write from before the copy until after it, and it is killed at a step and begun again: rows are equal."""
    with BankLoad(bank.source, seed=1, pace_s=0.002) as load:
        load.wait_for_more(50)
        if point:
            environ = {"PARAPPLY_FAILPOINT": f"{point}:kill"}
            killed = run_command(bank, "init", "--copy", environ=environ)
            assert killed.returncode == -signal.SIGKILL, f"{point} was not reached: {killed.stdout}{killed.stderr}"
            load.wait_for_more(50)
        done = run_command(bank, "init", "--copy")
        assert done.returncode == 0, done.stderr
        assert bank.target.rows(_COPIED) == [("copied", 3)]
        load.wait_for_more(50)
        daemon = start_daemon(bank)
        daemon.wait_for_event("source_connected")
        load.wait_for_more(50)
        load.stop()
        daemon.wait_caught_up()
    daemon.stop()
    check_bank(bank.source, bank.target, load)
    assert run_command(bank, "init", "--copy").stdout.endswith("nothing to do\n")

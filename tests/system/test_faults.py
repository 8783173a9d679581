"""The fault campaign in short: some faults over one load, and broken daemons that it must find (O1 to O10).

The whole of it runs by `make faults`.
"""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from parapply import failpoints
from tests.faults import lab
from tests.faults.campaign import Campaign
from tests.faults.catalogue import FAULTS, Fault
from tests.faults.mutants import MUTANTS, environment
from tests.faults.process_faults import kill_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.faults.lab import Round, Servers

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(300)]

_SETTINGS: Mapping[str, str | float] = {
    "apply.commit_order": "preserve", "apply.workers": 4, "apply.max_batch_transactions": 5, "source.streaming": "on",
    "apply.stream_start_bytes": 0, "target.session_replication_role": "replica", "target.synchronous_commit": "off",
}  # fmt: skip
#: By title: the daemon, the way to either side, a server. Ended sessions and a publisher that restarts: test_long_life.
_TITLES = (
    ("daemon killed (-9) at random moments", "connections to the publisher cut"),
    ("COMMIT lost, or its answer", "target crashes and forgets acknowledged commits"),
)
_FOREVER_S = 3600.0
#: A load for faults to meet, not one that keeps the machine busy.
_PACE_S = 0.1


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """A publisher and a target that the tests of this module crash."""
    with lab.servers() as made:
        yield made


def _fault(title: str) -> Fault:
    (found,) = [one for one in FAULTS if one.title == title]
    return found


def _kill_after_a_commit(run: Round) -> None:
    """Kill the daemon when some of what it has committed is in no watermark (K6)."""
    kill_at(run, failpoints.COMMITTED, 20)
    run.start_connected()


def _run(servers: Servers, faults: Sequence[Fault], environ: Mapping[str, str] | None = None) -> Campaign:
    """Run one round with faults."""
    campaign = Campaign(
        servers=servers, seed="test", faults=faults, tell=lambda _: None, environ=environ or {}, pace_s=_PACE_S
    )
    campaign.run_round(0, faults, time.monotonic() + _FOREVER_S, _SETTINGS)
    return campaign


@pytest.mark.in_turn("titles")
@pytest.mark.parametrize("titles", _TITLES, ids=["processes", "answers"])
def test_nothing_is_lost_doubled_or_torn(servers: Servers, titles: Sequence[str]) -> None:
    """After each of two faults, both in one load, markers, bank, state and log are as they must be; so is the end."""
    campaign = _run(servers, [_fault(title) for title in titles])
    assert not campaign.problems, campaign.problems
    assert [one.injected for one in campaign.results.values()] == [1] * (len(titles) + 1)
    assert campaign.transactions > 0


@pytest.mark.in_turn("name", "title", "says")
@pytest.mark.parametrize(
    ("name", "title", "says"),
    [
        ("no-record", "daemon killed (-9) at named points", "O2|insert_exists"),
        ("feedback", "target crashes and forgets acknowledged commits", "O7|the target was restored"),
    ],
)
def test_o10_a_broken_daemon_is_found(servers: Servers, name: str, title: str, says: str) -> None:
    """O10: a daemon without records applies twice, one that reports early loses; the campaign says which it was.

    Its next start may find the damage before an oracle looks: a row that exists already, a slot that is ahead.
    """
    assert name in MUTANTS
    fault = _fault(title)
    if name == "no-record":
        fault = replace(fault, inject=_kill_after_a_commit)
    campaign = _run(servers, (fault,), environ=environment(name))
    assert campaign.problems, "nothing was found"
    texts = " ".join(text for one in campaign.problems for text in [*one["texts"], one["log"]])
    assert re.search(says, texts), texts

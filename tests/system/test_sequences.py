"""Sequences that the daemon carries along (`sequences.interval_s`)."""

from __future__ import annotations

from tests.fixtures.pair import Pair, pair

__all__ = ["pair"]

_BOTH = """
CREATE TABLE item (id bigint PRIMARY KEY);
CREATE SEQUENCE untouched START 77;
CREATE SEQUENCE ahead;
"""


def test_the_daemon_carries_them_along(pair: Pair) -> None:
    """With sequences.interval_s values follow while the daemon runs, forwards only; a missing one is a warning."""
    pair.create(_BOTH)
    pair.source.execute("CREATE SEQUENCE only_here; SELECT nextval('untouched') FROM generate_series(1, 9)")
    pair.target.execute("SELECT setval('ahead', 1000)")
    daemon = pair.start(settings={"sequences.interval_s": 0.05})
    pair.target.wait_until("SELECT last_value = 85 FROM untouched")
    pair.source.execute("SELECT nextval('untouched'), nextval('ahead')")
    pair.target.wait_until("SELECT last_value = 86 FROM untouched")
    assert daemon.wait_for_event("sequence_missing")["relation"] == "public.only_here"
    daemon.stop()
    assert pair.target.rows("SELECT last_value FROM ahead") == [(1000,)]
    assert len(daemon.events_of("sequence_missing")) == 1

"""Tables for which prediction keeps failing, and transactions that take their tables whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fixtures.pair import Pair, pair

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["pair"]

_MAILS = """
CREATE TABLE u (id int PRIMARY KEY, mail text, v int);
CREATE UNIQUE INDEX u_lower ON u (lower(mail));
INSERT INTO u SELECT n, 'm' || n, 0 FROM generate_series(1, 100) AS n;
CREATE TABLE first (id int PRIMARY KEY);
"""


def _handed_over(first: int, count: int) -> Iterator[str]:
    """Yield transactions in which values go from row to row, unseen, because their index is on an expression.

    The giver has more to do before than the taker, so that the taker comes too early where nothing holds it.
    """
    for number in range(first, first + count):
        rows = f"INSERT INTO first SELECT generate_series({number * 10000}, {number * 10000 + 2500})"
        yield f"BEGIN; {rows}; UPDATE u SET mail = 'other{number}' WHERE id = {number}; COMMIT"
        yield f"INSERT INTO u VALUES ({1000 + number}, 'M{number}', 0)"


def test_t19_a_table_that_keeps_failing_has_its_batches_follow_one_another(pair: Pair) -> None:
    """Still as sets, for a while: retries are counted and shown with the reason, and later the table is trusted again.

    None of its batches fails at the head, so none is split, and the table never goes row by row.
    """
    pair.create(_MAILS)
    pair.write(*_handed_over(1, 25))
    settings = {"apply.max_batch_transactions": 1}
    daemon = pair.start(workers=4, settings=settings)
    daemon.wait_caught_up()
    # The number of batches that meet is left to the machine.
    for first in range(26, 101, 25):
        if daemon.events_of("table_trust"):
            break
        pair.write(*_handed_over(first, 25))
        daemon.wait_caught_up()
    pair.check_equal()
    levels = [event["value"] for event in daemon.events_of("table_trust")]
    assert levels[:1] == ["alone"], daemon.log_tail()
    pair.target.wait_until(
        "SELECT reason ~ 'for now, for 256 batches' AND retries >= 4 AND lane = 'set-based' AND is_table_exclusive"
        " FROM parapply.tables WHERE table_name = 'u'"
    )
    # As many batches as the penalty, and more.
    pair.write(*(f"UPDATE u SET v = {number} WHERE id = 3" for number in range(300)))
    daemon.finish()
    pair.check_equal()
    assert [event["value"] for event in daemon.events_of("table_trust")][-1] == "trusted"
    assert not daemon.events_of("batch_failed")
    assert not daemon.events_of("batch_split")
    assert "in_order" not in [event["value"] for event in daemon.events_of("table_trust")]

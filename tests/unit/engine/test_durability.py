"""LSNs reported as flushed, when they are written, and when the publisher is left: without a clock."""

from __future__ import annotations

import pytest

from parapply.engine.durability import Durability, Reporting, Stream
from parapply.engine.flight import Flight
from parapply.engine.job import SetJob
from parapply.engine.state import EngineState
from parapply.errors import SourceLost
from parapply.model import Until
from parapply.plan.batch import Batch
from parapply.wire.copy import Keepalive

_AT_LSN = 100
_QUIET = Stream(received_lsn=_AT_LSN, holds_nothing=True, is_inside_large=False, is_synchronous=False)
_STANDBY = _QUIET._replace(is_synchronous=True)


def _made(*, is_apply_durable: bool = False, until: Until | None = None, receive_timeout_s: float = 60) -> Durability:
    reporting = Reporting(
        advance_interval_s=0.5,
        status_interval_s=10,
        receive_timeout_s=receive_timeout_s,
        is_apply_durable=is_apply_durable,
        until=until or Until(),
    )
    return Durability(Flight(EngineState(_AT_LSN, 0.0)), reporting, 0.0)


def _asking(lsn: int) -> Keepalive:
    return Keepalive(end_lsn=lsn, send_time_us=0, reply_requested=True)


def test_only_what_was_written_is_durable() -> None:
    """A commit moves the watermark; what is reported as flushed follows the synchronous commit (trap T-1)."""
    durability = _made()
    state = durability.state
    state.watermark.low_lsn = 200
    assert durability.committed(0.0, is_synchronous=False)
    assert state.durable_lsn == _AT_LSN
    assert durability.advances(0.6) == 200
    state.watermark.low_lsn = 300  # while it is being written
    assert durability.made_durable(200)
    assert state.durable_lsn == 200
    assert not durability.made_durable(200)


def test_a_transaction_left_out_at_its_end_is_durable_once_it_is_written() -> None:
    """No record of a commit says that the watermark is behind it, not even where commits are durable at once."""
    durability = _made(is_apply_durable=True)
    state = durability.state
    state.watermark.low_lsn = 200
    assert durability.committed(0.0, is_synchronous=False, is_believed=False)
    assert state.durable_lsn == _AT_LSN
    durability.committed(0.1, is_synchronous=False)
    assert state.durable_lsn == 200


def test_a_keepalive_has_us_look_only_where_it_says_more_than_the_commits() -> None:
    """One comes with nearly every commit, which has us look when it is acknowledged; a question always does."""
    durability = _made()
    more = Keepalive(end_lsn=_AT_LSN + 1, send_time_us=0, reply_requested=False)
    durability.state.jobs[1] = SetJob(Batch(1), {})
    assert not durability.keepalive(more, 1.0)
    assert durability.keepalive(_asking(_AT_LSN + 1), 1.0)
    durability.state.jobs.clear()
    assert durability.keepalive(more, 1.0)
    durability.settle(_QUIET)
    assert not durability.keepalive(more, 1.0)


def test_an_idle_position_counts_once_nothing_is_open() -> None:
    """A keep-alive's position moves the watermark only when all before it has passed (trap T-8)."""
    durability = _made()
    state = durability.state
    durability.keepalive(Keepalive(end_lsn=300, send_time_us=0, reply_requested=False), 1.0)
    state.jobs[1] = SetJob(Batch(1), {})
    durability.settle(_QUIET)
    assert state.watermark.low_lsn == _AT_LSN
    state.jobs.clear()
    durability.settle(_QUIET._replace(holds_nothing=False))
    assert state.watermark.low_lsn == _AT_LSN
    durability.settle(_QUIET)
    assert state.watermark.low_lsn == 300


def test_under_load_it_is_written_now_and_then_and_at_once_when_idle() -> None:
    """With a batch in flight once for each interval, with none at once; without news once a second."""
    durability = _made()
    state = durability.state
    state.watermark.low_lsn = 200
    assert durability.committed(0.0, is_synchronous=False)
    assert durability.advance_is_due(_QUIET, 0.02)
    state.jobs[1] = SetJob(Batch(1), {})
    assert not durability.advance_is_due(_QUIET, 0.49)
    assert durability.advance_is_due(_QUIET, 0.5)
    durability.made_durable(durability.advances(0.5))
    assert not durability.advance_is_due(_QUIET, 1.49)
    assert durability.advance_is_due(_QUIET, 1.5)


def test_one_commit_after_the_other_is_load() -> None:
    """None of them wakes anybody but the first, and when no more come the last is soon written."""
    durability = _made()
    durability.state.watermark.low_lsn = 200
    assert durability.committed(0.1, is_synchronous=False)
    assert durability.rest_s(_QUIET, 0.1) == pytest.approx(0.001), "due"
    assert not durability.committed(0.11, is_synchronous=False)
    assert not durability.advance_is_due(_QUIET, 0.129)
    assert durability.rest_s(_QUIET, 0.11) == pytest.approx(0.02)
    assert durability.advance_is_due(_QUIET, 0.131)
    durability.made_durable(durability.advances(0.2))
    # The keep-alive behind a commit says nothing that is waited for, unless it asks.
    durability.state.watermark.low_lsn = 201
    assert not durability.advance_is_due(_QUIET, 0.6)
    assert durability.advance_is_due(_QUIET, 0.62)
    durability.keepalive(_asking(201), 0.3)
    assert durability.advance_is_due(_QUIET, 0.3)
    alone = _made()
    alone.state.watermark.low_lsn = 201
    assert alone.advance_is_due(_QUIET, 0.02)


def test_while_commits_wait_nothing_rests() -> None:
    """One flush follows the other as long as what is visible is not durable."""
    durability = _made()
    durability.state.watermark.low_lsn = 200
    assert durability.is_waited_for(_STANDBY)
    assert durability.rest_s(_STANDBY, 0.0) == 0.0
    durability.made_durable(200)
    assert not durability.is_waited_for(_STANDBY)
    assert durability.rest_s(_STANDBY, 0.0) > 0.0


def test_an_answer_waits_a_moment_and_a_report_its_interval() -> None:
    """A publisher that shuts down asks again as soon as it is answered."""
    durability = _made()
    durability.reported(0.0)
    durability.keepalive(_asking(_AT_LSN), 0.0)
    assert not durability.report_is_due(0.04)
    assert durability.rest_s(_QUIET, 0.0) == pytest.approx(0.02, abs=0.04)
    assert durability.report_is_due(0.05)
    durability.reported(0.05)
    assert not durability.report_is_due(10.0)
    assert durability.report_is_due(10.05)


def test_a_publisher_that_shuts_down_is_left_when_nothing_moves() -> None:
    """Ten questions for one LSN and three seconds without a step; a step starts both again (F9)."""
    durability = _made()
    state = durability.state
    for number in range(20):
        durability.keepalive(_asking(300), 0.1 * number)
    state.durable_lsn = 200
    for number in range(9):
        durability.keepalive(_asking(300), 4.0 + number)
    with pytest.raises(SourceLost, match="shutting down"):
        durability.keepalive(_asking(300), 13.0)


def test_a_silent_publisher_is_asked_and_then_left() -> None:
    """At half of its patience it is asked, a quarter later again.

    While ranges are read it may be silent, but not to the monitor's question.
    """
    durability = _made()
    assert not durability.silence_is_long(0.0, 29.0)
    assert durability.silence_is_long(0.0, 30.0)
    assert not durability.silence_is_long(0.0, 44.0)
    assert durability.silence_is_long(0.0, 45.0)
    with pytest.raises(SourceLost, match="60 s"):
        durability.silence_is_long(0.0, 60.0)
    durability.reads_ranges(60.0)
    assert not durability.silence_is_long(0.0, 60.0)
    durability.state.unanswered_since_s = 50.0
    durability.reads_ranges(100.0)
    assert durability.silence_is_long(0.0, 100.0)
    with pytest.raises(SourceLost, match="60 s"):
        durability.silence_is_long(0.0, 110.0)


def test_it_is_over_when_the_end_is_durable() -> None:
    """An LSN of `--until`, and a time that the publisher's WAL has passed by a second."""
    durability = _made(until=Until(lsn=300))
    durability.state.watermark.low_lsn = 300
    assert not durability.is_over()
    durability.made_durable(300)
    assert durability.is_over()
    durability = _made(until=Until(time_us=5_000_000))
    state = durability.state
    state.source_insert_lsn = _AT_LSN
    state.passed_us = 6_000_000
    assert not durability.is_over()
    state.passed_us = 6_000_001
    assert durability.is_over()


def test_commits_that_are_durable_by_themselves_are_reported_as_that() -> None:
    """Where the workers flush, the watermark is durable with each commit, and an answer is due."""
    durability = _made(is_apply_durable=True)
    durability.state.watermark.low_lsn = 200
    assert durability.committed(0.0, is_synchronous=False)
    assert durability.state.durable_lsn == 200
    assert durability.report_is_due(0.05)
    assert durability.made_durable(200), "written, so reported once more"
    assert not durability.made_durable(200)


def test_a_commit_is_not_believed_while_code_may_run_in_it() -> None:
    """Code may have turned the flush off for its transaction, so only an advance makes it durable.

    A commit after it is acknowledged when the WAL before it is flushed also.
    """
    durability = _made(is_apply_durable=True)
    before = durability.state.durable_lsn
    durability.state.watermark.low_lsn = 200
    assert durability.committed(0.0, is_synchronous=False, is_believed=False), "an advance follows the first"
    assert durability.state.durable_lsn == before
    assert not durability.report_is_due(0.05)
    durability.state.watermark.low_lsn = 300
    durability.committed(0.0, is_synchronous=False)
    assert durability.state.durable_lsn == 300


def test_at_rest_it_is_written_seldom_and_a_silent_publisher_is_left_in_time() -> None:
    """Once the row says so, and sooner where a position moves, the publisher may be silent for less, or asks."""
    durability = _made()
    resting = _QUIET._replace(rest_s=14.0)
    durability.advances(0.0, durability.shown_every_s(_QUIET))
    assert durability.rest_s(_QUIET, 0.0) == pytest.approx(0.5)
    assert durability.rest_s(resting, 0.0) == pytest.approx(1.0)
    assert durability.advance_is_due(resting, 1.0)
    # A row that does not say so yet would count as silence, whatever has moved.
    durability.state.watermark.low_lsn = 150
    assert not durability.advance_is_due(resting, 0.9)
    assert durability.advance_is_due(resting, 1.0)
    assert durability.made_durable(150)
    durability.advances(1.0, durability.shown_every_s(resting))
    assert durability.rest_s(resting, 1.0) == pytest.approx(9.0)  # a report
    assert not durability.advance_is_due(resting, 14.9)
    assert durability.advance_is_due(resting, 15.0)
    # A position that brought nothing, which comes with every commit in other databases of the server.
    durability.state.watermark.low_lsn = 200
    assert not durability.advance_is_due(resting, 10.9)
    assert durability.advance_is_due(resting, 11.0)
    durability.keepalive(_asking(200), 1.0)
    assert durability.advance_is_due(resting, 2.0)
    impatient = _made(receive_timeout_s=4)
    assert impatient.rest_s(resting, 0.0) == pytest.approx(1.0)

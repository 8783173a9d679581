"""The watermark against a list of what is open and done."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parapply.engine.state import Watermark


class Naive:
    """Everything that ever ended, in order, and whether it is committed."""

    def __init__(self, low_lsn: int) -> None:
        """Start with one committed entry."""
        self.entries: list[tuple[int, bool]] = [(low_lsn, True)]

    @property
    def low_lsn(self) -> int:
        """Return the last LSN before which all is committed."""
        low = 0
        for lsn, is_done in self.entries:
            if not is_done:
                break
            low = lsn
        return low

    @property
    def high_lsn(self) -> int:
        """Return the highest committed LSN."""
        return max(lsn for lsn, is_done in self.entries if is_done)

    def open_lsns(self) -> list[int]:
        """Return what is not committed."""
        return [lsn for lsn, is_done in self.entries if not is_done]

    def close(self, end_lsn: int) -> None:
        """Mark as committed."""
        self.entries = [(lsn, is_done or lsn == end_lsn) for lsn, is_done in self.entries]


@given(low_lsn=st.integers(0, 50), data=st.data())
def test_the_watermark_is_that_of_a_naive_model(low_lsn: int, data: st.DataObject) -> None:
    """Commits in any order: low is the end of the unbroken run, high the highest, neither ever goes back."""
    watermark, naive = Watermark(low_lsn), Naive(low_lsn)
    last_lsn = low_lsn
    for _ in range(data.draw(st.integers(0, 40), label="steps")):
        low_before = naive.low_lsn
        choices = ["open", "reached", *(["close"] if naive.open_lsns() else [])]
        step = data.draw(st.sampled_from(choices), label="step")
        if step == "open":
            last_lsn += data.draw(st.integers(1, 9), label="advance")
            watermark.open(last_lsn)
            naive.entries.append((last_lsn, False))
        elif step == "close":
            end_lsn = data.draw(st.sampled_from(naive.open_lsns()), label="closed")
            naive.close(end_lsn)
            assert watermark.close(end_lsn) is (naive.low_lsn > low_before)
        else:
            lsn = last_lsn + data.draw(st.integers(-5, 9), label="reached")
            is_news = not naive.open_lsns() and lsn > naive.low_lsn
            assert watermark.reached(lsn) is is_news
            if is_news:
                last_lsn = lsn
                naive.entries.append((lsn, True))
        assert watermark.low_lsn == naive.low_lsn >= low_before
        assert watermark.high_lsn == naive.high_lsn


def test_a_keepalive_proves_nothing_while_a_batch_is_open() -> None:
    """The publisher's position is not the target's: the low LSN stays (trap T-8)."""
    watermark = Watermark(10)
    watermark.open(20)
    assert not watermark.reached(30)
    assert watermark.low_lsn == 10
    assert watermark.close(20)
    assert watermark.reached(30)


@pytest.mark.parametrize("end_lsn", [5, 10])
def test_a_batch_below_the_watermark_is_our_own_fault(end_lsn: int) -> None:
    """The watermark says that all below it is committed; a batch opened there would make that a lie."""
    with pytest.raises(AssertionError):
        Watermark(10).open(end_lsn)


def test_batches_open_in_source_order_and_close_once() -> None:
    """An end LSN out of order, unknown or closed already is a fault of the caller."""
    watermark = Watermark(10)
    watermark.open(20)
    watermark.open(30)
    with pytest.raises(AssertionError):
        watermark.open(30)
    with pytest.raises(AssertionError):
        watermark.close(25)
    watermark.close(30)
    with pytest.raises(AssertionError):
        watermark.close(30)
    assert (watermark.low_lsn, watermark.high_lsn) == (10, 30)

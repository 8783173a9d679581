"""Transaction ids of the stream, which come without their epoch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parapply.source.slot import full_xid

_EPOCH = 2**32


@given(near=st.integers(2**31, 2**40), distance=st.integers(1 - 2**31, 2**31 - 1))
def test_the_epoch_of_a_transaction_id(near: int, distance: int) -> None:
    """A transaction id is the one that lies within 2^31 of the next, also where the epoch changes between the two."""
    xid = near + distance
    assert full_xid(xid % _EPOCH, near) == xid

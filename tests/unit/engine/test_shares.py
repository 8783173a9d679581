"""Division of a total among slots: each has its own part, no more is given than is free, the rest is fair."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parapply.engine.shares import Claim, divide

_claims = st.lists(
    st.builds(Claim, own=st.integers(1, 20), holds=st.integers(0, 60), wants=st.integers(0, 60)), min_size=1, max_size=8
)


@given(claims=_claims, more=st.integers(0, 200))
def test_no_more_is_given_than_is_free(claims: list[Claim], more: int) -> None:
    """Each gets its own part at least and no more than it wants; all that is or may be in use is below the total.

    Uses that are above the total already are the only exception: they came from another total, and no share grows.
    """
    total = sum([claim.own for claim in claims]) + more
    shares = divide(total, claims)
    for claim, share in zip(claims, shares, strict=True):
        assert claim.own <= share <= max(claim.own, claim.wants)
    in_use = sum([max(claim.own, claim.holds) for claim in claims])
    in_reach = sum([max(share, claim.holds) for claim, share in zip(claims, shares, strict=True)])
    assert in_reach <= max(total, in_use)


@given(claims=_claims, more=st.integers(0, 200))
def test_what_is_free_is_given_as_equally_as_it_is_wanted(claims: list[Claim], more: int) -> None:
    """Once no slot holds more than its share, nothing that is wanted is left over, and one with less wants no more."""
    claims = [claim._replace(holds=0) for claim in claims]
    total = sum([claim.own for claim in claims]) + more
    shares = divide(total, claims)
    additions = [share - claim.own for claim, share in zip(claims, shares, strict=True)]
    unmet = [n for n, claim, share in zip(additions, claims, shares, strict=True) if share < claim.wants]
    assert sum(shares) == total or not unmet
    assert all(n >= max(additions) - 1 for n in unmet)


@given(claims=_claims, more=st.integers(0, 100))
def test_shares_settle(claims: list[Claim], more: int) -> None:
    """If each slot keeps to its share and takes all of it, the second division is the fair one."""
    total = sum([claim.own for claim in claims]) + more
    fair = divide(total, [claim._replace(holds=0) for claim in claims])
    first = divide(total, claims)
    assert all(now <= then for now, then in zip(first, fair, strict=True))
    assert divide(total, [claim._replace(holds=now) for claim, now in zip(claims, first, strict=True)]) == fair


def test_a_backlog_gets_the_rest_until_another_one_comes() -> None:
    """Ten sessions, two of them each slot's own: a backlog gets six more, and two divide them."""
    idle, busy = Claim(2, 2, 2), Claim(2, 2, 16)
    assert divide(10, [busy, idle]) == [8, 2]
    assert divide(10, [busy._replace(holds=8), busy]) == [5, 2]
    assert divide(10, [busy._replace(holds=6), busy]) == [5, 4]
    assert divide(10, [busy._replace(holds=5), busy]) == [5, 5]
    assert divide(10, [idle._replace(holds=5), busy]) == [2, 5]

"""Shares: the parts of a process's totals that each of its slots may take, and the rule that divides a total.

The rule, in four sentences. Each slot always has its own part. The rest is divided equally among the slots that could
use more, and none gets more than it could use. A slot that has to give something back takes nothing new until it has.
Only the amount that is not in use is given away, so that all together never take more than the total.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Share:
    """Limits of one slot. Written by its owner, the fleet, at any time; the parts of an epoch read them as they go."""

    __slots__ = ("first_workers", "least_workers", "memory_bytes", "most_workers")

    def __init__(self, *, least_workers: int, first_workers: int, most_workers: int, memory_bytes: int) -> None:
        """Begin with these limits.

        Args:
            least_workers: that stay, however little there is to do.
            first_workers: at the begin of an epoch.
            most_workers: at any time.
            memory_bytes: of changes in hand.
        """
        self.least_workers = least_workers
        self.first_workers = first_workers
        self.most_workers = most_workers
        self.memory_bytes = memory_bytes


class Claim(NamedTuple):
    """Amounts of one slot, all of one total."""

    own: int  # always its
    holds: int  # in use now
    wants: int  # could be used


def divide(total: int, claims: Sequence[Claim]) -> list[int]:
    """Return the share of each claim, in their order.

    The larger of share and present use, over all claims together, is not above the total unless their own parts and
    their present use are.
    """
    owns = [claim.own for claim in claims]
    fair = _filled(owns, [max(claim.own, claim.wants) for claim in claims], total)
    # A claim that holds more than is fair keeps that until it gives it back.
    kept = [max(claim.own, claim.holds) for claim in claims]
    grown = _filled(kept, [max(pair) for pair in zip(kept, fair, strict=True)], total)
    return [min(pair) for pair in zip(fair, grown, strict=True)]


def _filled(begin: Sequence[int], most: Sequence[int], total: int) -> list[int]:
    """Return amounts from `begin` up to `most` whose sum is at most the total, with additions as equal as can be."""
    amounts = list(begin)
    left = max(0, total - sum(amounts))
    # The smallest wishes first: what they leave is for the others.
    order = sorted(range(len(amounts)), key=lambda at: most[at] - begin[at])
    for n_done, at in enumerate(order):
        part = min(most[at] - begin[at], left // (len(order) - n_done))
        amounts[at] += part
        left -= part
    return amounts

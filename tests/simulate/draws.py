"""The choices of one schedule: drawn from a seed, or given again as numbers, and made fewer while it still fails."""

from __future__ import annotations

import time
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Seconds that one search for a shorter schedule may take.
SHRINK_S = 30.0


class Violation(AssertionError):
    """A promise is broken; the message says which."""


class Draws:
    """Choices among numbered possibilities. 0 is the plainest one, and the one drawn when given choices have ended."""

    __slots__ = ("_given", "_random", "_take", "taken")

    def __init__(self, seed: int, given: Sequence[int] | None = None) -> None:
        """Start before the first choice; `given` is taken instead of the seed's."""
        self._random = Random(seed).random
        self._given = None if given is None else iter(given)
        #: All choices so far.
        self.taken: list[int] = []
        self._take = self.taken.append

    def below(self, n: int) -> int:
        """Return a number from 0 to before n."""
        value = int(self._random() * n) if self._given is None else min(next(self._given, 0), n - 1)
        self._take(value)
        return value

    def chance(self, share: float) -> bool:
        """Return whether something happens that does so in a share of all cases."""
        value = self._random() < share if self._given is None else share > 0 and bool(next(self._given, 0))
        self._take(int(value))
        return value


def shrink(parts: Sequence[Sequence[int]], fails: Callable[[list[list[int]]], bool]) -> list[list[int]]:
    """Return fewer and lower choices with which a schedule still fails.

    Args:
        parts: several lists of choices, with which it fails.
        fails: plays it with others; it may run for a bounded time in all.
    """
    until_s = time.monotonic() + SHRINK_S
    best = [list(part) for part in parts]
    has_shrunk = True
    while has_shrunk:
        has_shrunk = False
        for number in range(len(best)):
            for lower in (_without, _zeroed, _lowered):
                size = len(best[number]) // 2 if lower is not _lowered else 1
                while size:
                    at = 0
                    while at < len(best[number]):
                        candidate = lower(best[number], at, size)
                        tried = [candidate if other == number else part for other, part in enumerate(best)]
                        if time.monotonic() > until_s:
                            return best
                        if candidate != best[number] and fails(tried):
                            best, has_shrunk = tried, True
                            at += lower is _zeroed and size
                        else:
                            at += max(1, size // 4)
                    size //= 2
    return best


def _without(choices: list[int], at: int, size: int) -> list[int]:
    return choices[:at] + choices[at + size :]


def _zeroed(choices: list[int], at: int, size: int) -> list[int]:
    return choices[:at] + [0] * len(choices[at : at + size]) + choices[at + size :]


def _lowered(choices: list[int], at: int, _size: int) -> list[int]:
    return [*choices[:at], max(0, choices[at] - 1), *choices[at + 1 :]]

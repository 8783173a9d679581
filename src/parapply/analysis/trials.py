"""Trials: short runs with settings of their own, which show the error of predictions from one log.

One log holds one order and batches about as large. So it cannot separate a cost of each batch from one of each change,
nor does it show how batches close in the other order. A trial differs in one of these. The time of batches of a size
between follows from both. A trial in the other order is also predicted, and the ratio is the error of all predictions
in that order.
"""

from __future__ import annotations

from math import log2, sqrt
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from parapply.analysis.changes import Change
from parapply.analysis.contention import MOST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.analysis.changes import Order

#: The least that `apply.max_batch_bytes` may be.
_LEAST_BYTES: Final = 1024
#: Largest factor of an error: a trial that is further off met something else.
_MOST_ERROR: Final = 2.0
_SIZES: Final = ("batch_transactions", "batch_changes", "batch_bytes")


class Usual(NamedTuple):
    """Settings of a log, with batches as large as they were."""

    order: Order
    sizes: tuple[float, float, float]  # transactions, changes and bytes of a batch, as most changes met them

    def halvings(self, change: Change) -> float:
        """Return how many times a change halves the batches."""
        asked = (change.batch_transactions, change.batch_changes, change.batch_bytes)
        return max([0.0, *[log2(mine / one) for one, mine in zip(asked, self.sizes, strict=True) if one]])

    def is_other(self, change: Change) -> bool:
        """Return whether a change is to the other order."""
        return change.order not in {None, self.order}


class Errors(NamedTuple):
    """Errors of predictions from a log, relative to its own time."""

    usual: Usual
    order: float = 1.0  # factor in the other order
    smaller: float = 1.0  # time of a trial of smaller batches, as a multiple of the log's
    halvings: float = 0.0  # that its batches are smaller by

    def right(self, change: Change) -> tuple[Change, float]:
        """Return the change to be predicted, and the factor by which that is put right.

        Between two sizes that were measured the time follows a power of the size, and is not predicted.
        """
        factor, at = self.order if self.usual.is_other(change) else 1.0, self.usual.halvings(change)
        if at and self.halvings:
            factor *= self.smaller ** (at / self.halvings)
            change = replace(change, batch_transactions=None, batch_changes=None, batch_bytes=None)
        return change, factor

    def unknown(self, change: Change) -> float:
        """Return by how many halvings a batch's size is off the log's, or off the trial's if that is nearer."""
        at = self.usual.halvings(change)
        return min(at, abs(at - self.halvings))

    def learn(self, trial: Change, took: float, predicted: float) -> Errors:
        """Return errors of which one more is known.

        Args:
            trial: its settings.
            took: its time, as a multiple of the log's for the same part.
            predicted: the same as predicted.
        """
        if self.usual.is_other(trial):
            return self._replace(order=min(max(took / predicted, 1 / _MOST_ERROR), _MOST_ERROR))
        return self._replace(smaller=took, halvings=self.usual.halvings(trial))


def trials(workers: int | None, order: Order, asked: Sequence[Change]) -> list[Change]:
    """Return the trials that show the errors of what is asked.

    Args:
        workers: of the log; None: as many as the daemon likes.
        order: of the log.
        asked: changes of its settings.
    """
    found = []
    transactions, changes, size_bytes = ([getattr(each, name) for each in asked] for name in _SIZES)
    smaller = Change(
        batch_transactions=_half(transactions), batch_changes=_half(changes),
        batch_bytes=_half(size_bytes, _LEAST_BYTES),
    )  # fmt: skip
    if smaller != Change():
        found.append(smaller)
    others = [change for change in asked if change.order not in {None, order}]
    if others:
        between = None
        if workers is not None:
            most = max([change.workers or workers for change in others])
            # Another number than the log's, as with the other order that is likely to be asked for.
            between = round(sqrt(workers * most))
            between = min(MOST, between + 1) if between == workers else between
        found.append(Change(workers=between, order=others[0].order))
    return found


def _half(sizes: Sequence[int | None], least: int = 1) -> int | None:
    asked = [size for size in sizes if size]
    return max(least, min(asked) // 2) if asked else None

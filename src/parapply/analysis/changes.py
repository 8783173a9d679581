"""The texts of `report --what-if`: settings and costs that are to be others than the log's; and trials of them."""

from __future__ import annotations

from math import log2, sqrt
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from parapply.analysis.contention import MOST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Order = Literal["preserve", "relaxed"]
ORDERS: Final[tuple[Order, ...]] = ("preserve", "relaxed")
_Size = Annotated[int, Meta(ge=1, le=1 << 40)]


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The changes of one question; None changes nothing."""

    workers: Annotated[int, Meta(ge=1, le=MOST)] | None = None
    order: Order | None = None
    batch_transactions: _Size | None = None  # at most, as the next two
    batch_changes: _Size | None = None
    batch_bytes: _Size | None = None
    target_speed: Annotated[float, Meta(ge=0.01, le=100)] = 1.0  # factor by which statements take less time
    synchronous_commit: Literal["on", "off"] | None = None
    flush_ms: Annotated[float, Meta(ge=0, le=10_000)] | None = None  # a flush; None: as in the log

    def __str__(self) -> str:
        values = msgspec.to_builtins(self).items()
        return ",".join(f"{name}={f'{value:g}' if isinstance(value, float) else value}" for name, value in values)


#: The settings of a daemon that a change can have, by its keys.
SETTINGS: Final = {
    "workers": "apply.workers",
    "order": "apply.commit_order",
    "batch_transactions": "apply.max_batch_transactions",
    "batch_changes": "apply.max_batch_changes",
    "batch_bytes": "apply.max_batch_bytes",
    "synchronous_commit": "target.synchronous_commit",
}

#: The value that each key takes, in words.
VALUES: Final = {
    "workers": f"a number from 1 to {MOST}",
    "order": "preserve or relaxed",
    "batch_transactions": "a number above 0",
    "batch_changes": "a number above 0",
    "batch_bytes": "a number above 0",
    "target_speed": "a factor from 0.01 to 100",
    "synchronous_commit": "on or off",
    "flush_ms": "milliseconds from 0 to 10000",
}


def change_between(pairs: Mapping[str, str]) -> Change:
    """Return the change that settings ask for, by values such as of ``apply.workers`` that differ from a log's.

    Raise ValueError, in words for people, if no log can answer one of them.
    """
    keys = {setting: key for key, setting in SETTINGS.items()}
    if unknown := sorted(pairs.keys() - keys.keys()):
        raise ValueError(f"{unknown[0]} cannot be predicted, only {', '.join(sorted(keys))}")
    return read_change(",".join(f"{keys[setting]}={value}" for setting, value in pairs.items())) if pairs else Change()


def read_change(text: str) -> Change:
    """Return the changes that a text such as ``workers=8,order=relaxed`` asks for.

    Raises:
        ValueError: says in words for people why it asks for nothing.
    """
    values: dict[str, str] = {}
    for part in text.split(","):
        name, is_pair, value = part.strip().partition("=")
        if not is_pair or name not in VALUES:
            raise ValueError(f"{part.strip()!r} is no KEY=VALUE with one of the keys {', '.join(VALUES)}")
        if name in values:
            raise ValueError(f"{name} is given twice")
        values[name] = value
    try:
        return msgspec.convert(values, Change, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).partition(" - at `$.")[2].rstrip("`")
        raise ValueError(f"{name}={values[name]}: {name} is {VALUES[name]}") from error


# One log holds one order and batches about as large. So it cannot separate a cost of each batch from one of each
# change, nor does it show how batches close in the other order. A trial, a short run, differs in one of these.

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
        """Return errors with one more trial; its times, taken and predicted, are multiples of the log's part."""
        if self.usual.is_other(trial):
            return self._replace(order=min(max(took / predicted, 1 / _MOST_ERROR), _MOST_ERROR))
        return self._replace(smaller=took, halvings=self.usual.halvings(trial))


def trials(workers: int | None, order: Order, asked: Sequence[Change]) -> list[Change]:
    """Return the trials that show the errors of what is asked; workers and order are the log's, None: any number."""
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

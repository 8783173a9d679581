"""Options of `parapply bench` as data, without anything that takes time to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

if TYPE_CHECKING:
    from pathlib import Path

Sync = Literal["off", "on"]
Order = Literal["preserve", "relaxed"]
System = Literal[
    "ceiling", "built-in", "built-in-parallel", "parapply", "parapply-interpreted", "pglogical", "bulk-statement"
]  # fmt: skip
#: The server that has a core for itself.
Alone = Literal["publisher", "subscriber"]
#: parapply's source.streaming.
Streaming = Literal["auto", "off"]
#: Shapes that --copy copies.
CopyShapeName = Literal["one-large", "middling", "wide"]

SYSTEMS: Final[tuple[System, ...]] = get_args(System)
ORDERS: Final[tuple[Order, ...]] = get_args(Order)
ALONE: Final[tuple[Alone, ...]] = get_args(Alone)
STREAMINGS: Final[tuple[Streaming, ...]] = get_args(Streaming)
COPY_SHAPES: Final[tuple[CopyShapeName, ...]] = get_args(CopyShapeName)
DEFAULT_SYSTEMS: Final[tuple[System, ...]] = ("ceiling", "built-in", "parapply")
LIVE_SYSTEMS: Final[tuple[System, ...]] = ("built-in", "built-in-parallel", "parapply")

#: For `workers`: the number finds itself.
AUTO: Final = "auto"
#: Divisor for a run shortened by `--quick`, and the most transactions that are left of it.
_QUICK_PART: Final = 10
_QUICK_MOST: Final = 20_000


@dataclass(frozen=True, kw_only=True)
class Disk:
    """How slow the subscriber's disk is made.

    Attributes:
        read_us: microseconds more for each call that reads pages.
        sync_us: microseconds more for each flush.
    """

    read_us: int = 0
    sync_us: int = 0

    @property
    def text(self) -> str:
        """The end of runners' names; empty for a disk as it is."""
        return "".join(f", {what} {us} us" for what, us in (("read", self.read_us), ("sync", self.sync_us)) if us)


FAST: Final = Disk()


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a measurement.

    Attributes:
        systems: those that drain; parapply once for each of its orders, workers and delays.
        transactions: at least so many, rounded up to a multiple of the clients; the workload's own when `None`.
        is_quick: a tenth of the workload's own transactions, and not more than 20,000.
        large_rows: of the one huge transaction, in the workload that has one.
        scale: of the tables.
        clients: pgbench clients that make the backlog.
        workers: target connections of parapply, or `AUTO`; one runner for each.
        orders: commit orders of parapply; one runner for each.
        delays_s: seconds in each direction between daemon and target; one runner for each.
        disks: how slow the subscriber's disk is; each system that has a subscriber drains once with each.
        rounds: turns of each runner.
        syncs: synchronous_commit on the subscriber; the rounds once for each.
        settings: further `key=value` for parapply; they win over the workload's.
        alone: the server that has the first core for itself, all else shares the others.
        bindir_source: programs of the publisher; PostgreSQL 18 when `None`.
        bindir_target: programs of the subscriber.
    """

    systems: tuple[System, ...] = DEFAULT_SYSTEMS
    transactions: int | None = None
    is_quick: bool = False
    large_rows: int
    scale: int = 10
    clients: int = 4
    workers: tuple[int | str, ...] = (4,)
    orders: tuple[Order, ...] = ("preserve",)
    delays_s: tuple[float, ...] = (0.0,)
    disks: tuple[Disk, ...] = (FAST,)
    rounds: int = 3
    syncs: tuple[Sync, ...] = ("off",)
    settings: tuple[str, ...] = ()
    alone: Alone | None = None
    bindir_source: Path | None = None
    bindir_target: Path | None = None

    def backlog(self, own_transactions: int) -> int:
        """Return how many transactions to ask of a workload that has so many by itself."""
        if self.transactions is not None:
            return self.transactions
        return min(max(1, own_transactions // _QUICK_PART), _QUICK_MOST) if self.is_quick else own_transactions

    @property
    def has_slow_disk(self) -> bool:
        """Return whether any runner has a subscriber with a disk that is made slow."""
        return any(disk != FAST for disk in self.disks)

    def large(self) -> int:
        """Return the rows of the huge transaction."""
        return max(1, self.large_rows // _QUICK_PART) if self.is_quick else self.large_rows

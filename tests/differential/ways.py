"""How the routes of a random case apply, chosen by its seed so that a few seeds in a row draw every combination.

In goes a seed; out come settings of the daemon.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

#: As many seeds in a row draw every combination of commit order, workers and role.
SEEDS_OF_ALL_WAYS = 3
_ROUTES = 3
# Small batches run beside each other, large ones are reduced to net changes: both must be right.
_BATCH_TRANSACTIONS = (1, 4, 1000)
# All are followed by a worker as long as one is free, the largest are, none is.
_STREAM_START_BYTES = (0, 300_000, 1 << 30)
# Of WAL that is read at once by a daemon that is behind at all; 0: by none, as for so small a backlog.
_RANGE_BYTES = (0, 0, 8192, 65_536)
_STREAMING = ("auto", "auto", "on", "off")
# In this order any three in a row have both orders, both roles and both numbers of workers.
_WAYS = (
    ("preserve", 8, "replica"),
    ("relaxed", 8, "origin"),
    ("relaxed", 1, "replica"),
    ("preserve", 8, "origin"),
    ("preserve", 1, "replica"),
    ("relaxed", 1, "origin"),
    ("relaxed", 8, "replica"),
    ("preserve", 1, "origin"),
)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How one route applies."""

    commit_order: str
    workers: int
    role: str  # session_replication_role; under origin foreign keys and ordinary triggers of the target act
    batch_transactions: int
    stream_start_bytes: int  # of a transaction in progress before a worker follows it
    streaming: str
    range_bytes: int  # of WAL to catch up that is read at once; 0: it is all streamed
    audited: str  # how the table with an audit is applied: each transaction separately, or several as one

    @property
    def settings(self) -> Mapping[str, str | float]:
        """The daemon's settings."""
        ranges = {
            "source.catch_up_enter_bytes": 1, "source.catch_up_range_bytes": self.range_bytes,
            "source.catch_up_pause_s": 0,
        }  # fmt: skip
        return {
            **(ranges if self.range_bytes else {}),
            "apply.commit_order": self.commit_order,
            "apply.workers": self.workers,
            "apply.max_batch_transactions": self.batch_transactions,
            "apply.stream_start_bytes": self.stream_start_bytes,
            "target.session_replication_role": self.role,
            "source.streaming": self.streaming,
            'apply.tables."public.t_audited".parallel': self.audited,
        }

    def __str__(self) -> str:
        """Return it for people."""
        streams = f"streaming {self.streaming} from {self.stream_start_bytes} bytes"
        applied = f"batches of {self.batch_transactions}, audit {self.audited}, {streams}"
        ranges = f", ranges of {self.range_bytes} bytes" if self.range_bytes else ""
        return f"{self.commit_order}, {self.workers} workers, {self.role}, {applied}{ranges}"


def random_ways(seed: int) -> list[Way]:
    """Return the ways of a seed; which of them has which size of batches, and what it follows, is left to chance.

    The first that may follow transactions in progress, because it has several workers, follows them all.
    """
    chooser = random.Random(f"ways {seed}")
    # By itself, so that seeds of old keep all else.
    range_chooser = random.Random(f"ranges {seed}")
    sizes = chooser.sample(_BATCH_TRANSACTIONS, _ROUTES)
    starts = [chooser.choice(_STREAM_START_BYTES) for _ in range(_ROUTES)]
    chosen = [_WAYS[(_ROUTES * seed + number) % len(_WAYS)] for number in range(_ROUTES)]
    starts[next(number for number, (_, workers, _) in enumerate(chosen) if workers > 1)] = 0
    return [
        Way(
            commit_order=order, workers=workers, role=role, batch_transactions=size, stream_start_bytes=start,
            streaming=chooser.choice(_STREAMING), range_bytes=range_chooser.choice(_RANGE_BYTES),
            audited=chooser.choice(("auto", "ordered")),
        )
        for (order, workers, role), size, start in zip(chosen, sizes, starts, strict=True)
    ]  # fmt: skip


def all_ways() -> set[tuple[str, int, str]]:
    """Return every combination of commit order, workers and role."""
    return {
        (order, workers, role)
        for order in ("preserve", "relaxed")
        for workers in (1, 8)
        for role in ("replica", "origin")
    }

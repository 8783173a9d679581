"""Shape of a synthetic apply log."""

from __future__ import annotations

from typing import Final

import msgspec

#: Part of the time that workers are busy: the rest of the shape decides how many of them a moment needs.
_BUSY: Final = 0.5


class LogShape(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a log."""

    records: int
    detail: str = "batch"  # or transaction
    slot: str = "synth"
    tables: int = 8  # of which the first is used most: each next one half as often as the one before
    workers: int = 4
    batch_transactions: int = 20  # of a batch, on average
    transaction_changes: int = 3  # of a transaction, on average
    dependency_rate: float = 0.1  # of batches wait for an earlier one
    conflict_rate: float = 0.0  # of transactions have one
    retry_rate: float = 0.001  # of batches are repeated
    execute_ms: float = 20.0  # of a batch, the median; its distribution is log-normal
    execute_spread: float = 0.6  # its sigma
    duration_s: float | None = None  # from first to last; None: so long that workers are busy half of the time
    seed: int = 1
    file_records: int = 100_000  # in a file, about

    def __post_init__(self) -> None:
        """Check what no single bound says."""
        if self.detail not in ("batch", "transaction"):
            raise ValueError("detail must be batch or transaction")

    @property
    def n_batches(self) -> int:
        """Return how many batches there are."""
        return max(1, self.records // (1 + self.batch_transactions * (self.detail == "transaction")))

    @property
    def length_s(self) -> float:
        """Return the seconds from the first to the last commit."""
        return self.duration_s or self.n_batches * self.execute_ms / 1000 / self.workers / _BUSY

    @property
    def file_batches(self) -> int:
        """Return how many batches a file holds."""
        return max(1, self.n_batches * self.file_records // max(self.records, 1))

    @property
    def n_files(self) -> int:
        """Return how many files there are."""
        return -(-self.n_batches // self.file_batches)

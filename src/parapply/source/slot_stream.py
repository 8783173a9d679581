"""A stream as intake and progress need it: of a publisher's slot, or of the files of a capture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.vocabulary import Reading
    from parapply.wire.copy import Keepalive


class SlotStream(Protocol):
    """One stream. Only the leader uses it; the fields are as of `CatchUpStream`."""

    keepalive: Keepalive | None
    is_synchronous: bool
    reading: Reading
    reason: str

    @property
    def sender_pid(self) -> int:
        """Return the publisher's process that sends; 0: none."""

    @property
    def standby_name(self) -> str:
        """Return the name that the publisher knows the stream by among its standbys."""

    @property
    def shown(self) -> str:
        """Return how it is read, for people."""

    def reading_of(self, end_lsn: int) -> Reading:
        """Return how the transaction was read that ends at an LSN."""

    @property
    def is_drained(self) -> bool:
        """Return whether the last `drain` took everything that had come."""

    @property
    def gathers(self) -> bool:
        """Return whether messages gather while nothing is read."""

    @property
    def waiting_bytes(self) -> int:
        """Return the number of bytes that have come and are not read."""

    @property
    def confirmed_flush_lsn(self) -> int:
        """Return the LSN that was last reported, and never goes back."""

    async def run(self) -> None:
        """Do what reading needs besides, until cancelled.

        Raises:
            SourceLost, SlotBusy, SourceRefused: the stream ended, or cannot go on.
        """

    def resume_reading(self, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` whenever there is something to drain, until `pause_reading`."""

    def pause_reading(self) -> None:
        """Stop calling."""

    def drain(self, limit_bytes: int) -> list[bytes]:
        """Return the data frames at hand, at most about `limit_bytes`, without waiting.

        Raise SourceLost or SourceRefused if the stream ended, ProtocolError if it cannot be read.
        """

    @property
    def gap_lsn(self) -> int | None:
        """Return the LSN before which a publication was missing; None: none was, as far as known."""

    def forget_gap(self, lsn: int) -> None:
        """Forget such an LSN, once the target's state says which tables wait, unless a later one was noted since."""

    def send_status(
        self, written_lsn: int, flushed_lsn: int, applied_lsn: int, *, reply_requested: bool = False
    ) -> None:
        """Report progress; errors as `drain`."""

    async def close(self) -> None:
        """End the stream; once more is harmless."""

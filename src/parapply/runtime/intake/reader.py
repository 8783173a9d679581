"""When the stream is read: what is at hand becomes transactions, and reading stops while the daemon has enough.

While reading is paused the kernel's buffers fill up, and the publisher waits.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from parapply.engine.intake import DRAIN_BYTES, SHORTEST_JUDGED_S, Gathering
from parapply.errors import ParapplyError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from parapply.model import Relation, Transaction
    from parapply.source.slot_stream import SlotStream
    from parapply.wire.assembler import Assembler
    from parapply.wire.copy import Keepalive
    from parapply.wire.omission import Omission

#: Bytes of a few keep-alives. A transaction has more.
_KEEPALIVES_BYTES = 128


class Taker(Protocol):
    """Intake while its task waits in `SlotReader.read`: the turn that wakes the task is a good part of a latency."""

    def may_take_alone(self) -> bool:
        """Return whether a keep-alive that comes alone needs no more than `take_alone`."""

    def take_alone(self, keepalive: Keepalive) -> None:
        """Take such a keep-alive."""

    def take_first(self, transactions: list[Transaction]) -> list[Transaction]:
        """Take transactions that need no wait, and return the others, all later, for `read` to return.

        Raises:
            ProtocolError: a change cannot be read.
        """


class SlotReader:
    """Reads the slot's stream. Used by intake's task; the fields say who else writes them."""

    def __init__(self, stream: SlotStream, assembler: Assembler, omission: Omission | None = None) -> None:
        """Start with nothing read, and not reading; without an omission all columns are wanted."""
        self.stream = stream
        self._assembler = assembler
        self._omission = omission
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._readable = asyncio.Event()
        self._pause_over = asyncio.Event()
        self._is_pause_ended = False
        self._gathering = Gathering()
        #: When bytes last came, or reading went on. Read by the batcher, by progress, which treats a silent publisher
        #: as gone, and by the watchdog.
        self.heard_s = self._clock()
        #: True if a transaction was begun that has not been read whole.
        self.is_inside_transaction = False
        #: True while reading is paused: memory or the queue is full, or intake is busy. Read by progress and gauges.
        self.is_paused = False
        self._taker: Taker | None = None
        #: Read before intake's task has its turn and not taken, and the error met there.
        self._early: list[Transaction] = []
        self._failure: Exception | None = None
        self._waits_for = ""
        self._waited_s = self._paused_s = 0.0
        #: Beginning of the present wait, and of the present pause; 0.0: none.
        self._waits_since_s = self._paused_since_s = 0.0

    @property
    def waits_for(self) -> str:
        """Return the thing outside this daemon that intake waits for; empty while it works or waits for the workers."""
        return self._waits_for

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Have the watchdog know, while the block runs, that intake waits for something outside of this daemon."""
        before, self._waits_for = self._waits_for, what
        try:
            yield
        finally:
            self._waits_for = before

    @property
    def waited_s(self) -> float:
        """Return the seconds for which the publisher was waited for so far."""
        return self._waited_s + (self._clock() - self._waits_since_s if self._waits_since_s else 0.0)

    @property
    def paused_s(self) -> float:
        """Return the seconds for which reading was paused so far."""
        return self._paused_s + (self._clock() - self._paused_since_s if self._paused_since_s else 0.0)

    @property
    def queue(self) -> Relation | None:
        """Return the publisher's queue of commands as last announced."""
        return self._assembler.queue

    @property
    def has_more(self) -> bool:
        """Return whether changes have come that were not read yet."""
        return not self.stream.is_drained or self.stream.waiting_bytes > _KEEPALIVES_BYTES

    async def read(self) -> list[Transaction]:
        """Wait until something has come, and return the transactions, pieces and events that it completes.

        Raises:
            SourceLost: the stream ended.
            ProtocolError: the stream cannot be read.
        """
        self.go_on()
        if not self._readable.is_set():
            self._waits_since_s = self._clock()
            # As `waiting` does, whose generator takes as long as the rest of a wait.
            before, self._waits_for = self._waits_for, "the publisher"
            try:
                await self._readable.wait()
            finally:
                self._waits_for = before
            self._waited_s += self._clock() - self._waits_since_s
            self._waits_since_s = 0.0
        self._readable.clear()
        if self._failure is not None:
            raise self._failure
        if not self._early:
            return self._drained()
        found, self._early = self._early, []
        try:
            found += self._drained()
        except ParapplyError as error:
            # For the next read. A keep-alive behind the error would move the watermark past what is not returned.
            self._failure = error
            self.stream.keepalive = None
            self._readable.set()
        return found

    def _drained(self) -> list[Transaction]:
        # No name for the frames: it would keep the last of them, and one may be a gigabyte.
        transactions = self._assembler.push(self.stream.drain(DRAIN_BYTES))
        self.is_inside_transaction = self._assembler.is_open
        if self._omission is not None:
            self._omission.cut(transactions)
        self.heard_s = self._clock()
        return transactions

    def take_keepalive(self) -> Keepalive | None:
        """Return the keep-alive that came with the last read, once; everything that came before it was returned."""
        keepalive, self.stream.keepalive = self.stream.keepalive, None
        return keepalive

    def start(self, taker: Taker) -> None:
        """Begin to read, with intake's methods for what comes while `read` waits."""
        self._taker = taker
        self.stream.resume_reading(self._bytes_came)

    def stop(self) -> None:
        """Read no more until `go_on`."""
        if not self.is_paused:
            self._paused_since_s = self._clock()
        self.is_paused = True
        self.stream.pause_reading()

    def go_on(self) -> None:
        """Read again if reading is stopped."""
        if self.is_paused:
            self.is_paused = False
            # Reading was paused, so the publisher was not silent.
            self.heard_s = self._clock()
            self._paused_s += self.heard_s - self._paused_since_s
            self._paused_since_s = 0.0
            self.stream.resume_reading(self._bytes_came)

    def end(self) -> None:
        """Read no more at all."""
        self._waits_for = "nothing: it has ended"
        self.stream.pause_reading()

    async def pause(self, pause_s: float) -> None:
        """Let the publisher send more than one message before the next read; `end_pause` ends it early.

        Args:
            pause_s: longest pause; it is shorter where the kernel's buffer is full before.
        """
        pause_s = self._gathering.pause_s(pause_s)
        if not pause_s or not self.stream.gathers:
            return
        self.stream.pause_reading()
        self._pause_over.clear()
        self._is_pause_ended = False
        if pause_s < SHORTEST_JUDGED_S:
            await self._passes(pause_s)
        elif await self._passes(pause_s / 2):
            at_half_bytes = self.stream.waiting_bytes
            if await self._passes(pause_s / 2):
                self._gathering.paused(pause_s, has_grown=self.stream.waiting_bytes > at_half_bytes)
        self.stream.resume_reading(self._bytes_came)

    async def _passes(self, seconds: float) -> bool:
        """Wait, and return whether the pause was not ended early."""
        timer = self._loop.call_later(seconds, self._pause_over.set)
        try:
            await self._pause_over.wait()
        finally:
            timer.cancel()
        self._pause_over.clear()
        return not self._is_pause_ended

    def end_pause(self) -> None:
        """Read on at once, because a worker could apply the next changes."""
        self._is_pause_ended = True
        self._pause_over.set()

    def _bytes_came(self) -> None:
        """Note that bytes have come; called repeatedly until it is read or reading is paused."""
        if self._readable.is_set():
            # Busy elsewhere: with a table's catalogue, or with a large transaction whose worker waits for a lock.
            self.stop()
        elif self._waits_since_s and self._taker is not None and self._takes_all(self._taker):
            return
        self._readable.set()

    def _takes_all(self, taker: Taker) -> bool:
        """Drain and have taken what can be; return whether that was a keep-alive, which needs intake's task no more.

        Everything before is taken, as `read` waits. To wake the task would cost several times as much as a keep-alive,
        and in a fleet one comes with each commit in any database of the server.
        """
        try:
            transactions = self._drained()
            has_gap = self.stream.gap_lsn is not None
            if transactions:
                self._early = transactions if has_gap else taker.take_first(transactions)
                return False
            keepalive = self.stream.keepalive
            if keepalive is None or keepalive.reply_requested or has_gap or not taker.may_take_alone():
                return False
            self.stream.keepalive = None
            taker.take_alone(keepalive)
        except Exception as error:  # noqa: BLE001  raised by `read`, because a callback's error would end nothing
            self._failure = error
            return False
        return True

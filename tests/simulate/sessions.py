"""The sessions of the target as others see them: workers, foreign ones, prepared transactions; and their work."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from parapply.engine.job import LargeJob, StreamJob
from parapply.vocabulary import WorkerState
from tests.simulate.tables import Session

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from parapply.engine.flight import CommitTurn
    from parapply.engine.job import Job
    from parapply.model import Transaction
    from parapply.plan.batch import Batch
    from tests.simulate.commits import Entry
    from tests.simulate.source import Event

#: Bytes of each piece.
PIECE_BYTES = 10


class For(Enum):
    """Event that a worker waits for."""

    SERVER = 0  # an answer of the target
    JOB = 1
    TURN = 2
    NEWS = 3  # of the transaction in progress that it follows
    PIECE = 4  # of a large transaction


#: Events that are an answer of the engine.
ASKS: Final = (For.JOB, For.TURN)


class Failed(Exception):
    """A statement failed; `is_again`: for another session's sake."""

    def __init__(self, *, is_again: bool) -> None:
        super().__init__(is_again)
        self.is_again = is_again


class Holder(Session):
    """A session or a prepared transaction that may hold locks for which others wait."""

    def __init__(self, xid: int = 0) -> None:
        """Start with no wait; `xid` of a prepared transaction, else a foreign session."""
        super().__init__()
        self.xid = xid
        #: Where it waits itself.
        self.held_by: Holder | None = None


class Worker(Holder):
    """One worker, as far as others see it."""

    def __init__(self, number: int) -> None:
        """Start idle."""
        super().__init__()
        self.number = number
        self.job: Job | None = None
        self.state = WorkerState.IDLE
        self.since_s = 0.0
        self.given: Job | None = None
        self.answer: CommitTurn | None = None
        #: True if the question for a job or for its turn has its answer; with none of them the worker leaves.
        self.is_answered = False
        self.is_open = self.in_statement = self.is_cancelled = False
        #: Sent, and not executed yet.
        self.in_doubt: Entry | None = None
        self.waits_for = For.SERVER
        self.steps: Steps

    def may_go_on(self) -> bool:
        """Return whether the event for which it waits can come now."""
        waits_for = self.waits_for
        if waits_for is For.SERVER:
            return self.held_by is None or self.is_cancelled
        if waits_for in ASKS:
            return self.is_answered
        if isinstance(self.job, StreamJob):
            return stream_of(self.job).news
        return isinstance(self.job, LargeJob) and bool(pieces_of(self.job))


class Stream:
    """A transaction in progress, as `runtime/pool/streams.py` keeps it."""

    def __init__(self, xid: int) -> None:
        """Start without a chunk."""
        self.xid = xid
        self.chunks: list[Event] = []
        #: Of each, the last batch that came before it.
        self.after: list[int] = []
        self.is_followed = self.is_aborted = self.was_spilled = self.news = False
        self.end: Transaction | None = None
        #: Events that its worker has not taken, each with the last batch that came before it.
        self.todo: deque[tuple[Event, int]] = deque()


if TYPE_CHECKING:
    Steps = Generator[For, None, None]
    Waits = Generator[For, None, bool]
    TurnWaits = Generator[For, None, CommitTurn]


class Work(NamedTuple):
    """The contents of statements."""

    batch: Batch | None = None
    is_late: bool | None = None  # of the batch: late keys only, others only; None: all
    transactions: Sequence[Transaction] = ()  # in source order
    is_piece: bool = False  # tried as sets first
    is_alone: bool = False  # at the head, so nothing may refuse it


def stream_of(job: StreamJob) -> Stream:
    """Return the stream of a job."""
    assert isinstance(job.stream, Stream)
    return job.stream


def pieces_of(job: LargeJob) -> list[Event | None]:
    """Return the pieces that wait for a job's worker; None ends them."""
    assert isinstance(job.pieces, list)
    return job.pieces


def chain(holder: Holder | None) -> list[Holder]:
    """Return a session with all those for which it waits, one behind the other."""
    found: list[Holder] = []
    while holder is not None:
        found.append(holder)
        holder = holder.held_by
    return found

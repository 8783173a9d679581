"""One batch on its way through the daemon, in its four forms: its times, its counts, its attempts, its waits.

All times are seconds of the event loop's clock, which is monotonic (fault F29: a clock that jumps must not matter).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import msgspec

from parapply.applylog_schema import CONFLICTS_LIMIT, XIDS_LIMIT, RowCounts
from parapply.limits import BLOCKED_S, next_line_s
from parapply.model import Relation
from parapply.plan.halving import Form
from parapply.plan.steps import OrderedStep, TruncateStep
from parapply.vocabulary import Mode
from parapply.wire.messages import CommitPrepared, Prepare, RollbackPrepared, StreamPrepare
from parapply.wire.rows import DELETE, INSERT, KIND_AT, RELATION_AT, TRUNCATE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.applylog_schema import ConflictRecord
    from parapply.model import Transaction
    from parapply.plan.batch import Batch
    from parapply.plan.commands import JudgedFrames
    from parapply.plan.halving import Halving
    from parapply.plan.scheduler import Wait
    from parapply.plan.table import TablePlan


_relation_at = struct.Struct(">I").unpack_from


class Counted(NamedTuple):
    """Counts of a job at one point."""

    rows: dict[str, RowCounts]
    n_changes: int
    size_bytes: int


NOTHING_COUNTED = Counted({}, 0, 0)


class JobCounts:
    """Written by intake when a batch is closed, or by the worker piece by piece; read when it is committed."""

    __slots__ = ("commands", "n_changes", "n_left_out", "n_transactions", "rows", "size_bytes", "xids")

    def __init__(self) -> None:
        """Start with nothing."""
        #: Rows by schema.table.
        self.rows: dict[str, RowCounts] = {}
        #: Number of source transactions.
        self.n_transactions = 0
        self.n_changes = 0
        self.size_bytes = 0
        #: The first of them, at most as many as a record lists.
        self.xids: tuple[int, ...] = ()
        #: Tags of the publisher's commands that have run, in order; and how many were left out.
        self.commands: list[str] = []
        self.n_left_out = 0

    def count_batch(self, batch: Batch) -> None:
        """Count the contents of a closed batch."""
        self.n_transactions = len(batch.transactions)
        self.n_changes = batch.n_changes
        self.size_bytes = batch.size_bytes
        self.xids = tuple([transaction.xid for transaction in batch.transactions[:XIDS_LIMIT]])
        self._count_steps(batch)

    def count_piece(self, piece: Transaction, batch: Batch | None, current: dict[int, TablePlan]) -> None:
        """Count a piece of a large transaction, which is dropped once it is applied.

        Args:
            piece: just applied.
            batch: with its net changes, if it could be read into one; counts are cheap there.
            current: plan of each publisher's OID after it; tables keep their name, so before it would do as well.
        """
        self.n_transactions = 1
        self.xids = (piece.xid,)
        self.n_changes += len(piece.changes) - len(piece.relations)
        self.size_bytes += piece.size_bytes
        if batch is not None:
            self._count_steps(batch)
            return
        for change in piece.changes:
            if not isinstance(change, Relation) and change[KIND_AT] != TRUNCATE:
                self._count_row(current[_relation_at(change, RELATION_AT)[0]], change)

    def counted(self) -> Counted:
        """Return the counts so far, to go back to."""
        return Counted(_copied(self.rows), self.n_changes, self.size_bytes)

    def go_back_to(self, counted: Counted) -> None:
        """Forget the counts since then, because the changes were rolled back."""
        self.n_changes, self.size_bytes = counted.n_changes, counted.size_bytes
        self.rows = _copied(counted.rows)

    def _count_steps(self, batch: Batch) -> None:
        for changes in batch.table_changes:
            counts = self._counts(changes.plan)
            inserts, updates, deletes = changes.counts
            counts.insert += inserts
            counts.update += updates
            counts.delete += deletes
        for truncate in batch.truncates:
            self._count_truncate(truncate)
        for step in batch.steps:
            if isinstance(step, OrderedStep):
                for change in step.changes:
                    if isinstance(change, TruncateStep):
                        self._count_truncate(change)
                    else:
                        self._count_row(*change)

    def _counts(self, plan: TablePlan) -> RowCounts:
        name = plan.relation.qualified_name
        counts = self.rows.get(name)
        if counts is None:
            counts = self.rows[name] = RowCounts()
        return counts

    def _count_row(self, plan: TablePlan, frame: bytes) -> None:
        counts = self._counts(plan)
        kind = frame[KIND_AT]
        if kind == INSERT:
            counts.insert += 1
        elif kind == DELETE:
            counts.delete += 1
        else:
            counts.update += 1

    def _count_truncate(self, step: TruncateStep) -> None:
        for plan in step.plans:
            self._counts(plan).truncate += 1


def _copied(rows: dict[str, RowCounts]) -> dict[str, RowCounts]:
    return {name: msgspec.structs.replace(counts) for name, counts in rows.items()}


#: Actions on a prepared transaction that a job can have.
Outcome: TypeAlias = CommitPrepared | RollbackPrepared | Prepare | StreamPrepare

#: Seconds between attempts at the head when another session is in the way, doubled from the first to the last.
_AGAIN_MIN_S = 0.01
_AGAIN_MAX_S = 1.0
#: Seconds between attempts with on_error = "retry", doubled likewise; an operator waits this long after a repair.
_ERROR_MIN_S = 0.5
_ERROR_MAX_S = 5.0


class JobTimes:
    """Times at which a job passed each point, 0.0 before, and seconds that it took between them.

    Written by intake (`received_s`), the pool (`submitted_s`, `freed_s`, `committed_s`) and the job's worker; read by
    the stall check, metrics and the apply log.
    """

    __slots__ = ("committed_s", "executed_s", "freed_s", "received_s", "started_s", "submitted_s", "turn_s")

    def __init__(self) -> None:
        """Start before all of them."""
        self.received_s = 0.0  # its last byte was read
        self.submitted_s = 0.0  # closed
        self.freed_s = 0.0  # the last dependency committed
        self.started_s = 0.0  # a worker has it
        self.executed_s = 0.0  # all its statements have succeeded
        self.turn_s = 0.0  # all earlier batches have committed
        self.committed_s = 0.0

    @property
    def wait_dependency_s(self) -> float:
        """Return the seconds from its close until the last dependency had committed."""
        return self.freed_s - self.submitted_s

    @property
    def queued_s(self) -> float:
        """Return the seconds that it waited for a worker, without waits for a dependency."""
        # A large transaction starts before its last byte is received.
        return max(0.0, self.started_s - self.received_s - self.wait_dependency_s)

    @property
    def execute_s(self) -> float:
        """Return the seconds from its start until its statements had succeeded."""
        return max(0.0, self.executed_s - self.started_s)

    @property
    def wait_turn_s(self) -> float:
        """Return the seconds that it waited for its turn to commit."""
        return max(0.0, self.turn_s - self.executed_s)

    @property
    def commit_s(self) -> float:
        """Return the seconds from its turn until the commit was acknowledged."""
        return max(0.0, self.committed_s - self.turn_s)


class TryLater(Exception):
    """A transaction is to be tried again later; it is rolled back, and nothing of it is held on the target."""

    def __init__(self, delay_s: float) -> None:
        """Keep how long to wait."""
        super().__init__(delay_s)
        self.delay_s = delay_s


class Attempts:
    """Count of attempts of one source transaction at the head, and the wait before the next."""

    def __init__(self, *, stops_on_error: bool) -> None:
        """Begin with the shortest pauses."""
        self.stops_on_error = stops_on_error
        self.is_refreshed = False
        #: True if each change is applied so that its conflicts can be settled.
        self.is_settling = False
        self._again_s = _AGAIN_MIN_S
        #: When another session was in the way first, and after how many seconds this is shown.
        self._in_the_way_s: float | None = None
        self._told_s = BLOCKED_S
        self._error_s = _ERROR_MIN_S

    def again_s(self) -> float:
        """Return the next pause when another session is in the way."""
        self._again_s, now = min(self._again_s * 2, _AGAIN_MAX_S), self._again_s
        return now

    def is_long(self, now_s: float) -> bool:
        """Return whether it is to be told that another session is in the way, as one seems to be; at growing intervals.

        The time is the event loop's. An error that always comes with such an SQLSTATE would never be told otherwise.
        """
        self._in_the_way_s = now_s if self._in_the_way_s is None else self._in_the_way_s
        wait_s = now_s - self._in_the_way_s
        if wait_s < self._told_s:
            return False
        self._told_s = next_line_s(wait_s)
        return True

    def error_s(self) -> float:
        """Return the next pause for a repair."""
        self._error_s, now = min(self._error_s * 2, _ERROR_MAX_S), self._error_s
        return now


class Resume:
    """Progress of a batch that is repeated at the head. Written by the worker that has it."""

    __slots__ = (
        "attempts",
        "halving",
        "is_told",
        "is_whole",
        "n_in_order",
        "out_of_order",
        "overtook",
        "plans",
        "suspects",
    )

    def __init__(self, halving: Halving, plans: dict[int, TablePlan], attempts: Attempts) -> None:
        """Start before the first part.

        Args:
            halving: which transactions are committed, and which are tried next.
            plans: in force before its first change.
            attempts: of the first part.
        """
        self.halving = halving
        #: In force after what is committed.
        self.plans = plans
        #: Attempts of the next part.
        self.attempts = attempts
        #: True if the repetition was logged.
        self.is_told = False
        #: It was applied as the same sets, so that it had failed only because it was not at the head.
        self.is_whole = False
        #: Tables that are to blame then.
        self.overtook: Sequence[Relation] = ()
        #: Source transactions applied row by row.
        self.n_in_order = 0
        #: Tables because of which the sets of the next part have failed.
        self.suspects: Sequence[Relation] = ()
        #: Source transactions that succeeded row by row where the sets of these tables had failed.
        self.out_of_order: dict[Relation, int] = {}

    def committed(self, plans: dict[int, TablePlan], attempts: Attempts) -> None:
        """Go on after the part, with the plans in force after it and the attempts of the next."""
        self.halving.committed()
        self.plans = plans
        self.attempts = attempts
        self.suspects = ()


class Alone(NamedTuple):
    """A source transaction that is a whole job."""

    xid: int
    commit_lsn: int
    commit_time_us: int


class _Job:
    """Common part of all jobs. Written by intake until the job is submitted, then by the pool and its worker."""

    __slots__ = (
        "alone",
        "arrivals",
        "attempts",
        "batch",
        "conflicts",
        "counts",
        "error",
        "first_transaction",
        "is_left_out",
        "is_unwanted",
        "more_conflicts",
        "must_yield",
        "times",
        "waited_for",
        "worker",
    )

    def __init__(self, batch: Batch) -> None:
        """Start with a batch that has no place in the order yet, or an open one."""
        #: Filled by intake.
        self.batch = batch
        self.times = JobTimes()
        #: Number of the worker that has it, or had it last.
        self.worker = 0
        #: Written by its worker: how often it was begun. Read by the apply log and metrics, as are the next three.
        self.attempts = 1
        #: Written by its worker: why it had to be repeated, for people: SQLSTATE or a `RetryReason`.
        self.error = ""
        #: Written by the pool: the last dependency that it, or the changes of its late keys, had to wait for.
        self.waited_for: Wait | None = None
        #: Written by the conflict handler: its changes' conflicts, each with the commit LSN of its source transaction.
        self.conflicts: list[tuple[int, ConflictRecord]] = []
        #: Written with it: number of conflicts of each sort beyond the ones that a record lists.
        self.more_conflicts: dict[ConflictRecord, int] = {}
        #: Written by the pool for the stall check, cleared by its worker: it blocks an earlier batch, so it rolls back
        #: and waits for its turn (trap T-30).
        self.must_yield = False
        #: Written by the stall check: what it waited for was cancelled, because the operator skips a transaction, which
        #: it is, has or, while it has not come whole, may be.
        self.is_unwanted = False
        #: Written by its worker: nothing of it was applied. It ends with a PREPARE that the publisher has rolled back,
        #: or it was committed before the start.
        self.is_left_out = False
        self.counts = JobCounts()
        #: Written by the batcher, only at ``applylog.detail = "transaction"``: the number of its first source
        #: transaction within the epoch (0: not noted), and how many had come at which time.
        self.first_transaction = 0
        self.arrivals: list[tuple[int, float]] = []
        #: Written by the batcher: its one source transaction, where the batch does not hold it.
        self.alone: Alone | None = None

    def add_conflict(self, commit_lsn: int, conflict: ConflictRecord) -> None:
        """Note a conflict in the source transaction with a commit LSN; beyond the limit it is only counted."""
        if len(self.conflicts) < CONFLICTS_LIMIT:
            self.conflicts.append((commit_lsn, conflict))
        else:
            self.more_conflicts[conflict] = self.more_conflicts.get(conflict, 0) + 1

    def left_out(self, why: str) -> None:
        """Count nothing, because nothing of it was applied; `why` is for people."""
        self.counts.go_back_to(NOTHING_COUNTED)
        self.conflicts, self.more_conflicts = [], {}
        self.is_left_out = True
        self.error = why


class SetJob(_Job):
    """Transactions that came whole: applied as sets, or row by row at the head if that fails."""

    __slots__ = ("flight_commit_s", "is_one_flight", "plans_before", "prepare", "resume")

    def __init__(self, batch: Batch, plans_before: dict[int, TablePlan]) -> None:
        """Start with an open batch.

        Args:
            batch: to be filled by intake.
            plans_before: plan in force for each publisher's OID before its first change; never written. A retry reads
                the changes again from there.
        """
        super().__init__(batch)
        self.plans_before = plans_before
        #: Written by intake: the message that ends it instead of a commit.
        self.prepare: Prepare | None = None
        #: Written by its worker: executed and committed at once.
        self.is_one_flight = False
        #: Written by its worker: seconds of COMMIT then; 0.0 where they were not taken.
        self.flight_commit_s = 0.0
        #: Written by its worker, once it is repeated at the head: the worker may leave it, and the next one that has it
        #: continues there.
        self.resume: Resume | None = None

    @property
    def mode(self) -> Mode:
        """Return how it is applied; final when it is committed."""
        if self.is_left_out:
            return Mode.OUTCOME
        return Mode.ROWS if self.n_in_order else Mode.SET

    @property
    def n_in_order(self) -> int:
        """Return the number of its source transactions that were applied row by row; final when it is committed."""
        return self.resume.n_in_order if self.resume is not None else 0

    @property
    def is_one_by_one(self) -> bool:
        """Return whether its transactions are executed and committed one after the other, without a wait between."""
        if self.resume is None or self.resume.halving.is_done:
            return False
        return self.resume.halving.part.form is Form.EACH


class PieceQueue(Protocol):
    """The way of a large transaction's pieces from intake to its worker; None ends them."""

    async def put(self, piece: Transaction | None, /) -> None:
        """Hand a piece over, as soon as there is room."""

    async def get(self) -> Transaction | None:
        """Wait for the next piece."""

    def empty(self) -> bool:
        """Return whether no piece is at hand."""


class LargeJob(_Job):
    """One large transaction, applied piece by piece as it comes: a barrier."""

    __slots__ = ("commands", "commit_lsn", "pieces", "plans_before", "prepare")

    def __init__(
        self,
        batch: Batch,
        plans_before: dict[int, TablePlan],
        pieces: PieceQueue,
        commit_lsn: int,
    ) -> None:
        """Start without a piece.

        Args:
            batch: gets no changes.
            plans_before: as of `SetJob`.
            pieces: from intake to its worker.
            commit_lsn: all that is known of its place before it has come whole.
        """
        super().__init__(batch)
        self.plans_before = plans_before
        self.pieces = pieces
        self.commit_lsn = commit_lsn
        #: Written by intake with the last piece: the message that ends it instead of a commit.
        self.prepare: Prepare | None = None
        #: The publisher's commands in the pieces that have come; written by intake before each piece.
        self.commands: JudgedFrames = {}

    @property
    def mode(self) -> Mode:
        """Return how it is applied, as `SetJob.mode`."""
        return Mode.OUTCOME if self.is_left_out else Mode.LARGE


class InProgress(Protocol):
    """A transaction in progress on the publisher, as far as the order of batches depends on it."""

    #: True if a worker follows it, or will.
    is_followed: bool
    #: Event of its commit or its prepare; None: it is in progress.
    end: Transaction | None


class StreamJob(_Job):
    """One transaction that was streamed while it was in progress: followed, or applied at its commit; a barrier."""

    __slots__ = ("commands", "plans_before", "prepare", "stream")

    def __init__(self, batch: Batch, plans_before: dict[int, TablePlan], stream: InProgress) -> None:
        """Start with the chunks that have come.

        Args:
            batch: gets no changes; of a transaction in progress it has number 0, and intake replaces it at the end.
            plans_before: as of `SetJob`; one that is followed announces again what it uses.
            stream: the chunks that have come.
        """
        super().__init__(batch)
        self.plans_before = plans_before
        self.stream = stream
        #: Written by intake at its end: the message that ends it instead of a commit.
        self.prepare: StreamPrepare | None = None
        #: The publisher's commands; written by intake at the end of the transaction.
        self.commands: JudgedFrames = {}

    @property
    def mode(self) -> Mode:
        """Return how it is applied, as `SetJob.mode`."""
        if self.is_left_out:
            return Mode.OUTCOME
        return Mode.STREAMED if self.stream.is_followed else Mode.SPILLED


class OutcomeJob(_Job):
    """The outcome of a prepared transaction, and nothing else: a barrier."""

    __slots__ = ("outcome",)

    def __init__(self, batch: Batch, outcome: Outcome) -> None:
        """Start with the action to take.

        Args:
            batch: gets no changes.
            outcome: the publisher's message; a PREPARE is only recorded.
        """
        super().__init__(batch)
        self.outcome = outcome

    @property
    def mode(self) -> Mode:
        """Return how it is applied, as `SetJob.mode`."""
        return Mode.OUTCOME


#: Jobs with changes.
AppliedJob: TypeAlias = SetJob | LargeJob | StreamJob
#: Jobs that a worker may get.
Job: TypeAlias = SetJob | LargeJob | StreamJob | OutcomeJob

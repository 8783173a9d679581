"""The core alone: a seed draws transactions, workers, the order of all that they do, failures, kills and crashes.

Checked after each step: commits keep the source's order, or what relaxed order promises; each transaction commits once;
what is reported as flushed survives every crash; something is always possible until all has committed; and at the end
nothing is held.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, Self

from parapply.engine.durability import Durability, Reporting, Stream
from parapply.engine.flight import Flight
from parapply.engine.intake import Closing, Room
from parapply.engine.job import LargeJob, OutcomeJob, SetJob, StreamJob
from parapply.engine.shares import Share
from parapply.engine.stalls import AT_WORK, Stalls, executed_now
from parapply.engine.state import EngineState
from parapply.engine.workers import LoadSample, Scaling
from parapply.model import Transaction, Until
from parapply.plan.batch import Batch
from parapply.plan.scheduler import KeysInFlight, overlaps
from parapply.vocabulary import WorkerState
from parapply.wire.copy import Keepalive
from tests.simulate.apply import Applying
from tests.simulate.commits import Commits, Entry
from tests.simulate.draws import Draws, Violation
from tests.simulate.sessions import ASKS, PIECE_BYTES, For, Worker, chain, pieces_of
from tests.simulate.sessions import Stream as InProgress
from tests.simulate.source import message_of, source_from, source_of

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Iterator, Sequence

    from parapply.engine.job import Job
    from tests.simulate.source import Batches, Event

#: Steps for each event in which a schedule must have ended: far more than any needs.
_PATIENCE: Final = 3_000
#: Pieces of a large transaction that wait for their worker, as in `runtime/intake/batcher.py`.
_PIECES: Final = 2
_MOST_WORKERS: Final = 5
_SERVER: Final = For.SERVER
#: Without and with a flush of each commit.
_REPORTING: Final = [
    Reporting(
        advance_interval_s=0.1, status_interval_s=10, receive_timeout_s=60, is_apply_durable=is_durable, until=Until()
    )
    for is_durable in (False, True)
]
_SCALED: Final = (0.1, 2.0, 20.0, 70.0)
#: Tables of keys in flight that no epoch uses: to fill the pages of a new one takes longer than an epoch.
_SPARE: Final[list[KeysInFlight]] = []


class Schedule:
    """One seed's."""

    __slots__ = (
        "_advancing", "_applied", "_check_steps", "_closing", "_durability", "_ends", "_events", "_has_timer",
        "_heard_s", "_is_backlog", "_is_durable", "_large", "_open", "_open_as", "_p_kill", "_p_other", "_pending",
        "_received_lsn", "_room", "_scaling", "_seq", "_share", "_size", "_stalls", "_streams", "applying", "commits",
        "confirmed_lsn", "draws", "flight", "is_relaxed", "seed", "seen", "source", "state", "trace",
    )  # fmt: skip

    #: Positions between the last transaction's end and the publisher's.
    _rest = 0x20

    @staticmethod
    def _source_of(seed: int) -> Batches:
        return source_of(seed)

    def __init__(self, seed: int, source: Batches | None = None, choices: Sequence[int] | None = None) -> None:
        """Draw how the engine is set.

        Args:
            seed: of the choices, and of the stream.
            source: another stream.
            choices: others than the seed's.
        """
        self.seed = seed
        self.source = self._source_of(seed) if source is None else source
        self.draws = draws = Draws(seed, choices)
        #: Events by their name; and each step in words, if asked for.
        self.seen: Counter[str] = Counter()
        self.trace: list[str] | None = None
        self.is_relaxed = draws.chance(0.5) and self.source.may_be_relaxed
        self.commits = Commits(is_relaxed=self.is_relaxed)
        #: Up to where the publisher was told that all is flushed.
        self.confirmed_lsn = 0
        self._p_other = (0.04, 0.1, 0.3)[draws.below(3)]
        self._p_kill = (0.0, 0.1, 0.3)[draws.below(3)]
        self._is_durable = draws.chance(0.3)
        self.flight: Flight = None  # type: ignore[assignment]
        self._ends = self.source.ends
        self._check_steps: Iterator[None] | None = None

    @classmethod
    def again(cls, parts: Sequence[Sequence[int]]) -> Self:
        """Return the schedule of other choices: of the stream, and of the schedule."""
        return cls(0, source_from(parts[0]), parts[1])

    @property
    def parts(self) -> list[list[int]]:
        """Return the choices so far, for `again`."""
        return [self.source.draws.taken, self.draws.taken]

    def run(self) -> None:
        """Play it to its end.

        Raises:
            Violation: a promise is broken.
        """
        try:
            self._play()
        except Violation:
            raise
        except (AssertionError, LookupError, AttributeError) as error:
            raise Violation(f"the engine fails: {error!r}") from error

    def _play(self) -> None:
        self._begin()
        draws, limit = self.draws, _PATIENCE * (2 + len(self.source.events))
        n_steps = 0
        while (
            self._events
            or self._open
            or self.state.jobs
            or self.state.held_bytes
            or self.applying.is_lost
            or self._has_more()
        ):
            n_steps += 1
            if n_steps > limit:
                raise Violation("it never ends")
            if self.applying.is_lost:
                self._kill("lost session")
                continue
            if not draws.chance(self._p_other):
                self._step()
            elif draws.chance(self._p_kill):
                self._kill(("kill", "kill", "crash", "lost answer", "takeover")[draws.below(5)])
            else:
                self._disturb()
        self._check_end()
        self._end()

    def _check_end(self) -> None:
        left = [lsn for lsn in self._ends if lsn not in self.commits.done and lsn > self.commits.low_lsn]
        if left:
            raise Violation("a transaction is missing at the end")
        if self.commits.prepared:
            raise Violation("a transaction is still prepared at the end")
        # A transaction committed before a kill is passed over, so only the publisher's position shows that all is done.
        end_lsn = self.source.end_lsn + self._rest
        self._durability.keepalive(Keepalive(end_lsn=end_lsn, send_time_us=0, reply_requested=False), 0.0)
        self._durability.settle(Stream(end_lsn, holds_nothing=True, is_inside_large=False, is_synchronous=False))
        if self.state.watermark.low_lsn != end_lsn:
            raise Violation("the watermark stands still")
        self._give_back_keys()

    def _has_more(self) -> bool:
        """Return whether the publisher has more than what has come."""
        return False

    def _say(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(text)

    # An epoch.

    def _begin(self) -> None:
        """Start an epoch with what the target has: nothing of the one before is left."""
        draws, commits, low_lsn = self.draws, self.commits, self.commits.low_lsn
        if any(lsn <= low_lsn and lsn not in commits.done for lsn in self._ends):
            raise Violation("the watermark is ahead of the commits")
        if self.confirmed_lsn > low_lsn:
            raise Violation("what was reported as flushed is gone")
        # The daemon's row is written durably before the first report, and with it all that was read here.
        commits.flush()
        self.state = EngineState(low_lsn, 0.0, is_relaxed=self.is_relaxed)
        self.flight = self._new_flight()
        self.applying = applying = self._new_applying()
        applying.changed = self._close_if_due  # type: ignore[method-assign]
        applying._check_start = self._check_start  # type: ignore[method-assign]
        applying.is_durable = is_durable = self._is_durable
        self._durability = Durability(self.flight, _REPORTING[is_durable and not self.is_relaxed], 0.0)
        self._share = Share(
            least_workers=1, first_workers=2, most_workers=_MOST_WORKERS, memory_bytes=(1, 40, 1 << 30)[draws.below(3)]
        )
        self._room = Room(self.flight, self._share)
        self._stalls = Stalls(self.flight, 0.0)
        self._closing = Closing(self.flight, linger_s=0.01)
        self._is_backlog = draws.chance(0.5)
        #: Number of reads, and whether the open batch waits for a while.
        self._heard_s = 0.0
        self._has_timer = False
        self._check_steps = None
        self._scaling = Scaling(self._share)
        self._seq = self._received_lsn = 0
        #: Ends of the open batch's transactions, how many it may have, and the batch of those that have come.
        self._open: list[int] = []
        self._size = 1
        self._open_as: Batch | None = None
        self._streams: dict[int, InProgress] = {}
        self._large: LargeJob | None = None
        #: Watermark of the advance that is under way.
        self._advancing: int | None = None
        self._events: deque[Event] = self.source.events_after(low_lsn)
        self._applied = frozenset(commits.done)
        self._pending = frozenset(commits.prepared)
        for _ in range(1 + draws.below(4)):
            applying.come()

    def _end(self) -> None:
        """Let go what refers to itself, so that no collector has to look for it."""
        self.applying.end()
        self._check_steps = None

    def _give_back_keys(self) -> None:
        if self.flight is not None:
            order = self.flight._scheduler
            for batch in order.batches():
                for changes in batch.table_changes:
                    order._keys.remove(changes)
            _SPARE.append(order._keys)

    def _new_flight(self) -> Flight:
        self._give_back_keys()
        flight = Flight(self.state)
        if _SPARE:
            flight._scheduler._keys = _SPARE.pop()
        return flight

    def _new_applying(self) -> Applying:
        return Applying(self.flight, self.commits, self.draws, self.seen)

    def _kill(self, why: str) -> None:
        """End the daemon, its session, or the target, which loses a part of what was not flushed."""
        draws, commits = self.draws, self.commits
        if why == "takeover":
            # The successor has the lease, and waits for the sessions of this one, which goes on until they end.
            for _ in range(draws.below(4)):
                if self._events or self.state.jobs:
                    self._step()
        self._fence(why)
        self._end()
        if why == "crash":
            kept = commits.n_flushed + draws.below(len(commits.wal) - commits.n_flushed + 1)
            self.seen["crash that loses commits"] += kept < len(commits.wal)
            commits.crash(kept)
        self.seen[why] += 1
        self._say(f"{why}; {len(commits.wal)} records are left")
        self._begin()

    def _fence(self, why: str) -> None:
        """Wait until every session of the daemon is gone, commits in doubt included."""
        for worker in self.applying.workers.values():
            entry = worker.in_doubt
            if entry is not None:
                self.seen["commit in doubt"] += 1
                self.seen["takeover while preparing"] += why == "takeover" and entry.kind == "prepare"
                # The server has it, or never got it.
                if self.draws.chance(0.5):
                    self.commits.write(entry)

    # Steps.

    def _step(self) -> None:
        found: list[Worker | SetJob | Closing | None] = [
            one
            for one in self.applying.workers.values()
            # The most frequent ones without a call.
            if (
                (one.held_by is None or one.is_cancelled)
                if one.waits_for is _SERVER
                else (one.is_answered if one.waits_for in ASKS else one.may_go_on())
            )
        ]
        if self._may_take():
            found.append(None)
        found += self.applying.later
        if self._has_timer:
            found.append(self._closing)
        if not found:
            if not self._unblock():
                raise Violation("nothing can happen any more" if not self._open else "a batch is never closed")
            return
        what = found[self.draws.below(len(found))]
        if what is None:
            self._take(self._events.popleft())
        elif isinstance(what, Worker):
            self._go_on(what)
        elif isinstance(what, Closing):
            self._has_timer = False
            if self._open:
                self._close_after(self._closing.waited(self._open_batch(), self._heard_s))
        else:
            self.applying.later.remove(what)
            self._say(f"batch {what.batch.seq} is tried again")
            self.applying.perform(self.flight.unpark(what.batch.seq))

    def _go_on(self, worker: Worker) -> None:
        committed = self.applying.committed
        self.applying.step(worker)
        if self.trace is not None:
            job = f" with batch {worker.job.batch.seq}" if worker.job else ""
            self._say(f"worker {worker.number}{job}: {worker.state}, waits for {worker.waits_for.name.lower()}")
        while committed:
            job_done = committed.pop()
            if self.trace is not None:
                self._say(f"batch {job_done.batch.seq} has committed")
            self._durability.committed(self.applying.now_s, is_synchronous=False)

    def _unblock(self) -> bool:
        """Have the stall check look, and if it changes nothing a foreign session leave; return whether one did."""
        before = self._shown()
        for _ in range(2):
            for _ in self._check_steps or ():
                pass
            self._check_steps = self._stall_check()
        for _ in self._check_steps or ():
            pass
        self._check_steps = None
        return before != self._shown() or self._foreign_leaves()

    def _shown(self) -> tuple[object, ...]:
        workers = self.applying.workers.values()
        return tuple([(one.answer, one.held_by, one.is_cancelled, one.job and one.job.must_yield) for one in workers])

    def _foreign_leaves(self) -> bool:
        free = self.applying.free_foreign()
        if not free:
            return False
        holder = free[0]
        self.applying.foreign.remove(holder)
        self.applying.let_go(holder)
        self._say("a foreign session ends")
        return True

    def _disturb_foreign(self) -> None:
        self._foreign_leaves()

    def _disturb(self) -> None:
        """Do what no batch waits for: look for stalls, write the watermark, report, change the number of workers."""
        draws, applying = self.draws, self.applying
        what = draws.below(8)
        if what <= 2:
            if self._check_steps is None:
                self._check_steps = self._stall_check()
            if next(self._check_steps, self) is self:
                self._check_steps = None
        elif what == 3:
            self._advance()
        elif what == 4:
            self._report()
        elif what == 5:
            self._disturb_foreign()
        elif what == 6:
            self._scale()
        elif self._ends:
            applying.skips.add(self._ends[draws.below(len(self._ends))])
            applying.skips -= self._applied

    def _advance(self) -> None:
        """Begin to write the watermark durably, or have that acknowledged."""
        commits = self.commits
        if self._advancing is None:
            self._advancing = self._durability.advances(0.0)
            commits.flush()
            commits.written_lsn = max(commits.written_lsn, self._advancing)
        else:
            self._durability.made_durable(self._advancing)
            self._advancing = None

    def _report(self) -> None:
        """Take the publisher's position, now and then, and report what is durable."""
        if self._received_lsn > self.state.watermark.low_lsn and self.draws.chance(0.3):
            lsn = self._received_lsn + 8
            keepalive = Keepalive(end_lsn=lsn, send_time_us=0, reply_requested=False)
            self._durability.keepalive(keepalive, 0.0)
        is_inside = self._large is not None
        holds_nothing = not self._open and not is_inside
        self._durability.settle(Stream(self._received_lsn, holds_nothing, is_inside, is_synchronous=False))
        self._durability.reported(0.0)
        self.confirmed_lsn = lsn = self.state.durable_lsn
        if not self.commits.is_flushed(self._ends, lsn):
            raise Violation("what is reported is not durable")

    def _scale(self) -> None:
        """As `runtime/worker_tasks.py` does, with samples at times of its own."""
        applying, scaling, draws = self.applying, self._scaling, self.draws
        applying.now_s += _SCALED[draws.below(len(_SCALED))]
        workers = applying.workers
        if len(workers) > scaling.wanted:
            return
        n_busy = sum([one.job is not None for one in workers.values()])
        is_pressed = self.flight.is_pressed and 2 * n_busy >= len(workers)
        waiting = draws.below(2) * 1.0 if is_pressed else None
        step = scaling.look(LoadSample(applying.now_s, len(workers), n_busy, is_pressed, waiting, self._seq, self._seq))
        if step is None:
            return
        n_more = step.n_workers - len(workers)
        self._say(f"{step.n_workers} workers: {step.reason}")
        if n_more <= 0:
            applying.perform(self.flight.release(-n_more))
        for _ in range(n_more):
            applying.come()

    # Intake, as `runtime/intake` does it.

    def _may_take(self) -> bool:
        if not self._events:
            return False
        if self._large is not None and self._events[0].kind in ("piece", "last"):
            return len(pieces_of(self._large)) < _PIECES
        return self._room.is_left(len(self._open))

    def _take(self, event: Event) -> None:
        if self.trace is not None:
            self._say(f"intake takes: {event.kind} of {event.xid}")
        self._received_lsn = max(self._received_lsn, event.end_lsn)
        if event.kind == "whole":
            self._whole(event)
        elif event.kind in ("piece", "last"):
            self._piece(event)
        elif event.kind == "outcome":
            if event.end_lsn not in self._applied:
                self._alone(OutcomeJob(self._new_batch(event), message_of(event)))
        else:
            self._in_progress(event)
        if self._open and len(self._open) >= self._size:
            self._close()
        elif not self._events or self.draws.chance(0.5):
            self._read_ends()

    def _read_ends(self) -> None:
        self._heard_s += 1
        self._close_if_due()

    def _open_batch(self) -> Batch:
        if self._open_as is None:
            ends, is_relaxed = tuple(self._open), self.is_relaxed
            self._open_as = self.source.batch_of(ends, self._seq, is_prepared=False, is_relaxed=is_relaxed)
        return self._open_as

    def _close_if_due(self) -> None:
        if self._open:
            self._close_after(self._closing.look(self._open_batch(), self._heard_s))

    def _close_after(self, wait_s: float | None) -> None:
        if wait_s == 0.0:
            self._close()
        elif wait_s is not None:
            self._has_timer = True

    def _whole(self, event: Event) -> None:
        if event.end_lsn in self._applied:
            return
        if event.is_prepared:
            self._close()
            if event.xid in self._pending:
                self._alone(OutcomeJob(self._new_batch(event), message_of(event)))
                return
            self._seq += 1
            batch = self.source.batch_of((event.end_lsn,), self._seq, is_prepared=True, is_relaxed=self.is_relaxed)
            job = SetJob(batch, {})
            job.prepare = message_of(event)  # type: ignore[assignment]
            self._submit(job)
            return
        self._closing.is_backlog = self._is_backlog
        if not self._open:
            self._seq += 1
            self._size = 1 + self.draws.below(3)
        self._open.append(event.end_lsn)
        self._open_as = None

    def _close(self) -> None:
        if self._open:
            self._closing.closed()
            self._has_timer = False
            batch, self._open, self._open_as = self._open_batch(), [], None
            self._submit(SetJob(batch, {}))

    def _submit(self, job: Job) -> None:
        if self.trace is not None:
            self._say(f"batch {job.batch.seq} is closed: {type(job).__name__}")
        self.applying.perform(self.flight.submit(job, 0.0))

    def _new_batch(self, event: Event) -> Batch:
        self._close()
        self._seq += 1
        batch = Batch(self._seq)
        batch.first_lsn = batch.end_lsn = event.end_lsn
        return batch

    def _alone(self, job: Job) -> None:
        job.batch.is_barrier = True
        self._submit(job)

    def _piece(self, event: Event) -> None:
        last = event if event.end_lsn else self._last_of(event)
        if last.is_prepared and event.xid in self._pending:
            if event.kind == "last" and event.end_lsn not in self._applied:
                self._alone(OutcomeJob(self._new_batch(event), message_of(event)))
            return
        job = self._large
        if job is None:
            batch = self._new_batch(event)
            job = self._large = LargeJob(batch, {}, [], 0)  # type: ignore[arg-type]
            self._alone(job)
        self.flight.count_in(PIECE_BYTES)
        pieces_of(job).append(event)
        if event.kind == "last":
            job.batch.first_lsn = job.batch.end_lsn = event.end_lsn
            job.prepare = message_of(event) if event.is_prepared else None  # type: ignore[assignment]
            self.flight.ended(job)
            pieces_of(job).append(None)
            self._large = None

    def _last_of(self, event: Event) -> Event:
        return next(one for one in self._events if one.xid == event.xid and one.end_lsn)

    def _in_progress(self, event: Event) -> None:
        xid = event.xid
        stream = self._streams.get(xid)
        if stream is None:
            stream = self._streams[xid] = InProgress(xid)
        if event.kind in ("chunk", "sub"):
            self._chunk(stream, event)
            return
        del self._streams[xid]
        is_done = event.end_lsn in self._applied or (event.kind == "prepare" and xid in self._pending)
        if event.kind == "abort" or is_done:
            stream.is_aborted = stream.news = True
            if is_done and event.kind == "prepare" and event.end_lsn not in self._applied:
                self._alone(OutcomeJob(self._new_batch(event), message_of(event)))
            return
        self._end_of(stream, event)

    def _chunk(self, stream: InProgress, event: Event) -> None:
        if event.kind == "sub":
            # Of what is kept, all since the subtransaction began is cut off.
            n_kept = next((n for n, one in enumerate(stream.chunks) if one.sub == event.sub), len(stream.chunks))
            del stream.chunks[n_kept:], stream.after[n_kept:]
            if stream.is_followed:
                stream.todo.append((event, self._seq))
                stream.news = True
            return
        stream.chunks.append(event)
        stream.after.append(self._seq)
        if stream.is_followed:
            stream.todo.append((event, self._seq))
            stream.news = True
        elif self.flight.may_follow and not stream.was_spilled and self.draws.chance(0.8):
            stream.is_followed = True
            stream.todo.extend(zip(stream.chunks, stream.after, strict=True))
            self.applying.perform(self.flight.follow(StreamJob(Batch(0), {}, stream)))

    def _end_of(self, stream: InProgress, event: Event) -> None:
        batch = self._new_batch(event)
        end = Transaction(event.xid, event.end_lsn, 1)
        end.end_lsn = event.end_lsn
        stream.end, stream.news = end, True
        job = self.flight.follower_of(stream)
        if job is None:
            job = StreamJob(batch, {}, stream)
        else:
            job.batch = batch
        job.prepare = message_of(event) if event.kind == "prepare" else None  # type: ignore[assignment]
        self._alone(job)

    # The stall check, as `runtime/apply/deadlocks.py` does it.

    def _stall_check(self) -> Iterator[None]:
        applying, stalls = self.applying, self._stalls
        self.state.foreign_waits.clear()
        for worker in list(applying.workers.values()):
            if worker.job is not None and stalls.holds_up(worker, applying.now_s):
                applying.perform(self.flight.take_back(worker.job))
        for worker in list(applying.workers.values()):
            if not stalls.stands_still(worker, applying.now_s):
                continue
            job, found = worker.job, chain(worker.held_by)
            yield
            if job is None or job is not worker.job or worker.state not in AT_WORK:
                continue
            if any(not isinstance(one, Worker) for one in found):
                stalls.waits(worker, job, "a lock", applying.now_s)
                if applying.skips and any(one.end_lsn in applying.skips for one in executed_now(job)):
                    self.seen["a blocked batch is skipped"] += 1
                    job.is_unwanted = True
                    self._cancel(worker)
            self._end_prepared(worker, job, [one.xid for one in found if one.xid])
            for one in found:
                if isinstance(one, Worker) and one is not worker and stalls.may_break(job, one):
                    self._break(job, one)
        stalls.looked()

    def _end_prepared(self, worker: Worker, job: Job, xids: list[int]) -> None:
        for xid in set(xids) & set(self.applying.rollbacks()) & self.commits.prepared:
            self.seen["rolled back early"] += 1
            self.applying.write(Entry("decide", 0, xid=xid, is_commit=False))
        if any(xid in self.commits.prepared for xid in xids):
            effects = self.flight.give_way(job)
            if effects is not None:
                self.seen["a stream gives way to what is prepared"] += 1
                self.applying.perform(effects)
                self._cancel(worker)

    def _break(self, job: Job, blocker: Worker) -> None:
        other = blocker.job
        if other is None:
            return
        is_executing = blocker.state is WorkerState.EXECUTING
        effects = self.flight.yield_to(job, other)
        if effects is None:
            return
        self._say(f"batch {other.batch.seq} is to yield to {job.batch.seq}")
        self.applying.perform(effects)
        if is_executing:
            self._cancel(blocker)

    def _cancel(self, worker: Worker) -> None:
        if worker.in_statement:
            worker.is_cancelled = True

    # Checks.

    def _check_start(self, job: Job) -> None:
        if job in self.applying.later:
            raise Violation("a batch is tried again before its pause is over")
        if not job.batch.seq:
            return
        for earlier in self.state.jobs.values():
            if earlier.batch.seq >= job.batch.seq:
                return
            if isinstance(job, StreamJob) and job.stream.is_followed:
                continue  # each chunk waits for what came before it
            for overlap in overlaps(earlier.batch, job.batch):
                is_late = overlap.changes is not None and overlap.keys and overlap.keys <= overlap.changes.late_keys
                if not is_late:
                    raise Violation("a batch starts before what it depends on")

"""The workers of the core: each step as `runtime/apply` takes it, statements and answers drawn.

A worker is a generator that gives what it waits for. A statement may wait for another session's lock or fail, and every
answer comes at a time of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.engine.flight import CommitTurn, Given, LetGo, News
from parapply.engine.job import Attempts, LargeJob, OutcomeJob, Resume, SetJob, StreamJob
from parapply.plan.halving import Form, Halving
from parapply.vocabulary import WorkerState
from parapply.wire.messages import CommitPrepared, Prepare, RollbackPrepared
from tests.simulate.commits import Entry
from tests.simulate.draws import Violation
from tests.simulate.sessions import PIECE_BYTES, Failed, For, Holder, Stream, Work, Worker, chain, pieces_of, stream_of

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from parapply.engine.flight import Effect, Flight
    from parapply.engine.job import Job
    from parapply.model import Transaction
    from tests.simulate.commits import Commits
    from tests.simulate.draws import Draws
    from tests.simulate.sessions import Steps, TurnWaits, Waits
    from tests.simulate.source import Event


class _GiveWay(Exception):
    """A follower rolls back."""


class _Aborted(Exception):
    """The publisher has rolled the transaction in progress back."""


class Applying:
    """The workers of one epoch."""

    def __init__(self, flight: Flight, commits: Commits, draws: Draws, seen: Counter[str]) -> None:
        """Start with no worker."""
        self.flight = flight
        self.state = flight.state
        self.commits = commits
        self.seen = seen
        self._draws = draws
        self.workers: dict[int, Worker] = {}
        #: Foreign sessions that hold a lock for which a worker waits, and prepared transactions that do.
        self.foreign: list[Holder] = []
        self.prepared: dict[int, Holder] = {xid: Holder(xid) for xid in commits.prepared}
        #: Jobs that are tried again after a pause.
        self.later: list[SetJob] = []
        #: Ends of transactions that the operator wants skipped.
        self.skips: set[int] = set()
        #: True if the session is lost, so that the epoch ends.
        self.is_lost = False
        self.is_durable = False
        #: Answers come later than what they answer, and others act in between.
        self.is_late = draws.chance(0.5)
        self.p_fail = (0.0, 0.1, 0.3, 0.6)[draws.below(4)]
        self.p_held = (0.0, 0.1, 0.3)[draws.below(3)]
        self.now_s = 0.0
        self.committed: list[Job] = []

    def come(self) -> None:
        """Add a worker."""
        number = max(self.workers, default=0) + 1
        worker = self.workers[number] = Worker(number)
        self.state.n_workers += 1
        self._set_followers()
        worker.steps = self._life(worker)
        self.step(worker)

    def _set_followers(self) -> None:
        self.flight.max_followers = self.state.n_workers // 2

    def step(self, worker: Worker) -> None:
        """Let a worker go on to its next wait."""
        try:
            worker.waits_for = next(worker.steps)
        except StopIteration:
            del self.workers[worker.number]
            self._set_followers()
            self.seen["a worker leaves"] += 1

    def end(self) -> None:
        """Let go what refers to itself, as `Schedule._end`."""
        for worker in self.workers.values():
            del worker.steps
        del self.changed, self._check_start

    def perform(self, effects: Sequence[Effect]) -> None:
        """Do what the engine decided."""
        for effect in effects:
            if isinstance(effect, Given):
                worker = self.workers[effect.asker]
                worker.given, worker.is_answered = effect.job, True
                self._check_start(effect.job)
            elif isinstance(effect, LetGo):
                self.workers[effect.asker].is_answered = True
            elif isinstance(effect, News):
                stream_of(effect.job).news = True
            else:
                found = [one for one in self.workers.values() if one.job and one.job.batch.seq == effect.seq]
                if len(found) != 1 or found[0].waits_for is not For.TURN:
                    raise Violation("a worker that did not ask has an answer")
                found[0].answer, found[0].is_answered = effect.turn, True

    def _check_start(self, job: Job) -> None:
        """To be replaced by the schedule's check."""

    def changed(self) -> None:
        """Notify intake, as the worker pool does; to be replaced by the schedule's."""

    # Statements and their answers.

    def _show(self, worker: Worker, state: WorkerState) -> None:
        worker.state, worker.since_s = state, self.now_s

    def _statements(self, worker: Worker, _work: Work | None = None) -> Steps:
        """Execute something: it may wait for a lock, be cancelled, or fail."""
        worker.is_open = worker.in_statement = True
        if self.p_held and self._draws.chance(self.p_held):
            self._wait_for_lock(worker)
        yield For.SERVER
        worker.in_statement = False
        if worker.is_cancelled:
            worker.is_cancelled, worker.held_by = False, None
            raise Failed(is_again=True)
        if self.p_fail and self._draws.chance(self.p_fail):
            raise Failed(is_again=self._draws.chance(0.5))

    def _wait_for_lock(self, worker: Worker) -> None:
        found: list[Holder] = [one for one in self.workers.values() if one.is_open and one is not worker]
        if isinstance(worker.job, StreamJob) and worker.job.stream.is_followed:
            found += self.prepared.values()
        else:
            found += [self.prepared[xid] for xid in self.rollbacks() if xid in self.prepared]
        at = self._draws.below(len(found) + 1)
        if at < len(found):
            holder = found[at]
        else:
            holder = Holder()
            self.foreign.append(holder)
            if isinstance(worker.job, StreamJob) and not worker.job.stream.is_followed:
                found += self.prepared.values()
            if found and self._draws.chance(0.5):
                holder.held_by = found[self._draws.below(len(found))]
        if worker in chain(holder):
            worker.in_statement = False
            raise Failed(is_again=True)  # the server sees such a circle
        worker.held_by = holder
        self.seen["foreign lock wait" if not isinstance(holder, Worker) and not holder.xid else "lock wait"] += 1

    def free_foreign(self) -> list[Holder]:
        """Return the foreign sessions that can end: none waits for a worker; the operator ends what waits for ever."""
        return [one for one in self.foreign if one.held_by is None or one.held_by.xid]

    def rollbacks(self) -> list[int]:
        """Return the prepared transactions whose ROLLBACK PREPARED is in flight."""
        jobs = [job for job in self.state.jobs.values() if isinstance(job, OutcomeJob)]
        return [job.outcome.xid for job in jobs if isinstance(job.outcome, RollbackPrepared)]

    def let_go(self, holder: Holder) -> None:
        """Free those that wait for locks of a session or of a prepared transaction."""
        for one in (*self.workers.values(), *self.foreign):
            if one.held_by is holder:
                one.held_by = None

    def _rollback(self, worker: Worker) -> Steps:
        """Roll back, whose answer comes later."""
        worker.is_open = worker.in_statement = False
        self.let_go(worker)
        if self.is_late:
            yield For.SERVER

    def _send(self, worker: Worker, entry: Entry) -> Steps:
        """Have the target write a record, at some time, and its answer come later still."""
        worker.in_doubt = entry
        yield For.SERVER
        worker.in_doubt = None
        self.write(entry)
        worker.is_open = False
        self.let_go(worker)
        if self.is_late:
            yield For.SERVER
        if self.is_durable:
            self.commits.flush()

    def write(self, entry: Entry) -> None:
        """Write a record; a prepared transaction keeps its locks."""
        self.commits.write(entry)
        if entry.kind == "prepare":
            self.prepared[entry.xid] = Holder(entry.xid)
        elif entry.kind == "decide" and entry.xid in self.prepared:
            self.let_go(self.prepared.pop(entry.xid))

    def _end(self, worker: Worker, prepare: Prepare | None, ends: tuple[int, ...], low_lsn: int) -> Steps:
        """Commit, or prepare and record that."""
        if prepare is None:
            yield from self._send(worker, Entry("commit", ends[-1], ends, low_lsn))
            return
        self.seen["prepared"] += 1
        yield from self._send(worker, Entry("prepare", ends[-1], xid=prepare.xid))
        yield from self._send(worker, Entry("record", ends[-1], low_lsn=low_lsn))

    # As `runtime/apply/worker.py`.

    def _life(self, worker: Worker) -> Steps:
        while True:
            self._show(worker, WorkerState.IDLE)
            worker.given, worker.is_answered = None, False
            self.perform(self.flight.ask(worker.number))
            if not worker.is_answered:
                self.changed()
            while not worker.is_answered:
                yield For.JOB
            if worker.given is None:
                return
            worker.job = job = worker.given
            self._show(worker, WorkerState.EXECUTING)
            is_committed = yield from self._apply(worker, job)
            worker.job = None
            if is_committed:
                self.committed.append(job)
                self.perform(self.flight.committed(job, self.now_s))
                self.changed()

    def _apply(self, worker: Worker, job: Job) -> Waits:
        match job:
            case SetJob() if job.batch.is_serial and job.prepare is None:
                if job.resume is None:
                    self._resume(job, Form.EACH)
                return (yield from self._parts(worker, job))
            case SetJob():
                return (yield from self._sets(worker, job))
            case LargeJob():
                yield from self._large(worker, job)
            case StreamJob():
                return (yield from self._streamed(worker, job))
            case OutcomeJob():
                yield from self._outcome(worker, job)
        return True

    def _sets(self, worker: Worker, job: SetJob) -> Waits:
        if job.resume is not None or job.batch.is_suspect:
            if job.resume is None:
                self._begin_parts(job, has_failed=True)
            return (yield from self._parts(worker, job))
        while not self._hits(job.batch.transactions):
            is_head = self.state.head is job
            try:
                turn = yield from self._attempt(worker, job)
            except Failed as failure:
                yield from self._rollback(worker)
                if not job.must_yield or not failure.is_again:
                    self._begin_parts(job, has_failed=is_head and not job.batch.has_late_keys)
                    return (yield from self._parts(worker, job))
                turn = CommitTurn.YIELD
            if turn is CommitTurn.COMMIT:
                return True
            self.seen[str(turn)] += 1
            job.attempts += 1
            if turn is CommitTurn.GIVE_BACK:
                self.flight.give_back(job)
                self.changed()
                return False
            job.must_yield = False
            if self.state.is_relaxed and self.state.head is not job:
                self._park(job)
                return False
            self._show(worker, WorkerState.WAITING)
            yield from self._head_turn(worker, job)
            self._show(worker, WorkerState.EXECUTING)
        self._begin_parts(job, has_failed=False)
        return (yield from self._parts(worker, job))

    def _hits(self, transactions: Sequence[Transaction]) -> bool:
        return bool(self.skips) and any(one.end_lsn in self.skips for one in transactions)

    def _attempt(self, worker: Worker, job: SetJob) -> TurnWaits:
        batch = job.batch
        has_turn = self.flight.turns.may_commit(job)
        is_head = not self.state.is_relaxed or self.state.head is job
        low_lsn = batch.end_lsn if is_head else self.state.watermark.low_lsn
        ends = tuple([one.end_lsn for one in batch.transactions])
        if has_turn and job.prepare is None and self._draws.chance(0.5):
            self._show(worker, WorkerState.COMMITTING)
            yield from self._statements(worker, Work(batch))
            yield from self._end(worker, None, ends, low_lsn)
            return CommitTurn.COMMIT
        self._show(worker, WorkerState.EXECUTING)
        yield from self._statements(worker, Work(batch, None if has_turn else False))
        self._show(worker, WorkerState.WAITING)
        turn = yield from self._turn(worker, job)
        if turn is CommitTurn.COMMIT and self._hits(batch.transactions):
            turn = CommitTurn.YIELD
        if turn is not CommitTurn.COMMIT:
            yield from self._rollback(worker)
            return turn
        if batch.has_late_keys and not has_turn:
            is_one_flight = self.state.head is job
            self.seen["late keys at the head" if is_one_flight else "late keys"] += 1
            self._show(worker, WorkerState.COMMITTING if is_one_flight else WorkerState.EXECUTING)
            yield from self._statements(worker, Work(batch, is_late=True))
        self._show(worker, WorkerState.COMMITTING)
        yield from self._end(worker, job.prepare, ends, low_lsn)
        return CommitTurn.COMMIT

    def _turn(self, worker: Worker, job: Job, *, needs_head: bool = False) -> TurnWaits:
        turn = self.flight.turns.ask(job, needs_head=needs_head)
        if turn is not None:
            return turn
        worker.answer, worker.is_answered = None, False
        while worker.answer is None:
            yield For.TURN
        turn, worker.answer = worker.answer, None
        self.flight.turns.heard(job)
        return turn

    def _head_turn(self, worker: Worker, job: Job) -> Steps:
        while (yield from self._turn(worker, job, needs_head=True)) is not CommitTurn.COMMIT:
            pass

    def _park(self, job: SetJob) -> None:
        self.seen["parked"] += 1
        self.flight.park(job)
        self.changed()

    # As `runtime/apply/parts.py`.

    def _resume(self, job: SetJob, form: Form) -> Resume:
        halving = Halving(len(job.batch.transactions), form=form)
        job.resume = Resume(halving, {}, Attempts(stops_on_error=False))
        return job.resume

    def _begin_parts(self, job: SetJob, *, has_failed: bool) -> None:
        self.seen["failed, then repeated"] += 1
        job.attempts += 1
        resume = self._resume(job, Form.SETS if job.prepare is None else Form.ALONE)
        if has_failed and job.prepare is None:
            resume.halving.failed()

    def _parts(self, worker: Worker, job: SetJob) -> Waits:
        assert job.resume is not None
        halving, transactions = job.resume.halving, job.batch.transactions
        self._show(worker, WorkerState.RETRYING)
        if self.state.is_relaxed and self.state.head is not job:
            self._park(job)
            return False
        yield from self._head_turn(worker, job)
        while not halving.is_done:
            start, end, form = halving.part
            if form is Form.ALONE or form is Form.EACH:
                end = start + 1
            elif wanted := [n for n in range(start, end) if transactions[n].end_lsn in self.skips]:
                halving.isolate(wanted[0])
                continue
            self._show(worker, WorkerState.RETRYING)
            try:
                work = Work(
                    transactions=transactions[start:end], is_piece=form is Form.SETS, is_alone=form is Form.ALONE
                )
                yield from self._statements(worker, work)
            except Failed as failure:
                yield from self._rollback(worker)
                if not self._has_less(halving, failure) and self.state.is_relaxed:
                    self.seen["parked head"] += 1
                    self.flight.park(job)
                    self.later.append(job)
                    self.changed()
                    return False
                continue
            if end < len(transactions) or start:
                self.seen["in parts"] += 1
            ends = tuple([one.end_lsn for one in transactions[start:end]])
            self.skips.difference_update(ends)
            yield from self._end(worker, job.prepare, ends, ends[-1])
            if form is Form.EACH:
                halving.passed(1)
            else:
                halving.committed()
        return True

    def _has_less(self, halving: Halving, failure: Failed) -> bool:
        """Try less of a part that failed; False if it is one transaction, which is tried after a pause."""
        start, end, form = halving.part
        if form is Form.ALONE:
            return failure.is_again
        if form is Form.EACH:
            halving.isolate(halving.n_done)
        elif form is Form.ORDERED:
            halving.isolate(start + self._draws.below(end - start))
        else:
            halving.failed()
        return True

    # As `runtime/apply/{large,streamed,outcome}.py`.

    def _piece(self, worker: Worker, transactions: Sequence[Transaction]) -> Steps:
        """Apply a piece at the head: as sets, or in source order, again until it succeeds."""
        is_first = True
        while True:
            before = self._savepoint(worker)
            try:
                yield from self._statements(worker, Work(None, None, transactions, is_first, not is_first))
            except Failed as failure:
                if worker.job and worker.job.must_yield:
                    raise Violation("the daemon ends, because a transaction at its commit is to yield") from failure
                self._go_back(worker, before)
                is_first = False
                continue
            return

    def _piece_applied(self) -> None:
        self.flight.count_out(PIECE_BYTES)
        self.changed()

    def _savepoint(self, _worker: Worker) -> object:
        return None

    def _go_back(self, _worker: Worker, _before: object) -> None:
        pass

    def _large(self, worker: Worker, job: LargeJob) -> Steps:
        self.seen["large"] += 1
        pieces = pieces_of(job)
        worker.is_open = True
        while True:
            while not pieces:
                yield For.PIECE
            piece = pieces.pop(0)
            if piece is None:
                break
            yield from self._piece(worker, piece.whole)
            self._piece_applied()
            if self.p_fail and self._draws.chance(0.02):
                self.seen["a large transaction is sent again"] += 1
                self.is_lost = True
        self._show(worker, WorkerState.COMMITTING)
        lsn = job.batch.end_lsn
        yield from self._end(worker, job.prepare, (lsn,), lsn)

    def _streamed(self, worker: Worker, job: StreamJob) -> Waits:
        stream = stream_of(job)
        if stream.is_followed:
            try:
                yield from self._follow(worker, job, stream)
            except _GiveWay:
                self.seen["a stream gives way"] += 1
                yield from self._rollback(worker)
                job.must_yield = False
                job.attempts += 1
                stream.is_followed, stream.was_spilled = False, True
                stream.todo.clear()
                if stream.end is None:
                    self.flight.leave(job)
                    self.changed()
                    return False
            except _Aborted:
                yield from self._rollback(worker)
                self.flight.leave(job)
                self.changed()
                return False
            else:
                return True
        yield from self._at_commit(worker, job, stream)
        return True

    def _follow(self, worker: Worker, job: StreamJob, stream: Stream) -> Steps:
        self.seen["a stream is followed"] += 1
        worker.is_open = True
        savepoints: dict[int, object] = {}
        try:
            while True:
                while self._must_wait(worker, job, lambda: bool(stream.todo) or stream.end is not None):
                    yield For.NEWS
                if not stream.todo:
                    break
                item, after_seq = stream.todo.popleft()
                if item.kind == "sub":
                    yield from self._sub_aborted(worker, item.sub, savepoints)
                else:
                    yield from self._chunk(worker, job, item, after_seq, savepoints)
            while self._must_wait(worker, job, lambda: self._has_turn(job)):
                yield For.NEWS
            assert stream.end is not None
            if stream.end.end_lsn in self.skips:
                raise _GiveWay
            yield from self._statements(worker)
            self._show(worker, WorkerState.COMMITTING)
        except Failed:
            raise _GiveWay from None
        yield from self._end(worker, job.prepare, (stream.end.end_lsn,), stream.end.end_lsn)  # type: ignore[arg-type]

    def _sub_aborted(self, worker: Worker, sub: int, savepoints: dict[int, object]) -> Steps:
        if sub in savepoints:
            self.seen["a stream is rolled back in part"] += 1
            yield For.SERVER
            self._go_back(worker, savepoints.pop(sub))

    def _chunk(
        self, worker: Worker, job: StreamJob, chunk: Event, after_seq: int, savepoints: dict[int, object]
    ) -> Steps:
        if chunk.sub and chunk.sub not in savepoints:
            savepoints[chunk.sub] = self._savepoint(worker)
        while self._must_wait(worker, job, lambda: self.flight.has_passed(after_seq)):
            yield For.NEWS
        if any(seq <= after_seq for seq in self.state.jobs):
            raise Violation("a chunk is applied before what came before it")
        self.flight.count_in(PIECE_BYTES)
        try:
            yield from self._statements(worker, Work(transactions=chunk.whole))
        except Failed:
            self._piece_applied()
            raise
        self._piece_applied()

    def _must_wait(self, worker: Worker, job: StreamJob, is_true: Callable[[], bool]) -> bool:
        stream = stream_of(job)
        if job.must_yield:
            raise _GiveWay
        if stream.is_aborted:
            raise _Aborted
        if is_true():
            self._show(worker, WorkerState.EXECUTING)
            return False
        self._show(worker, WorkerState.STREAMING if not job.batch.seq else WorkerState.WAITING)
        stream.news = False
        return True

    def _has_turn(self, job: StreamJob) -> bool:
        return job.batch.seq > 0 and not self.flight.waits_of(job)

    def _at_commit(self, worker: Worker, job: StreamJob, stream: Stream) -> Steps:
        self.seen["a stream is applied at its commit"] += 1
        self._show(worker, WorkerState.WAITING)
        while not self._has_turn(job):
            stream.news = False
            yield For.NEWS
        self._show(worker, WorkerState.EXECUTING)
        assert stream.end is not None
        for chunk in stream.chunks:
            self.flight.count_in(PIECE_BYTES)
            yield from self._piece(worker, chunk.whole)
            self._piece_applied()
        self.skips.discard(stream.end.end_lsn)
        self._show(worker, WorkerState.COMMITTING)
        yield from self._end(worker, job.prepare, (stream.end.end_lsn,), stream.end.end_lsn)  # type: ignore[arg-type]

    def _outcome(self, worker: Worker, job: OutcomeJob) -> Steps:
        outcome, lsn = job.outcome, job.batch.end_lsn
        if isinstance(outcome, CommitPrepared | RollbackPrepared):
            self.seen["outcome"] += 1
            is_commit = isinstance(outcome, CommitPrepared)
            if outcome.xid in self.commits.prepared:
                yield from self._send(worker, Entry("decide", lsn, xid=outcome.xid, is_commit=is_commit))
            elif is_commit and outcome.xid not in self.commits.committed_xids:
                raise Violation("a prepared transaction is lost")
        yield from self._send(worker, Entry("record", lsn, low_lsn=lsn))

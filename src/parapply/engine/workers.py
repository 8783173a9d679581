"""Number of workers with `apply.workers = "auto"`: a rule without clock, task or connection.

The rule, in six sentences. While batches wait for a worker and at least half of the workers execute, the target is
asked what their sessions wait for; if half of them wait for its disk twice in a row, the workers are doubled at once,
because a session that waits takes no processor from the others. Otherwise, whenever a window of some seconds was like
that, the double number is tried for the next window, and kept if changes a second rose by a tenth. The half is tried in
turn, and kept if changes a second fell by less than a twentieth. After a trial that failed the next one waits, each
time twice as long. Workers that were not needed at any time of a minute leave, down to the first number.
In a fleet the most may change at any time, and workers above it leave at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from parapply.engine.shares import Share

#: Part of the executing sessions that wait for the disk, from which on they count as waiting.
_WAITING: Final = 0.5
#: Samples in a row that say so: one alone may be a coincidence.
_SAMPLES: Final = 2
#: Seconds of a window at least, and at most; in between, two batches of each worker make one.
_WINDOW_S: Final = 1.0
_LONG_WINDOW_S: Final = 15.0
_BATCHES: Final = 2
#: Part of a window in which batches must have waited for workers; one with less says nothing.
_PRESSED: Final = 0.8
#: Factors of throughput: more workers must gain the first, fewer may lose down to the second.
_GAIN: Final = 1.1
_LOSS: Final = 0.95
#: Seconds until the next trial after one that failed, at first and at most.
_PAUSE_S: Final = 30.0
_LONG_PAUSE_S: Final = 600.0
#: Seconds in which a worker must have been needed once, or it leaves.
_IDLE_S: Final = 60.0


class LoadSample(NamedTuple):
    """Load of the workers at one moment."""

    now_s: float
    n_workers: int
    n_busy: int
    is_pressed: bool  # batches wait for a worker, and at least half of the workers execute
    waiting: float | None  # part of the executing sessions that wait for the target's disk; None: not asked
    n_batches: int  # committed so far
    n_changes: int  # the same


class Step(NamedTuple):
    """Another number of workers."""

    n_workers: int
    reason: str


class _Trial(NamedTuple):
    n_before: int
    changes_s: float


class Scaling:
    """Asked by `worker_tasks.py` at each of its looks."""

    def __init__(self, share: Share) -> None:
        """Begin with the first number of workers of a share, and stay between its fewest and its most."""
        self._share = share
        #: Number of workers wanted.
        self.wanted = share.first_workers
        self._begin: LoadSample | None = None
        self._n_samples = 0
        self._n_pressed = 0
        self._n_waiting = 0
        self._trial: _Trial | None = None
        self._tries_more = True
        self._pause_s = _PAUSE_S
        self._next_trial_s = 0.0
        self._peak = 0
        self._peak_from_s: float | None = None

    @property
    def is_at_first(self) -> bool:
        """Return whether no time that passes makes the workers fewer."""
        return self.wanted <= self._share.first_workers

    def may_grow(self) -> bool:
        """Return whether an answer about the sessions' waits could be used."""
        return self.wanted < self._share.most_workers

    def stay(self, sample: LoadSample) -> None:
        """Accept the present number, because no more can be had for now."""
        self.wanted = max(self._share.least_workers, sample.n_workers)
        self._trial = None
        self._fail(sample.now_s)
        self._restart()

    def look(self, sample: LoadSample) -> Step | None:
        """Return the number of workers that is wanted from now on, None if it stays."""
        step = self._less() or self._idle(sample) or self._waiting(sample) or self._judge(sample)
        if step is not None:
            self.wanted = step.n_workers
            self._restart()
        return step

    def _restart(self) -> None:
        self._begin = None
        self._n_waiting = 0
        self._peak_from_s = None

    def _less(self) -> Step | None:
        if self.wanted <= self._share.most_workers:
            return None
        self._trial = None
        return Step(self._share.most_workers, "its share of the fleet's connections")

    def _idle(self, sample: LoadSample) -> Step | None:
        if self._peak_from_s is None:
            self._peak_from_s, self._peak = sample.now_s, 0
        self._peak = max(self._peak, sample.n_workers if sample.is_pressed else sample.n_busy)
        if sample.now_s - self._peak_from_s < _IDLE_S:
            return None
        self._peak_from_s = None
        # The next backlog begins with as many as the first.
        needed = max(self._share.first_workers, self._peak)
        if needed >= self.wanted:
            return None
        self._trial = None
        return Step(needed, f"no more were needed for {_IDLE_S:.0f} s")

    def _waiting(self, sample: LoadSample) -> Step | None:
        is_waiting = sample.is_pressed and sample.waiting is not None and sample.waiting >= _WAITING
        self._n_waiting = self._n_waiting + 1 if is_waiting else 0
        if self._n_waiting < _SAMPLES or not self.may_grow():
            return None
        self._trial = None
        self._next_trial_s = sample.now_s + _PAUSE_S
        return Step(min(2 * self.wanted, self._share.most_workers), "the target waits for its disk")

    def _judge(self, sample: LoadSample) -> Step | None:
        """Look at a window when it is over: end the trial that it was, or begin one."""
        if self._begin is None:
            if sample.n_workers == self.wanted:
                self._begin, self._n_samples, self._n_pressed = sample, 0, 0
            return None
        self._n_samples += 1
        self._n_pressed += sample.is_pressed
        begin, took_s = self._begin, sample.now_s - self._begin.now_s
        if took_s < _WINDOW_S:
            return None
        if self._n_pressed < _PRESSED * self._n_samples:
            # The backlog is over, or others than the workers hold it up; without it no trial can be judged.
            self._begin = None
            return self._back("the backlog ended during a trial") if self._trial else None
        if sample.n_batches - begin.n_batches < _BATCHES * self.wanted and took_s < _LONG_WINDOW_S:
            return None
        self._begin = None
        changes_s = (sample.n_changes - begin.n_changes) / took_s
        if self._trial is not None:
            return self._end(self._trial, changes_s, sample.now_s)
        return self._try(changes_s) if sample.now_s >= self._next_trial_s else None

    def _try(self, changes_s: float) -> Step | None:
        fewer, more = max(self._share.least_workers, self.wanted // 2), min(2 * self.wanted, self._share.most_workers)
        if (more if self._tries_more else fewer) == self.wanted:
            self._tries_more = not self._tries_more
        n_workers = more if self._tries_more else fewer
        if n_workers == self.wanted:
            return None
        self._trial = _Trial(self.wanted, changes_s)
        return Step(n_workers, f"a trial: {changes_s:,.0f} changes/s with {self.wanted}")

    def _end(self, trial: _Trial, changes_s: float, now_s: float) -> Step | None:
        least = trial.changes_s * (_GAIN if self.wanted > trial.n_before else _LOSS)
        if changes_s >= least:
            self._trial = None
            self._pause_s = _PAUSE_S
            return None
        self._fail(now_s)
        return self._back(f"{changes_s:,.0f} changes/s with {self.wanted}, {trial.changes_s:,.0f} before")

    def _fail(self, now_s: float) -> None:
        self._tries_more = not self._tries_more
        self._next_trial_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONG_PAUSE_S)

    def _back(self, reason: str) -> Step:
        assert self._trial is not None
        n_before, self._trial = self._trial.n_before, None
        return Step(min(n_before, self._share.most_workers), reason)

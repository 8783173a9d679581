"""Broken planners: each must be caught by the property that the right one has."""

from __future__ import annotations

import heapq
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from parapply.plan import values
from parapply.plan.keys import key_reader
from parapply.plan.scheduler import Scheduler, overlaps
from parapply.plan.table_changes import TableChanges
from parapply.runtime.pool.pool import WorkerPool
from tests.unit.changes_stream import one_of_all
from tests.unit.foreign_key_model import CHILD, PARENT, Op
from tests.unit.pool_model import check_equal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.engine.flight import CommitTurn
    from parapply.engine.job import Job
    from parapply.plan.batch import Batch
    from parapply.plan.scheduler import Overlap

    Mutant = Callable[[pytest.MonkeyPatch], None]

_KINDS = ("insert",) * 5 + ("delete", "update", *["move"] * 4, "truncate") + ("commit",) * 6
#: Of a wish: kind, table, key and value.
_PARTS: tuple[Sequence[Any], ...] = (_KINDS, (PARENT, PARENT, CHILD), range(1, 5), (None, 1, 2, 3, 4))
_OP = one_of_all(*_PARTS).map(lambda parts: Op(*parts))
_CASES = {
    "wishes": st.integers(0, 60).flatmap(lambda n: st.lists(_OP, min_size=n, max_size=80)),
    "sizes": st.lists(st.integers(1, 3), max_size=12),
    "n_workers": st.integers(2, 4),
    "seed": st.integers(0, 1 << 32),
}
_ORDERS = pytest.mark.parametrize("is_relaxed", [False, True], ids=["preserve", "relaxed"])
#: So many of each order; a mistake must be found by no more.
_EXAMPLES = 100


def _ignore_unique_keys(patch: pytest.MonkeyPatch) -> None:
    """A value that goes from row to row belongs to no batch (trap T-19)."""
    patch.setattr(values, "claimed", lambda _changes, _unique: set())


def _ignore_foreign_keys(patch: pytest.MonkeyPatch) -> None:
    """A child does not know its parent (trap T-25)."""
    patch.setattr(values, "shared", lambda _changes, _foreign: set())


def _ignore_the_old_key(patch: pytest.MonkeyPatch) -> None:
    """A row that moves only takes a key, and frees none (trap T-20)."""
    note_move = TableChanges._note_move

    def note(changes: TableChanges, frame: bytes) -> None:
        before = set(changes.moved_keys)
        note_move(changes, frame)
        old, _ = changes.moved_rows[-1]
        changes.moved_keys -= {key_reader(changes.plan)(old)} - before

    patch.setattr(TableChanges, "_note_move", note)


def _no_truncate_barrier(patch: pytest.MonkeyPatch) -> None:
    """TRUNCATE is like any other change (trap T-26)."""

    def meet(earlier: Batch, later: Batch) -> list[Overlap]:
        both = (earlier, later)
        were = [batch.is_barrier for batch in both]
        for batch in both:
            batch.is_barrier = batch.is_barrier and not batch.has_truncate
        found = overlaps(earlier, later)
        for batch, was in zip(both, were, strict=True):
            batch.is_barrier = was
        return found

    patch.setattr("parapply.plan.scheduler.overlaps", meet)


def _release_keys_early(patch: pytest.MonkeyPatch) -> None:
    """A batch that waits for another starts when its COMMIT is sent, not when that is acknowledged (trap T-35)."""
    turn = WorkerPool.turn

    async def ask(pool: WorkerPool, job: Job) -> CommitTurn:
        told = await turn(pool, job)
        for one in pool.flight._scheduler._open.values():
            if one.waits.pop(job.batch.seq, None) is not None and not one.waits:
                heapq.heappush(pool.flight._ready, one.batch.seq)
        pool._perform(pool.flight._assign())
        return told

    patch.setattr(WorkerPool, "turn", ask)


def _commit_before_holders(patch: pytest.MonkeyPatch) -> None:
    """Late keys and the commit itself wait for no batch (trap T-34)."""

    def may_commit(_scheduler: Scheduler, _batch: Batch) -> bool:
        return True

    patch.setattr(Scheduler, "may_commit", may_commit)


_MUTANTS: tuple[Mutant, ...] = (
    _ignore_unique_keys,
    _ignore_foreign_keys,
    _ignore_the_old_key,
    _no_truncate_barrier,
    _release_keys_early,
    _commit_before_holders,
)


def _check(wishes: list[Op], sizes: list[int], n_workers: int, seed: int, *, is_relaxed: bool) -> None:
    check_equal(wishes, sizes, Random(seed), n_workers=n_workers, is_relaxed=is_relaxed)


@_ORDERS
# The last batch deletes the row that has the value which its insert takes, and that row's key is late.
@example(
    wishes=[
        *[Op(kind=kind, table=table, key=key, value=None)
          for kind, table, key in (
              ("insert", PARENT, 1), ("commit", 1, 1), ("insert", CHILD, 1), ("commit", 1, 1), ("insert", PARENT, 2),
              ("commit", 1, 1), ("truncate", PARENT, 1), ("commit", 1, 1), ("insert", PARENT, 1), ("commit", 1, 1),
              ("truncate", PARENT, 1), ("commit", 1, 1),
          )],
        Op(kind="insert", table=PARENT, key=3, value=2), Op(kind="commit", table=1, key=1, value=None),
        Op(kind="move", table=PARENT, key=3, value=2), Op(kind="commit", table=1, key=1, value=None),
        Op(kind="delete", table=PARENT, key=2, value=None), Op(kind="insert", table=PARENT, key=1, value=2),
    ],
    sizes=[1, 2, 2, 3], n_workers=2, seed=1,
)  # fmt: skip
@given(**_CASES)
@settings(max_examples=2 * settings().max_examples, suppress_health_check=[HealthCheck.too_slow])
def test_nothing_is_refused_where_the_wire_says_all(
    *, wishes: list[Op], sizes: list[int], n_workers: int, seed: int, is_relaxed: bool
) -> None:
    """With old rows sent, no batch fails but by a failed commit, none waits for a lock, and the rows are equal."""
    _check(wishes, sizes, n_workers, seed, is_relaxed=is_relaxed)


@_ORDERS
@pytest.mark.parametrize("mutant", _MUTANTS, ids=[mutant.__name__.lstrip("_") for mutant in _MUTANTS])
def test_a_broken_planner_is_caught(monkeypatch: pytest.MonkeyPatch, mutant: Mutant, *, is_relaxed: bool) -> None:
    """The property fails with each of these mistakes, so it would with one that is not listed."""
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        _check_many(is_relaxed=is_relaxed)


def _check_many(*, is_relaxed: bool) -> None:
    """Check cases as above, the same each time, without Hypothesis: none is to be made simpler, which makes it slow."""
    random = Random(1)
    for _ in range(_EXAMPLES):
        n_wishes = random.randint(random.randint(0, 60), 80)
        wishes = [Op(*map(random.choice, _PARTS)) for _ in range(n_wishes)]
        sizes = [random.randint(1, 3) for _ in range(random.randint(0, 12))]
        _check(wishes, sizes, random.randint(2, 4), random.getrandbits(32), is_relaxed=is_relaxed)

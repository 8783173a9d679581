"""What earlier source transactions held: the last holder of each thing. Pure; for ``tracks.py``.

Things are hashes of keys and values, never those themselves. Memory is bounded.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from parapply.plan.table import ForeignKey, TablePlan
    from parapply.vocabulary import WaitKind

#: Holders that are remembered at least; at most twice as many, a few hundred bytes each.
_REMEMBERED: Final = 1 << 17
#: Transactions remembered that touched a table which a later one takes whole.
_TOUCHED: Final = 16
#: More changes than any transaction has: all of them must come after.
ALL_CHANGES: Final = 1 << 40


class DependencyCause(NamedTuple):
    """Where two transactions meet; the fields of a `Dependency` of the apply log."""

    kind: WaitKind
    table: str
    name: str = ""


#: How many changes of a transaction meet an earlier one at a place.
Found = dict[tuple[int, DependencyCause], int]


class _Recent:
    """The last holder of each of some things, by hash; the oldest are forgotten."""

    __slots__ = ("_limit", "_old", "_young")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def get(self, thing: int) -> int:
        """Return the holder; 0 if none is known."""
        return self._young.get(thing) or self._old.get(thing, 0)

    def clear(self) -> None:
        self._young.clear()
        self._old.clear()

    def swap(self, thing: int, holder: int) -> int:
        """Put a holder in the place of the one before, which is returned; 0 if none is known."""
        young = self._young
        before = young.get(thing)
        if before is None:
            before = self._old.get(thing, 0)
        young[thing] = holder
        if len(young) >= self._limit:
            self._old, self._young = young, {}
        return before

    def put(self, thing: int, holder: int) -> None:
        """Put a holder in the place of the one before."""
        self._young[thing] = holder
        if len(self._young) >= self._limit:
            self._old, self._young = self._young, {}


class Tree:
    """One partition tree as a whole."""

    __slots__ = ("exclusive", "touched")

    def __init__(self) -> None:
        self.exclusive = 0  # the last that took it whole
        self.touched: deque[int] = deque(maxlen=_TOUCHED)  # since then, the latest last

    def meet(self, seq: int, place: DependencyCause, found: Found) -> None:
        """Meet all that have touched it."""
        for earlier in self.touched:
            if earlier != seq:
                found[earlier, place] = ALL_CHANGES


class Referring(NamedTuple):
    """A foreign key seen from its parent."""

    foreign: ForeignKey
    child_oid: int  # of its partition tree


class Holders:
    """What earlier transactions held, of all tables. Written by the tracks only."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        """Start with nothing seen.

        Args:
            remembered: holders that are known at least.
        """
        self.holders = _Recent(remembered)
        #: Value that a row has in a unique index, by key, where the wire does not say what an update frees.
        self.claims = _Recent(remembered)
        #: By foreign key: the last that let go of a parent the wire does not name.
        self.let_go: dict[int, int] = {}
        self._trees: dict[int, Tree] = {}
        self._referring: dict[int, dict[tuple[int, str], Referring]] = {}
        #: Raised when a table begins to refer to another one.
        self.version = 0

    def forget(self) -> None:
        """Forget all holders: nothing that comes can meet them any more."""
        self.holders.clear()
        self.let_go.clear()
        for tree in self._trees.values():
            tree.exclusive = 0
            tree.touched.clear()

    def tree(self, oid: int) -> Tree:
        """Return what is known of a whole tree."""
        return self._trees.setdefault(oid, Tree())

    def refer(self, plan: TablePlan) -> None:
        """Learn of a child's foreign keys."""
        for foreign in plan.foreign_keys:
            known = self._referring.setdefault(foreign.parent_oid, {})
            entry = (plan.facts.oid, foreign.name)
            if entry not in known or known[entry].foreign != foreign:
                known[entry] = Referring(foreign, plan.facts.root_oid)
                self.version += 1

    def referring(self, parent_oid: int) -> list[Referring]:
        """Return the foreign keys that refer to a tree."""
        return list(self._referring.get(parent_oid, {}).values())


def note(found: Found, earlier: int, place: DependencyCause, weight: int) -> None:
    """Add changes that must come after an earlier transaction."""
    met = (earlier, place)
    found[met] = found.get(met, 0) + weight

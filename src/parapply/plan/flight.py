"""Keys of a new batch that one in flight may hold: one lookup a key, however many batches are in flight. Pure.

Comparing a batch with each of those in flight, key by key, was the leader's largest part of a transaction. Nearly all
keys are held by no batch, and one lookup a key finds that out here. The compiled twin counts hashes, so it may name a
key that no batch holds (one in a few hundred), but it never leaves out one that is held. The exact comparison follows
in ``overlap.py``, for the named ones only. The types of the compiled twin are in ``flight.pxd``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.plan.segments import NetSegment

if TYPE_CHECKING:
    from collections.abc import Mapping

    import cython  # read by the compiler only

    from parapply.plan.keys import Key
    from parapply.plan.table_changes import TableChanges
else:
    from parapply import uncompiled as cython


class KeysInFlight:
    """Keys of the batches in flight, with how many hold each. Written by the scheduler only."""

    def __init__(self) -> None:
        """Start with none."""
        if cython.compiled:
            self._slots = bytearray(1 << 20)
        else:
            self._held: dict[int, dict[Key, int]] = {}

    def add(self, changes: TableChanges) -> set[Key]:
        """Note the keys of one table of a new batch, and return those that an earlier one may hold."""
        found: set[Key] = set()
        for segment in changes.segments:
            if isinstance(segment, NetSegment) and segment.net:
                self._note(changes.tree_oid, segment.net, found)
        if changes.moved_keys:
            self._note(changes.tree_oid, dict.fromkeys(changes.moved_keys), found)
        return found

    def remove(self, changes: TableChanges) -> None:
        """Forget the keys of one table of a batch that has committed."""
        for segment in changes.segments:
            if isinstance(segment, NetSegment) and segment.net:
                self._forget(changes.tree_oid, segment.net)
        if changes.moved_keys:
            self._forget(changes.tree_oid, dict.fromkeys(changes.moved_keys))

    def _note(self, tree_oid: int, keys: Mapping[Key, object], found: set[Key]) -> None:
        if cython.compiled:
            note_hashes(self._slots, tree_oid, keys, found)  # type: ignore[name-defined]  # noqa: F821  flight.pxd
        else:
            held = self._held.setdefault(tree_oid, {})
            found |= held.keys() & keys.keys()
            for key in keys:
                held[key] = held.get(key, 0) + 1

    def _forget(self, tree_oid: int, keys: Mapping[Key, object]) -> None:
        if cython.compiled:
            forget_hashes(self._slots, tree_oid, keys)  # type: ignore[name-defined]  # noqa: F821  flight.pxd
        else:
            held = self._held[tree_oid]
            for key in keys:
                count = held[key] - 1
                if count:
                    held[key] = count
                else:
                    del held[key]
            if not held:
                del self._held[tree_oid]

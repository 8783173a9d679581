"""Effect of the policies of conflicts on a stream, change by change, as docs/CONFLICTS.md says it. Pure.

In go the rows of a target, each written by another client at a time, and changes; out come rows and records. Time is
counted in transactions: number 3 commits at 3, and a client that writes between it and number 4 does so at 3.5.
Without `error`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Row = tuple[int, ...]
    #: Transaction, change, type and outcome.
    Record = tuple[int, int, str, str]

_OUTCOMES: Final = {"skip": "skipped", "keep_local": "kept_local", "apply_remote": "applied_remote"}
#: The first column is the key where it is unique.
_KEY: Final = 0


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change as the stream has it: of one table, which may be a partition."""

    table: str
    operation: Literal["insert", "update", "delete", "truncate"]
    old: Row = ()
    new: Row = ()

    @property
    def rows(self) -> set[Row]:
        """The rows before and after it."""
        return {row for row in (self.old, self.new) if row}

    @property
    def keys(self) -> set[int]:
        """First columns of them."""
        return {row[_KEY] for row in self.rows}


@dataclass(kw_only=True)
class _Local:
    """A row of the target, whether a client wrote it last, and when it was written."""

    row: Row
    is_foreign: bool
    time: float


@dataclass(kw_only=True)
class PolicyModel:
    """Follows a stream.

    Attributes:
        policies: by type; those that are left out are off.
        unique: by table, the positions of its columns that have a unique index each.
        records: what was met so far.
    """

    policies: Mapping[str, str]
    unique: Mapping[str, Sequence[int]]
    records: list[Record] = field(default_factory=list)
    _rows: dict[str, list[_Local]] = field(default_factory=dict)
    _met: dict[str, str] = field(default_factory=dict)
    #: Of the transaction in hand.
    _time: int = 0

    def load(self, table: str, rows: Iterable[tuple[Row, float]]) -> None:
        """Begin with rows that a client has written, each with its time."""
        self._rows[table] = [_Local(row=row, is_foreign=True, time=time) for row, time in rows]

    def rows(self, table: str) -> list[Row]:
        """Return the rows of a table, sorted."""
        return sorted(one.row for one in self._rows[table])

    def apply(self, number: int, change_no: int, change: Change) -> None:
        """Apply the next change of the stream, which is the `change_no`-th of its transaction."""
        self._met, self._time = {}, number
        if change.operation == "truncate":
            self._rows[change.table].clear()
        elif change.operation == "insert":
            self._insert(change, "insert_exists")
        else:
            self._change(change)
        self.records += [(number, change_no, kind, outcome) for kind, outcome in sorted(self._met.items())]

    def _change(self, change: Change) -> None:
        rows, kind = self._rows[change.table], change.operation
        is_keyed = _KEY in self.unique[change.table]
        found = [one for one in rows if one.row[: 1 if is_keyed else None] == change.old[: 1 if is_keyed else None]]
        if not found:
            if self._applies(f"{kind}_missing", ()) and kind == "update":
                self._insert(change, "insert_exists")
            return
        # Of twins without a key one that the stream wrote, if there is one.
        one = min(found, key=lambda each: each.is_foreign)
        differs = f"{kind}_origin_differs"
        if one.is_foreign and differs in self.policies and not self._applies(differs, [one]):
            return
        if kind == "delete":
            rows.remove(one)
        else:
            rows.remove(one)
            if not self._insert(change, "update_exists"):
                rows.append(one)

    def _insert(self, change: Change, kind: str) -> bool:
        """Add the new row, if what is in its way may be deleted; say whether it was added."""
        rows, positions = self._rows[change.table], self.unique[change.table]
        hit = {position for position in positions for one in rows if one.row[position] == change.new[position]}
        found = [one for one in rows if any(one.row[position] == change.new[position] for position in positions)]
        if hit and not self._applies("multiple_unique_conflicts" if len(hit) > 1 else kind, found):
            return False
        rows[:] = [
            *(one for one in rows if one not in found),
            _Local(row=change.new, is_foreign=False, time=self._time),
        ]
        return True

    def _applies(self, kind: str, local: Iterable[_Local]) -> bool:
        """Note a conflict with rows of the target; say whether its policy lets the publisher win."""
        policy = self.policies[kind]
        if policy == "last_update_wins":
            policy = "keep_local" if any(one.time > self._time for one in local) else "apply_remote"
        outcome = self._met[kind] = _OUTCOMES[policy]
        if outcome != "applied_remote":
            # A conflict settled before in favour of the publisher had no effect.
            self._met = dict.fromkeys(self._met, outcome)
        return outcome == "applied_remote"

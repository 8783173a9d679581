"""One change of a source transaction, read for a conflict: its operation, key and rows as text. Pure.

Off the hot path: here a value may become an object.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from parapply.plan.table import TablePlan
from parapply.quoting import identifier
from parapply.wire.rows import DELETE, INSERT, KIND_AT, UNCHANGED, Row, read_delete, read_insert, read_update, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parapply.plan.steps import TruncateStep

#: Characters of one value that the history keeps; a jsonb takes 256 MB, and a row of it must be read by people.
_VALUE_CHARACTERS = 16 * 1024 * 1024


#: Mark in the history's key of a TRUNCATE that restarted the sequences of the tables.
RESTARTS_IDENTITY = "restart_identity"
_NAME = r'("(?:[^"]|"")*"|[^".,]+)'
_LISTED = rf"{_NAME}\.{_NAME}(?:, |\Z)"


def key_of_truncate(step: TruncateStep) -> dict[str, str | None]:
    """Return the history's text in place of a key of a TRUNCATE: its tables, and whether sequences restart."""
    listed = [f"{_listed(plan.relation.schema)}.{_listed(plan.relation.name)}" for plan in step.plans]
    return {"tables": ", ".join(listed), **({RESTARTS_IDENTITY: "true"} if step.restart_identity else {})}


def listed_tables(key: Mapping[str, str | None]) -> list[tuple[str, str]]:
    """Return the publisher's tables, schema and name, from what `key_of_truncate` returned."""
    return [(_plain(schema), _plain(name)) for schema, name in re.findall(_LISTED, key.get("tables") or "")]


def _listed(part: str) -> str:
    return identifier(part) if set(part) & set('".,') else part


def _plain(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part


class RowChange(msgspec.Struct, frozen=True, kw_only=True):
    """An insert, update or delete. Rows have one value for each wire column, as the wire readers return them."""

    plan: TablePlan
    operation: str
    old: Row | None  # what was sent of the old row: its key, or all of it
    new: Row | None  # None for a delete

    @property
    def found_by(self) -> Row:
        """Return the row that holds the key by which the target's row is found."""
        row = self.old if self.old is not None else self.new
        assert row is not None
        return row

    @property
    def present(self) -> tuple[int, ...]:
        """Return the wire positions of the new row that have a value; the others are unchanged TOAST (T-41)."""
        new = self.new or []
        return tuple([position for position, value in enumerate(new) if value is not UNCHANGED])

    @property
    def is_complete(self) -> bool:
        """Return whether the new row has every published column, and can be kept as text."""
        return self.new is None or (len(self.present) == len(self.new) and all(map(_is_text, self.new)))

    def key(self) -> dict[str, str | None]:
        """Return the columns that the row is found by: the target's key, or all of them."""
        plan = self.plan
        positions = plan.key_positions if plan.key_positions and not plan.is_full else range(len(plan.columns))
        return self._texts(self.found_by, positions)

    def remote_row(self) -> dict[str, str | None]:
        """Return the new row as far as it was sent and is text; of a delete the old one as far as it was sent."""
        if self.new is not None:
            return self._texts(self.new, self.present, is_exact=True)
        return self._texts(self.found_by, [*range(len(self.plan.columns))] if self.plan.is_full else self._sent())

    def _sent(self) -> tuple[int, ...]:
        # In an old key the columns outside the identity are no values; which those are the relation says.
        keys = [at for at, column in enumerate(self.plan.relation.columns) if column.is_key]
        return tuple(keys) or self.plan.key_positions

    def _texts(
        self, row: Row, positions: range | tuple[int, ...] | list[int], *, is_exact: bool = False
    ) -> dict[str, str | None]:
        # The publisher's value of a replaced column is not for the target to keep.
        kept = [at for at in positions if row[at] is not UNCHANGED and at not in self.plan.replaced]
        if is_exact:
            kept = [at for at in kept if _is_text(row[at])]
        return {self.plan.columns[at].name: _text(row[at]) for at in kept}


def read_change(plan: TablePlan, frame: bytes) -> RowChange:
    """Read one change frame; raise ProtocolError if the bytes are malformed."""
    n_columns = len(plan.columns)
    if frame[KIND_AT] == INSERT:
        return RowChange(plan=plan, operation="insert", old=None, new=read_insert(frame, n_columns))
    if frame[KIND_AT] == DELETE:
        return RowChange(plan=plan, operation="delete", old=read_delete(frame, n_columns), new=None)
    old, new = read_update(frame, n_columns)
    return RowChange(plan=plan, operation="update", old=old, new=new)


def _text(value: bytes | None) -> str | None:
    raw = text_of(value) if value is not None else None
    return None if raw is None else raw.decode("utf-8", "replace")


def _is_text(value: bytes | None) -> bool:
    """Return whether a value can be kept as it is: a publisher in SQL_ASCII may send bytes that are no UTF-8 (T-61)."""
    raw = text_of(value) if value is not None else None
    try:
        (raw or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def shortened(row: dict[str, str | None] | None, *, is_ascii: bool) -> tuple[dict[str, str | None] | None, bool]:
    """Leave out values too large for the history, or with characters outside ASCII; return whether any was."""
    if row is None:
        return None, False
    kept = {
        name: value for name, value in row.items()
        if value is None or (len(value) <= _VALUE_CHARACTERS and (value.isascii() or not is_ascii))
    }  # fmt: skip
    return kept, len(kept) < len(row)

"""What a failed statement means: try again, look at the tables again, or stop. Pure."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

import psycopg

from parapply.errors import ApplyFailed, StatementFailed
from parapply.model import format_lsn

if TYPE_CHECKING:
    from parapply.target.commands import Command


class Verdict(Enum):
    """What to do with a failure at the head, where nothing of ours can be the cause any more."""

    AGAIN = "again"  # somebody else was in the way: the same once more, later
    STALE = "stale"  # the tables may have changed under the statements: read the catalogue, then once more
    FINAL = "final"


#: Deadlock, serialization failure, lock not available, cancelled by somebody.
_AGAIN: Final = frozenset({"40P01", "40001", "55P03", "57014"})
#: Undefined column or table, type mismatch, cached plan, bad text for a type, unknown statement (traps T-48, F27);
#: generated and identity columns, missing conversion.
_STALE: Final = frozenset(
    {"42703", "42P01", "42804", "0A000", "22P02", "26000", "428C9", "42846", "42883", "42P18", "08P01"}
)

#: The name of the conflict by what was done and what the target said, as PostgreSQL 18 names it.
_UNIQUE: Final = "23505"
_CONFLICTS: Final = {
    ("insert", _UNIQUE): "insert_exists",
    ("update", _UNIQUE): "update_exists",
    ("update", ""): "update_missing",
    ("delete", ""): "delete_missing",
    ("exists", ""): "update_missing",
}

_HINT: Final = (
    "the target differs from the publisher here, or refuses the row: correct the target (the server's log has the "
    "values), then start the daemon again; it resumes with this transaction, nothing was lost"
)


def verdict(failure: StatementFailed) -> Verdict:
    """Judge a failure by its SQLSTATE; a wrong row count has none and is final."""
    if failure.sqlstate in _AGAIN:
        return Verdict.AGAIN
    return Verdict.STALE if failure.sqlstate in _STALE else Verdict.FINAL


def apply_failed(failure: StatementFailed, command: Command | None, xid: int, end_lsn: int) -> ApplyFailed:
    """Return the error the operator reads: type, table, key columns (never values), xid and end LSN.

    Args:
        failure: as met at the head.
        command: the one that failed; None for the commit or the record.
        xid: of the source transaction.
        end_lsn: of the source transaction; 0 if it is not known yet (a large one that has not ended).
    """
    operation = command.operation if command else "commit"
    kind = _CONFLICTS.get((operation, failure.sqlstate), operation)
    place = ""
    if command:
        facts = command.plan.facts
        keys = [command.plan.columns[position].name for position in command.plan.key_positions]
        place = f" on {facts.schema}.{facts.name}" + (f", key ({', '.join(keys)})" if keys else ", no key")
    if failure.sqlstate:
        reason = f"{_condition(failure.sqlstate)} ({failure.sqlstate})"
        reason += f", constraint {failure.constraint}" if failure.constraint else ""
    else:
        reason = "the row is not there" if kind.endswith("_missing") else str(failure)
    end = f"end LSN {format_lsn(end_lsn)}" if end_lsn else "not ended yet"
    return ApplyFailed(f"{kind}{place}: {reason}; transaction {xid}, {end}.", hint=_HINT)


def _condition(sqlstate: str) -> str:
    """Return the name of an SQLSTATE like unique_violation; the server's own message may hold values."""
    try:
        name = psycopg.errors.lookup(sqlstate).__name__
    except KeyError:
        return "error"
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")

"""Source transactions that the operator wants skipped: requested on the target, known to the daemon, done exactly once.

The request is a row of `parapply.skips`, so it reaches a daemon that runs, one that starts later, and survives both.
It is named by the transaction's end LSN alone: the LSN of a commit record may be the end of the transaction before.

    requested ──► accepted ──► skipped      in the target transaction that records the source transaction as done
         └────────────┴──────► passed       the watermark went past it: it was applied, or nothing ends there

A worker calls `Skips.find` with the LSNs of its transaction. Before a large transaction has come whole, only its commit
LSN is known, so the daemon records that LSN at its end, and has it sent again (`learn`). Where it stands at a foreign
lock and may be the one, it is rolled back to read where it ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from parapply.conflict.statements import statement
from parapply.logs import get_logger
from parapply.model import format_lsn, parse_lsn
from parapply.target.session.settings import rows, target_errors
from parapply.target.state.schema import in_schema, state_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.plan.batch import Batch
    from parapply.target.session.pipeline import Statement
    from parapply.target.session.settings import Connection

_OPEN: Final = "outcome IN ('requested', 'accepted')"
_PASSED_HINT: Final = (
    "its rows are on the target if what ends there was not rolled back; undo them there if they must not be"
)
#: The same for a request that is forgotten with its history.
OTHER_HISTORY_HINT: Final = "the publisher's history is another one since: ask again if a transaction stops the daemon"
#: Rows that prepared transactions have written are locked until the outcome (T-37).
_FORGET: Final = """
WITH of AS (SELECT s.slot_id, s.lowest_lsn FROM {s}.slots AS s
             WHERE s.slot_id = $1::int AND ($2::int IS NULL OR s.timeline <> $2::int)),
     stopped AS (DELETE FROM {s}.conflicts WHERE conflict_id IN
                 (SELECT c.conflict_id FROM {s}.conflicts AS c JOIN of USING (slot_id)
                   WHERE c.outcome = 'stopped' AND c.remote_lsn > of.lowest_lsn FOR UPDATE OF c SKIP LOCKED))
DELETE FROM {s}.skips WHERE (slot_id, lsn) IN
       (SELECT k.slot_id, k.lsn FROM {s}.skips AS k JOIN of USING (slot_id)
         WHERE k.lsn > of.lowest_lsn FOR UPDATE OF k SKIP LOCKED)
RETURNING lsn::text, outcome"""


async def forget_other_history(conn: Connection, schema: str, slot_id: int, timeline: int | None) -> list[str]:
    """Forget requests and stopped conflicts above the watermark if the slot's timeline is not this one.

    There another transaction may end at the same LSN. Where the histories part is not known here, so some of them may
    be of both: the daemon stops again. None for the timeline is another history in any case, as after a heal. Return
    the LSNs that were asked for.

    Raises:
        TargetRefused, TargetLost: as everywhere.
    """
    found = await state_rows(conn, schema, "forgetting what was asked of another history", _FORGET, [slot_id, timeline])
    return [lsn for lsn, outcome in found if outcome in {"requested", "accepted"}]


class Skips:
    """Requests of one slot. Written by `look` and `learn`, read by the workers; empty nearly always."""

    def __init__(self, schema: str, slot_id: int, large_ends: dict[int, int]) -> None:
        """Start without requests, but with the ends of large transactions read to their end before, by commit LSN."""
        self.schema = schema
        self.slot_id = slot_id
        self._large_ends = large_ends
        #: End LSNs of the transactions that are wanted; who has many to ask about looks here before.
        self.ends: set[int] = set()
        #: End LSN by commit LSN, of large ones.
        self._commits: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self.ends)

    def find(self, commit_lsn: int, end_lsn: int) -> int | None:
        """Return the end LSN under which a transaction is to be skipped, None if it is not; 0: its end is not known."""
        end_lsn = end_lsn or self._large_ends.get(commit_lsn, 0)
        if end_lsn in self.ends:
            return end_lsn
        return self._commits.get(commit_lsn)

    def may_find(self, commit_lsn: int) -> bool:
        """Return whether `find` may find a large transaction once it is known where it ends."""
        return commit_lsn not in self._large_ends and any(end_lsn > commit_lsn for end_lsn in self.ends)

    def read_to_end(self, commit_lsn: int, end_lsn: int) -> None:
        """Note where a large transaction ends that comes again."""
        self._large_ends[commit_lsn] = end_lsn

    def hits(self, batch: Batch) -> bool:
        """Return whether a transaction of a batch is to be skipped; never where `ends` is empty."""
        return any(one.end_lsn in self.ends for one in batch.transactions)

    def done(self, end_lsn: int) -> None:
        """Forget a transaction whose skipping has committed."""
        self.ends.discard(end_lsn)
        self._commits = {commit: end for commit, end in self._commits.items() if end != end_lsn}

    async def look(self, conn: Connection, low_lsn: int, is_committing: Callable[[int], bool]) -> list[int]:
        """Read the requests, answer new ones, and return the end LSNs accepted now; `conn` is in autocommit mode.

        Everything that ends at `low_lsn` or before has been applied. A skip is too late where COMMIT was sent for the
        transaction's end, if that succeeds.
        """
        query = in_schema(
            "SELECT lsn, commit_lsn, outcome FROM {s}.skips WHERE slot_id = $1::int AND " + _OPEN,  # noqa: S608  own text
            self.schema,
        )
        with target_errors("reading which transactions to skip"):
            found = await rows(conn, query, [self.slot_id])
            accepted = []
            for text, commit_text, outcome in found:
                end_lsn = parse_lsn(text)
                if end_lsn <= low_lsn:
                    self.done(end_lsn)
                    if await self._answer(conn, end_lsn, "passed") and outcome == "accepted":
                        get_logger().warning("skip_passed", end_lsn=text, hint=_PASSED_HINT)
                    continue
                self.ends.add(end_lsn)
                if commit_text is not None:
                    self._commits[parse_lsn(commit_text)] = end_lsn
                # Answered at the next query otherwise: it may succeed, or fail and be skipped.
                if outcome == "requested" and not is_committing(end_lsn):
                    await self._answer(conn, end_lsn, "accepted")
                    accepted.append(end_lsn)
            wanted = {parse_lsn(text) for text, _, _ in found}
            for gone in self.ends - wanted:
                self.done(gone)  # the request was taken back
        return accepted

    async def learn(self, conn: Connection, commit_lsn: int, end_lsn: int) -> None:
        """Record the commit LSN of a wanted large transaction, for when it is sent again."""
        query = "UPDATE {s}.skips SET commit_lsn = $3::pg_lsn WHERE slot_id = $1::int AND lsn = $2::pg_lsn"
        values = [self.slot_id, format_lsn(end_lsn), format_lsn(commit_lsn)]
        await state_rows(conn, self.schema, "writing which transaction to skip", query, values)

    def finishing(self, end_lsn: int, xid: int) -> tuple[Statement, Statement]:
        """Return the statements that say that a transaction is skipped, for the target transaction that records it.

        The first one returns no row if the request was taken back since `find`.
        """
        lsn = format_lsn(end_lsn).encode()
        slot = str(self.slot_id).encode()
        return (
            statement(
                self._text(
                    "UPDATE {s}.skips SET outcome = 'skipped', remote_xid = $3::bigint,"  # noqa: S608  own text
                    " resolved_at = pg_catalog.clock_timestamp() WHERE slot_id = $1::int AND lsn = $2::pg_lsn"
                    f" AND {_OPEN} RETURNING true"
                ),
                [slot, lsn, str(xid).encode()],
            ),
            # The conflicts that stopped it are settled by the skip.
            statement(
                self._text(
                    "UPDATE {s}.conflicts SET outcome = 'skipped' WHERE slot_id = $1::int AND remote_lsn = $2::pg_lsn"
                    " AND outcome = 'stopped'"
                ),
                [slot, lsn],
            ),
        )

    async def _answer(self, conn: Connection, end_lsn: int, outcome: str) -> bool:
        resolved = "pg_catalog.clock_timestamp()" if outcome == "passed" else "NULL"
        query = in_schema(
            # If it was skipped in a prepared transaction, its row is locked until the outcome (T-37).
            f"UPDATE {{s}}.skips SET outcome = $3, resolved_at = {resolved} WHERE (slot_id, lsn) IN"  # noqa: S608  own text
            " (SELECT slot_id, lsn FROM {s}.skips WHERE slot_id = $1::int AND lsn = $2::pg_lsn"
            f" AND {_OPEN} FOR UPDATE SKIP LOCKED) RETURNING true",
            self.schema,
        )
        return bool(await rows(conn, query, [self.slot_id, format_lsn(end_lsn), outcome]))

    def _text(self, text: str) -> str:
        return in_schema(text, self.schema).as_string(None)

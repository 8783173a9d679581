"""PREPARE, COMMIT PREPARED and ROLLBACK PREPARED on the target, each exactly once (trap T-57).

Each of the three is a separate batch: everything earlier has committed when it starts. It is done, and then recorded.
If the answer to the first step is lost, or the process dies between the two, the publisher sends it again, and the
state of the target decides:

| again comes      | prepared here         | proof visible | a note only              | nothing                     |
|------------------|-----------------------|---------------|--------------------------|-----------------------------|
| PREPARE          | done; record it       | -             | -                        | prepare                     |
| COMMIT PREPARED  | commit it             | done; record  | error: it is lost        | never prepared here: record,|
|                  |                       |               |                          | or an error                 |
| ROLLBACK PREPARED| roll it back          | error         | done or left out; record | done or never prepared;     |
|                  |                       |               |                          | record                      |

Of a PREPARE whose rollback the publisher met while it decoded it only a part was sent, which may fail or not. So the
publisher is asked before anything is prepared, and before a failure is an error. If it has rolled back, nothing is
prepared, and the PREPARE is recorded with its note, so that the COMMIT PREPARED of a standby that was promoted without
the rollback is an error.

Up to PostgreSQL 17 the outcome of a transaction without changes may come without its PREPARE. From 18 on, if a COMMIT
PREPARED finds nothing, its PREPARE was sent to another reader of the slot. With `origin = none` each may come alone:
the PREPARE of a subscriber is left out, the COMMIT PREPARED of a client is not. A PREPARE comes again only until it is
recorded, and its outcome is recorded after it, so a transaction that was rolled back is not prepared again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from parapply import failpoints
from parapply.errors import ApplyFailed, StatementFailed
from parapply.logs import get_logger
from parapply.model import format_lsn
from parapply.target.session.prepared import gid_of, start_of_gid
from parapply.wire.messages import BeginPrepare, CommitPrepared, Prepare, RollbackPrepared, StreamPrepare

if TYPE_CHECKING:
    from parapply.engine.job import Outcome
    from parapply.source.slot import StreamSender
    from parapply.target.session.session import Record, WorkerSession

#: SQLSTATE of an outcome for a name that is not prepared; for one that another session is ending ("is busy").
_UNKNOWN, _BUSY = "42704", "55000"
#: Seconds until an outcome is tried again while another session is ending the transaction.
_BUSY_S = 0.05


class TwoPhase:
    """Transactions prepared here. Written by the workers, one at a time, because each event is a separate batch."""

    def __init__(
        self, slot_id: int, pending: dict[int, tuple[str, int]], sender: StreamSender, *, is_each_noted: bool
    ) -> None:
        """Start with the transactions prepared on the target, as `target.prepared.pending` has them.

        The sender knows whether one that it sent was rolled back. With `is_each_noted` no COMMIT PREPARED comes without
        its PREPARE.
        """
        self._slot_id = slot_id
        self._pending = dict(pending)
        self._sender = sender
        self._is_each_noted = is_each_noted
        self._log = get_logger()

    @property
    def n_pending(self) -> int:
        """Return the number of transactions that wait for their outcome."""
        return len(self._pending)

    @property
    def oldest_lsn(self) -> int:
        """Return the end LSN of the oldest PREPARE among them; 0: there is none."""
        return min([end_lsn for _, end_lsn in self._pending.values()], default=0)

    def gid(self, message: BeginPrepare | Prepare | StreamPrepare) -> str:
        """Return the name of a transaction on the target."""
        return gid_of(self._slot_id, message.xid, message.end_lsn)

    def is_prepared(self, message: BeginPrepare | Prepare | StreamPrepare) -> bool:
        """Return whether that very PREPARE was done."""
        return self._pending.get(message.xid) == (self.gid(message), message.end_lsn)

    def is_ours(self, gid: str) -> bool:
        """Return whether a transaction is prepared here and waits for its outcome in the stream."""
        return any(gid == pending for pending, _ in self._pending.values())

    def pending_gid(self, message: CommitPrepared | RollbackPrepared) -> str:
        """Return the name here of the transaction that an outcome ends; empty if it is not prepared here."""
        gid, _ = self._pending.get(message.xid, ("", 0))
        return gid

    async def is_rolled_back(self, message: object) -> bool:
        """Return whether a message belongs to a PREPARE whose transaction the publisher has rolled back since.

        Ask this before it is prepared, and when it cannot be applied, before anything is made of that.

        Raises:
            SourceLost: the publisher cannot be asked; the PREPARE is sent again.
        """
        if not isinstance(message, BeginPrepare | Prepare | StreamPrepare):
            return False
        is_rolled_back = await self._sender.is_rolled_back(message.xid)
        if is_rolled_back:
            self._log.info("prepare_left_out", xid=message.xid, end_lsn=format_lsn(message.end_lsn))
        return is_rolled_back

    async def leave_out(self, session: WorkerSession, message: Prepare | StreamPrepare, record: Record) -> None:
        """Record a PREPARE whose transaction was rolled back, without preparing anything; no transaction is open."""
        failpoints.probe(failpoints.DECIDED)
        await session.record_prepared(record, self.gid(message))

    async def prepare(self, session: WorkerSession, message: Prepare | StreamPrepare, record: Record) -> None:
        """Prepare the open transaction, and record that.

        Raises:
            StatementFailed: it cannot be prepared; the server has rolled it back.
            TargetLost: the connection ended; whether it is prepared the target knows.
        """
        gid = self.gid(message)
        await session.prepare(gid)
        self._pending[message.xid] = (gid, message.end_lsn)
        await session.record_prepared(record, gid)

    async def decide(self, session: WorkerSession, message: Outcome, record: Record) -> None:
        """Repeat the publisher's action on a prepared transaction, and record it; a PREPARE is only recorded.

        Raises:
            ApplyFailed: another session ended the transaction prepared here, and not as on the publisher.
            StatementFailed: the server refuses, for example because another role prepared it.
        """
        if isinstance(message, Prepare | StreamPrepare):
            await session.record_prepared(record, self.gid(message))
            return
        gid = self.pending_gid(message)
        is_ended = bool(gid) and await self._end(session, gid, record, is_commit=isinstance(message, CommitPrepared))
        self._pending.pop(message.xid, None)
        start = start_of_gid(self._slot_id, message.xid)
        if not is_ended:
            await self._check_ended(session, message, start, record.end_lsn)
        failpoints.probe(failpoints.DECIDED)
        await session.record_outcome(record, start)

    async def _end(self, session: WorkerSession, gid: str, record: Record, *, is_commit: bool) -> bool:
        """End a prepared transaction; return whether this session did, and no other one."""
        is_logged = False
        while True:
            try:
                await session.decide(gid, record, is_commit=is_commit)
            except StatementFailed as failure:
                if failure.sqlstate == _UNKNOWN:
                    return False
                if failure.sqlstate != _BUSY:
                    raise
                # By the stall check, or by hand; the next attempt sees how it ended.
                if not is_logged:
                    self._log.warning("outcome_waits", gid=gid, end_lsn=format_lsn(record.end_lsn))
                    is_logged = True
                await asyncio.sleep(_BUSY_S)
            else:
                return True

    async def _check_ended(self, session: WorkerSession, message: Outcome, start: str, end_lsn: int) -> None:
        """Fail if a transaction that is not prepared here was ended in another way than on the publisher."""
        is_committed = await session.is_proved(start)
        which = f"of transaction {message.xid}, end LSN {format_lsn(end_lsn)}"
        if isinstance(message, CommitPrepared):
            if is_committed:
                return
            if await session.is_noted(start):
                raise ApplyFailed(
                    f"COMMIT PREPARED {which}: its PREPARE is recorded on the target, where it is neither prepared nor "
                    "committed.",
                    hint="another session rolled it back, here or on a publisher that a standby has replaced since: "
                    "its changes are lost, copy its tables again (`parapply drop`, then `init --copy --truncate`)",
                )
            if self._is_each_noted:
                raise ApplyFailed(
                    f"COMMIT PREPARED {which}: its PREPARE never came here.",
                    hint="another reader was sent it before the slot was taken over: its changes are lost, copy its "
                    "tables again (`parapply drop`, then `init --copy --truncate`)",
                )
        elif is_committed:
            raise ApplyFailed(
                f"ROLLBACK PREPARED {which}: it is committed on the target.",
                hint="another session committed it here: undo its changes by hand, or copy its tables again "
                "(`parapply drop`, then `init --copy --truncate`)",
            )

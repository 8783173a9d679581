"""PREPARE, COMMIT PREPARED and ROLLBACK PREPARED on the target, each exactly once (trap T-57).

Each of the three is a batch of its own: everything earlier has committed when it starts. It is done, and then recorded.
If the answer to the first is lost, or the process dies between the two, the publisher sends it again, and what is found
on the target decides:

| again comes      | prepared here         | proof visible | nothing                                           |
|------------------|-----------------------|---------------|---------------------------------------------------|
| PREPARE          | done; record it       | -             | prepare                                           |
| COMMIT PREPARED  | commit it             | done; record  | error: it is lost                                 |
| ROLLBACK PREPARED| roll it back          | -             | done, or never prepared here: record it           |

A PREPARE comes again only until it is recorded, and its outcome is recorded after it: so what was rolled back is not
prepared once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from parapply import probes
from parapply.errors import ApplyFailed, StatementFailed
from parapply.model import format_lsn
from parapply.target.prepared import gid_of, start_of_gid
from parapply.wire.messages import CommitPrepared, Prepare, RollbackPrepared, StreamPrepare

if TYPE_CHECKING:
    from parapply.target.session import Record, WorkerSession
    from parapply.wire.messages import BeginPrepare

#: What a job can do with a prepared transaction.
Outcome: TypeAlias = CommitPrepared | RollbackPrepared | Prepare | StreamPrepare

#: SQLSTATE of an outcome for a name that is not prepared.
_UNKNOWN = "42704"


class TwoPhase:
    """What is prepared here. Written by the workers, one at a time: all this is done in batches of their own."""

    def __init__(self, slot_id: int, pending: dict[int, tuple[str, int]]) -> None:
        """Start with what the target has.

        Args:
            slot_id: of the state.
            pending: of `target.prepared.pending`.
        """
        self._slot_id = slot_id
        self._pending = dict(pending)

    def gid(self, message: BeginPrepare | Prepare | StreamPrepare) -> str:
        """Return the name of a transaction on the target."""
        return gid_of(self._slot_id, message.xid, message.end_lsn)

    def is_prepared(self, message: BeginPrepare | Prepare | StreamPrepare) -> bool:
        """Tell whether that very PREPARE was done."""
        return self._pending.get(message.xid) == (self.gid(message), message.end_lsn)

    async def prepare(self, session: WorkerSession, message: Prepare | StreamPrepare, record: Record) -> None:
        """Prepare the open transaction, and record that.

        Raises:
            StatementFailed: it cannot be prepared; the server has rolled it back.
            TargetLost: the connection ended; whether it is prepared the target knows.
        """
        gid = self.gid(message)
        await session.prepare(gid)
        self._pending[message.xid] = (gid, message.end_lsn)
        await session.record_alone(record)

    async def decide(self, session: WorkerSession, message: Outcome, record: Record) -> None:
        """Do what the publisher did with a prepared transaction, and record it; a PREPARE is only recorded.

        Raises:
            ApplyFailed: it was committed, but is neither prepared nor committed here.
            StatementFailed: the server refuses, for example because another role prepared it.
            TargetLost: the connection ended.
        """
        if isinstance(message, Prepare | StreamPrepare):
            await session.record_alone(record)
            return
        is_commit = isinstance(message, CommitPrepared)
        gid, _ = self._pending.get(message.xid, ("", 0))
        if gid:
            try:
                await session.decide(gid, record, is_commit=is_commit)
            except StatementFailed as failure:
                if failure.sqlstate != _UNKNOWN:
                    raise
                gid = ""  # somebody else ended it
            self._pending.pop(message.xid, None)
        start = start_of_gid(self._slot_id, message.xid)
        if is_commit and not gid and not await session.is_proved(start):
            raise ApplyFailed(
                f"COMMIT PREPARED of transaction {message.xid}, end LSN {format_lsn(record.end_lsn)}: it is neither "
                "prepared nor committed on the target.",
                hint="somebody rolled it back here, or the slot was read by another before: copy the tables anew",
            )
        probes.probe(probes.DECIDED)
        await session.record_alone(record, forget=start)

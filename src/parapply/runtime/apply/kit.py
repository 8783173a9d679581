"""Objects that all workers of an epoch share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from parapply.engine.job import Attempts
from parapply.runtime.apply.sets import Ahead

if TYPE_CHECKING:
    from parapply.runtime.apply.command_rules import CommandRules
    from parapply.runtime.apply.conflicts import ConflictHandler
    from parapply.runtime.pool.pool import WorkerPool
    from parapply.runtime.pool.two_phase import TwoPhase
    from parapply.runtime.tables.plans import TablePlans
    from parapply.target.sql.commands import CommandBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKit:
    """Made by the epoch, with nothing of a single worker or session.

    Attributes:
        pool: gives out the jobs and the turns to commit.
        builder: of commands; used in the event loop's thread only.
        tables: how each announced table is applied.
        conflict_handler: knows the transactions to skip, and keeps conflicts.
        two_phase: knows the prepared transactions.
        commands: rules of the publisher's commands that may run.
        tracks_commits: the target knows when rows were written and by which origin.
        stops_on_error: on_error is "stop".
        piece_bytes: bytes of changes of a streamed transaction that are applied at once.
        ahead: commands of a batch that waits for another.
        times_commits: True with an apply log, which has the time of COMMIT.
    """

    pool: WorkerPool
    builder: CommandBuilder
    tables: TablePlans
    conflict_handler: ConflictHandler
    two_phase: TwoPhase
    commands: CommandRules
    tracks_commits: bool
    stops_on_error: bool
    piece_bytes: int
    ahead: Ahead = field(default_factory=Ahead)
    times_commits: bool = False

    def new_attempts(self) -> Attempts:
        """Return the count of a source transaction that was not tried at the head yet."""
        return Attempts(stops_on_error=self.stops_on_error)

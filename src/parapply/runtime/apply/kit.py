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
class ApplyRules:
    """Conditions under which an epoch applies.

    Attributes:
        commands: rules of the publisher's commands that may run.
        piece_bytes: bytes of changes of a streamed transaction that are applied at once.
        stops_on_error: on_error is "stop".
        tracks_commits: the target knows when rows were written and by which origin.
        times_commits: True with an apply log, which has the time of COMMIT.
    """

    commands: CommandRules
    piece_bytes: int
    stops_on_error: bool
    tracks_commits: bool = False
    times_commits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKit:
    """Made by the epoch, with nothing of a single worker or session.

    Attributes:
        pool: gives out the jobs and the turns to commit.
        builder: of commands; used in the event loop's thread only.
        tables: how each announced table is applied.
        conflict_handler: knows the transactions to skip, and keeps conflicts.
        two_phase: knows the prepared transactions.
        rules: conditions of the epoch.
        ahead: commands of a batch that waits for another.
    """

    pool: WorkerPool
    builder: CommandBuilder
    tables: TablePlans
    conflict_handler: ConflictHandler
    two_phase: TwoPhase
    rules: ApplyRules
    ahead: Ahead = field(default_factory=Ahead)

    def new_attempts(self) -> Attempts:
        """Return the count of a source transaction that was not tried at the head yet."""
        return Attempts(stops_on_error=self.rules.stops_on_error)

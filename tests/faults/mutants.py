"""Broken daemons: the campaign must find each, or it proves nothing (oracle O10).

A mutant is a daemon in whose process one method was replaced before it began (`mutate/sitecustomize.py`); nothing of it
is in the package.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parapply.plan import scheduler
from parapply.plan.scheduler import Scheduler, overlaps
from parapply.runtime.control.progress import Progress
from parapply.runtime.pool.streams import StreamBuffers
from parapply.target.session.pipeline import Statement
from parapply.target.session.session import WorkerSession
from parapply.target.sql.statements import Sql

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from parapply.engine.job import Job
    from parapply.plan.batch import Batch
    from parapply.plan.scheduler import Overlap
    from parapply.target.session.session import Proof, Record
    from parapply.wire.messages import StreamAbort

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]


def _feedback_before_durability() -> None:
    committed = Progress.committed

    def tell(progress: Progress, job: Job) -> None:
        committed(progress, job)
        low_lsn = progress._engine.watermark.low_lsn
        progress._stream.send_status(max(progress._batcher.received_lsn, low_lsn), low_lsn, low_lsn)

    Progress.committed = tell  # type: ignore[method-assign, assignment]


def _no_record() -> None:
    nothing = Statement(Sql(name=b"nothing", text=b"SELECT 1", n_parameters=0, is_set=False, positions=()), ())

    def first(_session: WorkerSession, _record: Record | Proof, *, commits: bool = False) -> Statement:
        return nothing

    WorkerSession._first = first  # type: ignore[method-assign, assignment]


def _order_ignored() -> None:
    def may_commit(own: Scheduler, batch: Batch) -> bool:
        return not own._open[batch.seq].late

    Scheduler.may_commit = may_commit  # type: ignore[method-assign, assignment]


def _dependencies_dropped() -> None:
    def meet(earlier: Batch, later: Batch) -> list[Overlap]:
        return overlaps(earlier, later) if earlier.runs_alone or later.runs_alone else []

    scheduler.overlaps = meet


def _aborts_ignored() -> None:
    abort = StreamBuffers.abort

    def only_whole(streams: StreamBuffers, message: StreamAbort) -> None:
        if message.subxid == message.xid:
            abort(streams, message)

    StreamBuffers.abort = only_whole  # type: ignore[method-assign, assignment]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A broken daemon, and where it is likely to show.

    Attributes:
        title: what it does wrong.
        break_it: replaces the method, in the daemon's process.
        settings: of the round.
        faults: names to inject.
    """

    title: str
    break_it: Callable[[], None]
    settings: Mapping[str, str | float]
    faults: tuple[str, ...]


_BUSY: Mapping[str, str | float] = {
    "apply.commit_order": "preserve", "apply.workers": 4, "apply.max_batch_transactions": 1, "source.streaming": "on",
    "target.synchronous_commit": "off", "target.session_replication_role": "replica",
}  # fmt: skip

MUTANTS = {
    "feedback": Mutant(
        title="reports what is not durable as flushed", break_it=_feedback_before_durability, settings=_BUSY,
        faults=("F6", "F6", "F1"),
    ),
    "no-record": Mutant(
        title="commits rows without the record that they are done", break_it=_no_record, settings=_BUSY,
        faults=("F1", "F3", "F1", "F16"),
    ),
    "order": Mutant(
        title="commits in any order where the order is to be kept", break_it=_order_ignored, settings=_BUSY,
        faults=("F23", "F2", "F1"),
    ),
    "dependencies": Mutant(
        title="does not see that batches touch the same rows", break_it=_dependencies_dropped,
        settings={**_BUSY, "apply.commit_order": "relaxed"}, faults=("F23", "F24", "F2"),
    ),
    "aborts": Mutant(
        title="keeps what a rolled back subtransaction did", break_it=_aborts_ignored,
        settings={**_BUSY, "apply.stream_start_bytes": 0}, faults=("F35", "F1"),
    ),
}  # fmt: skip


def environment(name: str) -> dict[str, str]:
    """Return the variables that make a daemon a mutant."""
    path = [str(_HERE / "mutate"), str(_ROOT / "src"), str(_ROOT)]
    return {"FAULTS_MUTANT": name, "PYTHONPATH": os.pathsep.join(path)}

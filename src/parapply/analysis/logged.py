"""Records of the apply log as what `prediction` takes, for logs that fit in memory: no engine of queries is needed."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from parapply.analysis.more_workers import BATCHES, ENOUGH
from parapply.analysis.prediction import Log, Second
from parapply.analysis.stream import Recorded
from parapply.applylog_schema import BatchRecord, IntervalRecord, UnreadableRecordError, read_record
from parapply.errors import ReportRefused
from parapply.limits import is_flush

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from parapply.analysis.changes import Change
    from parapply.analysis.prediction import Predicted
    from parapply.applylog_schema import Record

#: Names of closed files of a log, none of them packed.
_FILES: Final = "*.jsonl"
#: Seconds at least of any run.
_LEAST_S: Final = 1e-6
#: Batches of one run in source order, and its intervals.
_Run: TypeAlias = "tuple[list[Recorded], list[Second]]"


class LoggedRun(NamedTuple):
    """The part of a run that was played, and predictions for it. Only their ratio holds for more than the part."""

    seconds: float
    changes: int  # applied in these
    predictions: list[Predicted]


class Trial(NamedTuple):
    """A run of the first part of the same stream with other settings."""

    change: Change  # of the log's settings
    folder: Path  # of its own log


def predicted_of(folder: Path, changes: Sequence[Change], trials: Sequence[Trial] = ()) -> LoggedRun:
    """Return a prediction for each change, from the log of one slot.

    The latest run with enough batches is taken, else the longest one, as the report does, and the last batches of it.

    Args:
        folder: of the log.
        changes: of its settings.
        trials: that show the error of predictions; the log is from the same first transaction.

    Raises:
        ReportRefused: a log has no batch, or a line that is no record.
    """
    played = _runs(folder)
    enough = [run for run in played if len(run[0]) >= ENOUGH]
    recorded, seconds = enough[-1] if enough else max(played, key=lambda run: len(run[0]))
    recorded = recorded[-BATCHES:]
    log = Log(recorded, [one for one in seconds if one.ended_s > recorded[0].received_s])
    for trial in trials:
        # Parts are compared as they were measured: they are too short to be predicted.
        took = _slower(played[0][0], _runs(trial.folder)[0][0])
        predicted_s = max(log.predict(trial.change).seconds, _LEAST_S)
        log.errors = log.errors.learn(trial.change, took, predicted_s / max(log.measured_s, _LEAST_S))
    n_changes = sum([one.changes for one in recorded])
    return LoggedRun(log.measured_s, n_changes, [log.predict(change) for change in changes])


def _slower(recorded: Sequence[Recorded], tried: Sequence[Recorded]) -> float:
    """Return the time of a trial, as a multiple of what the log took for as many changes."""
    n_changes = min([sum([one.changes for one in each]) for each in (recorded, tried)])
    log, trial = (_each_s(_first(each, n_changes)) for each in (recorded, tried))
    return trial / log


def _each_s(recorded: Sequence[Recorded]) -> float:
    begun_s, ended_s = min([one.started_s for one in recorded]), max([one.committed_s for one in recorded])
    return max(ended_s - begun_s, _LEAST_S) / max(1, sum([one.changes for one in recorded]))


def _first(recorded: Sequence[Recorded], n_changes: int) -> Sequence[Recorded]:
    ends = accumulate([one.changes for one in recorded])
    return [one for one, end in zip(recorded, ends, strict=True) if end - one.changes < n_changes] or recorded


def _runs(folder: Path) -> list[_Run]:
    """Return all runs of a log that have a batch, in the order of their ends; raise ReportRefused if none has."""
    runs: defaultdict[str, list[Record]] = defaultdict(list)
    for path in sorted(folder.glob(_FILES)):
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    record = read_record(line)
                except UnreadableRecordError as error:
                    raise ReportRefused(
                        f"{path}, line {number} is no record: {error}", hint="name an empty folder for the log"
                    ) from error
                if isinstance(record, BatchRecord | IntervalRecord):
                    runs[record.run].append(record)
    found = [recorded_of(records) for records in runs.values()]
    played = sorted((run for run in found if run[0]), key=lambda run: max(one.committed_s for one in run[0]))
    if not played:
        raise ReportRefused(f"{folder} has no batch to predict from", hint="repeat the run with --again")
    return played


def recorded_of(records: Iterable[Record]) -> tuple[list[Recorded], list[Second]]:
    """Return the batches of one run in source order, and its intervals; transactions are passed over."""
    batches = [_recorded(one) for one in records if isinstance(one, BatchRecord)]
    seconds = [_second(one) for one in records if isinstance(one, IntervalRecord)]
    return sorted(batches), sorted(seconds)


def _recorded(one: BatchRecord) -> Recorded:
    counts = [each.insert + each.update + each.delete + each.truncate for each in one.rows.values()]
    return Recorded(
        seq=one.seq,
        transactions=one.n_transactions,
        changes=sum(counts),
        size_bytes=one.size_bytes,
        tables=len(one.rows),
        received_s=_seconds(one.received_at),
        started_s=_seconds(one.started_at),
        committed_s=_seconds(one.committed_at),
        due_s=_seconds(one.commit_time_last),
        execute_s=one.execute_s,
        commit_s=one.commit_s,
        late_rows=one.late_keys,
        holder_seq=one.waited_for.seq if one.waited_for else -1,
        waits=one.wait_dependency_s > 0,
        is_one_flight=one.is_one_flight,
        flight_commit_s=one.flight_commit_s,
        keys=[late.key for late in one.late_rows],
        kind=one.waited_for.kind if one.waited_for else "",
        is_alone=one.mode not in {"set", "rows"} or any(each.truncate for each in one.rows.values()),
    )


def _second(one: IntervalRecord) -> Second:
    samples = {each.wait: each.samples for each in one.backends}
    return Second(
        ended_s=_seconds(one.ended_at),
        length_s=one.length_s,
        workers=one.workers,
        leader_cpu_s=one.leader_cpu_s,
        paused_s=one.paused_s,
        samples=sum(samples.values()),
        on_cpu=samples.get("CPU", 0),
        order=one.commit_order,
        max_transactions=one.max_batch_transactions,
        max_changes=one.max_batch_changes,
        max_bytes=one.max_batch_bytes,
        processors=one.processors,
        busy_s=one.busy_cpu_s,
        sessions_s=one.sessions_cpu_s,
        sender_s=one.sender_cpu_s,
        flushing=sum([number for wait, number in samples.items() if is_flush(wait)]),
    )


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()

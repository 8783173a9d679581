"""The figure `what_if`: predictions from the latest run of each slot that says enough.

In go an engine with the views; out come rows. At most `BATCHES` batches of a slot are held, whatever the log's size:
the last ones of the run by their numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from parapply.analysis.changes import ORDERS, Change
from parapply.analysis.prediction import Log, Second
from parapply.analysis.stream import Recorded
from parapply.errors import ReportRefused
from parapply.limits import FLUSHES
from parapply.quoting import plain_literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.analysis.engine import Rows
    from parapply.analysis.prediction import Predicted
    from parapply.analysis.store import Engine

#: Batches of a slot that are played, with each number of workers in a good part of a second.
BATCHES: Final = 1_000
#: Batches from which on a run says enough; if none has that many, the longest is taken.
ENOUGH: Final = 50
#: Slots that are predicted without a question, each of which takes seconds.
MOST_SLOTS: Final = 5

RUNS: Final = """
SELECT slot, run, count(*) AS n, max(seq) AS last_seq, max(committed_at) AS until
  FROM batches GROUP BY slot, run ORDER BY slot, until DESC, run
"""
# The fields of `Recorded`.
_BATCHES: Final = """
SELECT seq, n_transactions, greatest(1, n_rows + n_truncates) AS changes, size_bytes, size(map_keys(rows)) AS tables,
       unix_micros(received_at) / 1e6 AS received_s, unix_micros(started_at) / 1e6 AS started_s,
       unix_micros(committed_at) / 1e6 AS committed_s, unix_micros(commit_time_last) / 1e6 AS due_s, execute_s,
       commit_s, late_keys, coalesce(waited_for.seq, -1) AS holder_seq, wait_dependency_s > 0 AS waits, is_one_flight,
       flight_commit_s, transform(late_rows, one -> one.key) AS keys, coalesce(waited_for.kind, '') AS kind,
       mode NOT IN ('set', 'rows') OR n_truncates > 0 AS is_alone
  FROM batches WHERE slot = :slot AND run = :run AND seq > :after_seq ORDER BY seq
"""
_FLUSHES: Final = ", ".join(map(plain_literal, FLUSHES))
# The fields of `Second`.
_INTERVALS: Final = f"""
SELECT unix_micros(ended_at) / 1e6 AS ended_s, length_s, workers, leader_cpu_s, paused_s,
       aggregate(transform(backends, one -> one.samples), 0L, (sum, one) -> sum + one) AS samples,
       aggregate(transform(backends, one -> if(one.wait = 'CPU', one.samples, 0)), 0L, (sum, one) -> sum + one)
         AS on_cpu, commit_order, max_batch_transactions, max_batch_changes, max_batch_bytes, processors, busy_cpu_s,
       sessions_cpu_s, sender_cpu_s,
       aggregate(transform(backends, one -> if(one.wait IN ({_FLUSHES}), one.samples, 0)), 0L, (sum, one) -> sum + one)
         AS flushing
  FROM intervals WHERE slot = :slot AND run = :run ORDER BY ended_s
"""


def predicted(engine: Engine, workers: Sequence[int], changes: Sequence[Change] = ()) -> Rows:
    """Return the rows of `what_if`.

    Args:
        engine: with the views of `views.make_views`.
        workers: numbers to predict, besides those that the daemon has and twice as many.
        changes: that are asked for besides, of all slots. Without any, of `MOST_SLOTS` slots, those with most batches.

    Raises:
        ReportRefused: a log has the same records twice, or does not say what is asked for.
    """
    rows: Rows = []
    for run in chosen(engine.rows(RUNS), MOST_SLOTS if not changes else None):
        recorded, seconds = read(engine, run["slot"], run["run"], run["last_seq"] - BATCHES)
        begun_s = recorded[0].received_s
        seconds = [one for one in seconds if one.ended_s > begun_s]
        try:
            log = Log(recorded, seconds)
        except ValueError as error:
            raise ReportRefused(
                f"Batches of slot {run['slot']} are in the log twice: {error}.",
                hint="leave copies of the same files out; --no-what-if counts them twice",
            ) from error
        found: list[tuple[str, Predicted]] = []
        for order in ORDERS:
            found += [("", one) for one in log.of_workers(order, sorted({*workers, log.workers, 2 * log.workers}))]
        one_worker_s = {one.order: one.seconds for _, one in found if one.workers == 1}
        for change in changes:
            _check(change, log, run["slot"])
            found.append((str(change), log.predict(change)))
        rows += [
            {
                "slot": run["slot"],
                "question": question,
                "commit_order": one.order,
                "workers": one.workers,
                "seconds": one.seconds,
                "least_s": one.least_s,
                "most_s": one.most_s,
                "speed_up": one_worker_s[one.order] / one.seconds if one.seconds else 1.0,
                "limit": one.limit,
                "units": len(recorded),
                "until": run["until"],
            }
            for question, one in found
        ]
    return rows


def _check(change: Change, log: Log, slot: str) -> None:
    if change.synchronous_commit == "on" and change.flush_ms is None and not log.flush_s:
        raise ReportRefused(
            f"No session of slot {slot} has waited for a flush, so the log does not say how long one takes.",
            hint="add flush_ms=N to --what-if (pg_test_fsync on the target measures it), or name another --slot",
        )


def read(engine: Engine, slot: str, run: str, after_seq: int = 0) -> tuple[list[Recorded], list[Second]]:
    """Return the batches of a run after a number, and all its intervals."""
    found: dict[str, Any] = {"slot": slot, "run": run}
    recorded = [Recorded(*row) for row in engine.stream(_BATCHES, **found, after_seq=after_seq)]
    return recorded, [Second(*row) for row in engine.stream(_INTERVALS, **found)]


def chosen(runs: Rows, most: int | None) -> Rows:
    """Return one run of each slot, the latest with enough batches, else the one with most; of `most` slots at most."""
    by_slot: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_slot.setdefault(run["slot"], []).append(run)
    found = [
        next((run for run in of_slot if run["n"] >= ENOUGH), max(of_slot, key=lambda run: run["n"]))
        for of_slot in by_slot.values()
    ]
    largest = {run["slot"] for run in sorted(found, key=lambda run: -run["n"])[:most]}
    return [run for run in found if run["slot"] in largest]

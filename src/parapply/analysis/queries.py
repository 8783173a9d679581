"""How the figures are computed: of limits, work, time, and of the batches to blame. Definitions: `figures`.

Each is one query over the views that `views` makes. No value comes from the log's text: parameters are bound.
"""

from __future__ import annotations

from typing import Final

from parapply.analysis.figures import EACH_TRANSACTION, PARTS, STAGES

# Events of a batch, and how they change the numbers of queued, blocked, held, executing and late ones.
_POINTS: Final = (
    ("least(received_us, start_us)", 1, 0, 0, 0, 0),
    ("start_us - depend_us", 0, 1, 0, 0, 0),
    ("start_us", -1, -1, 1, 1, 0),
    ("done_us", 0, 0, 0, -1, 0),
    ("turn_us", 0, 0, 0, 0, "is_late"),
    ("late_us", 0, 0, 0, 0, "-is_late"),
    ("end_us", 0, 0, -1, 0, 0),
)
_EVENTS: Final = ", ".join(
    f"struct({us} AS us, {queued} AS queued, {blocked} AS blocked, {held} AS held, {executing} AS executing,"
    f" {late} AS late)"
    for us, queued, blocked, held, executing, late in _POINTS
)
# Each moment of a run has one state, by what the batches under way were doing then. Where several things happen at one
# time their order does not matter: no time passes between them. The workers are as many as the interval of that moment
# says, or the last one before: another run may have had others, and their number may be automatic. Before the first one
# they are as many as have committed in that run. Of stamps, a time and the workers from then on, the last one counts.
MOMENTS: Final = f"""
SELECT slot, state, sum(seconds) AS seconds
  FROM (SELECT slot, (until_us - us) / 1e6 AS seconds,
               CASE WHEN held + queued <= 0 THEN 'nothing'
                    WHEN held < workers AND blocked > 0 THEN 'dependency'
                    WHEN held < workers THEN 'worker free'
                    WHEN 2 * executing >= held THEN 'executing'
                    WHEN late > 0 THEN 'late rows'
                    ELSE 'commit' END AS state
          FROM (SELECT slot, us, lead(us, 1, us) OVER (PARTITION BY slot, run ORDER BY us) AS until_us,
                       sum(queued) OVER moments AS queued, sum(blocked) OVER moments AS blocked,
                       sum(held) OVER moments AS held, sum(executing) OVER moments AS executing,
                       sum(late) OVER moments AS late,
                       coalesce(max(stamped) OVER moments % 1024, max(seen) OVER runs) AS workers,
                       min(if(seen IS NULL, NULL, us)) OVER runs AS first_us,
                       max(if(seen IS NULL, NULL, us)) OVER runs AS last_us
                  FROM (SELECT slot, run, us, sum(queued) AS queued, sum(blocked) AS blocked, sum(held) AS held,
                               sum(executing) AS executing, sum(late) AS late, max(seen) AS seen,
                               max(stamped) AS stamped
                          FROM (SELECT slot, run, worker AS seen, CAST(NULL AS bigint) AS stamped,
                                       inline(array(
                                         {_EVENTS}))
                                  FROM timed
                                UNION ALL
                                SELECT slot, run, NULL, begun_us * 1024 + least(workers, 1023), begun_us, 0, 0, 0, 0, 0
                                  FROM (SELECT slot, run, workers, unix_micros(ended_at)
                                               - CAST(round(length_s * 1e6) AS bigint) AS begun_us FROM intervals))
                         GROUP BY slot, run, us)
                WINDOW moments AS (PARTITION BY slot, run ORDER BY us ROWS UNBOUNDED PRECEDING),
                       runs AS (PARTITION BY slot, run))
         WHERE us >= first_us AND us < last_us)
 WHERE seconds > 0
 GROUP BY slot, state ORDER BY slot, seconds DESC, state
"""

# Work of the leader and the reader while workers were free and more was to be read.
READING: Final = """
SELECT slot, count(*) AS intervals, max_by(workers, ended_at) AS workers, sum(length_s) AS seconds,
       sum(leader_cpu_s) AS leader_cpu_s, sum(publisher_s) AS publisher_s, sum(paused_s) AS paused_s,
       sum(throttled_s) AS throttled_s,
       coalesce(sum(greatest(length_s - paused_s, 0)) FILTER (WHERE behind_bytes > :behind_bytes), 0) AS behind_s,
       coalesce(sum(leader_cpu_s) FILTER (WHERE behind_bytes > :behind_bytes), 0) AS behind_cpu_s,
       coalesce(sum(publisher_s) FILTER (WHERE behind_bytes > :behind_bytes), 0) AS behind_publisher_s,
       max_by(behind_bytes, ended_at) AS last_behind_bytes
  FROM intervals GROUP BY slot ORDER BY slot
"""

BACKENDS: Final = """
SELECT slot, one.wait AS wait, sum(one.samples) AS samples
  FROM (SELECT slot, explode(backends) AS one FROM intervals)
 GROUP BY slot, one.wait ORDER BY slot, samples DESC, wait
"""


def _most(query: str, columns: str, order: str, most: int) -> str:
    """Return the query of the first rows of each slot in an order."""
    return f"""
SELECT {columns}
  FROM (SELECT *, row_number() OVER (PARTITION BY slot ORDER BY {order}) AS place FROM ({query}))
 WHERE place <= {most} ORDER BY {order}
"""


LOCKS: Final = _most(
    """
SELECT slot, one.pid AS pid, one.role AS role, one.relation AS relation, one.mode AS mode, sum(length_s) AS seconds,
       min(ended_at) AS first_at, max(ended_at) AS last_at
  FROM (SELECT slot, length_s, ended_at, explode(locks) AS one FROM intervals WHERE size(locks) > 0)
 GROUP BY ALL""",
    "slot, pid, role, relation, mode, seconds, first_at, last_at",
    "seconds DESC, slot, pid, relation, mode",
    100,
)

HOT_KEYS: Final = _most(
    """
SELECT slot, run, one.table AS table, one.key AS key, count(*) AS batches
  FROM (SELECT slot, run, explode(late_rows) AS one FROM batches WHERE size(late_rows) > 0)
 GROUP BY ALL""",
    "slot, run, table, key, batches",
    "batches DESC, slot, run, table, key",
    100,
)

BLOCKERS: Final = _most(
    """
SELECT waiter.slot, waiter.run, waiter.seq, waiter.end_lsn, element_at(waiter.xids, 1) AS xid,
       holder.seq AS holder_seq, holder.end_lsn AS holder_end_lsn, element_at(holder.xids, 1) AS holder_xid,
       waiter.waited_for.table AS table, waiter.waited_for.kind AS kind, waiter.waited_for.name AS name,
       waiter.committed_at AS at,
       waiter.depending_s + if(waiter.late_keys > 0,
                               greatest(0, (unix_micros(holder.committed_at) - unix_micros(waiter.started_at)) / 1e6
                                           - waiter.execute_s), 0) AS wait_s
  FROM batches AS waiter JOIN batches AS holder
    ON holder.slot = waiter.slot AND holder.run = waiter.run AND holder.seq = waiter.waited_for.seq
 WHERE waiter.waited_for IS NOT NULL""",
    "slot, run, seq, end_lsn, xid, holder_seq, holder_end_lsn, holder_xid, table, kind, name, at, wait_s",
    "wait_s DESC, slot, run, seq",
    20,
)


SUMMARY: Final = """
SELECT slot, min(committed_at) AS first_at, max(committed_at) AS last_at, count(*) AS batches,
       sum(n_transactions) AS transactions, sum(n_rows) AS row_changes, sum(size_bytes) AS size_bytes,
       count(DISTINCT worker) AS workers, count(DISTINCT run) AS runs,
       count_if(attempts > 1) AS repeated_batches, sum(n_conflicts) AS conflicts,
       coalesce(max(recorded.n), 0) AS transaction_records, coalesce(max(doubled.n), 0) AS doubled_records,
       max_by(end_lsn, end_lsn_number) AS highest_end_lsn
  FROM batches
  LEFT JOIN (SELECT slot AS doubled_slot, n FROM doubled) AS doubled ON doubled_slot = slot
  LEFT JOIN (SELECT slot AS recorded_slot, count(*) AS n FROM transactions GROUP BY slot) AS recorded
         ON recorded_slot = slot
 GROUP BY slot ORDER BY slot
"""

OVER_TIME: Final = """
SELECT slot, at, batches, transactions, row_changes, size_bytes, transactions / :interval_s AS transactions_per_s,
       row_changes / :interval_s AS rows_per_s, repeated_batches, element_at(oldest, 1) AS oldest_p50_s,
       element_at(oldest, 2) AS oldest_p99_s, oldest_max_s, delivery_p50_s, delivery_floor_s
  FROM (SELECT slot, at, count(*) AS batches, sum(n_transactions) AS transactions, sum(n_rows) AS row_changes,
               sum(size_bytes) AS size_bytes, count_if(attempts > 1) AS repeated_batches,
               percentile_approx(oldest_s, array(0.5, 0.99)) AS oldest, max(oldest_s) AS oldest_max_s,
               percentile_approx(delivery_s, 0.5) AS delivery_p50_s, min(delivery_s) AS delivery_floor_s
          FROM batches GROUP BY slot, at)
 ORDER BY slot, at
"""

TABLES: Final = """
SELECT slot, at, one.key AS table, count(*) AS batches, sum(coalesce(one.value.insert, 0)) AS inserts,
       sum(coalesce(one.value.update, 0)) AS updates, sum(coalesce(one.value.delete, 0)) AS deletes,
       sum(coalesce(one.value.truncate, 0)) AS truncates
  FROM (SELECT slot, at, explode(map_entries(rows)) AS one FROM batches)
 GROUP BY slot, at, one.key ORDER BY slot, at, table
"""

TARGET_NAMES: Final = """
SELECT DISTINCT slot, one.table AS table, one.target AS target
  FROM (SELECT slot, explode(target_names) AS one FROM batches WHERE size(target_names) > 0)
 ORDER BY slot, table, target
"""

WORKERS: Final = """
SELECT slot, at, worker, count(*) AS batches, sum(n_transactions) AS transactions, sum(n_rows) AS row_changes,
       sum(execute_s) AS execute_s, sum(wait_turn_s) AS wait_turn_s, sum(commit_s) AS commit_s
  FROM batches GROUP BY slot, at, worker ORDER BY slot, at, worker
"""

BATCH_SIZES: Final = """
SELECT slot, at_least, count(*) AS batches, sum(n_transactions) AS transactions, avg(size_bytes) AS mean_bytes
  FROM (SELECT slot, n_transactions, size_bytes,
               CAST(power(2, length(bin(greatest(n_transactions, 1))) - 1) AS bigint) AS at_least FROM batches)
 GROUP BY slot, at_least ORDER BY slot, at_least
"""

RETRIES: Final = """
SELECT slot, mode, retry_reason AS reason, count(*) AS batches, sum(attempts - 1) AS repeats
  FROM batches WHERE attempts > 1 GROUP BY slot, mode, retry_reason ORDER BY slot, batches DESC, mode, reason
"""

# A record lists the first conflicts and counts the others.
CONFLICTS: Final = """
SELECT slot, at, one.type AS type, one.table AS table, one.policy AS policy, one.outcome AS outcome,
       sum(one.conflicts) AS conflicts
  FROM (SELECT slot, at, explode(concat(transform(conflicts, c -> struct(c.type, c.table, c.policy, c.outcome,
                                                                         1L AS conflicts)),
                                        more_conflicts)) AS one
          FROM batches WHERE n_conflicts > 0)
 GROUP BY ALL ORDER BY slot, at, type, table, policy, outcome
"""

# Numbers of a run that no record has. A batch that a lost connection left uncommitted after later ones had committed is
# none of them: another run has committed it since. A copied record follows its own number, and makes no gap either.
GAPS: Final = """
SELECT slot, run, after_seq, seq AS before_seq, seq - after_seq - 1 AS missing, committed_at AS at
  FROM (SELECT *, lag(seq, 1, 0L) OVER numbers AS after_seq, lag(last_number, 1, 0L) OVER numbers AS after_number
          FROM numbered WINDOW numbers AS (PARTITION BY slot, run ORDER BY seq)) AS one
 WHERE seq > after_seq + 1 AND is_within AND (is_whole OR after_seq > 0)
   AND NOT EXISTS (SELECT 1 FROM numbered AS other
                    WHERE other.slot = one.slot AND other.run <> one.run AND other.committed_at >= one.committed_at
                      AND other.last_number > one.after_number AND other.last_number < one.first_number)
 ORDER BY slot, at, run, after_seq
"""

FILES: Final = "SELECT file, size_bytes, records, bad FROM files ORDER BY file"

BAD_LINES: Final = """
SELECT file, reason, count(*) AS lines, min(line) AS example
  FROM bad_lines GROUP BY file, reason ORDER BY file, reason
"""


_SECONDS: Final = "array(0.5, 0.9, 0.95, 0.99, 0.999)"


def seconds(expression: str) -> str:
    """Return a stage's expression as seconds: the difference of two times, or a column that is seconds already."""
    later, minus, earlier = expression.partition(" - ")
    return f"(unix_micros({later}) - unix_micros({earlier})) / 1e6" if minus else expression


def _stage(name: str, expression: str) -> str:
    value = seconds(expression)
    return (
        f"struct('{name}' AS stage, count(*) AS n, avg({value}) AS mean_s,"
        f" percentile_approx({value}, {_SECONDS}) AS p, max({value}) AS max_s)"
    )


# The texts are constants of this program.
_STAGES: Final = ", ".join(_stage(name, expression) for name, (expression, _) in STAGES.items())
_PERCENTILES: Final = ", ".join(
    f"element_at(p, {n}) AS {name}_s" for n, name in enumerate(("p50", "p90", "p95", "p99", "p999"), 1)
)
LATENCY: Final = f"""
SELECT slot, stage, n, mean_s, {_PERCENTILES}, max_s
  FROM (SELECT slot, inline(stages)
          FROM (SELECT slot, array({_STAGES}) AS stages FROM batches GROUP BY slot
                UNION ALL
                SELECT slot, array({_stage(*EACH_TRANSACTION[:2])}) FROM transactions GROUP BY slot))
"""

_PARTS: Final = ", ".join(
    f"struct('{part}' AS part, count_if({column} > 0) AS batches, sum({column}) AS seconds)"
    for part, column in PARTS.items()
)
WAITS: Final = f"""
SELECT slot, part, batches, seconds, coalesce(seconds / nullif(sum(seconds) OVER (PARTITION BY slot), 0), 0) AS share
  FROM (SELECT slot, inline(parts) FROM (SELECT slot, array({_PARTS}) AS parts FROM batches GROUP BY slot))
"""

DEPENDENCIES: Final = """
SELECT slot, waited_for.table AS table, waited_for.kind AS kind, waited_for.name AS name, count(*) AS batches,
       sum(wait_dependency_s) AS seconds, count_if(late_keys > 0) AS late_batches, sum(late_keys) AS late_keys
  FROM batches WHERE waited_for IS NOT NULL
 GROUP BY ALL ORDER BY slot, seconds DESC, batches DESC, table, kind, name
"""

# A batch is cut at the bounds of intervals, so that each interval is swept separately and on any machine. Where several
# things happen at one time their order does not matter: no time passes between them.
PARALLELISM: Final = """
SELECT slot, at, held, executing, sum(until_us - us) / 1e6 AS seconds
  FROM (SELECT slot, at, us, sum(held) OVER moments AS held, sum(executing) OVER moments AS executing,
               lead(us, 1, us) OVER (PARTITION BY slot, at ORDER BY us) AS until_us
          FROM (SELECT slot, timestamp_micros(n * :interval_us) AS at,
                       inline(array(struct(greatest(start_us, n * :interval_us) AS us, 1 AS held, 0 AS executing),
                                    struct(greatest(start_us, n * :interval_us) AS us, 0 AS held, 1 AS executing),
                                    struct(least(greatest(done_us, n * :interval_us), (n + 1) * :interval_us) AS us,
                                           0 AS held, -1 AS executing),
                                    struct(least(end_us, (n + 1) * :interval_us) AS us, -1 AS held, 0 AS executing)))
                  FROM (SELECT slot, start_us, least(done_us, end_us) AS done_us, end_us,
                               explode(sequence(start_us div :interval_us, end_us div :interval_us)) AS n
                          FROM (SELECT slot, unix_micros(started_at) AS start_us, unix_micros(committed_at) AS end_us,
                                       unix_micros(started_at) + CAST(round(execute_s * 1e6) AS bigint) AS done_us
                                  FROM batches WHERE committed_at >= started_at)))
        WINDOW moments AS (PARTITION BY slot, at ORDER BY us ROWS UNBOUNDED PRECEDING))
 WHERE held > 0 AND until_us > us
 GROUP BY slot, at, held, executing ORDER BY slot, at, held, executing
"""


#: The same number of each for every slot.
MOST: Final = 20
_LONGEST: Final = f"greatest({', '.join(PARTS.values())})"
_STAGE: Final = " ".join(f"WHEN {column} = stage_s THEN '{part}'" for part, column in PARTS.items())

#: Neighbours whose slowest is looked for first.
_NEAR: Final = 1024


def _slowest(view: str, total_s: str, columns: str) -> str:
    """Return the query of the slowest rows of each slot with these columns, and their place.

    All rows are summed up in groups of neighbours, and only the groups with the slowest are sorted: what is held does
    not grow with the log as sorting all rows would. Of rows that are as slow the first ones are taken by both.
    """
    return f"""
        SELECT *, row_number() OVER (PARTITION BY slot ORDER BY total_s DESC, run, seq) AS place
          FROM (SELECT slot, run, seq, {columns}, {total_s} AS total_s
                  FROM {view} JOIN (SELECT near_slot, near_run, near
                                      FROM (SELECT *, row_number() OVER (PARTITION BY near_slot
                                                     ORDER BY slowest_s DESC, near_run, near) AS near_place
                                              FROM (SELECT slot AS near_slot, run AS near_run, seq div {_NEAR} AS near,
                                                           max({total_s}) AS slowest_s
                                                      FROM {view} GROUP BY slot, run, seq div {_NEAR}))
                                     WHERE near_place <= {MOST})
                    ON slot = near_slot AND run = near_run AND seq div {_NEAR} = near)"""


_BATCH: Final = f"""worker, committed_at AS at, end_lsn, element_at(xids, 1) AS xid, n_transactions AS transactions,
    n_rows AS row_changes, array_join(array_sort(map_keys(rows)), ', ') AS tables, mode, {", ".join(PARTS.values())},
    {_LONGEST} AS stage_s"""
# From received to committed; what a transaction executes while it comes is before that.
SLOW_BATCHES: Final = f"""
SELECT slot, run, seq, worker, at, end_lsn, xid, transactions, row_changes, tables, mode, total_s,
       CASE {_STAGE} ELSE '' END AS stage, stage_s
  FROM ({_slowest("batches", "(unix_micros(committed_at) - unix_micros(received_at)) / 1e6", _BATCH)})
 WHERE place <= {MOST} ORDER BY slot, total_s DESC, run, seq
"""

_TRANSACTION: Final = """batch_seq, worker, committed_at AS at, commit_lsn, end_lsn, xid, n_changes AS row_changes,
    array_join(array_sort(map_keys(rows)), ', ') AS tables,
    (unix_micros(received_at) - unix_micros(commit_time)) / 1e6 AS delivery_s"""
SLOW_TRANSACTIONS: Final = f"""
SELECT slot, run, seq, batch_seq, worker, at, commit_lsn, end_lsn, xid, row_changes, tables, total_s, delivery_s
  FROM ({_slowest("transactions", "(unix_micros(committed_at) - unix_micros(commit_time)) / 1e6", _TRANSACTION)})
 WHERE place <= {MOST} ORDER BY slot, total_s DESC, run, seq
"""

# A run has its own workers' sessions: its beginning is a start of the daemon, or a connection again.
RUNS: Final = """
SELECT slot, run, min(started_at) AS first_at, max(committed_at) AS last_at, count(*) AS batches,
       sum(n_transactions) AS transactions, count(DISTINCT worker) AS workers
  FROM batches GROUP BY slot, run ORDER BY slot, first_at, run
"""

#: Batches in one picture of lanes, of one slot.
LANES_MOST: Final = 600
LANES: Final = f"""
SELECT slot, run, worker, seq, first_at, at, execute_s, wait_turn_s, commit_s, transactions
  FROM (SELECT slot, run, worker, seq, started_at AS first_at, committed_at AS at, execute_s, wait_turn_s, commit_s,
               n_transactions AS transactions,
               row_number() OVER (PARTITION BY slot ORDER BY committed_at DESC, seq DESC) AS place
          FROM batches WHERE committed_at >= started_at)
 WHERE place <= {LANES_MOST} ORDER BY slot, first_at, worker, seq
"""

#: How far back the chain before a batch is looked for, in batches.
CHAIN_REACH: Final = 2000
# Batches that may precede one that waited; `compute` walks from each to the one that it waited for last.
CHAIN: Final = f"""
SELECT run, seq, end_lsn, element_at(xids, 1) AS xid, n_transactions AS transactions, worker, execute_s, commit_s,
       waited_for.seq AS holder_seq, waited_for.table AS table, waited_for.kind AS kind, waited_for.name AS name,
       committed_at AS at
  FROM batches WHERE slot = :slot AND run = :run AND seq <= :seq AND seq > :seq - {CHAIN_REACH}
   AND (waited_for IS NOT NULL OR seq IN (SELECT waited_for.seq FROM batches
                                           WHERE slot = :slot AND run = :run AND waited_for IS NOT NULL))
 ORDER BY seq DESC
"""

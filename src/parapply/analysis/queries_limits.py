"""How the figures of what limits are computed. Definitions: `figures`; what they mean together: `verdict`."""

from __future__ import annotations

from typing import Final

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
# time their order does not matter: no time passes between them.
MOMENTS: Final = f"""
SELECT slot, state, sum(seconds) AS seconds
  FROM (SELECT slot, (until_us - us) / 1e6 AS seconds,
               CASE WHEN held + queued <= 0 THEN 'nothing'
                    WHEN held < workers AND blocked > 0 THEN 'dependency'
                    WHEN held < workers THEN 'worker free'
                    WHEN 2 * executing >= held THEN 'executing'
                    WHEN late > 0 THEN 'late rows'
                    ELSE 'commit' END AS state
          FROM (SELECT slot, run, workers, us, lead(us, 1, us) OVER (PARTITION BY slot, run ORDER BY us) AS until_us,
                       sum(queued) OVER moments AS queued, sum(blocked) OVER moments AS blocked,
                       sum(held) OVER moments AS held, sum(executing) OVER moments AS executing,
                       sum(late) OVER moments AS late
                  FROM (SELECT slot, run, us, sum(queued) AS queued, sum(blocked) AS blocked, sum(held) AS held,
                               sum(executing) AS executing, sum(late) AS late, max(workers) AS workers
                          FROM (SELECT slot, run, workers,
                                       inline(array(
                                         {_EVENTS}))
                                  FROM timed JOIN (SELECT slot AS s, max(n) AS workers
                                                     FROM (SELECT slot, workers AS n FROM intervals
                                                           UNION ALL SELECT slot, worker FROM batches)
                                                    GROUP BY slot) ON s = slot)
                         GROUP BY slot, run, us)
                WINDOW moments AS (PARTITION BY slot, run ORDER BY us ROWS UNBOUNDED PRECEDING)))
 WHERE seconds > 0
 GROUP BY slot, state ORDER BY slot, seconds DESC, state
"""

# Work of the leader and the reader while workers were free and more was to be read.
READING: Final = """
SELECT slot, count(*) AS intervals, max(workers) AS workers, sum(length_s) AS seconds,
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

LOCKS: Final = """
SELECT slot, one.pid AS pid, one.role AS role, one.relation AS relation, one.mode AS mode, sum(length_s) AS seconds,
       min(ended_at) AS first_at, max(ended_at) AS last_at
  FROM (SELECT slot, length_s, ended_at, explode(locks) AS one FROM intervals WHERE size(locks) > 0)
 GROUP BY ALL ORDER BY seconds DESC, slot, pid, relation, mode LIMIT 100
"""

HOT_KEYS: Final = """
SELECT slot, run, one.table AS table, one.key AS key, count(*) AS batches
  FROM (SELECT slot, run, explode(late_rows) AS one FROM batches WHERE size(late_rows) > 0)
 GROUP BY ALL ORDER BY batches DESC, slot, run, table, key LIMIT 100
"""

BLOCKERS: Final = """
SELECT waiter.slot, waiter.run, waiter.seq, waiter.end_lsn, element_at(waiter.xids, 1) AS xid,
       holder.seq AS holder_seq, holder.end_lsn AS holder_end_lsn, element_at(holder.xids, 1) AS holder_xid,
       waiter.waited_for.table AS table, waiter.waited_for.kind AS kind, waiter.waited_for.name AS name,
       waiter.committed_at AS at,
       waiter.depending_s + if(waiter.late_keys > 0,
                               greatest(0, (unix_micros(holder.committed_at) - unix_micros(waiter.started_at)) / 1e6
                                           - waiter.execute_s), 0) AS wait_s
  FROM batches AS waiter JOIN batches AS holder
    ON holder.slot = waiter.slot AND holder.run = waiter.run AND holder.seq = waiter.waited_for.seq
 WHERE waiter.waited_for IS NOT NULL
 ORDER BY wait_s DESC, slot, run, seq LIMIT 20
"""

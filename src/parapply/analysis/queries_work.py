"""How the figures of work are computed: what was done, by table, worker and time. Definitions: `figures`.

Each is one query over the views `batches` and `transactions` that `views` makes. No value comes from the log's text:
parameters are bound.
"""

from __future__ import annotations

from typing import Final

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

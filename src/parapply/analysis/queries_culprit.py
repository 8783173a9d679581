"""How the figures are computed that name a batch or a transaction: the slowest, their way, who ran when."""

from __future__ import annotations

from typing import Final

from parapply.analysis.figures import PARTS

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

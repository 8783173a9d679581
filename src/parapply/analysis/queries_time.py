"""How the figures of time are computed: delays, waits, dependencies, parallelism. Definitions: `figures`."""

from __future__ import annotations

from typing import Final

from parapply.analysis.figures import EACH_TRANSACTION, PARTS, STAGES

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

"""The report over the apply log, on DuckDB or Spark: the only place with either. The daemon imports nothing of it.

In go closed files of the apply log; out come Parquet tables and one HTML page.

`command` (options) → `job` (order of the work) or `follow` (while the daemon writes) → `store` (closed files to
Parquet, each once) with `schema` (from the log's own) → `views` → `compute` with `figures` (what each figure means),
`queries` (how it is computed) and `more_workers` → `page` with `sections`, `plots` and `words`.

`more_workers` answers `--what-if` (`changes`): `prediction` learns what things cost, with `contention`, and states an
interval. `stream` makes the transactions of a log again, and `replay` drives the daemon's engine with them.

An `engine` computes: `duck` with `local` (files of this machine), or `spark` with `session` (where Spark and Java come
from). Only these know which one it is. `progress` writes to the terminal.
"""

"""The report over the apply log, on Spark: the only place with PySpark. The daemon imports nothing of it.

In go closed files of the apply log, on any file system that Hadoop knows; out come Parquet tables and one HTML page.

`command` (options) → `job` (order of the work) or `follow` (the same as a stream) → `store` (closed files to Parquet,
each once) with `lines` (one line to one row) and `schema` (from the log's own) → `views` → `compute` with `figures`
(what each figure means), `queries_work`, `queries_time` (how it is computed) and `whatif` → `page` with `sections`,
`plots` and `words`. Besides these there are `java` and `session` (where Spark comes from), `storage` (files by Hadoop's
names), `progress` (what the terminal shows) and `bundle` (the job for spark-submit).
"""

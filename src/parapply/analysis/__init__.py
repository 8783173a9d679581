"""The report over the apply log, on Spark: the only place with PySpark. The daemon imports nothing of it.

In go closed files of the apply log, on any file system that Hadoop knows; out come Parquet tables and one HTML page.

`command` (options) → `job` (order of the work) → `store` (closed files to Parquet, each once) with `lines` (one line to
one row) and `schema` (from the log's own); `figures` (what each figure means) with `queries_*` (how it is computed) and
`whatif`; `page` with `plots` and `words`; `follow` (the same as a stream). Beside them `java` and `session` (where Spark
comes from), `storage` (files by Hadoop's names) and `bundle` (the job for spark-submit).
"""

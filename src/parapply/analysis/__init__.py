"""The report over the apply log: the only package that may import PySpark. The daemon never imports it."""

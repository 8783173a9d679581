"""The report over the apply log."""

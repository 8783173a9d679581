"""The daemon's metrics: the table of them all, the figures that are counted, and the output for Prometheus."""

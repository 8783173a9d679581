"""What the daemon measures of itself: the table of all metrics, what is counted, and the output for Prometheus."""

"""What the daemon measures of itself: the table of all metrics, what is counted, and how it is told to Prometheus."""

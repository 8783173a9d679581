"""What is in flight, which batch may start, and which one commits."""

"""Batches in flight: which one may start, and which one commits."""

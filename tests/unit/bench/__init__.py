"""Figures and displays of the benchmark, without a server."""

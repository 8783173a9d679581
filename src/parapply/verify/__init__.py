"""Comparison of both sides at one LSN, while both are in use. The daemon does not need it."""

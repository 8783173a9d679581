"""Displays of a running daemon. Decides nothing."""

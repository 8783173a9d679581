"""Tests without a server."""

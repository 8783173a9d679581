"""Embedded PostgreSQL servers and the demonstration that runs on them; the daemon needs nothing from here."""

from __future__ import annotations

from parapply.demo.binaries import PgBinaries, available, find_binaries
from parapply.demo.errors import DemoError
from parapply.demo.server import DEFAULT_SETTINGS, PgServer

__all__ = ["DEFAULT_SETTINGS", "DemoError", "PgBinaries", "PgServer", "available", "find_binaries"]

"""parapply: parallel apply of PostgreSQL logical replication, from the subscriber's side."""

from __future__ import annotations

__version__ = "0.1.0"

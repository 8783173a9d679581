"""The benchmark: one backlog, drained by each system in turn; the daemon needs nothing from here."""

from __future__ import annotations

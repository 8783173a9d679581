"""The benchmark: one backlog, drained by each system in turn; parapply itself needs nothing from here."""

from __future__ import annotations

"""The steps of a migration. Imports nothing that `--help` need not load."""

from __future__ import annotations

from enum import StrEnum


class MigrationStep(StrEnum):
    """The steps, in their order; no word ever changes."""

    CHECK = "check"
    ROLES = "roles"
    SCHEMA = "schema"
    COPY = "copy"
    INDEXES = "indexes"
    CATCH_UP = "catch-up"
    CONSTRAINTS = "constraints"
    LARGE_OBJECTS = "large-objects"
    UNLOGGED = "unlogged"
    SEQUENCES = "sequences"
    ANALYZE = "analyze"
    VIEWS = "views"
    FOLLOW = "follow"

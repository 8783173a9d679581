"""Options of `parapply migrate`. Pure data, and the only rule that says which tables are meant."""

from __future__ import annotations

import re
from fnmatch import translate
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from parapply.errors import ConfigError
from parapply.vocabulary import MigrationStep

if TYPE_CHECKING:
    from collections.abc import Sequence


#: Treatment of rows that the stream does not bring.
Outside = Literal["refuse", "copy", "skip"]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Choices that a migration keeps to from its first step to its last, however often it is interrupted."""

    include: tuple[str, ...] = ()  # patterns schema.table; none: all
    exclude: tuple[str, ...] = ()
    has_owners: bool = True
    has_privileges: bool = True
    has_tablespaces: bool = True
    large_objects: Outside = "refuse"
    unlogged: Outside = "refuse"

    def is_meant(self, schema: str, table: str) -> bool:
        """Return whether a table, by the names of its topmost partitioned table, is to be migrated."""
        name = f"{schema}.{table}"
        is_included = not self.include or any(matches(one, name) for one in self.include)
        return is_included and not any(matches(one, name) for one in self.exclude)

    def words(self) -> str:
        """Return the options that make it, as they are given."""
        words = [f"--include {one}" for one in self.include] + [f"--exclude {one}" for one in self.exclude]
        words += [
            *([] if self.has_owners else ["--no-owner"]),
            *([] if self.has_privileges else ["--no-privileges"]),
            *([] if self.has_tablespaces else ["--no-tablespaces"]),
            *([] if self.large_objects == "refuse" else [f"--large-objects {self.large_objects}"]),
            *([] if self.unlogged == "refuse" else [f"--unlogged {self.unlogged}"]),
        ]
        return " ".join(words)


class MigrateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to migrate."""

    choice: Choice = Choice()
    has_roles: bool = False  # bring them over
    jobs: int = 4
    max_bytes_per_s: int = 0  # of the copy; 0: no limit
    truncates: bool = False
    pg_bin: Path | None = None
    despite: tuple[str, ...] = ()
    only: MigrationStep | None = None
    first: MigrationStep | None = None
    last: MigrationStep | None = None
    is_waiting: bool = True  # for the cut-over
    max_lag_s: float = 1.0
    as_json: bool = False
    #: Arguments of `parapply run` and its environment, which has the secrets.
    run_arguments: tuple[str, ...] = ()
    run_environ: tuple[tuple[str, str], ...] = ()
    daemon_log: Path | None = None


def matches(pattern: str, name: str) -> bool:
    """Return whether schema.table matches a pattern with `*` and `?`."""
    return re.fullmatch(translate(pattern.replace("[", "[[]")), name) is not None


def check_patterns(patterns: Sequence[str]) -> None:
    """Refuse a pattern that can match no table, because it has no schema."""
    if wrong := [pattern for pattern in patterns if "." not in pattern]:
        raise ConfigError(
            f"{', '.join(wrong)}: a pattern is schema.table, as in public.audit_* or archive.*",
            hint="* stands for any characters, ? for one",
        )

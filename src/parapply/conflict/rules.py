"""The policy for each conflict on each table, and the needs of all policies on the target. Pure.

In: the section [conflict] of the configuration. Out: policies by type and table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.conflict.kinds import ORIGIN_DIFFERS, Policy
from parapply.vocabulary import ConflictType

if TYPE_CHECKING:
    from parapply.config import ConflictConfig

_TYPES = tuple(one for one in ConflictType if one is not ConflictType.SKIPPED)
_UPDATE_ORIGIN, _DELETE_ORIGIN = ConflictType.UPDATE_ORIGIN_DIFFERS, ConflictType.DELETE_ORIGIN_DIFFERS


class Rules:
    """Never written after it is made."""

    def __init__(self, config: ConflictConfig) -> None:
        """Read the section."""
        self._common: dict[ConflictType, Policy] = {kind: Policy(getattr(config, kind.value)) for kind in _TYPES}
        self._tables: dict[str, dict[ConflictType, Policy]] = {
            name: {
                kind: Policy(getattr(table, kind.value)) for kind in _TYPES if getattr(table, kind.value) is not None
            }
            for name, table in config.tables.items()
        }
        every = {*self._common.items(), *(pair for table in self._tables.values() for pair in table.items())}
        #: True if any policy replaces the target's row by the publisher's.
        self.overwrites = any(policy in {Policy.APPLY_REMOTE, Policy.LAST_UPDATE_WINS} for _, policy in every)
        #: True if commit times of rows are compared, so that each target transaction must have its source's time.
        self.needs_commit_times = any(policy is Policy.LAST_UPDATE_WINS for _, policy in every)

    def policy(self, kind: ConflictType, table: str) -> Policy:
        """Return the policy for a type on a table, named schema.table."""
        return self._tables.get(table, {}).get(kind, self._common[kind])

    def checks_origin(self, table: str) -> tuple[bool, bool]:
        """Return whether rows of a table must be read before they are updated, and before they are deleted."""
        is_on = [self.policy(kind, table) is not Policy.OFF for kind in (_UPDATE_ORIGIN, _DELETE_ORIGIN)]
        return is_on[0], is_on[1]

    def needing(self) -> str:
        """Name the first setting that needs track_commit_timestamp; empty if none does."""
        places = [("conflict", self._common)]
        places += [(f'conflict.tables."{name}"', policies) for name, policies in self._tables.items()]
        for place, policies in places:
            for kind, policy in policies.items():
                if policy is Policy.LAST_UPDATE_WINS or (kind in ORIGIN_DIFFERS and policy is not Policy.OFF):
                    return f'{place}.{kind.value} = "{policy.value}"'
        return ""

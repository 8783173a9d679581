"""The policy for each conflict on each table, and the action of each policy: one small function each. Pure.

The truth table is in docs/CONFLICTS.md. In: the section [conflict] of the configuration, and the facts of both sides of
a conflict. Out: an `Action`. Must never read anything, because `Facing` has all that it needs.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

import msgspec

from parapply.conflict.kinds import ORIGIN_DIFFERS, Policy
from parapply.vocabulary import ConflictOutcome, ConflictType

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.config import ConflictConfig


_TYPES = tuple(one for one in ConflictType if one is not ConflictType.SKIPPED)
_UPDATE_ORIGIN, _DELETE_ORIGIN = ConflictType.UPDATE_ORIGIN_DIFFERS, ConflictType.DELETE_ORIGIN_DIFFERS


class Rules:
    """Never written after it is made."""

    def __init__(self, config: ConflictConfig) -> None:
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


class Action(Enum):
    """The treatment of the change."""

    STOP = "stop"  # roll the transaction back
    DROP = "drop"  # leave the change out, continue with the next
    APPLY = "apply"  # make the target hold what the publisher holds


class Facing(msgspec.Struct, frozen=True, kw_only=True):
    """The two sides of a conflict."""

    type: ConflictType
    is_complete: bool = True  # the remote row has every column; False: unchanged TOAST was not sent
    remote_time_us: int = 0  # when the publisher committed the change
    local_time_us: int | None = None  # when the newest local row in the way was written; None: not known, or no row
    is_remote_greater: bool = False  # of equal times: the remote row's text sorts after the local one's


def error(_: Facing) -> Action:
    """Stop: an operator decides."""
    return Action.STOP


def skip(_: Facing) -> Action:
    """Leave the change out."""
    return Action.DROP


def keep_local(_: Facing) -> Action:
    """Leave the target's row as it is."""
    return Action.DROP


def apply_remote(facing: Facing) -> Action:
    """Make the row equal the publisher's; a row that is missing cannot be made without all its columns (T-41)."""
    if facing.type is ConflictType.UPDATE_MISSING and not facing.is_complete:
        return Action.STOP
    return Action.APPLY


def last_update_wins(facing: Facing) -> Action:
    """Keep the row that was committed last. A local row whose time is no longer known is old, and loses.

    Of equal times the row whose text is greater wins: two nodes that see each other's row so decide the same, if they
    see it whole.
    """
    if facing.local_time_us is None or facing.remote_time_us > facing.local_time_us:
        return Action.APPLY
    if facing.remote_time_us < facing.local_time_us:
        return Action.DROP
    if not facing.is_complete:
        return Action.STOP
    return Action.APPLY if facing.is_remote_greater else Action.DROP


_POLICIES: Final[dict[Policy, Callable[[Facing], Action]]] = {
    Policy.ERROR: error,
    Policy.SKIP: skip,
    Policy.KEEP_LOCAL: keep_local,
    Policy.APPLY_REMOTE: apply_remote,
    Policy.LAST_UPDATE_WINS: last_update_wins,
}


def decide(policy: Policy, facing: Facing) -> Action:
    """Return the action of a policy on a conflict."""
    return _POLICIES[policy](facing)


def outcome(policy: Policy, action: Action) -> ConflictOutcome:
    """Return the outcome of a policy's action, as the history names it."""
    if action is Action.STOP:
        return ConflictOutcome.STOPPED
    if action is Action.APPLY:
        return ConflictOutcome.APPLIED_REMOTE
    return ConflictOutcome.SKIPPED if policy is Policy.SKIP else ConflictOutcome.KEPT_LOCAL

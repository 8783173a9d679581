"""The steps of a batch, done one after the other, and the form that keeps source order change by change. Pure.

Most batches have one step, the changes of each table. TRUNCATE of several relations is a step of its own (trap T-26),
which comes once where no other table depends on its place. A transaction that touches a serial table is one step of raw
frames in source order.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import msgspec

from parapply.errors import ProtocolError
from parapply.model import FRAME_HEADER_BYTES, Relation
from parapply.plan.table import Lane, TablePlan
from parapply.plan.table_changes import TableChanges
from parapply.wire.decode import decode
from parapply.wire.messages import Truncate
from parapply.wire.rows import KIND_AT, MARK_AT, RELATION_AT, TRUNCATE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.model import Transaction
    from parapply.plan.table import Plans


class TablesStep(msgspec.Struct):
    """Changes of tables that do not care about each other, by `TablePlan.rows_oid`."""

    tables: dict[int, TableChanges]


#: Where a Truncate frame has its options, and one that no publisher sends: some of its tables are left out.
_FLAGS_AT: Final = KIND_AT + 5
_PARTIAL: Final = 0x80

_relation_at = struct.Struct(">I").unpack_from


class TruncateStep(msgspec.Struct, frozen=True):
    """One TRUNCATE of all its relations at once."""

    plans: tuple[TablePlan, ...]
    restart_identity: bool
    #: The publisher has emptied more tables with it, which are left out here.
    is_partial: bool = False

    @property
    def stands_alone(self) -> bool:
        """Return whether only these tables' own changes have to keep their place before it or after it.

        Not where a partition tree or a foreign key ties rows of other tables to them. A key that refers to them from
        elsewhere makes PostgreSQL refuse the TRUNCATE, wherever it stands. The DELETE that some become may take rows of
        other tables along.
        """
        return not self.is_partial and all(
            not (plan.constants or plan.foreign_keys or plan.facts.is_partitioned)
            and plan.facts.root_oid == plan.facts.oid
            for plan in self.plans
        )


class OrderedStep(msgspec.Struct, frozen=True):
    """Change frames in source order, each with the plan it is decoded with; applied one by one."""

    changes: list[tuple[TablePlan, bytes] | TruncateStep]


Step = TablesStep | TruncateStep | OrderedStep


def ordered_changes(transaction: Transaction, plans: Plans) -> list[tuple[TablePlan, bytes] | TruncateStep]:
    """Return a transaction's changes in source order, each with its plan; announcements on the way are put in force."""
    changes: list[tuple[TablePlan, bytes] | TruncateStep] = []
    for change in transaction.changes:
        if isinstance(change, Relation):
            plans.announce(change)
        elif change[KIND_AT] == TRUNCATE:
            changes.append(truncate_step(change, plans))
        else:
            changes.append((plans.of(change), change))
    return changes


def truncate_step(frame: bytes, plans: Plans) -> TruncateStep:
    """Read a Truncate frame.

    Raises:
        ProtocolError: a relation was never announced, or the bytes are malformed.
        TargetRefused: a relation cannot be applied.
    """
    message = read_truncate(frame)
    if not message.relation_oids:
        raise ProtocolError("T", 1, "no relation is truncated")
    tables = [plans.of_oid(oid, "T", 5) for oid in message.relation_oids]
    return TruncateStep(tuple(tables), message.restart_identity, bool(frame[_FLAGS_AT] & _PARTIAL))


def read_truncate(frame: bytes) -> Truncate:
    """Read a Truncate frame, the publisher's or one of `without_tables`.

    Raises:
        ProtocolError: the bytes are malformed.
    """
    if len(frame) > _FLAGS_AT and frame[_FLAGS_AT] & _PARTIAL:
        frame = frame[:_FLAGS_AT] + bytes([frame[_FLAGS_AT] & ~_PARTIAL]) + frame[_FLAGS_AT + 1 :]
    message = decode(frame[FRAME_HEADER_BYTES:])
    assert isinstance(message, Truncate)
    return message


def without_tables(frame: bytes, left: Sequence[int]) -> bytes:
    """Return a Truncate frame with only some of its tables, at least one, by their OIDs.

    Layout: Int32 number of relations, Int8 flags, Int32 each. (PostgreSQL manual, "Logical Replication Message
    Formats".)
    """
    flags = frame[_FLAGS_AT] | _PARTIAL
    return frame[: KIND_AT + 1] + struct.pack(f">IB{len(left)}I", len(left), flags, *left)


def check_plans(transaction: Transaction, plans: Plans) -> None:
    """Make sure that every change can be applied, before anything of the transaction is in a batch.

    Raises:
        ProtocolError, TargetRefused: as `Plans.of`.
    """
    if plans.refused and not are_planned(transaction, plans):
        ordered_changes(transaction, plans.view())


def are_planned(transaction: Transaction, plans: Plans) -> bool:
    """Return whether a transaction only changes rows of tables with plans, so that none of them is refused."""
    for change in transaction.changes:
        if isinstance(change, Relation) or len(change) < MARK_AT or change[KIND_AT] == TRUNCATE:
            return False
        if _relation_at(change, RELATION_AT)[0] not in plans.current:
            return False
    return True


def is_serial(transaction: Transaction, plans: Plans) -> bool:
    """Return whether a transaction touches a table where the target runs code: then all of it keeps source order.

    The leader puts such transactions into batches in which each is a target transaction of its own.

    Raises:
        ProtocolError: a change names a relation that was never announced, or is malformed.
    """
    if not plans.may_be_serial:
        return False
    # An announcement changes a view of the plans; the plans themselves move only when the changes are read.
    ahead = plans
    for change in transaction.changes:
        if isinstance(change, Relation):
            ahead = plans.view() if ahead is plans else ahead
            ahead.announce(change)
        else:
            touched = truncate_step(change, ahead).plans if change[KIND_AT] == TRUNCATE else (ahead.of(change),)
            if any(plan.lane is Lane.SERIAL for plan in touched):
                return True
    return False


def may_join(steps: Sequence[Step]) -> bool:
    """Return whether the transactions of a serial batch may be one target transaction, in source order."""
    touched = [
        plan
        for step in steps
        if isinstance(step, OrderedStep)
        for change in step.changes
        for plan in (change.plans if isinstance(change, TruncateStep) else change[:1])
    ]
    return all(plan.is_joined for plan in touched if plan.lane is Lane.SERIAL)

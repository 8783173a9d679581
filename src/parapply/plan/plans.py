"""The plans in force for relations at a point of the stream. Pure."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from parapply.errors import ParapplyError, ProtocolError
from parapply.wire.rows import KIND_AT, RELATION_AT, malformed

if TYPE_CHECKING:
    from parapply.model import Relation
    from parapply.plan.table import TablePlan

_OID_BYTES = 4
_relation_at = struct.Struct(">I").unpack_from


class Plans:
    """The table plans in force at a point of the stream.

    `known` maps every announced relation to its plan; the leader writes it before the announcement is read here.
    `current` maps a publisher's OID to the plan of the relation last announced under it (trap T-71).
    `gone` holds, by publisher's OID, why what was announced last cannot be applied any more: commands of the publisher
    have changed or dropped its table. Such a table is announced again before its next change.
    `refused` holds announced relations that cannot be applied, and why. That is no error before a change of them comes:
    pgoutput announces a partition along with the root that it is published as, and the target may have no such
    partition.
    """

    __slots__ = ("current", "gone", "known", "may_be_serial", "refused")

    def __init__(self) -> None:
        """Start with nothing announced."""
        self.known: dict[Relation, TablePlan] = {}
        self.current: dict[int, TablePlan] = {}
        self.refused: dict[Relation, ParapplyError] = {}
        self.gone: dict[int, ParapplyError] = {}
        #: False only if the writer of `known` is sure that no table in it is serial; saves a check of each transaction.
        self.may_be_serial = True

    def announce(self, relation: Relation) -> None:
        """Put a relation in force; a refused one leaves its OID without a plan."""
        if relation in self.refused:
            self.current.pop(relation.oid, None)
        else:
            self.current[relation.oid] = self.known[relation]

    def view(self) -> Plans:
        """Return plans that can move ahead without moving these."""
        ahead = Plans()
        ahead.known, ahead.refused, ahead.may_be_serial = self.known, self.refused, self.may_be_serial
        ahead.gone = self.gone
        ahead.current = dict(self.current)
        return ahead

    def of(self, frame: bytes) -> TablePlan:
        """Return the plan of a change frame.

        Raises:
            ProtocolError: the change names a relation that was never announced, or is cut before the name.
            TargetRefused: the relation cannot be applied.
        """
        if len(frame) < RELATION_AT + _OID_BYTES:
            raise malformed(frame, 0)
        return self.of_oid(_relation_at(frame, RELATION_AT)[0], chr(frame[KIND_AT]), 1)

    def of_oid(self, oid: int, kind: str, offset: int) -> TablePlan:
        """Return the plan of the publisher's OID at a place of a message.

        Raises:
            ProtocolError, TargetRefused: as `of`.
        """
        plan = self.current.get(oid)
        if plan is None:
            # The last one first: an OID may have been announced several times.
            errors = [error for relation, error in self.refused.items() if relation.oid == oid]
            if not errors and oid in self.gone:
                raise self.gone[oid]
            raise errors[-1] if errors else ProtocolError(kind, offset, f"relation {oid} was never announced")
        return plan

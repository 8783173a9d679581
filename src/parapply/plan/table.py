"""Facts of one target table for the planner and the statements, and the plans in force at a point of the stream. Pure.

`target/` fills the facts from the catalogue.
"""

from __future__ import annotations

import struct
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import force_setattr

from parapply.errors import ParapplyError, ProtocolError
from parapply.model import Relation
from parapply.quoting import identifier, qualified
from parapply.wire.rows import KIND_AT, RELATION_AT, malformed

if TYPE_CHECKING:
    from collections.abc import Iterable


class Equality(Enum):
    """How the target's index compares values of a key column, seen from their text on the wire (trap T-21)."""

    BYTES = "bytes"  # equal exactly when the text is: integers, uuid, text with a deterministic collation ...
    BPCHAR = "bpchar"  # trailing blanks do not count
    NUMERIC = "numeric"  # 1.0 = 1.00
    FLOAT = "float"  # -0 = 0
    INTERVAL = "interval"  # 1 mon = 30 days = 720:00:00
    JSONB = "jsonb"  # numbers in it as in NUMERIC
    NUMBERS = "numbers"  # arrays, ranges and multiranges of numeric, and arrays of those
    FLOAT_ARRAY = "float[]"
    BPCHAR_ARRAY = "bpchar[]"
    INTERVAL_ARRAY = "interval[]"
    JSONB_ARRAY = "jsonb[]"
    UNKNOWN = "unknown"  # widen to the table


class Lane(Enum):
    """How a table's changes are applied, best first."""

    SET = "set-based"  # net changes per key, few statements
    ROW = "row by row"  # each change in order; other tables are not concerned
    SERIAL = "serial"  # the whole transaction alone, row by row, in source order, with everything earlier committed


class ColumnFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One column of a target table."""

    name: str
    type_sql: str  # quoted schema.type of the base type: a cast to it applies no length and no domain (trap T-44)
    type_oid: int
    base_type_oid: int  # the domain's base type, or type_oid
    is_generated: bool
    is_identity_always: bool
    has_equality: bool  # the type has a default equality operator; json and xml have none
    equality: Equality
    type_modifier: int = -1  # of the base type; -1: no length, precision or scale that input could round to
    is_enum: bool = False
    equality_operator: str = "OPERATOR(pg_catalog.=)"  # of the key index, else the default one
    collation_sql: str = ""  # COLLATE clause of a key column whose index has its own collation
    default_code: tuple[str, ...] = ()  # code its default runs: matters only if the publisher does not send the column
    array_type_sql: str = ""  # quoted schema.type of arrays of the column's own type, by which that is recognised
    is_required: bool = False  # NOT NULL without a default: every row must bring a value
    has_text_cast: bool = False  # text casts to it by other rules than its input function's: no set can be exact


class UniqueFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A unique or exclusion index of a target table that is not the key its rows are found by."""

    name: str  # of the index; with " on schema.leaf" where a partition has it for itself
    columns: tuple[str, ...]  # () if an expression is part of it
    equalities: tuple[Equality, ...]  # how the index compares each column; UNKNOWN for another operator class
    is_nulls_distinct: bool  # False for NULLS NOT DISTINCT
    is_partial: bool
    is_exclusion: bool  # compares by other operators than equality, too (EXCLUDE, WITHOUT OVERLAPS)
    is_immediate: bool = True  # False for DEFERRABLE: checked when a statement ends, or at COMMIT
    named: tuple[str, ...] = ()  # its columns, without the expressions beside them


class Constant(msgspec.Struct, frozen=True, kw_only=True):
    """A column with one value in all rows that a published relation has in its target table."""

    column: ColumnFacts
    text: str  # as the type prints it

    @property
    def pair(self) -> tuple[str, str]:
        """Return name and text."""
        return self.column.name, self.text


class Input(msgspec.Struct, frozen=True, kw_only=True):
    """A published column that an expression reads."""

    name: str
    type_sql: str  # quoted; of the publisher, built in


class Replacement(msgspec.Struct, frozen=True, kw_only=True):
    """A column that gets the value of an SQL expression of the publisher's row."""

    name: str
    sql: str  # as the target prints it: one expression, of the names of its inputs
    is_system: bool  # made of the server's own functions and operators, which are also on the publisher
    inputs: tuple[Input, ...]
    type_sql: str  # of the target's column, with length, precision and scale
    base_sql: str  # without

    def of(self, values: Iterable[str]) -> str:
        """Return the expression as SQL, for the SQL of its inputs' values."""
        pairs = zip(values, self.inputs, strict=True)
        columns = ", ".join([f"{value}::{one.type_sql} AS {identifier(one.name)}" for value, one in pairs])
        return f"(SELECT {self.sql} FROM (SELECT {columns}) AS r)"  # noqa: S608  names are quoted


class ForeignKeyFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A foreign key of a target table, the child."""

    name: str
    columns: tuple[str, ...]  # of the child
    parent_oid: int  # topmost table of the partition tree of the referenced table
    parent: str  # schema.table of that one, for people
    parent_columns: tuple[str, ...]  # referenced by `columns`, in their order
    parent_equalities: tuple[Equality, ...]  # how the referenced index compares each; UNKNOWN if the types print apart
    is_enforced: bool  # one of its triggers fires under the session's role
    is_cascading: bool  # a delete of the parent changes the child by itself, if enforced
    constants: tuple[tuple[str, str], ...] = ()  # columns of the parent, not in `parent_columns`, with their values


class UniqueKey(msgspec.Struct, frozen=True, kw_only=True):
    """A unique index whose values can be read from the rows on the wire, so that equal ones are seen (trap T-19)."""

    name: str
    positions: tuple[int, ...]  # wire positions
    equalities: tuple[Equality, ...]  # never UNKNOWN
    is_nulls_distinct: bool
    is_old_sent: bool  # the old row of every update and delete holds the value that is freed


#: Columns of rows whose old and new values one statement can have.
_MOST_WHOLE = 800


def table_name(facts: TableFacts) -> str:
    """Return the table's quoted name with its schema, without ONLY."""
    return _qualified(facts.schema, facts.name)


# Each batch asks for the names of its tables.
_qualified = lru_cache(maxsize=16_384)(qualified)


class ForeignKey(msgspec.Struct, frozen=True, kw_only=True):
    """A foreign key whose edges matter: it is enforced, or readers could see a child without its parent."""

    name: str
    positions: tuple[int, ...]  # wire positions in the child
    parent_oid: int
    parent_columns: tuple[str, ...]
    equalities: tuple[Equality, ...]  # good for both sides; () where values of the two cannot be compared by their text
    is_old_sent: bool  # the old row of every update and delete of the child holds the value
    is_enforced: bool
    is_cascading: bool
    constants: tuple[tuple[str, str], ...] = ()  # as in the facts

    def leads_to(self, plan: TablePlan) -> bool:
        """Return whether rows of a plan of the parent table may be referred to."""
        return not (self.constants and plan.constants and differ(self.constants, [one.pair for one in plan.constants]))


def differ(some: Iterable[tuple[str, str]], others: Iterable[tuple[str, str]]) -> bool:
    """Return whether no row has all of some values of columns and all of others."""
    wanted = dict(some)
    return any(wanted.get(name, text) != text for name, text in others)


class ForeignCode(msgspec.Struct, frozen=True, kw_only=True):
    """Code that would run as the role that applies, of owners who may not become that role."""

    role: str  # that applies
    owners: tuple[str, ...]  # of the table and its partitions
    code: tuple[tuple[str, str | None], ...]  # for people, and the column where it is one's default


class RowTrigger(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger that reads and writes nothing but the row that is inserted or updated; see `catalogue/row_code.py`."""

    name: str
    version: str  # of the trigger and its function
    reads: tuple[str, ...]  # columns of the old or new row
    writes: tuple[str, ...]  # columns of the new row
    is_function_of_new: bool  # on inserts and updates alike, `reads` of the new row decide about all of `writes`


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A foreign key of one column that one query can check for a set of new rows; see `target/sql/references.py`."""

    column: str  # of the child
    type_sql: str  # of `column`, with its length or precision: a cast to it makes of a value what is stored
    parent_oid: int
    parent_schema: str
    parent_name: str
    parent_column: str
    version: str  # of the key, its trigger and both columns


class TableFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One target table as the catalogue describes it now."""

    oid: int
    schema: str
    name: str
    is_partitioned: bool
    columns: tuple[ColumnFacts, ...]  # by attnum, dropped ones left out
    key_columns: tuple[str, ...]  # replica identity index, else primary key; () if neither
    key_is_deferrable: bool
    triggers: tuple[str, ...]  # user triggers that fire under the session's role, of leaf partitions too
    rules: tuple[str, ...]  # rules that act under the session's role
    code: tuple[str, ...]  # user functions that are not immutable in checks, defaults, domains, generated columns
    unique: tuple[UniqueFacts, ...]  # unique and exclusion indexes besides the key, of leaf partitions too
    foreign_keys: tuple[ForeignKeyFacts, ...]  # of the table and its leaf partitions, with inherited ones
    root_oid: int  # topmost table of the partition tree it belongs to; its own OID where there is none
    #: Columns that come first in an index on the whole table, or on each partition, by which equal values are found.
    indexed_columns: tuple[str, ...] = ()
    foreign: ForeignCode | None = None  # None: every owner may become the role that applies
    row_triggers: tuple[RowTrigger, ...] = ()  # not among `triggers`
    #: Under the role `origin`: all that an insert of a row runs. None: it runs something else as well.
    references: tuple[Reference, ...] | None = None
    n_indexes: int = 0  # about how many it has, from those that are known; made of them

    def __post_init__(self) -> None:
        """Count the indexes once, because each batch asks."""
        force_setattr(self, "n_indexes", len(self.unique) + len(self.indexed_columns) or 1)


class TablePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One published relation matched by column name to one target table."""

    relation: Relation
    facts: TableFacts
    columns: tuple[ColumnFacts, ...]  # target column of each wire column, in wire order
    key_positions: tuple[int, ...]  # wire positions of the target's key columns; () if rows are not found by a key
    is_full: bool  # updates and deletes carry the whole old row, and no target key serves: match every column
    can_update: bool  # updates and deletes can be applied at all; `refusal` says why not
    refusal: str
    lane: Lane
    is_table_exclusive: bool  # batches that touch the table never run at the same time
    reason: str  # why the lane and the width are what they are, for parapply.tables
    unique_keys: tuple[UniqueKey, ...] = ()
    foreign_keys: tuple[ForeignKey, ...] = ()
    #: The lane is SERIAL, yet several source transactions may be one target transaction, in order.
    is_joined: bool = False
    #: Transactions commit in any order, and values of rows that a batch writes and then changes or deletes also meet
    #: others: the batch may be repeated row by row when a later one has committed.
    keeps_written_over: bool = False
    #: Columns that are not sent. `facts` describe keys without them: within these rows they distinguish nothing.
    constants: tuple[Constant, ...] = ()
    #: Columns with the values of expressions, by wire position.
    replaced: dict[int, Replacement] = {}
    runs_code: bool = False  # of triggers, rules or functions, be it trusted by the configuration
    #: Numbers in the place of the OIDs of table and tree, where only the rows with the constants are meant.
    own_oid: int = 0
    own_root_oid: int = 0
    #: How the names of the slot's replication origins begin; rows that others wrote must be noticed before they are ...
    own_origins: str = ""
    checks_update_origin: bool = False  # ... updated
    checks_delete_origin: bool = False  # ... deleted
    # Made of the fields above:
    rows_oid: int = 0  # number of the rows that may be changed: of a table, or of the part with the constants
    tree_oid: int = 0  # the same of the topmost table of the partition tree: rows under two numbers never meet
    #: Sets check the origin of a row: a net delete may have been an update before.
    checks_origin: bool = False

    def __post_init__(self) -> None:
        """Fill in what each batch asks for."""
        force_setattr(self, "rows_oid", self.own_oid or self.facts.oid)
        force_setattr(self, "tree_oid", self.own_root_oid or self.facts.root_oid)
        force_setattr(self, "checks_origin", self.checks_update_origin or self.checks_delete_origin)

    @property
    def nets_whole_rows(self) -> bool:
        """Return whether sets can apply updates and deletes of rows that are found by all their columns.

        Not where each row has to be asked for by itself: who wrote it last, whether a trigger has vetoed the change,
        whether an ALWAYS identity column would change (trap T-50), whether its parent has taken it along (T-25).
        Nor where old and new values are more than PostgreSQL has in one list (1664, MaxTupleAttributeNumber).
        """
        return (
            self.is_full
            and self.can_update
            and self.lane is Lane.SET
            and len(self.columns) <= _MOST_WHOLE
            and not self.checks_origin
            and not self.facts.triggers
            and not any(foreign.is_enforced for foreign in self.foreign_keys)
            and not any(column.is_identity_always for column in self.columns)
        )

    @property
    def may_go_with_parent(self) -> bool:
        """Return whether the target may delete a row by itself, with its parent, before its own delete comes (T-25)."""
        return any(foreign.is_enforced and foreign.is_cascading for foreign in self.foreign_keys)

    @property
    def is_indexed(self) -> bool:
        """Return whether an index narrows the search for a whole row, as the built-in subscription wants it.

        Source: RemoteRelContainsLeftMostColumnOnIdx in relation.c.
        """
        return any(column.name in self.facts.indexed_columns for column in self.columns)

    @property
    def is_checked_by_statement(self) -> bool:
        """Return whether rows may be right only together, when the statement that writes them ends.

        Where an enforced foreign key leads to the table itself, or values of a deferrable unique index change hands.
        """
        leads_here = any(one.is_enforced and one.parent_oid == self.facts.root_oid for one in self.facts.foreign_keys)
        return leads_here or not all(one.is_immediate for one in self.facts.unique)


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

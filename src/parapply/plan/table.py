"""What the planner and the statements know of one target table. Pure data; `target/` fills it from the catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parapply.model import Relation


class Equality(Enum):
    """How the target's index compares values of a key column, seen from their text on the wire (trap T-21)."""

    BYTES = "bytes"  # equal exactly when the text is: integers, uuid, text with a deterministic collation ...
    BPCHAR = "bpchar"  # trailing blanks do not count
    NUMERIC = "numeric"  # 1.0 = 1.00
    FLOAT = "float"  # -0 = 0
    UNKNOWN = "unknown"  # widen to the table


class Lane(Enum):
    """How a table's changes are applied, best first."""

    SET = "set-based"  # net changes per key, few statements
    ROW = "row by row"  # each change in order; other tables are not concerned
    SERIAL = "serial"  # the whole transaction alone, row by row, in source order, with everything earlier committed


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnFacts:
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
    collation_sql: str = ""  # COLLATE clause of a key column whose index has a collation of its own
    default_code: tuple[str, ...] = ()  # code its default runs: matters only if the publisher does not send the column
    has_text_cast: bool = False  # text casts to it by other rules than its input function's: no set can be exact


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFacts:
    """One target table as the catalogue describes it now."""

    oid: int
    schema: str
    name: str
    is_partitioned: bool
    columns: tuple[ColumnFacts, ...]  # by attnum, dropped ones left out
    key_columns: tuple[str, ...]  # replica identity index, else primary key; () if neither
    key_is_deferrable: bool
    other_unique: tuple[str, ...]  # other unique and exclusion indexes, of leaf partitions too
    triggers: tuple[str, ...]  # user triggers that fire under the session's role, of leaf partitions too
    rules: tuple[str, ...]  # rules that act under the session's role
    code: tuple[str, ...]  # user functions that are not immutable in checks, defaults, domains, generated columns


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlan:
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
    is_shared: bool = False  # several published relations map to this target table: one lane in source order

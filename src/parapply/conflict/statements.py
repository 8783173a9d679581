"""Small pieces of SQL that every module here needs. Pure text; names are quoted, values are parameters or literals."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from parapply.plan.table import table_name
from parapply.quoting import identifier, literal
from parapply.target.session.pipeline import Statement
from parapply.target.sql.conditions import column_is_null, constants_hold, key_condition, row_condition
from parapply.target.sql.statements import Sql

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.plan.table import ColumnFacts, TablePlan


def statement(text: str, parameters: Sequence[bytes | None] = ()) -> Statement:
    """Return an execution of a text; the same text has the same name in every session, so it is prepared once."""
    encoded = text.encode("utf-8", "surrogateescape")
    name = b"x" + blake2b(encoded, digest_size=16).hexdigest().encode()
    prepared = Sql(name=name, text=encoded, n_parameters=len(parameters), is_set=False, positions=())
    return Statement(prepared, parameters)


def only(plan: TablePlan) -> str:
    """Return the place to look for rows: a partitioned table as a whole, else the table without its children."""
    name = table_name(plan.facts)
    return name if plan.facts.is_partitioned else f"ONLY {name}"


def found_by(plan: TablePlan, first: int) -> tuple[str, tuple[int, ...]]:
    """Return the condition for a change's old row on `t`, parameters from `$first` on, and their wire positions."""
    if plan.is_full:
        positions = tuple(range(len(plan.columns)))
        found = row_condition(plan.columns, first)
    else:
        positions = plan.key_positions
        found = key_condition([plan.columns[position] for position in positions], first)
    return f"{found} AND {constants_hold(plan.constants)}" if plan.constants else found, positions


def row_as_text(columns: Sequence[ColumnFacts]) -> str:
    """Return an expression of jsonb: every column of the target's row by name, as text that equals the wire's.

    A cast to text is not the type's output function: of a boolean, an address or a padded character it is other text.
    """
    # In pieces: a function takes a hundred arguments at most, an array constructor any number.
    names = ", ".join(literal(column.name) for column in columns)
    values = ", ".join(
        f"CASE WHEN {column_is_null(column)} THEN NULL ELSE pg_catalog.format('%s', t.{identifier(column.name)}) END"
        for column in columns
    )
    return f"pg_catalog.jsonb_object(ARRAY[{names}]::text[], ARRAY[{values}]::text[])"

"""Columns with one value in all rows that a published relation has in its target table. Pure.

So several relations, of one publisher or of several, have their rows in one table. Rows of two of them never meet,
because every unique index holds the constants. Within the rows of one of them the constants distinguish nothing, so
keys are described without them, and everything that compares keys needs not know of them.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from parapply.errors import TargetRefused
from parapply.plan.table import Constant, Equality

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from parapply.plan.table import ColumnFacts, ForeignKeyFacts, TableFacts, TablePlan, UniqueFacts

#: Bits of the integer types, by OID.
_INTEGERS: Final = {20: 64, 21: 16, 23: 32}
_BOOL, _TEXT, _VARCHAR, _UUID = 16, 25, 1043, 2950
#: A modifier that is a length is greater by this number (VARHDRSZ).
_LENGTH_OFFSET: Final = 4
#: Texts of which a value of the type has only this one, so that equal values are equal texts.
_FORMS: Final = {
    _BOOL: ("true|false", "true or false"),
    _UUID: ("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "as PostgreSQL prints a uuid"),
    **dict.fromkeys(_INTEGERS, ("0|-?[1-9][0-9]*", "an integer")),
}
#: Above every OID.
_OWN: Final = 1 << 63


def constants_of(facts: TableFacts, given: Mapping[str, str], sent: Collection[str]) -> tuple[Constant, ...]:
    """Return the constants of a target table.

    Args:
        facts: of the table.
        given: texts by column, as configured.
        sent: columns that the publisher sends.

    Raises:
        TargetRefused: a column does not exist, is sent, or takes no such value; or a unique index does not hold it, so
            that rows of another source could be met.
    """
    by_name = {column.name: column for column in facts.columns}
    found, problems = [], []
    for name, text in sorted(given.items()):
        column = by_name.get(name)
        why = "does not exist" if column is None else "is also published" if name in sent else _why_not(column, text)
        if why or column is None:
            problems.append(f'column "{name}" {why}')
        else:
            found.append(Constant(column=column, text=text))
    problems += [f"{index} does not hold {_names(missing)}" for index, missing in _without(facts, given, sent)]
    if problems:
        raise TargetRefused(
            f"target table {facts.schema}.{facts.name} cannot take the constants of [mapping]: {'; '.join(problems)}",
            hint="correct `set` in [mapping], or the table: each of its unique indexes must hold the constant columns",
        )
    return tuple(found)


def within(facts: TableFacts, constants: Collection[Constant]) -> TableFacts:
    """Return the facts as they are for the rows with the constants: keys without them."""
    if not constants:
        return facts
    texts = dict(one.pair for one in constants)
    return replace(
        facts,
        key_columns=tuple([name for name in facts.key_columns if name not in texts]),
        unique=tuple([_unique(index, texts) for index in facts.unique]),
        foreign_keys=tuple([_foreign_key(one, texts) for one in facts.foreign_keys]),
    )


def marked(plan: TablePlan, constants: tuple[Constant, ...]) -> TablePlan:
    """Return a plan that was made `within` constants, with them."""
    if not constants:
        return plan
    pairs = [one.pair for one in constants]
    return replace(
        plan,
        constants=constants,
        own_oid=_number(plan.facts.oid, pairs),
        own_root_oid=_number(plan.facts.root_oid, pairs),
        reason=f"{plan.reason}; only rows with {', '.join(f'{name} = {text}' for name, text in pairs)}",
    )


def _number(oid: int, pairs: Iterable[tuple[str, str]]) -> int:
    digest = blake2b(repr((oid, *pairs)).encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return _OWN | int.from_bytes(digest) >> 1


def _why_not(column: ColumnFacts, text: str) -> str:
    """Return why a column cannot have a value in all rows; empty: it can."""
    if column.is_generated or column.is_identity_always:
        return "takes no values, because the target makes them"
    kind = column.base_type_oid
    if not (kind in _FORMS or kind in {_TEXT, _VARCHAR} or column.is_enum):
        return "is of no type for a constant: smallint, integer, bigint, boolean, text, varchar, uuid or an enum"
    if column.equality is not Equality.BYTES:
        return "takes different texts for equal ones"
    form, noun = _FORMS.get(kind, (None, ""))
    return (
        f"takes {noun}, and the constant is none" if form and not re.fullmatch(form, text) else _too_large(column, text)
    )


def _too_large(column: ColumnFacts, text: str) -> str:
    """Return why a value of the right form does not fit a column; empty: it does."""
    kind = column.base_type_oid
    if kind in _INTEGERS and not -(1 << _INTEGERS[kind] - 1) <= int(text) < 1 << _INTEGERS[kind] - 1:
        return "takes no integer as large as the constant"
    if kind == _VARCHAR and column.type_modifier != -1 and len(text) > column.type_modifier - _LENGTH_OFFSET:
        return "takes no text as long as the constant"
    return ""


def _without(facts: TableFacts, given: Mapping[str, str], sent: Collection[str]) -> Iterable[tuple[str, list[str]]]:
    """Yield the key and unique indexes in which rows of several sources could meet, and what they lack."""
    keys = [(f"the key ({_names(facts.key_columns)})", facts.key_columns)] if facts.key_columns else []
    keys += [(f'unique index "{index.name}"', index.named or index.columns) for index in facts.unique]
    for shown, columns in keys:
        missing = [name for name in given if name not in columns]
        # An index on columns that the target alone fills is nothing to the sources.
        if missing and not (columns and not {*sent, *given}.intersection(columns)):
            yield shown, missing


def _unique(index: UniqueFacts, texts: Mapping[str, str]) -> UniqueFacts:
    pairs = [pair for pair in zip(index.columns, index.equalities, strict=True) if pair[0] not in texts]
    return replace(
        index, columns=tuple([name for name, _ in pairs]), equalities=tuple([equality for _, equality in pairs])
    )


def _foreign_key(one: ForeignKeyFacts, texts: Mapping[str, str]) -> ForeignKeyFacts:
    pairs = list(zip(one.columns, one.parent_columns, one.parent_equalities, strict=True))
    left = [pair for pair in pairs if pair[0] not in texts]
    return replace(
        one,
        columns=tuple([name for name, _, _ in left]),
        parent_columns=tuple([parent for _, parent, _ in left]),
        parent_equalities=tuple([equality for _, _, equality in left]),
        constants=tuple([(parent, texts[name]) for name, parent, _ in pairs if name in texts]),
    )


def _names(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)

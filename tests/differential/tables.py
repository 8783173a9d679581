"""Random tables: what a publisher has, and a target that differs from it as real targets do.

In go definitions and values; out come the statements that make a table on either side and the query of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from psycopg import sql

from tests.differential.types import TYPES, RandomType, available, number

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping

    from tests.differential.types import Feature, Values

    Operation = Callable[["RandomTable", random.Random], str]

# Above 2 kB, so that a column with STORAGE EXTERNAL is kept apart and not sent with updates of others (T-41).
_BIG_BYTES = 2500
#: Share of columns whose type on the target is another one.
_OTHER_TYPE_SHARE = 0.15


def _text(chooser: random.Random) -> str:
    return chooser.choice("xyz") * chooser.choice((3, _BIG_BYTES, 2 * _BIG_BYTES))


#: By type: values that mostly are big.
_BIG: Mapping[str, Values] = {
    "text": _text,
    "bytea": lambda chooser: f"\\x{_text(chooser).encode().hex()}",
    "jsonb": lambda chooser: f'{{"a": "{_text(chooser)}", "b": [1.0]}}',
    "text[]": lambda chooser: f"{{{_text(chooser)},NULL,b}}",
}


@dataclass(frozen=True, kw_only=True)
class RandomColumn:
    """A column of a random table.

    Attributes:
        name: of the column, quoted where it must be.
        type_sql: its type.
        values: its values as text, or expressions of SQL with `is_expression`.
        clause: what comes after the type, on both sides.
        source_clause, target_clause: the same, on one side.
        target_type: its type on the target, if it is another one.
        nulls: share of NULLs.
        spare: a value that `values` never gives, through which two rows swap theirs; empty if they do not.
        is_expression: see `values`.
        compared_as: type that a condition casts it to; empty for none.
        is_big: mostly kept apart from its row, and so not sent with updates of others (T-41).
    """

    name: str
    type_sql: str
    values: Values
    clause: str = ""
    source_clause: str = ""
    target_clause: str = ""
    target_type: str = ""
    nulls: float = 0.0
    spare: str = ""
    is_expression: bool = False
    compared_as: str = ""
    is_big: bool = False

    def value(self, chooser: random.Random) -> str:
        """Return a value as SQL."""
        if chooser.random() < self.nulls:
            return "NULL"
        text = self.values(chooser)
        return text if self.is_expression else literal(text)

    def is_equal(self, value: str, table: str = "") -> str:
        """Return the condition that it has a value.

        Args:
            value: in SQL.
            table: where it is, for conditions in which several tables have its name.
        """
        qualified = f"{table}.{self.name}" if table else self.name
        cast = f"::{self.compared_as}" if self.compared_as else ""
        # A composite type is not compared with a constant of no type.
        return f"{qualified}{cast} = {value}::{self.compared_as or self.type_sql}"

    def definition(self, *, on_target: bool) -> str:
        """Return it as CREATE TABLE has it."""
        type_sql = self.target_type if on_target and self.target_type else self.type_sql
        clause = self.target_clause if on_target else self.source_clause
        return " ".join(filter(None, (self.name, type_sql, self.clause, clause)))


@dataclass(frozen=True, kw_only=True)
class RandomTable:
    """A table on both sides. Every one has a number `n`, in no unique index, for statements that choose by it.

    Attributes:
        name: of the table, with its schema where that is another than public; quoted where it must be.
        key: columns of the primary key, empty without one.
        columns: the others that transactions write.
        both_extra, target_extra: definitions of more columns and constraints, on both sides or on the target only.
        both_after, source_after, target_after: statements that follow the table's own.
        source_tree, target_tree: `PARTITION BY` clauses; the partitions are made by what follows.
        target_leaves: tables of the target that stand for this one, when it has none of this name.
        source_columns: all columns in the publisher's order; key and other columns when empty.
        target_columns: all columns in the target's order; the source's order when empty.
        key_clause: what comes after the primary key, on both sides.
        target_key: the target's form of the primary key, with `{}` for its columns.
        identity: what comes after REPLICA IDENTITY on the source; its default when empty.
        has_audit: the target's audit tables get an entry for every change (`kinds.AUDIT`).
        operations: what transactions do to it; by its shape when empty.
        listed: the columns that the publication lists; all when empty.
        where: row filter of the publication; none when empty.
        is_ambiguous: holds rows that are equal but look different, of which the built-in subscription changes any.
        target_live: statements that a target runs while it applies, in this order and again from the first.
    """

    name: str
    key: tuple[RandomColumn, ...]
    columns: tuple[RandomColumn, ...]
    both_extra: tuple[str, ...] = ()
    target_extra: tuple[str, ...] = ()
    both_after: tuple[str, ...] = ()
    source_after: tuple[str, ...] = ()
    target_after: tuple[str, ...] = ()
    source_tree: str = ""
    target_tree: str = ""
    target_leaves: tuple[str, ...] = ()
    source_columns: tuple[RandomColumn, ...] = ()
    target_columns: tuple[RandomColumn, ...] = ()
    key_clause: str = ""
    target_key: str = "PRIMARY KEY ({})"
    identity: str = ""
    has_audit: bool = False
    operations: tuple[Operation, ...] = ()
    listed: tuple[RandomColumn, ...] = ()
    where: str = ""
    is_ambiguous: bool = False
    target_live: tuple[str, ...] = ()

    @property
    def all_columns(self) -> tuple[RandomColumn, ...]:
        """Key and other columns."""
        return (*self.key, *self.columns)

    @property
    def can_update(self) -> bool:
        """Return whether the publication takes updates and deletes of it."""
        return self.identity != "NOTHING" and (bool(self.key) or self.identity == "FULL")

    @property
    def published(self) -> tuple[RandomColumn, ...]:
        """The columns that are sent."""
        return self.listed or self.all_columns

    @property
    def is_copied(self) -> bool:
        """Return whether the texts of the sent columns are the same on both sides."""
        return not any(column.target_type for column in self.published)

    def source_sql(self) -> str:
        """Return the statements that make it on the publisher."""
        columns = [column.definition(on_target=False) for column in self.source_columns or self.all_columns]
        primary = f"PRIMARY KEY ({self._key_names}) {self.key_clause}" if self.key else ""
        made = f"CREATE TABLE {self.name} ({_body(*columns, *self.both_extra, primary)}) {self.source_tree}"
        identity = (f"ALTER TABLE {self.name} REPLICA IDENTITY {self.identity}",) if self.identity else ()
        return _script(made, *self._storage(), *self.both_after, *self.source_after, *identity)

    def target_sql(self) -> str:
        """Return the statements that make it on a target."""
        body = self.target_body(self.target_columns or self.source_columns or self.all_columns)
        if self.target_leaves:
            return _script(*(f"CREATE TABLE {leaf} ({body})" for leaf in self.target_leaves), *self.target_after)
        made = f"CREATE TABLE {self.name} ({body}) {self.target_tree}"
        return _script(made, *self._storage(), *self.both_after, *self.target_after)

    def target_body(self, columns: tuple[RandomColumn, ...]) -> str:
        """Return what stands in the brackets of CREATE TABLE on the target."""
        primary = f"{self.target_key.format(self._key_names)} {self.key_clause}" if self.key and self.target_key else ""
        definitions = [column.definition(on_target=True) for column in columns]
        return _body(*definitions, *self.both_extra, *self.target_extra, primary)

    def publication_sql(self) -> str:
        """Return it as CREATE PUBLICATION names it."""
        columns = f" ({', '.join(column.name for column in self.listed)})" if self.listed else ""
        return f"{self.name}{columns}" + (f" WHERE ({self.where})" if self.where else "")

    def sent_rows_sql(self, *, on_target: bool) -> str:
        """Return the query of all rows as text, of what the publication sends."""
        names = ", ".join(column.name for column in self.published)
        where = f" WHERE {self.where}" if self.where and not on_target else ""
        return " UNION ALL ".join(
            f"SELECT ROW({names})::text FROM {table}{where}" for table in self._tables(on_target=on_target)
        )

    def target_rows_sql(self) -> str:
        """Return the query of all rows of a target with all columns by name, and with their texts."""
        names = ", ".join(column.name for column in self.all_columns)
        tables = self._tables(on_target=True)
        return " UNION ALL ".join(f"SELECT ROW({names})::text, to_jsonb(t)::text FROM {table} AS t" for table in tables)

    @property
    def _key_names(self) -> str:
        # In another order than the columns.
        turn = len(self.key) // 2
        return ", ".join(column.name for column in (*self.key[turn:], *self.key[:turn]))

    def _tables(self, *, on_target: bool) -> tuple[str, ...]:
        return self.target_leaves if on_target and self.target_leaves else (self.name,)

    def _storage(self) -> list[str]:
        return [
            f"ALTER TABLE {self.name} ALTER {column.name} SET STORAGE EXTERNAL"
            for column in self.columns
            if column.is_big
        ]


def _body(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _script(*statements: str) -> str:
    return "".join(f"{statement};\n" for statement in statements)


def literal(value: str) -> str:
    """Return a value as a constant of SQL whose type its place decides."""
    return sql.Literal(value).as_string(None).strip()


def column_of(kind: RandomType, name: str, *, nulls: float = 0.0) -> RandomColumn:
    """Return a column of a type."""
    return RandomColumn(
        name=name, type_sql=kind.name, values=kind.values, spare=kind.spare, compared_as=kind.compared_as, nulls=nulls
    )


def key(type_name: str, name: str = "k") -> RandomColumn:
    """Return a key column."""
    return column_of(TYPES[type_name], name)


def numbered() -> RandomColumn:
    """Return the number that every table has."""
    return RandomColumn(name="n", type_sql="int", values=number(0, 10))


def big(chooser: random.Random) -> RandomColumn:
    """Return a column that mostly is kept apart from its row."""
    type_sql = chooser.choice(sorted(_BIG))
    return RandomColumn(name="big", type_sql=type_sql, values=_BIG[type_sql], nulls=0.1, is_big=True)


def others(
    chooser: random.Random, features: frozenset[Feature], *, is_exact: bool = False, has_big: bool | None = None
) -> tuple[RandomColumn, ...]:
    """Return a number and some columns of random types; of big values there is one in most tables.

    Args:
        chooser: of all.
        features: of the servers.
        is_exact: only types that a row can be found by without doubt: of two rows that are equal but look different, a
            subscription changes either.
        has_big: whether there is one of big values; mostly when `None`.
    """
    kinds = [one for one in available(features) if not is_exact or (one.is_exact and one.is_comparable)]
    some = [column_of(kind, f"c{n}", nulls=0.2) for n, kind in enumerate(chooser.sample(kinds, chooser.randint(1, 6)))]
    if has_big is None:
        has_big = chooser.random() < 0.7
    return (numbered(), *some, *((big(chooser),) if has_big else ()))


def with_other_types(columns: tuple[RandomColumn, ...], chooser: random.Random) -> tuple[RandomColumn, ...]:
    """Return the columns, some with another type on the target that takes the publisher's texts; not the number."""
    return tuple(
        _with_other_type(column, chooser)
        if column.name != "n" and TYPES[column.type_sql].others and chooser.random() < _OTHER_TYPE_SHARE
        else column
        for column in columns
    )


def _with_other_type(column: RandomColumn, chooser: random.Random) -> RandomColumn:
    return replace(column, target_type=chooser.choice(TYPES[column.type_sql].others))


def is_comparable(columns: tuple[RandomColumn, ...]) -> bool:
    """Return whether rows can be found by all their columns."""
    return all(TYPES[column.type_sql].is_comparable for column in columns if column.type_sql in TYPES)

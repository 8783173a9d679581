"""SQL texts that apply changes to one target table, set-based and row by row. Pure text; nothing is executed here.

In: a `TablePlan` and the wire positions present. Out: `Sql`, whose parameters are values (row forms, text format, type
left to the server) or one array per wire position (set forms). Must never put a value or a raw name into a text.

Why the texts look as they do:

- Values travel as the publisher's text. A row form leaves a parameter's type open (OID 0), so the column's own input
  function reads it, as in the built-in apply worker. A set form casts each element to the column's base type *without*
  length and domain: an explicit cast to varchar(3) or to a domain over it cuts silently, while the assignment to the
  column refuses (trap T-44). Arrays of the base type do the same, for types whose binary form the caller can make; for
  others they would not: unnest flattens arrays of arrays.
- Equality is spelled OPERATOR(schema.=): with the pinned search_path a plain = on a citext column would compare text.
- ONLY on plain tables: children by inheritance are other published tables. A partitioned table is written as a whole.
- OVERRIDING SYSTEM VALUE is harmless without identity columns (trap T-50). UPDATE cannot set an ALWAYS identity column,
  so it is left out of SET; an update that would change it finds no row (see `Statements.row_update`).
"""

# ruff: noqa: S608 - this module makes SQL: names are quoted by conditions.py, values are parameters
from __future__ import annotations

from functools import cache, cached_property, lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from parapply.errors import TargetRefused
from parapply.plan.foreign_keys import children_first
from parapply.plan.table import Equality, table_name
from parapply.quoting import identifier
from parapply.target.catalogue.query import GUARD_SQL, INSERTING, REFERENCE_VERSION, TRIGGER_VERSION
from parapply.target.sql.conditions import (
    column_equals,
    column_is,
    column_is_null,
    constant_value,
    constants_hold,
    key_condition,
    row_condition,
    same_text,
    types_unaltered,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.plan.table import ColumnFacts, Constant, TableFacts, TablePlan

_TEXT_OID: Final = 25
_NO_TYPES: Final[frozenset[int]] = frozenset()


class Sql(NamedTuple):
    """One statement to prepare, and what its parameters are.

    A set form takes one array for each of `positions`, all of one length, its elements of the type in `type_oids`; a
    set delete's positions are the key's.
    A row form takes the values at `positions` of the new row, then those at `old_positions` of the old row; without an
    old tuple on the wire the key has not moved and its values are in the new row.
    """

    name: bytes  # stands for the text: the same text has the same name in every session; 33 bytes
    text: bytes  # UTF-8
    n_parameters: int
    is_set: bool
    positions: tuple[int, ...]
    old_positions: tuple[int, ...] = ()
    type_oids: tuple[int, ...] = ()


class Statements:
    """The statements of one table plan; each text is built once.

    Every statement's row count is the number of rows found, also where it is a SELECT because nothing can be set.
    """

    def __init__(
        self, plan: TablePlan, binary_types: frozenset[int] = _NO_TYPES, *, may_lock_rows: bool = True
    ) -> None:
        """Build nothing yet.

        Args:
            plan: of the table.
            binary_types: OIDs of the types that set forms take as arrays of themselves; all others come as text[].
            may_lock_rows: False: the role may not, because nothing that it applies changes a row.
        """
        self.plan = plan
        self._binary = {
            position for position, column in enumerate(plan.columns) if column.base_type_oid in binary_types
        }
        places = {column.name: position for position, column in enumerate(plan.relation.columns)}
        #: Wire positions that the expressions of replaced columns read; these come as text, of the publisher's types.
        self._inputs = {at: tuple([places[one.name] for one in each.inputs]) for at, each in plan.replaced.items()}
        self._binary.difference_update(*self._inputs.values())
        self._lock = " FOR NO KEY UPDATE OF t" if may_lock_rows else ""
        self._table = table_name(plan.facts)
        self._names = [identifier(column.name) for column in plan.columns]
        #: The constants, for statements that insert; and what leaves the rows of other sources out.
        self._more_names = [identifier(one.column.name) for one in plan.constants]
        self._more_values = [constant_value(one) for one in plan.constants]
        self._mine = f" AND {constants_hold(plan.constants)}" if plan.constants else ""
        self._cache: dict[tuple[str, tuple[int, ...]], Sql] = {}

    def set_insert(self, present: tuple[int, ...]) -> Sql:
        """Return the insert of many rows that have values at the wire positions `present` (at least one).

        Raises:
            ValueError: no position; a set of rows without columns has no length (trap T-67).
        """
        return self._cached("set_insert", present, lambda: self._build_set_insert(present))

    def few_insert(self, n_rows: int) -> Sql:
        """Return the insert of a few whole rows by their values, one row after the other; it is never prepared.

        To parse and execute it costs the target no more than to execute a set form that is prepared, and half of what
        one costs that is not. It needs no test of `types_unaltered`, because it is executed as it was parsed, under the
        lock that parsing took.
        """
        rows, positions = _numbered(n_rows, len(self._names), tuple(self._more_values))
        text = self._few_head + rows
        return Sql(name=b"", text=text, n_parameters=len(positions), is_set=False, positions=positions)

    def set_update(self, present: tuple[int, ...], *, is_lone: bool = False) -> Sql:
        """Return the update of many rows by key; positions not in `present` keep their value (unchanged TOAST).

        Each key may occur once: of two source rows for one target row PostgreSQL takes any (trap T-40). Keys must
        not move (trap T-38). `positions` holds the key positions too, present or not: fill them from the old row.

        Args:
            present: wire positions of the new rows that have a value.
            is_lone: set the key as well, as `row_update` does: for a row alone, for which triggers are not looked for.

        Raises:
            TargetRefused: the plan allows no updates.
            ValueError: the plan has no key.
        """
        self._check_updates(needs_key=True)
        kind = "lone_update" if is_lone else "set_update"
        return self._cached(kind, present, lambda: self._build_set_update(present, is_lone=is_lone))

    def set_delete(self) -> Sql:
        """Return the delete of many rows by key; its arrays come from old rows.

        Raises:
            TargetRefused: the plan allows no deletes.
            ValueError: the plan has no key.
        """
        self._check_updates(needs_key=True)
        return self._cached("set_delete", (), self._build_set_delete)

    def set_move(self, present: tuple[int, ...]) -> Sql:
        """Return the update of many rows that get other keys; of none may the new key be the old or new one of another.

        The arrays of the old keys follow the arrays of the new rows.

        Raises:
            TargetRefused: the plan allows no updates.
            ValueError: the plan has no key, or an ALWAYS identity column, which SQL cannot set.
        """
        self._check_updates(needs_key=True)
        if any(column.is_identity_always for column in self.plan.columns):
            raise ValueError(f"{self._table}: rows with an ALWAYS identity column move one by one")
        return self._cached("set_move", present, lambda: self._build_set_move(present))

    def whole_update(self, present: tuple[int, ...], nulls: tuple[int, ...]) -> Sql:
        """Return the update of many rows that are found by all their columns, NULL in `nulls` and nowhere else.

        The arrays of the new values precede the arrays of the old ones. Two arrays of int4 follow: of the rows that
        equal an old one, the rows with numbers above the first and up to the second are changed (trap T-24). No row is
        waited for while another one is free, as a statement sees them when it begins; so it is not used beside a
        prepared transaction.

        Raises:
            TargetRefused: the plan allows no updates.
            ValueError: rows that are nothing but NULL cannot be looked for together.
        """
        self._check_updates()
        return self._cached("whole_update", (*present, -1, *nulls), lambda: self._build_whole(present, nulls))

    def whole_delete(self, nulls: tuple[int, ...]) -> Sql:
        """Return the delete of many rows that are found as in `whole_update`.

        Raises:
            TargetRefused, ValueError: as `whole_update`.
        """
        self._check_updates()
        return self._cached("whole_delete", nulls, lambda: self._build_whole((), nulls))

    def send_as_text(self, positions: Sequence[int]) -> None:
        """Have set forms built from now on take these wire positions as text[], whatever their type."""
        self._binary.difference_update(positions)
        self._cache.clear()

    def row_insert(self, present: tuple[int, ...]) -> Sql:
        """Return the insert of one row; without positions every column takes its default (trap T-67)."""
        return self._cached("row_insert", present, lambda: self._build_row_insert(present))

    def row_update(self, present: tuple[int, ...], *, is_key_moved: bool = False) -> Sql:
        """Return the update of one row, found by the old key or, with `is_full`, by the whole old row.

        Every present column is set, changed or not, as the built-in worker does: UPDATE OF triggers see the same
        (trap T-29). Of ALWAYS identity columns outside the key the row must already hold the new value: an update that
        changes one finds no row although `row_exists` does, and that is an error, not a trigger's doing.

        Args:
            present: wire positions of the new row that have a value.
            is_key_moved: old and new key differ.

        Raises:
            TargetRefused: the plan allows no updates, or the moved key holds an ALWAYS identity column (trap T-50).
        """
        self._check_updates()
        if is_key_moved:
            self._check_key_can_move()
        return self._cached("row_update", present, lambda: self._build_row_update(present))

    def row_delete(self) -> Sql:
        """Return the delete of one row, found as in `row_update`; of several twins exactly one is deleted (trap T-24).

        Raises:
            TargetRefused: the plan allows no deletes.
        """
        self._check_updates()
        return self._cached("row_delete", (), self._build_row_delete)

    def row_exists(self, *, frees_key: bool = False) -> Sql:
        """Return a SELECT of one row if the old row exists, to know a trigger's veto from a missing row (trap T-43).

        It is locked as the change will, so that no session moves it before the change looks for it. That keeps checks
        of foreign keys out only if it `frees_key`; a lock raised later would meet sessions that have checked already.

        Raises:
            TargetRefused: the plan allows no updates, so rows cannot be found.
        """
        self._check_updates()
        lock = self._lock.replace("NO KEY ", "") if frees_key else self._lock
        return self._cached("row_exists", (int(frees_key),), lambda: self._build_select((), lock))

    def set_foreign(self) -> Sql:
        """Return a SELECT of a row if one of many rows is missing, or was last written by another origin.

        The rows are locked before their writer is checked, so that no session writes them between the check and the
        change. A row of this very transaction, or one so old that its writer is unknown, has no other writer. A missing
        one may have been waited for, and replaced: the change would find the new row, because it sees what is committed
        when it begins.

        Raises:
            TargetRefused: the plan allows no updates.
            ValueError: the plan has no key.
        """
        self._check_updates(needs_key=True)
        return self._cached("set_foreign", (), self._build_set_foreign)

    def row_foreign(self, *, may_miss: bool = False) -> Sql:
        """Return `set_foreign` for one row, found as in `row_update`; a missing one counts unless it `may_miss`.

        Raises:
            TargetRefused: the plan allows no updates.
        """
        self._check_updates()
        return self._cached("row_foreign", (int(may_miss),), lambda: self._build_row_foreign(may_miss=may_miss))

    def _cached(self, kind: str, present: tuple[int, ...], build: Callable[[], Sql]) -> Sql:
        found = self._cache.get((kind, present))
        if found is None:
            found = self._cache[kind, present] = build()
        return found

    def _check_updates(self, *, needs_key: bool = False) -> None:
        if not self.plan.can_update:
            raise TargetRefused(
                self.plan.refusal,
                hint="give the table the same primary key on both sides, or set its REPLICA IDENTITY on the publisher"
                " (of each partition, if it has any)",
            )
        if needs_key and not self.plan.key_positions:
            raise ValueError(f"{self._table} has no key: only its row forms can update and delete")

    def _check_key_can_move(self) -> None:
        always = [
            self._names[position] for position in self.plan.key_positions if self._column(position).is_identity_always
        ]
        if always:
            raise TargetRefused(
                f"target table {self._table}: a key column is GENERATED ALWAYS AS IDENTITY and SQL cannot change its "
                f"value: {', '.join(always)}",
                hint="ALTER TABLE ... ALTER COLUMN ... SET GENERATED BY DEFAULT on the target",
            )

    def _column(self, position: int) -> ColumnFacts:
        return self.plan.columns[position]

    def _build_set_insert(self, present: tuple[int, ...]) -> Sql:
        if not present:
            raise ValueError(f"{self._table}: a set of rows needs at least one column")
        assigned = self.assigned(present)
        used = self._used(assigned)
        targets = ", ".join([*[self._names[position] for position in assigned], *self._more_names])
        values = ", ".join([*[self._element(position) for position in assigned], *self._more_values])
        return _sql(
            f"INSERT INTO {self._table} ({targets}) OVERRIDING SYSTEM VALUE SELECT {values} FROM {self._rows(used)}"
            f" WHERE {self._unaltered(assigned)}",
            used,
            type_oids=self._type_oids(used),
        )

    @cached_property
    def _few_head(self) -> bytes:
        """Return a few rows' insert up to them. Texts with rows are not kept: of each number one for every table."""
        text = f"INSERT INTO {self._table} ({', '.join([*self._names, *self._more_names])}) OVERRIDING SYSTEM VALUE"
        return f"{text} VALUES ".encode("utf-8", "surrogateescape")

    def _build_set_update(self, present: tuple[int, ...], *, is_lone: bool) -> Sql:
        keys = self.plan.key_positions
        # Equal keys of other classes may print differently (1.0 and 1.00), and the new text is what must remain.
        # Leaving out the rest spares the check whether an indexed column changed.
        fixed = [position for position in keys if self._column(position).equality is Equality.BYTES and not is_lone]
        assigned = self.assigned(present)
        settable = [position for position in assigned if not self._column(position).is_identity_always]
        # Something must be set for the row to count as updated: the key, to what it is.
        changed = [position for position in settable if position not in fixed] or settable[:1]
        guarded = self._guarded(present)
        if not changed:
            return self._build_select(guarded)
        positions = tuple(sorted({*self._used(changed), *guarded, *keys}))
        assignments = ", ".join(f"{self._names[position]} = {self._element(position)}" for position in changed)
        return _sql(
            f"UPDATE {self._only} AS t SET {assignments} FROM {self._rows(positions)} "
            f"WHERE {self._joined((*keys, *guarded))}{self._mine} AND {self._unaltered(changed)}",
            positions,
            type_oids=self._type_oids(positions),
        )

    def _build_set_move(self, present: tuple[int, ...]) -> Sql:
        keys = self.plan.key_positions
        assigned = self.assigned(present)
        used = self._used(assigned)
        assignments = ", ".join(f"{self._names[position]} = {self._element(position)}" for position in assigned)
        found = " AND ".join(column_equals(self._column(position), f"v.o{position}") for position in keys)
        text = f"UPDATE {self._only} AS t SET {assignments} FROM {self._rows(used, keys)}"
        text += f" WHERE {found}{self._mine} AND {self._unaltered(assigned)}"
        return _sql(text, used, keys, type_oids=(*self._type_oids(used), *self._type_oids(keys)))

    def _build_set_delete(self) -> Sql:
        keys = self.plan.key_positions
        text = f"DELETE FROM {self._only} AS t USING {self._rows(keys)} WHERE {self._joined(keys)}{self._mine}"
        return _sql(text, keys, type_oids=self._type_oids(keys))

    def _build_whole(self, present: tuple[int, ...], nulls: tuple[int, ...]) -> Sql:
        """Return an update, or without `present` a delete, of rows found by all their columns."""
        found = tuple([position for position in range(len(self.plan.columns)) if position not in nulls])
        if not found:
            raise ValueError(f"{self._table}: a row of NULLs has nothing to be found by")
        arrays = [*self._arrays(present), *self._arrays(found, first=len(present) + 1)]
        number = len(arrays)
        names = [*[f"c{position}" for position in present], *[f"o{position}" for position in found], "low", "high", "n"]
        rows = f"unnest({', '.join(arrays)}, ${number + 1}::int4[], ${number + 2}::int4[])"
        rows += f" WITH ORDINALITY AS v({', '.join(names)})"
        wanted = [column_is(self._column(position), f"v.o{position}") for position in found]
        wanted += [column_is_null(self._column(position)) for position in nulls]
        tables = "t.tableoid AS tree, " if self.plan.facts.is_partitioned else ""
        # Without an index one scan of the table is enough for all rows, but only a hash join does that, and sessions of
        # workers have it switched off, like sequential scans. A full join can be nothing else here.
        join = "JOIN" if self.plan.is_indexed else "FULL JOIN"
        pairs = (
            f"SELECT v.*, {tables}t.ctid AS id, t.xmax <> 0 AS is_locked FROM {rows}"
            f" {join} {self._only} AS t ON {' AND '.join(wanted)}{self._mine} OFFSET 0"
        )
        order = f"is_locked, {'tree, ' if tables else ''}id"
        one = f"SELECT *, row_number() OVER (PARTITION BY n ORDER BY {order}) AS k FROM ({pairs}) AS pairs"
        one += " WHERE n IS NOT NULL AND id IS NOT NULL"
        where = "v.k > v.low AND v.k <= v.high AND t.ctid = v.id" + (" AND t.tableoid = v.tree" if tables else "")
        if present:
            assignments = ", ".join(f"{self._names[position]} = {self._element(position)}" for position in present)
            text = f"UPDATE {self._only} AS t SET {assignments} FROM ({one}) AS v WHERE {where}"
            text += f" AND {self._unaltered(present)}"
        else:
            text = f"DELETE FROM {self._only} AS t USING ({one}) AS v WHERE {where}"
        prepared = _sql(text, present, found, type_oids=(*self._type_oids(present), *self._type_oids(found)))
        return prepared._replace(n_parameters=number + 2)

    def _build_row_insert(self, present: tuple[int, ...]) -> Sql:
        if not (present or self._more_names):
            return _sql(f"INSERT INTO {self._table} DEFAULT VALUES", ())
        assigned = self.assigned(present)
        values, positions = self.row_values(assigned)
        targets = ", ".join([*[self._names[position] for position in assigned], *self._more_names])
        return _sql(
            f"INSERT INTO {self._table} ({targets}) OVERRIDING SYSTEM VALUE"
            f" SELECT {', '.join([*values, *self._more_values])} WHERE {self._unaltered(assigned)}",
            positions,
        )

    def _build_row_update(self, present: tuple[int, ...]) -> Sql:
        guarded = self._guarded(present)
        changed = [position for position in self.assigned(present) if not self._column(position).is_identity_always]
        values, taken = self.row_values(changed)
        if not changed:
            return self._build_select(guarded, self._lock)
        positions = (*taken, *guarded)
        pairs = zip(changed, values, strict=True)
        assignments = ", ".join(f"{self._names[position]} = {value}" for position, value in pairs)
        guards = self._guards(guarded, first=len(taken) + 1)
        where, old_positions = self._found_row(first=len(positions) + 1)
        where += f"{guards} AND {self._unaltered(changed)}"
        return _sql(f"UPDATE {self._only} AS t SET {assignments} WHERE {where}", positions, old_positions)

    def _build_row_delete(self) -> Sql:
        where, old_positions = self._found_row(first=1)
        return _sql(f"DELETE FROM {self._only} AS t WHERE {where}", (), old_positions)

    def _build_select(self, guarded: tuple[int, ...], lock: str | None = None) -> Sql:
        """Return a SELECT that counts the rows found: for updates in which nothing can be set, and for row_exists.

        It is a set form without a `lock`, which may be empty.
        """
        if lock is None:
            keys = self.plan.key_positions
            positions = tuple(sorted({*keys, *guarded}))
            joined = self._joined((*keys, *guarded)) + self._mine
            text = f"SELECT 1 FROM {self._only} AS t, {self._rows(positions)} WHERE {joined}"
            return _sql(text, positions, type_oids=self._type_oids(positions))
        guards = self._guards(guarded, first=1)
        where, old_positions = self._found_row(first=len(guarded) + 1)
        return _sql(f"SELECT 1 FROM {self._only} AS t WHERE {where}{guards}{lock}", guarded, old_positions)

    def _build_set_foreign(self) -> Sql:
        keys = self.plan.key_positions
        wanted = f"pg_catalog.cardinality({self._arrays(keys)[0]})"
        text = self._foreign(f"{self._only} AS t, {self._rows(keys)}", self._joined(keys) + self._mine, wanted)
        return _sql(text, keys, type_oids=self._type_oids(keys))

    def _build_row_foreign(self, *, may_miss: bool) -> Sql:
        where, old_positions = self._found_row(first=1)
        wanted = "pg_catalog.count(*)" if may_miss else "1"
        return _sql(self._foreign(f"{self._only} AS t", where, wanted), (), old_positions)

    def _foreign(self, tables: str, where: str, wanted: str) -> str:
        return (
            f"WITH held AS MATERIALIZED (SELECT t.xmin AS x FROM {tables} WHERE {where} FOR UPDATE OF t)"
            " SELECT 1 FROM held HAVING pg_catalog.count(*) FILTER"
            f" (WHERE ({self._is_foreign('held.x')}) IS NOT TRUE) <> {wanted}"
        )

    def _is_foreign(self, xmin: str) -> str:
        """Return a query for whether another origin has written a row; NULL where that is no longer known."""
        # By name each time it runs: a copy or a replay makes origins while the daemon runs.
        own = "SELECT roident FROM pg_catalog.pg_replication_origin WHERE pg_catalog.starts_with(roname, '{}')"
        return (
            f"SELECT w.roident <> ALL (ARRAY({own.format(self.plan.own_origins)}))"
            f" FROM pg_catalog.pg_xact_commit_timestamp_origin({xmin}) AS w"
        )

    @property
    def _only(self) -> str:
        return self._table if self.plan.facts.is_partitioned else f"ONLY {self._table}"

    def _guarded(self, present: tuple[int, ...]) -> tuple[int, ...]:
        keys = self.plan.key_positions
        return tuple([p for p in present if self._column(p).is_identity_always and p not in keys])

    def _guards(self, guarded: tuple[int, ...], first: int) -> str:
        pairs = enumerate(guarded, first)
        return "".join(f" AND {column_equals(self._column(position), f'${number}')}" for number, position in pairs)

    def _unaltered(self, positions: Sequence[int]) -> str:
        fixed = [one.column for one in self.plan.constants]
        return types_unaltered(self.plan.facts, [*[self._column(position) for position in positions], *fixed])

    def row_values(self, assigned: Sequence[int], first: int = 1) -> tuple[list[str], tuple[int, ...]]:
        """Return the SQL of the values of columns to assign, and the wire positions of its parameters.

        Args:
            assigned: wire positions of the columns.
            first: number of the first parameter.
        """
        values, positions = [], list[int]()
        for position in assigned:
            taken = self._inputs.get(position, (position,))
            numbers = [f"${first + len(positions) + number}" for number in range(len(taken))]
            positions += taken
            values.append(self._replaced(position, numbers) if position in self._inputs else numbers[0])
        return values, tuple(positions)

    def assigned(self, present: Sequence[int]) -> list[int]:
        """Return the columns to assign: a replaced one where all values are present that its expression reads.

        Where one is not, it is unchanged TOAST and the only one, so the expression has its old value.
        """
        if not self._inputs:
            return list(present)
        plain = [position for position in present if position not in self._inputs]
        has = {*present}
        return sorted([*plain, *[at for at, read in self._inputs.items() if has.issuperset(read or (at,))]])

    def _used(self, assigned: Sequence[int]) -> tuple[int, ...]:
        """Return the wire positions whose values the columns to assign are made of."""
        if not self._inputs:
            return tuple(assigned)
        return tuple(sorted({one for position in assigned for one in self._inputs.get(position, (position,))}))

    def _replaced(self, position: int, values: Sequence[str]) -> str:
        # To the base type, as any value: the assignment checks the length.
        one = self.plan.replaced[position]
        return f"{one.of(values)}::{one.base_sql}"

    def _element(self, position: int) -> str:
        if position in self._inputs:
            return self._replaced(position, [f"v.c{one}" for one in self._inputs[position]])
        return f"v.c{position}::{self._column(position).type_sql}"

    def _rows(self, positions: Sequence[int], old_positions: Sequence[int] = ()) -> str:
        """Return the arrays of new and then of old values as rows in step: `v.c3` is new, `v.o3` is old.

        They advance together in the select list, without the tuplestore that a function in FROM fills. That spares the
        target a quarter of updates of 45 columns, a tenth of 10, nothing of two. (Manual, "SQL Functions Returning
        Sets".)
        """
        arrays = [*self._arrays(positions), *self._arrays(old_positions, first=len(positions) + 1)]
        names = [*[f"c{position}" for position in positions], *[f"o{position}" for position in old_positions]]
        columns = [f"unnest({array}) AS {name}" for array, name in zip(arrays, names, strict=True)]
        return f"(SELECT {', '.join(columns)}) AS v"

    def _arrays(self, positions: Sequence[int], first: int = 1) -> list[str]:
        return [
            f"${number}::{self._column(position).type_sql if position in self._binary else 'text'}[]"
            for number, position in enumerate(positions, first)
        ]

    def _type_oids(self, positions: Sequence[int]) -> tuple[int, ...]:
        return tuple(
            [self._column(position).base_type_oid if position in self._binary else _TEXT_OID for position in positions]
        )

    def _joined(self, positions: Sequence[int]) -> str:
        return " AND ".join(column_equals(self._column(position), f"v.c{position}") for position in positions)

    def _found_row(self, first: int) -> tuple[str, tuple[int, ...]]:
        """Return the condition for one old row, its parameters numbered from `first`, and their wire positions."""
        keys = self.plan.key_positions
        if not self.plan.is_full:
            return key_condition([self._column(position) for position in keys], first) + self._mine, keys
        # ctid and not the columns themselves: one change, one row, whatever twins there are. tableoid as well where
        # the table has several files, since a ctid is unique in one file only.
        row_id = "tableoid, ctid" if self.plan.facts.is_partitioned else "ctid"
        columns = self.plan.columns
        any_row = f"SELECT {row_id} FROM {self._only} AS t WHERE {row_condition(columns, first)}{self._mine}"
        is_same = same_text(columns, first)
        # Of twins one that a prepared transaction has changed must not be waited for: its outcome may be waiting for
        # this change. Where every one is locked, the session that has it is waited for.
        free = "LIMIT 1 FOR UPDATE SKIP LOCKED"
        # Of equal rows the one that looks the same, if there is one: an Append asks its parts in their order.
        choices = [f"SELECT * FROM ({any_row} AND {is_same} {free}) AS same"] if is_same else []
        if self.plan.checks_origin:
            # Of a local client's row and an equal one of the publisher's the latter is meant.
            ours = f"{any_row} AND NOT coalesce(({self._is_foreign('t.xmin')}), false)"
            own = [f"SELECT * FROM ({ours} AND {is_same} {free}) AS own_same"] if is_same else []
            choices = [*own, f"SELECT * FROM ({ours} {free}) AS own", *choices]
        choices += [f"SELECT * FROM ({any_row} {free}) AS free", f"({any_row} LIMIT 1)"]
        one_row = " UNION ALL ".join(choices)
        return f"({row_id}) = ({one_row} LIMIT 1)", tuple(range(len(columns)))


def emptying(
    tables: Sequence[tuple[TableFacts, tuple[Constant, ...]]], *, restart_identity: bool, is_partial: bool = False
) -> list[Sql]:
    """Return the statements of a TRUNCATE of the publisher.

    Args:
        tables: of it, with the constants of the rows that are meant.
        restart_identity: the publisher restarted the sequences that the tables own.
        is_partial: the publisher emptied more tables with it.
    """
    if is_partial or any(constants for _, constants in tables):
        # A table that keeps rows may refer to these, and PostgreSQL then refuses TRUNCATE.
        return [delete_all(*tables[at]) for at in children_first([facts for facts, _ in tables])]
    return [truncate([facts for facts, _ in tables], restart_identity=restart_identity)]


def truncate(tables: Sequence[TableFacts], *, restart_identity: bool) -> Sql:
    """Return one TRUNCATE of all tables of a message, as foreign keys between them would refuse several (trap T-26).

    Never CASCADE, as in the built-in subscription: the publisher already listed what its own cascade emptied, and
    tables that only the target has must not be emptied.

    Args:
        tables: at least one; two published relations may stand for the same one.
        restart_identity: the publisher restarted the sequences that the tables own.
    """
    targets = [table_name(facts) if facts.is_partitioned else f"ONLY {table_name(facts)}" for facts in tables]
    identity = "RESTART" if restart_identity else "CONTINUE"
    return _sql(f"TRUNCATE TABLE {', '.join(dict.fromkeys(targets))} {identity} IDENTITY RESTRICT", ())


def delete_all(facts: TableFacts, constants: Sequence[Constant] = ()) -> Sql:
    """Return a DELETE of every row with the constants, without the rows of tables that inherit from the table."""
    table = table_name(facts) if facts.is_partitioned else f"ONLY {table_name(facts)}"
    own = f" WHERE {constants_hold(constants)}" if constants else ""
    return _sql(f"DELETE FROM {table} AS t{own}", ())


@cache
def acting_code(role: str, *, is_partitioned: bool) -> Sql:
    """Return the statement whose rows are triggers and rules that act on tables, and tables replaced, as a set form.

    Its parameters are a binary oid[] of the tables as they were planned, a binary text[] of the names by which
    statements have written to them, and a binary text[] of the versions of their row triggers, as planned. Run by a
    transaction that has done so it is final until the end of that transaction, because to enable a trigger, or to give
    the name to another table, waits for its locks, and a function that is replaced later has not run. It locks none of
    the tables itself: another session may hold a partition that nothing was written to.

    Args:
        role: session_replication_role of the session.
        is_partitioned: some of the tables are partitioned; row triggers of their partitions also count then.
    """
    enabled = f"IN ('A', '{'R' if role == 'replica' else 'O'}')"
    # Several arguments are special syntax that a schema-qualified name would lose; the session's search_path
    # is pinned.
    text = (
        "SELECT 1 FROM pg_catalog.pg_trigger AS t WHERE t.tgrelid = ANY ($1::oid[]) AND NOT t.tgisinternal"
        f" AND t.tgenabled {enabled} AND {TRIGGER_VERSION} <> ALL ($3::text[])"
        " UNION ALL SELECT 1 FROM pg_catalog.pg_rewrite AS r"
        f" WHERE r.ev_class = ANY ($1::oid[]) AND r.rulename <> '_RETURN' AND r.ev_enabled {enabled}"
        " UNION ALL SELECT 1 FROM unnest($1::oid[], $2::text[]) AS named (oid, name)"
        " WHERE pg_catalog.to_regclass(named.name) IS DISTINCT FROM named.oid"
    )
    if is_partitioned:
        # Of the few tables with such triggers, not of all, it is asked whether they are partitions: children by plain
        # inheritance are not written to.
        text = (
            "WITH RECURSIVE tree (relid) AS (SELECT pg_catalog.unnest($1::oid[]) UNION ALL"
            " SELECT i.inhrelid FROM tree JOIN pg_catalog.pg_inherits AS i ON i.inhparent = tree.relid)"
            f" {text} UNION ALL SELECT 1 FROM tree JOIN pg_catalog.pg_trigger AS t ON t.tgrelid = tree.relid"
            " JOIN pg_catalog.pg_class AS c ON c.oid = t.tgrelid AND c.relispartition"
            f" WHERE NOT t.tgisinternal AND t.tgtype & 1 = 1 AND t.tgenabled {enabled}"
        )
    return sql_set(text, n_parameters=3)


@lru_cache
def _numbered(n_rows: int, n_columns: int, more: tuple[str, ...]) -> tuple[bytes, tuple[int, ...]]:
    """Return rows of numbered parameters, each with more values behind them, and the positions of the parameters."""
    numbers = [range(at, at + n_columns) for at in range(1, n_rows * n_columns + 1, n_columns)]
    text = ", ".join([f"({', '.join([*[f'${number}' for number in each], *more])})" for each in numbers])
    return text.encode("utf-8", "surrogateescape"), (*range(n_columns),) * n_rows


@cache
def inserting_code() -> Sql:
    """Return the statement whose rows are triggers and rules that act on inserts under either role, as a set form.

    Its parameters are a binary oid[] of tables and a binary text[] of the versions of their `references`, as planned.
    It is final as `acting_code` is.
    """
    return sql_set(
        f"SELECT 1 FROM pg_catalog.pg_trigger AS t WHERE t.tgrelid = ANY ($1::oid[]) AND {INSERTING}"
        f" AND {REFERENCE_VERSION} <> ALL ($2::text[])"
        " UNION ALL SELECT 1 FROM pg_catalog.pg_rewrite AS r WHERE r.ev_class = ANY ($1::oid[])",
        n_parameters=2,
    )


def lock_table(facts: TableFacts) -> Sql:
    """Return the statement that takes the lock of a change, so that no trigger, rule or constraint comes later."""
    only = "" if facts.is_partitioned else "ONLY "
    return _sql(f"LOCK TABLE {only}{table_name(facts)} IN ROW EXCLUSIVE MODE", (), type_oids=())


def counted(prepared: Sql) -> Sql:
    """Return a statement that fails unless it finds as many rows as its last parameter, an int8, says.

    COMMIT can be sent behind it without waiting for its answer, because in a pipeline nothing runs behind an error. It
    fails with 22012 (division by zero), like a division of the user's; and costs a few tenths of a microsecond a row.
    (PostgreSQL manual, "Data-Modifying Statements in WITH".)

    Args:
        prepared: a set form, or a row form other than TRUNCATE; a table with rules refuses it (0A000).
    """
    assert prepared.name, "sessions keep what is made of it by its name"
    # A SELECT stands where nothing can be set; its rows are those found.
    returning = b"" if prepared.text.startswith((b"SELECT ", b"WITH ")) else b" RETURNING 1"
    number = prepared.n_parameters + 1
    text = b"WITH done AS (%s%s) SELECT 1 / (pg_catalog.count(*) = $%d::pg_catalog.int8)::pg_catalog.int4 FROM done" % (
        prepared.text,
        returning,
        number,
    )
    return prepared._replace(name=b"c" + prepared.name[1:], text=text, n_parameters=number)


def sql_set(text: str, *, n_parameters: int = 1) -> Sql:
    """Return a set form that is made of no columns of a table."""
    return _sql(text, tuple(range(n_parameters)), type_oids=())


def _sql(
    text: str, positions: Sequence[int], old_positions: Sequence[int] = (), *, type_oids: tuple[int, ...] | None = None
) -> Sql:
    # A publisher in SQL_ASCII may name columns in bytes that are no UTF-8 (trap T-61); they go back as they came.
    encoded = text.encode("utf-8", "surrogateescape")
    name = b"p" + blake2b(encoded, digest_size=16).hexdigest().encode()
    return Sql(
        name=name,
        text=encoded,
        n_parameters=len(positions) + len(old_positions),
        is_set=type_oids is not None,
        positions=tuple(positions),
        old_positions=tuple(old_positions),
        type_oids=type_oids or (),
    )


#: Foreign keys that change rows of other tables than $2 when rows of the tables $1 are deleted. Both are a text[] of
#: names as SQL takes them.
ACTING_KEYS: Final = (
    "SELECT DISTINCT k.conname || ' of ' || k.conrelid::regclass FROM unnest($1::text[]) AS w(name)"
    " CROSS JOIN LATERAL (SELECT w.name::regclass UNION"
    " SELECT p.relid FROM pg_catalog.pg_partition_tree(w.name::regclass) AS p) AS m(oid)"
    " JOIN pg_catalog.pg_constraint AS k ON k.contype = 'f' AND k.confrelid = m.oid"
    " AND k.confdeltype IN ('c', 'n', 'd')"
    " JOIN pg_catalog.pg_trigger AS t ON t.tgconstraint = k.oid AND t.tgrelid = k.confrelid"
    " AND t.tgenabled IN ('A',"
    " CASE pg_catalog.current_setting('session_replication_role') WHEN 'replica' THEN 'R' ELSE 'O' END)"
    " WHERE NOT EXISTS (SELECT FROM unnest($2::text[]::regclass[]) AS b(oid) WHERE b.oid = k.conrelid"
    " OR k.conrelid IN (SELECT p.relid FROM pg_catalog.pg_partition_tree(b.oid) AS p)) ORDER BY 1"
)
NO_ACTING_KEYS = sql_set(ACTING_KEYS, n_parameters=2)

#: Around a TRUNCATE: deferred checks of earlier changes are made at once, checks of later changes are deferred again.
CHECK_NOW = _sql("SET CONSTRAINTS ALL IMMEDIATE", ())
CHECK_LATER = _sql("SET CONSTRAINTS ALL DEFERRED", ())

#: Behind `lock_table`: fails if the table has code of an owner who may not become the role that applies. Its parameters
#: are schema, table and a binary text[] of the columns that are sent.
NO_FOREIGN_CODE = sql_set(GUARD_SQL, n_parameters=3)

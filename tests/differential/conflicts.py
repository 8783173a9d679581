"""Random conflicts on random trees of partitions: what a policy leaves must equal a model that follows it row by row.

In go a seed and servers; out comes nothing, or an AssertionError that says which rows or conflicts differ. The target
has rows and unique indexes that the publisher does not have: of the root, of partitions that are partitioned
themselves, and of leaves, where indexes of one name stand in several schemas. The model asks PostgreSQL which
partitions a row belongs to, and knows each index by what it has drawn. The built-in subscription has no policies.

Every transaction is one change, and is not merged with others: of several the net change may meet no row where a
change by itself does.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from psycopg import sql

from tests.differential.case import Applier, Servers, new_database
from tests.differential.compare import check_equal
from tests.differential.exotic import SCHEMAS
from tests.differential.trees import Tree, random_tree
from tests.fixtures.fan import make_slot
from tests.fixtures.plain import FAST
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psycopg

    from tests.fixtures.databases import Database

    Row = tuple[object, ...]

_COLUMNS = ("k", "region", "day", "u", "w", "v")
_KEY = _COLUMNS[:3]
_TABLE = "CREATE TABLE t (k int, region text, day int, u int, w int, v text, PRIMARY KEY (k, region, day))"
_REGIONS = ("north", "south", "east")
_LOCAL_ROWS = 60
_CHANGES = 100


@dataclass(frozen=True, kw_only=True)
class _Index:
    """A unique index of the target: of this table, which may be a partition."""

    table: str
    columns: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ConflictCase:
    """A drawn case.

    Attributes:
        tree: of the target; the publisher's table is plain.
        indexes: every unique index of the target, the primary key's first.
        index_sql: makes all but that one.
        policies: by conflict type.
        workers: of the daemon.
    """

    seed: int
    tree: Tree
    indexes: Sequence[_Index]
    index_sql: Sequence[str]
    policies: dict[str, str]
    workers: int

    def __str__(self) -> str:
        """Return it for people."""
        target = "; ".join((f"PARTITION BY {self.tree.by}", *self.tree.statements, *self.index_sql))
        return f"conflicts of seed {self.seed}: {self.workers} workers, {self.policies}; target: {target}"


def draw_conflicts(seed: int) -> ConflictCase:
    """Return the case of a seed."""
    chooser = random.Random(f"conflicts {seed}")
    tree = random_tree("t", chooser)
    indexes, made = [_Index(table="t", columns=_KEY)], []
    for name, tables in (("leaf", tree.leaves), ("middle", tree.middles)):
        for table in tables:
            if chooser.random() < 0.3:
                continue
            columns = chooser.choice((("u",), ("u",), ("w",), ("u", "w")))
            # The index of a partition that is partitioned itself holds what divides it.
            every = tuple(dict.fromkeys((*columns, *((tree.divided_by[table],) if name == "middle" else ()))))
            number = table.rpartition("_")[2] if name == "leaf" else ""
            made.append(f"CREATE UNIQUE INDEX own_{name}_{number} ON {table} ({', '.join(every)})")
            indexes.append(_Index(table=table, columns=every))
    exists = chooser.choice(("skip", "apply_remote", "keep_local", "apply_remote"))
    policies = {
        "insert_exists": exists,
        "update_exists": chooser.choice(("skip", "apply_remote")),
        "multiple_unique_conflicts": chooser.choice(("skip", "apply_remote", exists)),
        "update_missing": chooser.choice(("skip", "apply_remote")),
        "delete_missing": "skip",
    }
    return ConflictCase(
        seed=seed, tree=tree, indexes=indexes, index_sql=made, policies=policies, workers=chooser.choice((1, 8))
    )  # fmt: skip


def run_conflicts(case: ConflictCase, servers: Servers) -> Counter[str]:
    """Run a case to its end and compare rows and history with the model's.

    Returns:
        how many conflicts of each type were met.

    Raises:
        AssertionError: the daemon failed, or left something else than the model; a note names the case.
    """
    with ExitStack() as stack:
        try:
            return _run(case, servers, stack)
        except BaseException as error:
            error.add_note(str(case))
            raise


def _run(case: ConflictCase, servers: Servers, stack: ExitStack) -> Counter[str]:
    chooser = random.Random(f"changes {case.seed}")
    source = new_database(servers.source, "source", stack)
    target, twin = (new_database(servers.target, role, stack) for role in ("target", "twin"))
    source.execute(f"{_TABLE}; CREATE PUBLICATION pub FOR TABLE t")
    made = [
        *(f"CREATE SCHEMA {schema}" for schema in SCHEMAS),
        f"{_TABLE} PARTITION BY {case.tree.by}",
        *case.tree.statements,
        *case.index_sql,
    ]
    rows = ", ".join(_values(_row(chooser)) for _ in range(_LOCAL_ROWS))
    for database in (target, twin):
        database.execute("; ".join([*made, f"INSERT INTO t VALUES {rows} ON CONFLICT DO NOTHING"]))
    settings: dict[str, str | float] = {
        **FAST, "apply.max_batch_transactions": 1, "apply.workers": case.workers,
        **{f"conflict.{name}": policy for name, policy in case.policies.items()},
    }  # fmt: skip
    applier = Applier(Route(source=source, target=target, settings=settings), ())
    make_slot(applier.route)
    stack.callback(applier.end)
    applier.start()
    with source.connect() as publisher, twin.connect() as connection:
        model = _Model(connection, case)
        for _ in range(_CHANGES):
            _change(publisher, model, chooser)
    applier.catch_up()
    _check(target, twin, model)
    return model.found


def _check(target: Database, twin: Database, model: _Model) -> None:
    query = "SELECT t::text FROM t"
    check_equal(twin.rows(query), target.rows(query), "t of the model and on the target")
    history = target.rows("SELECT conflict_type, outcome FROM parapply.conflicts")
    found = Counter(f"{kind} {outcome}" for kind, outcome in history)
    assert found == model.found, f"conflicts of the model {model.found} and in the history {found}"


def _row(chooser: random.Random) -> Row:
    """Return a row: few keys, and fewer unique values, so that most rows meet others."""
    return (
        chooser.randrange(12), chooser.choice(_REGIONS), chooser.choice((5, 15, 25)), chooser.randrange(15),
        chooser.randrange(15), chooser.choice("abc"),
    )  # fmt: skip


def _values(row: Row) -> str:
    return f"({sql.SQL(', ').join(map(sql.Literal, row)).as_string(None)})"


def _change(publisher: psycopg.Connection, model: _Model, chooser: random.Random) -> None:
    """Make one change on the publisher, and the same on the model if there was one."""
    kind = chooser.choice(("insert", "insert", "insert", "update", "update", "move", "delete"))
    row = _row(chooser)
    if kind == "insert":
        text = f"INSERT INTO t VALUES {_values(row)} ON CONFLICT DO NOTHING RETURNING t.*"
        for inserted in publisher.execute(text.encode()):
            model.insert(inserted)
        return
    chosen = publisher.execute(f"SELECT * FROM t ORDER BY md5(t::text || '{chooser.random()}') LIMIT 1".encode())
    old = chosen.fetchone()
    if old is None:
        return
    where = _is_row(_KEY, old)
    if kind == "delete":
        publisher.execute(f"DELETE FROM t WHERE {where}".encode())
        model.delete(old)
        return
    new = row if kind == "move" else (*old[:3], *row[3:])
    if kind == "move" and publisher.execute(f"SELECT 1 FROM t WHERE {_is_row(_KEY, new)}".encode()).fetchone():
        return
    names = ", ".join(_COLUMNS)
    publisher.execute(f"UPDATE t SET ({names}) = ROW{_values(new)} WHERE {where}".encode())
    model.update(old, new)


def _is_row(columns: Sequence[str], row: Row) -> str:
    named = dict(zip(_COLUMNS, row, strict=True))
    return " AND ".join(f"{column} = {sql.Literal(named[column]).as_string(None)}" for column in columns)


class _Model:
    """Follows the policies on a twin of the target.

    Attributes:
        found: conflicts so far, by type and outcome.
    """

    def __init__(self, connection: psycopg.Connection, case: ConflictCase) -> None:
        self.found: Counter[str] = Counter()
        self._outcome = ""  # of the latest conflict
        self._connection = connection
        self._indexes = case.indexes
        self._policies = case.policies
        self._bounds = {index.table: self._bounds_of(index.table) for index in case.indexes}

    def insert(self, new: Row) -> bool:
        """Insert a row if the policies say so; return whether they did."""
        if not self._makes_room(new, "insert_exists", None):
            return False
        self._connection.execute(f"INSERT INTO t VALUES {_values(new)}".encode())
        return True

    def update(self, old: Row, new: Row) -> None:
        """Update a row, or insert it, or leave it."""
        if not self._rows("t", _is_row(_KEY, old)):
            if self._applies("update_missing") and not self.insert(new):
                # The first policy's effect on the change was undone, and its record says what became of the change.
                self.found["update_missing applied_remote"] -= 1
                self.found[f"update_missing {self._outcome}"] += 1
            return
        if self._makes_room(new, "update_exists", old):
            names = ", ".join(_COLUMNS)
            self._connection.execute(
                f"UPDATE t SET ({names}) = ROW{_values(new)} WHERE {_is_row(_KEY, old)}".encode()
            )  # fmt: skip

    def delete(self, old: Row) -> None:
        """Delete a row, or leave it."""
        where = _is_row(_KEY, old)
        if self._rows("t", where):
            self._connection.execute(f"DELETE FROM t WHERE {where}".encode())
        else:
            self._applies("delete_missing")

    def _makes_room(self, new: Row, kind: str, old: Row | None) -> bool:
        """Delete what is in the way if the policy says so; say whether the change is to be made."""
        own = f" AND NOT ({_is_row(_KEY, old)})" if old else ""
        ways = []
        for index in self._indexes:
            where = _is_row(index.columns, new) + own
            if self._belongs(new, index.table) and self._rows(index.table, where):
                ways.append((index.table, where))
        if not ways:
            return True
        if not self._applies("multiple_unique_conflicts" if len(ways) > 1 else kind):
            return False
        for table, where in ways:
            self._connection.execute(f"DELETE FROM {table} WHERE {where}".encode())
        return True

    def _applies(self, kind: str) -> bool:
        """Note a conflict, and say whether its policy lets the publisher win."""
        policy = self._policies[kind]
        self._outcome = {"skip": "skipped", "keep_local": "kept_local", "apply_remote": "applied_remote"}[policy]
        self.found[f"{kind} {self._outcome}"] += 1
        return policy == "apply_remote"

    def _rows(self, table: str, where: str) -> list[Row]:
        return self._connection.execute(f"SELECT FROM {table} WHERE {where}".encode()).fetchall()

    def _bounds_of(self, table: str) -> str:
        query = "SELECT pg_get_partition_constraintdef(%s::regclass)"
        row = self._connection.execute(query, [table]).fetchone()
        return str(row[0]) if row and row[0] else "true"

    def _belongs(self, new: Row, table: str) -> bool:
        names = ", ".join(_COLUMNS)
        query = f"SELECT {self._bounds[table]} FROM (VALUES {_values(new)}) AS t ({names})"
        row = self._connection.execute(query.encode()).fetchone()
        return bool(row and row[0])

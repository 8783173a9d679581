"""The floor of the target's part: the backlog's net changes as one DELETE, one UPDATE and one INSERT a table.

In go a stage with a backlog; out come a template database that holds the net changes in tables of its own, made once
and not measured, and the seconds that one session needs to apply them. Exact for tables with a primary key; a table
without one may only have got new rows.

Source: PostgreSQL manual, "UPDATE", "COPY", "pg_index".
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import sql

from parapply.demo.errors import DemoError
from parapply.demo.race import drop_target, make_target, write_checkpoints
from parapply.demo.stage import BANK, PUBLICATION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.observe import Observer
    from bench.options import Sync
    from parapply.demo.stage import Stage

#: Database on the subscriber: the tables as they were before the backlog, and what changed.
TEMPLATE: Final = "bulk_template"

# Not in a schema that the publication or the comparison covers.
_SCHEMA: Final = "bulk"
_TABLES = "SELECT schemaname, tablename FROM pg_publication_tables WHERE pubname = %s ORDER BY 1, 2"
# Columns in their order, and whether each belongs to the primary key.
_COLUMNS = """
    SELECT a.attname, coalesce(a.attnum = ANY (i.indkey), false)
    FROM pg_attribute a LEFT JOIN pg_index i ON i.indrelid = a.attrelid AND i.indisprimary
    WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
    ORDER BY a.attnum
"""


@dataclass(frozen=True, kw_only=True)
class _Table:
    """One table, and where its net changes lie.

    Attributes:
        name: schema and table.
        number: names the three tables of its changes.
        key: columns of the primary key; empty without one.
        others: all other columns.
        columns: all, in their order.
    """

    name: tuple[str, str]
    number: int
    key: tuple[str, ...]
    others: tuple[str, ...]
    columns: tuple[str, ...]

    def changes(self, kind: str) -> sql.Identifier:
        """Return the table with the rows to insert, update or delete, or `after`: all rows of the publisher."""
        return sql.Identifier(_SCHEMA, f"{kind}_{self.number}")


def make_template(stage: Stage) -> None:
    """Make the database `TEMPLATE` from the tables as they are on both servers now.

    Raises:
        DemoError: a table without a primary key has lost or changed rows, or a server failed.
    """
    make_target(stage, TEMPLATE)
    try:
        with (
            psycopg.connect(stage.source.dsn(BANK)) as source,
            psycopg.connect(stage.target.dsn(TEMPLATE), autocommit=True) as target,
        ):
            target.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(_SCHEMA)))
            for table in _tables(source):
                _copy(source, target, table)
                _find_changes(target, table)
    except psycopg.Error as error:
        raise DemoError(f"The net changes could not be made: {error}", sqlstate=error.sqlstate or "") from error


def drop_template(stage: Stage) -> None:
    """Drop the database `TEMPLATE`."""
    drop_target(stage, TEMPLATE)


def apply_changes(stage: Stage, dbname: str, sync: Sync, observer: Observer) -> float:
    """Apply the net changes in one transaction and return the seconds; drop them then.

    Args:
        stage: the servers.
        dbname: database on the subscriber, a copy of `TEMPLATE`.
        sync: synchronous_commit of the session.
        observer: watches the session in the meantime.

    Raises:
        DemoError: the server failed.
    """
    with psycopg.connect(stage.source.dsn(BANK)) as source:
        tables = _tables(source)
    write_checkpoints(stage)
    try:
        with psycopg.connect(stage.target.dsn(dbname), autocommit=True) as target:
            target.execute(sql.SQL("SET synchronous_commit = {}").format(sql.Literal(sync)))
            # As the daemon does it by default; and all the CPU is this session's.
            target.execute("SET session_replication_role = replica; SET max_parallel_workers_per_gather = 0")
            observer.add("target", target.info.backend_pid)
            observer.begin()
            started_s = time.monotonic()
            with target.transaction():
                for table in tables:
                    for statement in _statements(table):
                        target.execute(statement)
            total_s = time.monotonic() - started_s
            observer.look(None, is_over=True)
            target.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(_SCHEMA)))
    except psycopg.Error as error:
        raise DemoError(f"The bulk statements failed: {error}", sqlstate=error.sqlstate or "") from error
    return total_s


def _tables(source: psycopg.Connection) -> list[_Table]:
    found = []
    for number, (schema, table) in enumerate(source.execute(_TABLES, [PUBLICATION]).fetchall()):
        columns = source.execute(_COLUMNS, [sql.Identifier(schema, table).as_string(source)]).fetchall()
        found.append(
            _Table(
                name=(schema, table),
                number=number,
                key=tuple(name for name, is_key in columns if is_key),
                others=tuple(name for name, is_key in columns if not is_key),
                columns=tuple(name for name, _ in columns),
            )
        )
    return found


def _copy(source: psycopg.Connection, target: psycopg.Connection, table: _Table) -> None:
    """Copy the publisher's rows to the subscriber, next to the table."""
    create = sql.SQL("CREATE UNLOGGED TABLE {} (LIKE {})")
    target.execute(create.format(table.changes("after"), sql.Identifier(*table.name)))
    names = _names(table.columns)
    read = sql.SQL("COPY {} ({}) TO STDOUT (FORMAT binary)").format(sql.Identifier(*table.name), names)
    write = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT binary)").format(table.changes("after"), names)
    with source.cursor().copy(read) as rows, target.cursor().copy(write) as sink:
        for data in rows:
            sink.write(data)


def _find_changes(target: psycopg.Connection, table: _Table) -> None:
    """Make the tables of rows to insert, update and delete, and drop the copy."""
    before, after = sql.Identifier(*table.name), table.changes("after")
    if table.key:
        queries = {
            "insert": "SELECT a.* FROM {after} a WHERE NOT EXISTS (SELECT FROM {before} b WHERE {same})",
            "update": "SELECT a.* FROM {after} a JOIN {before} b ON {same} WHERE a IS DISTINCT FROM b",
            "delete": "SELECT {key} FROM {before} b WHERE NOT EXISTS (SELECT FROM {after} a WHERE {same})",
        }
    else:
        queries = {"insert": "SELECT * FROM {after} EXCEPT ALL SELECT * FROM {before}"}
        lost = sql.SQL("SELECT EXISTS (TABLE {} EXCEPT ALL TABLE {})").format(before, after)
        if target.execute(lost).fetchone() != (False,):
            raise DemoError(f"{'.'.join(table.name)} has no primary key and lost rows: no bulk statement does that.")
    for kind, query in queries.items():
        # Unlogged: writing them to a copy of the template is not measured either.
        create = "CREATE UNLOGGED TABLE {changes} AS " + query
        target.execute(
            sql.SQL(create).format(
                changes=table.changes(kind), before=before, after=after, same=_same(table), key=_names(table.key, "b")
            )
        )
        target.execute(sql.SQL("ANALYZE {}").format(table.changes(kind)))
    target.execute(sql.SQL("DROP TABLE {}").format(after))


def _statements(table: _Table) -> list[sql.Composed]:
    """Return what applies the changes; values that a delete or an update frees are free for the insert."""
    name = sql.Identifier(*table.name)
    insert = sql.SQL("INSERT INTO {} ({names}) SELECT {names} FROM {}").format(
        name, table.changes("insert"), names=_names(table.columns)
    )
    if not table.key:
        return [insert]
    delete = sql.SQL("DELETE FROM {} a USING {} b WHERE {}").format(name, table.changes("delete"), _same(table))
    if not table.others:
        return [delete, insert]
    values = sql.SQL(", ").join(
        sql.SQL("{name} = b.{name}").format(name=sql.Identifier(column)) for column in table.others
    )
    update = sql.SQL("UPDATE {} a SET {} FROM {} b WHERE {}").format(
        name, values, table.changes("update"), _same(table)
    )
    return [delete, update, insert]


def _same(table: _Table) -> sql.Composed:
    """Return the condition that rows `a` and `b` have the same key; all rows for a table without one."""
    equal = [sql.SQL("a.{name} = b.{name}").format(name=sql.Identifier(column)) for column in table.key]
    return sql.SQL(" AND ").join(equal)


def _names(columns: Sequence[str], prefix: str = "") -> sql.Composed:
    return sql.SQL(", ").join(sql.Identifier(*filter(None, (prefix, column))) for column in columns)

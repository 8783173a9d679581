"""The target's tables before and after their rows come: do they fit, are they empty, which indexes wait.

In: a control session, published tables. Out: answers, and statements run.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
import psycopg
from psycopg import sql

from parapply.amounts import few
from parapply.errors import TargetRefused
from parapply.state_mark import STATE_SCHEMAS_SQL
from parapply.target.catalogue.facts import look_for_foreign_code, own_table
from parapply.target.session.settings import rows, target_errors
from parapply.target.sql.own_rows import own_rows
from parapply.target.sql.statements import ACTING_KEYS
from parapply.target.state import indexes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.config import TargetConfig
    from parapply.copy.published import PublishedTable
    from parapply.plan.copy_starts import Name
    from parapply.target.session.settings import Connection


#: Tables queried in one statement: each is a lock until it ends.
_AT_ONCE = 64


async def check_columns(conn: Connection, tables: Sequence[PublishedTable], *, may_be_made: bool = False) -> None:
    """Refuse tables and columns that the target does not have, all in one message, and tables of parapply's own state.

    Raises:
        TargetRefused: something is missing, or generated on the target, or holds parapply's own progress.
    """
    own = sql.SQL("SELECT schema_name FROM {} AS own").format(sql.SQL(STATE_SCHEMAS_SQL))
    with target_errors("looking for parapply's own tables"):
        schemas = {str(schema) for (schema,) in await rows(conn, own)}
    if meeting := [table.text for table in tables if table.schema in schemas]:
        raise own_table(meeting)
    query = sql.SQL(
        "SELECT pg_catalog.to_regclass(w.quoted) IS NOT NULL,"
        " ARRAY(SELECT a.attname::text FROM pg_catalog.pg_attribute AS a WHERE a.attrelid = c.oid AND a.attnum > 0"
        " AND NOT a.attisdropped), ARRAY(SELECT a.attname::text FROM pg_catalog.pg_attribute AS a"
        " WHERE a.attrelid = c.oid AND a.attgenerated <> '' AND NOT a.attisdropped)"
        " FROM unnest($1::text[], $2::text[], $3::text[]) WITH ORDINALITY AS w(schema_name, table_name, quoted, n)"
        " LEFT JOIN (pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace)"
        " ON n.nspname = w.schema_name AND c.relname = w.table_name AND c.relkind IN ('r', 'p') ORDER BY w.n"
    )
    with target_errors("looking for the published tables"):
        found = await rows(conn, query, [*_names(tables), [_quoted(table) for table in tables]])
    problems = []
    for table, (is_there, columns, all_generated) in zip(tables, found, strict=True):
        if not is_there:
            problems.append(f"table {table.text} is missing")
            continue
        if missing := [column for column in table.filled if column not in columns]:
            problems.append(f"table {table.text} lacks {', '.join(missing)}")
        if generated := [column for column in table.filled if column in all_generated]:
            problems.append(f"table {table.text} generates {', '.join(generated)}, which the publisher sends")
    if problems:
        other = ", or give --schema to bring it over" if may_be_made else ""
        raise TargetRefused(f"target: {'; '.join(problems)}", hint=f"create what is missing{other}")


async def column_types(conn: Connection, tables: Sequence[PublishedTable]) -> dict[tuple[str, str], dict[str, int]]:
    """Return the OIDs of the types of each table's columns, by schema and name."""
    query = sql.SQL(
        "SELECT n.nspname, c.relname, a.attname, a.atttypid::bigint"
        " FROM unnest($1::text[], $2::text[]) AS w(schema_name, table_name)"
        " JOIN pg_catalog.pg_namespace AS n ON n.nspname = w.schema_name"
        " JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = w.table_name"
        " JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped"
    )
    with target_errors("reading the columns' types"):
        found = await rows(conn, query, _names(tables))
    types: dict[tuple[str, str], dict[str, int]] = {table.full_name: {} for table in tables}
    for schema, name, column, type_oid in found:
        types[schema, name][column] = type_oid
    return types


async def shapes(conn: Connection, tables: Sequence[PublishedTable]) -> dict[Name, str]:
    """Return the facts that decide the rows of a copy in each table: names and types of its columns, and defaults."""
    query = sql.SQL(
        "SELECT n.nspname, c.relname, pg_catalog.md5(pg_catalog.string_agg(pg_catalog.concat_ws(':', a.attnum,"
        " pg_catalog.quote_ident(a.attname), a.atttypid, a.atttypmod, a.attgenerated, a.attidentity,"
        " pg_catalog.pg_get_expr(d.adbin, d.adrelid)), ',' ORDER BY a.attnum))"
        " FROM unnest($1::text[], $2::text[]) AS w(schema_name, table_name)"
        " JOIN pg_catalog.pg_namespace AS n ON n.nspname = w.schema_name"
        " JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = w.table_name"
        " LEFT JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped"
        " LEFT JOIN pg_catalog.pg_attrdef AS d ON d.adrelid = c.oid AND d.adnum = a.attnum GROUP BY 1, 2"
    )
    with target_errors("reading the columns"):
        # Several sources may lead to one table.
        once = list({table.full_name: table for table in tables}.values())
        return {(schema, name): text or "" for schema, name, text in await rows(conn, query, _names(once))}


def _names(tables: Sequence[PublishedTable]) -> list[list[str]]:
    return [[table.schema for table in tables], [table.name for table in tables]]


def _quoted(table: PublishedTable) -> str:
    return sql.Identifier(table.schema, table.name).as_string(None)


async def alone(conn: Connection, names: Sequence[Name]) -> dict[Name, sql.Composed]:
    """Return the expression for each table without its children in a statement, because their rows are not its own."""
    query = sql.SQL(
        "SELECT w.schema_name, w.table_name, EXISTS (SELECT FROM pg_catalog.pg_class AS c"
        " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
        " WHERE n.nspname = w.schema_name AND c.relname = w.table_name AND c.relkind = 'p')"
        " FROM unnest($1::text[], $2::text[]) AS w(schema_name, table_name)"
    )
    with target_errors("looking for partitioned tables"):
        found = await rows(conn, query, [[schema for schema, _ in names], [name for _, name in names]])
    return {
        (schema, name): sql.SQL("{}" if is_partitioned else "ONLY {}").format(sql.Identifier(schema, name))
        for schema, name, is_partitioned in found
    }


async def not_empty(conn: Connection, tables: Sequence[PublishedTable], target: TargetConfig) -> list[PublishedTable]:
    """Return the tables that hold rows of their own.

    Raises:
        TargetRefused, TargetLost: they could not be read, or have code that must not run.
    """
    if target.apply_as == "owner":
        # To plan a SELECT runs what is constant in the expressions of indexes and statistics.
        for table in tables:
            await look_for_foreign_code(conn, *table.full_name, table.filled, role=target.session_replication_role)
    full: list[PublishedTable] = []
    relations = await alone(conn, [table.full_name for table in tables])
    for first in range(0, len(tables), _AT_ONCE):
        some = tables[first : first + _AT_ONCE]
        one = sql.SQL("EXISTS (SELECT FROM {}{})")
        query = sql.SQL("SELECT {}").format(
            sql.SQL(", ").join([one.format(relations[t.full_name], own_rows(t.constants)) for t in some])
        )
        with target_errors("looking whether the tables are empty"):
            (answers,) = await rows(conn, query)
        full += [table for table, has_rows in zip(some, answers, strict=True) if has_rows]
    return full


async def empty(conn: Connection, tables: Sequence[PublishedTable], *, also: Sequence[PublishedTable] = ()) -> None:
    """Take all rows out of tables, in one transaction, and none out of others.

    By TRUNCATE, which waits until no session reads them; by DELETE where foreign keys of other tables lead here, and
    where a table also has the rows of other sources. Rows of `also` may go as well.

    Raises:
        TargetRefused: it could not be done, or a foreign key would change rows of another table.
    """
    if not tables:
        return
    # A table that keeps rows of other sources is like any other that may refer to these.
    whole = [table for table in tables if not table.constants]
    relations = await alone(conn, [table.full_name for table in tables])
    single = [(relations[table.full_name], own_rows(table.constants)) for table in tables if table.constants]
    with target_errors("emptying tables"):
        async with conn.transaction():
            held = await _held(conn, [_quoted(table) for table in whole])
            single += [(relations[t.full_name], sql.Composed([])) for t in whole if _quoted(t) in held]
            together = [relations[t.full_name] for t in whole if _quoted(t) not in held]
            if together:
                await rows(conn, sql.SQL("TRUNCATE {}").format(sql.SQL(", ").join(together)))
            emptied = [table.full_name for table in [*whole, *also] if not table.constants]
            if single and (acting := await still_acting(conn, list(relations), but=emptied)):
                raise TargetRefused(
                    f"target: emptying tables would change rows of others by {few(acting)}",
                    hint="GRANT SET ON PARAMETER session_replication_role TO the target's role; or name the tables of"
                    " these foreign keys, too, in the same command",
                )
            for relation, own in single:
                await rows(conn, sql.SQL("DELETE FROM {}{}").format(relation, own))


async def _held(conn: Connection, names: Sequence[str]) -> set[str]:
    """Return the tables that TRUNCATE refuses, although it is given all of the others: foreign keys lead to them."""
    query = sql.SQL(
        "WITH own AS MATERIALIZED (SELECT w.name, m.oid FROM unnest($1::text[]) AS w(name) CROSS JOIN LATERAL"
        " (SELECT w.name::regclass::oid UNION SELECT p.relid FROM pg_catalog.pg_partition_tree(w.name::regclass) AS p)"
        " AS m(oid)) SELECT DISTINCT o.name, r.name FROM own AS o"
        " JOIN pg_catalog.pg_constraint AS k ON k.contype = 'f' AND k.confrelid = o.oid"
        " LEFT JOIN own AS r ON r.oid = k.conrelid WHERE r.name IS DISTINCT FROM o.name"
    )
    leading = [(name, referring) for name, referring in await rows(conn, query, [list(names)])]
    held: set[str] = set()
    # A table of these that is emptied otherwise still leads to the next.
    while more := {name for name, by in leading if by is None or by in held} - held:
        held |= more
    return held


async def still_acting(conn: Connection, names: Sequence[Name], *, but: Sequence[Name] = ()) -> list[str]:
    """Keep foreign keys from acting on other rows when rows are deleted in this transaction; return those that do.

    Under session_replication_role = origin ON DELETE CASCADE, SET NULL and SET DEFAULT would change rows that do not
    come again, because the publisher does not send what is undone here. Foreign keys of `but` do not matter.
    """
    with suppress(psycopg.errors.InsufficientPrivilege):
        async with conn.transaction():
            await rows(conn, sql.SQL("SELECT pg_catalog.set_config('session_replication_role', 'replica', true)"))
    with target_errors("looking for foreign keys that act"):
        quoted = [[sql.Identifier(*name).as_string(None) for name in some] for some in (names, but)]
        return [str(name) for (name,) in await rows(conn, sql.SQL(ACTING_KEYS), quoted)]


async def check_access(
    conn: Connection, tables: Sequence[PublishedTable], *, emptied: Sequence[PublishedTable]
) -> None:
    """Refuse tables into which the role may not copy, or which it may not empty, all of them in one message.

    Raises:
        TargetRefused: a privilege is missing, or row-level security applies, which COPY does not work with.
    """
    query = sql.SQL(
        "SELECT pg_catalog.row_security_active(c.oid), ARRAY(SELECT p.name FROM unnest($3::text[]) AS p(name)"
        " WHERE NOT pg_catalog.has_table_privilege(c.oid, p.name)"
        " AND NOT (p.name = 'INSERT' AND pg_catalog.has_any_column_privilege(c.oid, p.name))),"
        " pg_catalog.has_schema_privilege(n.oid, 'USAGE'), n.nspname || '.' || c.relname"
        " FROM unnest($1::text[], $2::text[]) AS w(schema_name, table_name)"
        " JOIN pg_catalog.pg_namespace AS n ON n.nspname = w.schema_name"
        " JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = w.table_name ORDER BY 4"
    )
    problems = []
    with target_errors("looking what the role may do"):
        whole, parts = ([one for one in emptied if bool(one.constants) is has] for has in (False, True))
        for some, privileges in ((tables, ["INSERT"]), (whole, ["TRUNCATE"]), (parts, ["DELETE", "SELECT"])):
            for has_policies, missing, has_usage, name in await rows(conn, query, [*_names(some), privileges]):
                lacks = [*([] if has_usage else ["USAGE on its schema"]), *missing]
                if lacks:
                    problems.append(f"{', '.join(lacks)} on {name}")
                elif has_policies:
                    problems.append(f"BYPASSRLS for {name}, whose row-level security applies")
    if problems:
        raise TargetRefused(
            f"target: the role lacks {'; '.join(dict.fromkeys(problems))}",
            hint="grant the target's role what is missing: config/roles/subscriber.sql does",
        )


class Deferrable(msgspec.Struct, frozen=True, kw_only=True):
    """An index that can be made after the rows."""

    drop: str  # statement
    make: str  # statement; does nothing if an index of this name exists
    is_allowed: bool  # the role may do both


async def deferrable_indexes(conn: Connection, tables: Sequence[PublishedTable]) -> dict[Name, list[Deferrable]]:
    """Return the indexes that can be made after the copy, by table; nothing for a table without any.

    Indexes of constraints stay: keys, and indexes that foreign keys refer to. So do those with a comment, a tablespace
    or a statistics target of their own. A partitioned table keeps all of its indexes.
    """
    query = sql.SQL(
        "SELECT w.schema_name, w.table_name, n.nspname, c.relname, pg_catalog.pg_get_indexdef(i.indexrelid),"
        " pg_catalog.pg_has_role(t.relowner, 'USAGE') AND pg_catalog.has_schema_privilege(n.oid, 'CREATE')"
        " FROM unnest($1::text[], $2::text[]) AS w(schema_name, table_name)"
        " JOIN pg_catalog.pg_namespace AS n ON n.nspname = w.schema_name"
        " JOIN pg_catalog.pg_class AS t ON t.relnamespace = n.oid AND t.relname = w.table_name AND t.relkind = 'r'"
        " JOIN pg_catalog.pg_index AS i ON i.indrelid = t.oid"
        " JOIN pg_catalog.pg_class AS c ON c.oid = i.indexrelid AND c.relkind = 'i' AND NOT c.relispartition"
        " WHERE NOT i.indisprimary AND NOT i.indisreplident AND NOT i.indisclustered"
        " AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend AS d WHERE d.refobjid = i.indexrelid"
        " AND d.refclassid = 'pg_catalog.pg_class'::regclass)"
        " AND NOT EXISTS (SELECT FROM pg_catalog.pg_constraint AS k WHERE k.conindid = i.indexrelid)"
        # The statement of an index does not have these.
        " AND c.reltablespace = 0 AND NOT EXISTS (SELECT FROM pg_catalog.pg_attribute AS a"
        " WHERE a.attrelid = i.indexrelid AND a.attstattarget >= 0)"
        " AND NOT EXISTS (SELECT FROM pg_catalog.pg_description AS o WHERE o.objoid = i.indexrelid"
        " AND o.classoid = 'pg_catalog.pg_class'::regclass)"
        " ORDER BY 1, 2, 3, 4"
    )
    with target_errors("reading the indexes"):
        found = await rows(conn, query, _names(tables))
    by_table: dict[Name, list[Deferrable]] = {}
    for schema, table, index_schema, index, definition, is_allowed in found:
        one = Deferrable(
            drop=sql.SQL("DROP INDEX {}").format(sql.Identifier(index_schema, index)).as_string(None),
            make=indexes.made_again(definition),
            is_allowed=is_allowed,
        )
        by_table.setdefault((schema, table), []).append(one)
    return by_table


async def check_owned(conn: Connection, tables: Sequence[PublishedTable]) -> None:
    """Refuse tables whose indexes the role may not drop, or not make again, all of them in one message.

    Raises:
        TargetRefused: there are some.
    """
    found = await deferrable_indexes(conn, tables)
    names = [
        f"{schema}.{table}" for (schema, table), some in found.items() if not all(index.is_allowed for index in some)
    ]
    if names:
        raise TargetRefused(
            f"target: the role may not drop the indexes of {', '.join(names)} and make them again",
            hint="leave out --defer-indexes, or make the role a member of the tables' owner and GRANT CREATE on their"
            " schemas to it",
        )

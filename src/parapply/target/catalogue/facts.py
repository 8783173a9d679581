"""The catalogue's description of a target table: `TableFacts`, and whether this role may write to it.

In: an open connection and names. Out: plain data for `match.py`, or an error that names what is wrong.
Must never change anything and never guess: what the catalogue does not say is UNKNOWN.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import WeakSet

import msgspec
import psycopg
from msgspec.structs import replace
from psycopg import sql
from psycopg.rows import tuple_row
from psycopg.types.json import set_json_loads

from parapply.errors import TargetRefused
from parapply.plan.table import ColumnFacts, ForeignCode, Reference, RowTrigger, TableFacts
from parapply.target.catalogue.fingerprint import LOOKUPS
from parapply.target.catalogue.key_facts import foreign_key_facts, indexed_equality, unique_facts
from parapply.target.catalogue.query import (
    ACCESS_SQL,
    FACTS_SQL,
    FOREIGN_SQL,
    MANY_FACTS_SQL,
    MANY_REPLICA_FACTS_SQL,
    OIDS_SQL,
)
from parapply.target.catalogue.row_code import row_trigger
from parapply.target.catalogue.shape import JOINS, SHAPES_SQL
from parapply.target.session.settings import target_errors

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

#: Privileges for a publication of everything. TRUNCATE is asked for when one comes, as the built-in subscription does.
ROW_PRIVILEGES: Final = ("INSERT", "UPDATE", "DELETE", "SELECT")

#: Runs a query with parameters in text format, and returns its rows.
Ask: TypeAlias = "Callable[[str, Sequence[bytes]], Awaitable[list[tuple[Any, ...]]]]"

_TABLE_KINDS: Final = frozenset({"r", "p"})
_KIND_NAMES: Final = {
    "v": "a view",
    "m": "a materialized view",
    "f": "a foreign table",
    "S": "a sequence",
    "i": "an index",
    "I": "an index",
    "c": "a composite type",
    "t": "a TOAST table",
}


#: Sessions that have planned the query for many tables, by lookups: where the plan is kept (`ControlPool`), to ask
#: again takes one round trip, and 3 ms for a table instead of 8. Written and read here only. Not for many tables:
#: after ANALYZE of a catalogue the server plans again, without `LOOKUPS`, and would read whole catalogues for them.
_planned: Final[WeakSet[psycopg.AsyncConnection[Any]]] = WeakSet()


async def load_facts(conn: psycopg.AsyncConnection[Any], schema: str, name: str, *, role: str) -> TableFacts | None:
    """Return the facts of a table from the catalogue as it is now, or None if no table has that name.

    As `load_many`. DDL on the target is not in the stream: read again after every Relation message and when a
    statement fails in a way that an unseen index or column explains (trap T-23).

    Args:
        conn: any session of the target, in autocommit mode.
        schema: as announced by the publisher; case matters.
        name: as announced.
        role: session_replication_role of the worker sessions; it decides which triggers and rules act.

    Raises:
        TargetRefused: the relation is not a table, or holds parapply's own progress; it or a partition is a foreign
            table or UNLOGGED.
    """
    found = (await load_many(conn, [(schema, name)], role=role)).get((schema, name))
    if isinstance(found, TargetRefused):
        raise found
    return found


async def make_plan(conn: psycopg.AsyncConnection[Any], *, role: str) -> None:
    """Have the server plan the question of `load_many`, which takes it ten times as long as the answer for a table.

    Args:
        conn: any session of the target, in autocommit mode.
        role: as of `load_facts`.
    """
    with target_errors("reading the catalogue of the published tables"):
        async with conn.transaction():
            await conn.execute(LOOKUPS)
            await _described(conn, [], role)
    _planned.add(conn)


async def load_facts_inside(
    ask: Ask, schema: str, name: str, *, role: str, privileges: Sequence[str]
) -> TableFacts | None:
    """Return what `load_facts` would return to a session that asks inside its open transaction, and check access.

    Raises:
        TargetRefused: as `load_facts` and `check_table_access`.
        StatementFailed, TargetLost: as `ask`.
    """
    found = await ask(FACTS_SQL, [schema.encode(), name.encode(), role.encode()])
    if not found:
        return None
    table = _table(schema, name, found[0])
    access = await ask(ACCESS_SQL, [b"{%d}" % table.oid, b"{%s}" % ",".join(privileges).encode()])
    _check_access(table, access[0] if access else None)
    return table


async def load_many(
    conn: psycopg.AsyncConnection[Any], names: Sequence[tuple[str, str]], *, role: str
) -> dict[tuple[str, str], TableFacts | TargetRefused]:
    """Return the result or error of `load_facts` for each existing table, by schema and name.

    A few round trips for all of them; one for a single table, except the first in a session.

    Args:
        conn: any session of the target.
        names: schema and name of each.
        role: as of `load_facts`.
    """
    with target_errors("reading the catalogue of the published tables"):
        if len(names) == 1 and conn in _planned:
            return await _described(conn, names, role)
        async with conn.transaction():
            await conn.execute(LOOKUPS)
            facts = await _described(conn, names, role)
        _planned.add(conn)
    return facts


async def load_alike(
    conn: psycopg.AsyncConnection[Any],
    oids: Sequence[int],
    *,
    role: str,
    shapes: dict[bytes, TableFacts],
    most: int,
) -> dict[tuple[str, str], TableFacts]:
    """Return the result of `load_many` for the tables with a common shape among thousands, in half the time.

    Args:
        conn: any session of the target, in autocommit mode.
        oids: of the tables.
        role: as of `load_facts`.
        shapes: tables described by earlier calls, a moment ago, by their shapes; more are added. Objects that tables
            use, such as functions, may have changed since then.
        most: shapes to describe at most, the commonest.
    """
    with target_errors("reading the catalogue of the published tables"):
        async with conn.transaction():
            # Shapes and facts must be of one moment, because a table may change in between.
            await conn.execute(f"SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; {JOINS}")
            shaped = await _rows(conn, SHAPES_SQL, [list(oids)])
            unknown = Counter([shape for *_, shape in shaped if shape not in shapes])
            common = {shape for shape, _ in unknown.most_common(most)}
            first = {shape: (schema, name) for schema, name, _, shape in shaped if shape in common}
            await conn.execute(f"SET LOCAL enable_nestloop = on; {LOOKUPS}")
            found = await _described(conn, list(first.values()), role) if first else {}
    shapes.update({shape: facts for shape, name in first.items() if isinstance(facts := found.get(name), TableFacts)})
    return {
        (schema, name): replace(shapes[shape], oid=oid, schema=schema, name=name, root_oid=oid)
        for schema, name, oid, shape in shaped
        if shape in shapes
    }


async def _described(
    conn: psycopg.AsyncConnection[Any], names: Sequence[tuple[str, str]], role: str
) -> dict[tuple[str, str], TableFacts | TargetRefused]:
    """Return the facts of each of some tables, or why it is refused, by one query."""
    facts: dict[tuple[str, str], TableFacts | TargetRefused] = {}
    query = MANY_REPLICA_FACTS_SQL if role == "replica" else MANY_FACTS_SQL
    for number, *row in await _rows(conn, query, (*_columns_of(names), role)):
        schema, name = names[number - 1]
        try:
            facts[schema, name] = _table(schema, name, row)
        except TargetRefused as error:
            facts[schema, name] = error
    return facts


def _columns_of(names: Sequence[tuple[str, str]]) -> tuple[list[str], list[str]]:
    return [schema for schema, _ in names], [name for _, name in names]


async def table_oids(
    conn: psycopg.AsyncConnection[Any], names: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], int]:
    """Return the OID of each existing relation, by schema and name; one round trip."""
    with target_errors("looking for the published tables"):
        found = await _rows(conn, OIDS_SQL, _columns_of(names))
    return {(schema, name): oid for schema, name, oid in found}


def _table(schema: str, name: str, row: Sequence[Any]) -> TableFacts:
    """Turn one row of the catalogue query into facts.

    Raises:
        TargetRefused: as `load_facts`.
    """
    oid, root_oid, kind, is_immediate, columns, key_columns, unique, foreign_keys, triggers, rules, code, *rest = row
    foreign, unlogged, is_state, indexed, row_code, of_others, references = rest
    if is_state:
        raise own_table([f"{schema}.{name}"])
    if kind not in _TABLE_KINDS:
        # SQL would work through a view's rules or triggers without a word (trap T-29).
        raise TargetRefused(
            f"target relation {schema}.{name} is {_KIND_NAMES.get(kind, 'not a table')}, not a table",
            hint="replicate into a table of that name, or leave the table out of the publication",
        )
    if foreign:
        raise TargetRefused(
            f"target table {schema}.{name} has foreign tables as partitions: {', '.join(foreign)}",
            hint="another server does not commit together with the progress record; detach these partitions",
        )
    if unlogged:
        # Confirmed changes must survive, because the publisher does not send them again.
        raise TargetRefused(
            f"target table {schema}.{name} is UNLOGGED: a crash of the server would empty {', '.join(unlogged)}",
            hint="ALTER TABLE ... SET LOGGED; what a crash has taken since, `parapply refresh --table ... --truncate`"
            " brings back",
        )
    row_triggers = tuple(filter(None, [_row_trigger(one) for one in row_code]))
    plain = {one.name for one in row_triggers}
    return TableFacts(
        oid=oid,
        schema=schema,
        name=name,
        is_partitioned=kind == "p",
        columns=tuple(_column(column) for column in columns),
        key_columns=tuple(key_columns),
        key_is_deferrable=is_immediate is False,
        triggers=tuple([one for one in triggers if one not in plain]),
        rules=tuple(rules),
        code=tuple(code),
        unique=tuple(unique_facts(index) for index in unique),
        foreign_keys=tuple(foreign_key_facts(each, columns) for each in foreign_keys),
        root_oid=root_oid,
        indexed_columns=tuple(indexed),
        foreign=of_others and msgspec.convert(of_others, ForeignCode),
        row_triggers=row_triggers,
        references=None if references is None else tuple([msgspec.convert(one, Reference) for one in references]),
    )


def _row_trigger(found: dict[str, Any]) -> RowTrigger | None:
    return row_trigger(found["name"], found["version"], found["body"], fires_on_all=found["fires_on_all"])


def own_table(names: Sequence[str]) -> TargetRefused:
    """Return the error for published tables that are, on the target, in a schema of parapply's own progress.

    If the publisher's schema is also one, its tables are left out before.
    """
    return TargetRefused(
        f"target: {', '.join(names)}: the schema holds parapply's own progress here, and nothing else is written to it",
        hint="choose another target.state_schema, or another schema for the tables",
    )


def privileges_for(published: Collection[str], *, overwrites: bool) -> tuple[str, ...]:
    """Return the privileges that a table must give.

    Args:
        published: what the publications send: insert, update, delete, truncate.
        overwrites: a policy settles conflicts with the publisher's row, by whatever statement that takes.
    """
    if overwrites:
        return ROW_PRIVILEGES
    return tuple([one for one in ROW_PRIVILEGES if one == "SELECT" or one.lower() in published])


async def check_table_access(
    conn: psycopg.AsyncConnection[Any], facts: TableFacts, privileges: Sequence[str] = ROW_PRIVILEGES
) -> None:
    """Make sure that the session's role may write to the table and sees all its rows.

    Table privileges count, not those on single columns, as for the built-in subscription. SELECT belongs to them:
    finding a row by key reads it (trap T-65).

    Args:
        conn: a session of the role that applies.
        facts: of the table.
        privileges: names as in GRANT.

    Raises:
        TargetRefused: a privilege is missing (all are named), row-level security applies, or the table is gone.
    """
    table = f"{facts.schema}.{facts.name}"
    with target_errors(f"checking access to {table}"):
        found = await _rows(conn, ACCESS_SQL, ([facts.oid], list(privileges)))
    _check_access(facts, found[0] if found else None)


def refuse_foreign_code(table: str, foreign: ForeignCode | None, sent: Collection[str] | None) -> None:
    """Refuse a table with code of an owner who may not become the role that applies.

    `SET ROLE` would keep no code within its owner's rights, because the code can set the role back, and a cursor WITH
    HOLD or a deferred trigger runs at COMMIT as the session's own role.

    Args:
        table: schema.table, for people.
        foreign: of its facts.
        sent: columns that come from the publisher: their defaults do not act. None: no default does.

    Raises:
        TargetRefused: as said.
    """
    if foreign is None:
        return
    acting = [what for what, column in foreign.code if column is None or (sent is not None and column not in sent)]
    if not acting:
        return
    role = sql.Identifier(foreign.role).as_string(None)
    owners = ", ".join(sql.Identifier(owner).as_string(None) for owner in foreign.owners)
    raise TargetRefused(
        f"target table {table} belongs to {owners}, and its code would run with the rights of role {role}: "
        f"{', '.join(sorted(set(acting)))}",
        hint="apply as the owner (the user of target.dsn), or give the table to a role that you trust, or, if all of "
        f"{role}'s rights may be {owners}'s: GRANT {role} TO {owners}; for every owner: target.apply_as = 'role'",
    )


async def check_foreign_code(
    conn: psycopg.AsyncConnection[Any], schema: str, name: str, sent: Collection[str] | None
) -> None:
    """Do what `refuse_foreign_code` does, and keep such code away until the end of the session's transaction.

    Raises:
        TargetRefused: as `refuse_foreign_code`.
    """
    with target_errors(f"looking for code of {schema}.{name}"):
        await conn.execute(sql.SQL("LOCK TABLE {} IN ROW EXCLUSIVE MODE").format(sql.Identifier(schema, name)))
        ((role,),) = await _rows(conn, "SELECT pg_catalog.current_setting('session_replication_role')", ())
    await look_for_foreign_code(conn, schema, name, sent, role=role)


async def look_for_foreign_code(
    conn: psycopg.AsyncConnection[Any], schema: str, name: str, sent: Collection[str] | None, *, role: str
) -> None:
    """Do what `refuse_foreign_code` does, as of now.

    Raises:
        TargetRefused: as `refuse_foreign_code`.
    """
    with target_errors(f"looking for code of {schema}.{name}"):
        found = await _rows(conn, FOREIGN_SQL, (schema, name, role))
    if found and found[0][0]:
        refuse_foreign_code(f"{schema}.{name}", msgspec.convert(found[0][0], ForeignCode), sent)


async def access_problems(
    conn: psycopg.AsyncConnection[Any], tables: Sequence[TableFacts], privileges: Sequence[str] = ROW_PRIVILEGES
) -> dict[tuple[str, str], TargetRefused]:
    """Return what `check_table_access` would raise, by schema and name; one round trip for all tables."""
    with target_errors("checking access to the published tables"):
        found = await _rows(conn, ACCESS_SQL, ([facts.oid for facts in tables], list(privileges)))
    by_oid = {row[0]: row for row in found}
    problems = {}
    for facts in tables:
        try:
            _check_access(facts, by_oid.get(facts.oid))
        except TargetRefused as error:
            problems[facts.schema, facts.name] = error
    return problems


def _check_access(facts: TableFacts, row: Sequence[Any] | None) -> None:
    """Refuse by one row of the query about access; None: it found no such table.

    Raises:
        TargetRefused: as `check_table_access`.
    """
    table = f"{facts.schema}.{facts.name}"
    if row is None:
        raise TargetRefused(f"target table {table} was dropped", hint="create it again; its rows are still in the slot")
    _, has_policies, has_usage, missing, user = row
    if not has_usage:
        missing = [f"USAGE on schema {facts.schema}", *missing]
    if missing:
        raise TargetRefused(
            f"role {user} lacks privileges on target table {table}: {', '.join(missing)}",
            hint="grant them to the role of target.dsn",
        )
    if has_policies:
        # A hidden row would be UPDATE 0 (trap T-63).
        raise TargetRefused(
            f"row-level security of target table {table} applies to role {user}",
            hint="apply with the table's owner, a superuser or a role with BYPASSRLS",
        )


async def _rows(conn: psycopg.AsyncConnection[Any], query: str, params: Sequence[object]) -> list[tuple[Any, ...]]:
    # A raw cursor: these texts hold percent signs. The row factory of the connection is not ours.
    async with psycopg.AsyncRawCursor(conn, row_factory=tuple_row) as cursor:
        set_json_loads(msgspec.json.decode, cursor)  # what describes a table is a dozen such values
        # Planning takes longer than executing: the texts never change, so they are planned once a session.
        await cursor.execute(sql.SQL(query), params, prepare=True)
        return await cursor.fetchall()


def _column(column: dict[str, Any]) -> ColumnFacts:
    """Turn one JSON object of the catalogue query into facts."""
    return ColumnFacts(
        name=column["name"],
        type_sql=column["type_sql"],
        type_oid=column["type_oid"],
        base_type_oid=column["base_type_oid"],
        type_modifier=column["type_modifier"],
        is_enum=column["is_enum"],
        is_generated=column["is_generated"],
        is_identity_always=column["is_identity_always"],
        is_required=column["is_required"],
        has_equality=column["has_equality"],
        # The key's index decides: another operator class or collation compares in its own way (trap T-21).
        equality=indexed_equality(column),
        equality_operator=column["operator"] or "OPERATOR(pg_catalog.=)",
        collation_sql=column["collate"] or "",
        default_code=tuple(column["default_code"]),
        array_type_sql=column["array_type_sql"],
        has_text_cast=column["has_text_cast"],
    )

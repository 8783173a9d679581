"""Names and values that would break out of a statement, a format, a log line or a screen: equal, or one clear error."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql

from tests.fixtures.daemon import Daemon, error_of
from tests.fixtures.databases import create_database, drop_database
from tests.fixtures.fan import make_slot
from tests.fixtures.route import Route
from tests.fixtures.table_rows import contents
from tests.fixtures.two_phase import TWO_PHASE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.daemon import RunCommand
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import ServerPool

#: Text that SQL, libpq, psycopg, Python's formats, JSON, a terminal and rich's markup each read as something else.
_PIECES: Final = (
    '"', "'", "\\", "%s", "%(a)s", "%", "{}", "{0}", "$1", "$$", ";", "--", "/*", "*/", "\n", "\r\n", "\t", "\x01",
    "\x1b[2J", "\x7f", " ", ".", ",", "=", ":", "(", ")", "[red]", "[/red]", "\\N", "\\.", "é", "ß", "\u202e", "a", "Z",
    "\U0001f600", "select", "1", "' OR '1'='1", '"; DROP TABLE x; --', "NULL",
)  # fmt: skip
_NAME_BYTES = 63


def _fits(text: str) -> str:
    """Return as much of a text as a name may hold: PostgreSQL cuts it, too, but by its own rule."""
    return text.encode()[:_NAME_BYTES].decode(errors="ignore")


NAMES = st.lists(st.sampled_from(_PIECES), min_size=1, max_size=30).map("".join).map(_fits)
VALUES = st.lists(st.sampled_from(_PIECES), max_size=200).map("".join)


class _Names(NamedTuple):
    """The names of one example's objects."""

    schema: str
    table: str
    columns: tuple[str, str, str]
    type_: str
    labels: tuple[str, str]
    index_name: str
    gid: str


def _several(count: int) -> st.SearchStrategy[list[str]]:
    return st.lists(NAMES, min_size=count, max_size=count, unique=True)


#: Tables, types and indexes share their names' space.
EXAMPLES = st.builds(
    lambda schema, objects, columns, labels, gid: _Names(
        schema=schema,
        table=objects[0],
        columns=(columns[0], columns[1], columns[2]),
        type_=objects[1],
        labels=(labels[0], labels[1]),
        index_name=objects[2],
        gid=gid,
    ),
    NAMES,
    _several(3),
    _several(3),
    _several(2),
    NAMES,
)


class _Lab(NamedTuple):
    """A daemon between two databases, for all tests."""

    route: Route
    daemon: Daemon


@pytest.fixture(scope="module")
def lab(server_pool: ServerPool, pg_major: int) -> Iterator[_Lab]:
    """Databases and a publication of hostile names, and two_phase on."""
    token = secrets.token_hex(4)
    source = create_database(server_pool.get("source", pg_major), f"source \"%s\" '{{}}' \\ {token}")
    target = create_database(server_pool.get("target", pg_major), f"target \"%s\" '{{}}' \\ {token}")
    publication = "pub \"%s\" '{0}' \\ [red] \U0001f600"
    source.execute(sql.SQL("CREATE PUBLICATION {} FOR ALL TABLES").format(sql.Identifier(publication)))
    route = Route(source=source, target=target, publication=publication, settings=TWO_PHASE)
    source.execute(f"SELECT pg_create_logical_replication_slot('{route.slot}', 'pgoutput', false, true)")
    daemon = Daemon(route)
    try:
        daemon.wait_for_event("source_connected")
        yield _Lab(route, daemon)
    finally:
        daemon.end()
        drop_database(target)
        drop_database(source)


def _create(database: Database, names: _Names, *, is_target: bool) -> None:
    quoted = {"schema": sql.Identifier(names.schema), "table": sql.Identifier(names.schema, names.table),
              "type": sql.Identifier(names.schema, names.type_), "index": sql.Identifier(names.index_name)}  # fmt: skip
    key, mood, text = map(sql.Identifier, names.columns)
    labels = sql.SQL(", ").join(map(sql.Literal, names.labels))
    create = (
        "CREATE SCHEMA {schema}; CREATE TYPE {type} AS ENUM ({labels});"
        " CREATE TABLE {table} ({key} text, {mood} {type}, {text} text, PRIMARY KEY ({key}));"
    )
    # Known on the target only: its name comes into reasons and messages.
    create += " CREATE UNIQUE INDEX {index} ON {table} (md5({text}));" if is_target else ""
    database.execute(sql.SQL(create).format(**quoted, key=key, mood=mood, text=text, labels=labels))


def _change(source: Database, names: _Names, values: tuple[str, str, str]) -> None:
    table = sql.Identifier(names.schema, names.table)
    key, mood, text = map(sql.Identifier, names.columns)
    first, second, third = (sql.Literal(value + suffix) for value, suffix in zip(values, "123", strict=True))
    parts = {"table": table, "key": key, "mood": mood, "text": text, "a": first, "b": second, "c": third,
             "label": sql.Literal(names.labels[0]), "other": sql.Literal(names.labels[1]),
             "gid": sql.Literal(names.gid)}  # fmt: skip
    for statement in (
        "INSERT INTO {table} VALUES ({a}, {label}, {a}), ({b}, {other}, {b})",
        "UPDATE {table} SET {mood} = {other}, {key} = {c} WHERE {key} = {a}",
        "BEGIN; INSERT INTO {table} VALUES ({a}, NULL, {c}); PREPARE TRANSACTION {gid}",
        "COMMIT PREPARED {gid}",
        "DELETE FROM {table} WHERE {key} = {b}",
        "TRUNCATE {table}; INSERT INTO {table} VALUES ({a}, {label}, {b}), ({c}, NULL, {a})",
    ):
        source.execute(sql.SQL(statement).format(**parts))


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(names=EXAMPLES, values=st.tuples(VALUES, VALUES, VALUES))
def test_any_name_and_value_is_applied(lab: _Lab, names: _Names, values: tuple[str, str, str]) -> None:
    """Schema, table, columns, type, labels, index, prepared transaction and values of any text arrive as they are."""
    route = lab.route
    ends = {False: route.source, True: route.target}
    try:
        for is_target in (True, False):
            _create(ends[is_target], names, is_target=is_target)
        _change(route.source, names, values)
        lab.daemon.wait_caught_up()
        assert contents(route.target, names.schema) == contents(route.source, names.schema)
    finally:
        for database in ends.values():
            database.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(names.schema)))


#: Everything at once, and cut in the middle of a character by code that cuts by bytes.
_WORST = _Names(
    schema="s \"%s\" '{}' \\ ;--\n[red]",
    table="t \"%(a)s\" $1 '\x1b[2J' {0} [/red]\U0001f600" + "é" * 9,
    columns=('k "%s" \\', "m' {} $$ \n", "t [/bold] %"),
    type_='y "%s" \'\\',
    labels=('it\'s "%s"', "\\N {} \n"),
    index_name='i "%s" \'\\ [red]',
    gid="g ' \" \\ %s $1",
)


def test_commands_show_and_compare_them(lab: _Lab, run_command: RunCommand) -> None:
    """`status` and `verify` work with the worst of names, as text and as JSON, and put no control character out."""
    route = lab.route
    for database, is_target in ((route.target, True), (route.source, False)):
        _create(database, _WORST, is_target=is_target)
    _change(route.source, _WORST, ("'", '"', "\\"))
    lab.daemon.wait_caught_up()
    # The daemon shows its tables once a second.
    name = sql.Literal(_WORST.table)
    route.target.wait_until(
        sql.SQL("SELECT EXISTS (SELECT FROM parapply.tables WHERE table_name = {})").format(name).as_string()
    )
    shown, as_json = run_command(route, "status"), run_command(route, "status", "--json")
    assert (shown.returncode, as_json.returncode) == (0, 0), shown.stderr + as_json.stderr
    assert "\x1b" not in shown.stdout
    tables = {(one["schema_name"], one["table_name"]) for one in json.loads(as_json.stdout)["tables"]}
    assert (_WORST.schema, _WORST.table) in tables
    run_command(route, "verify", "--json", code=0)
    assert [line for line in lab.daemon.lines if not line.startswith("{")] == []


def test_a_refusal_is_one_line(source_db: Database, target_db: Database, run_command: RunCommand) -> None:
    """A table that the target lacks is named in one line, whatever its name; nothing of it acts on a terminal."""
    route = Route(source=source_db, target=target_db)
    route.source.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    make_slot(route)
    route.source.execute("CREATE TABLE \"no\nthing \x1b[2J '%s' {}\" (id int PRIMARY KEY)")
    route.source.execute("INSERT INTO \"no\nthing \x1b[2J '%s' {}\" VALUES (1)")
    done = run_command(route, "run", "--until", route.end_of_source_lsn(), code=4)
    assert "no thing" in error_of(done.stderr.splitlines())
    assert "\x1b" not in done.stderr

"""A migration of a database that is not to be trusted: names, comments and settings are only texts on the target."""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING, Final

import pytest
from psycopg import sql

from parapply.copy.schema import statements
from parapply.demo.binaries import find_binaries, find_program
from parapply.quoting import copyable, identifier, literal
from tests.fixtures.databases import create_database, drop_database
from tests.fixtures.plain import FAST
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.daemon import RunCommand
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import ServerOf

_NAME_BYTES: Final = 63
_KEY: Final = "aKeyOfTheTest"
#: Forms of a dump's own lines, of psql's commands, and what ends each kind of quotes; the last line has no end.
_LINES: Final = """a
\\restrict x
\\unrestrict x
--
-- Name: evil; Type: INDEX; Schema: public; Owner: x
--

CREATE SCHEMA public;
CREATE EVENT TRIGGER parapply_ddl_1_begin ON sql_drop EXECUTE FUNCTION f();
\\! touch /tmp/evil
$$ $a$ %s %(a)s {} {0} \x1b[2J \u202e <script>alert(1)</script> '; ALTER ROLE MALLORY SUPERUSER; --
\\restrict"""
#: As `_LINES`' last line would leave the quotes open: this is then a statement.
_NEXT: Final = "; ALTER ROLE MALLORY SUPERUSER; --"
#: A value that a role's setting may have without being asked for a list.
_PATH: Final = "public;ALTER/**/ROLE/**/MALLORY/**/SUPERUSER"

_OBJECTS: Final = """
CREATE SCHEMA {schema};
SET search_path = {schema};
CREATE TYPE {enum} AS ENUM ({label}, {other_label});
CREATE DOMAIN {domain} AS text DEFAULT {text} CONSTRAINT {check} CHECK (VALUE <> {other_text});
CREATE TYPE {composite} AS ({column} int, {other_column} text);
CREATE TYPE {range} AS RANGE (subtype = int, multirange_type_name = {multirange});
CREATE COLLATION {collation} FROM "C";
CREATE SEQUENCE {sequence};
CREATE FUNCTION {function}({argument} int, b text DEFAULT {text}) RETURNS boolean LANGUAGE sql AS {body};
CREATE FUNCTION {equal}(int, text) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT $1::text = $2';
CREATE FUNCTION {to_domain}({composite}) RETURNS {domain} LANGUAGE sql AS 'SELECT ''x''';
CREATE FUNCTION {atomic}() RETURNS text LANGUAGE sql BEGIN ATOMIC SELECT 1 AS a; SELECT {text} AS b; END;
CREATE FUNCTION {fires}() RETURNS trigger LANGUAGE plpgsql SET search_path = {schema}, "A b" AS {body_of_trigger};
CREATE FUNCTION {watches}() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END';
CREATE PROCEDURE {procedure}() LANGUAGE sql AS {body};
CREATE OPERATOR === (LEFTARG = int, RIGHTARG = text, FUNCTION = {equal});
CREATE CAST ({composite} AS {domain}) WITH FUNCTION {to_domain} AS ASSIGNMENT;
CREATE AGGREGATE {aggregate} (int) (SFUNC = int4pl, STYPE = int, INITCOND = '0');
CREATE CONVERSION {conversion} FOR 'LATIN1' TO 'UTF8' FROM iso8859_1_to_utf8;
CREATE OPERATOR FAMILY {family} USING btree;
CREATE TEXT SEARCH DICTIONARY {dictionary} (TEMPLATE = simple);
CREATE TEXT SEARCH CONFIGURATION {configuration} (PARSER = "default");
CREATE TABLE {table} (
  {column} int CONSTRAINT {primary} PRIMARY KEY DEFAULT nextval({sequence_text}), mood {enum} DEFAULT {label},
  {other_column} text COLLATE {collation} DEFAULT {text}, d {domain},
  made int GENERATED ALWAYS AS ({column} * 2) STORED,
  CONSTRAINT {unique} UNIQUE ({other_column}), CONSTRAINT {check} CHECK ({other_column} <> {other_text}));
CREATE TABLE {child} (id int PRIMARY KEY, up int, CONSTRAINT {foreign} FOREIGN KEY (up) REFERENCES {table});
CREATE TABLE {root} (id int PRIMARY KEY) PARTITION BY RANGE (id);
CREATE TABLE {leaf} PARTITION OF {root} FOR VALUES FROM (0) TO (10);
CREATE INDEX {index} ON {table} (({other_column} || {text})) WHERE {other_column} <> {text};
CREATE STATISTICS {statistics} ON {column}, {other_column} FROM {table};
CREATE VIEW {view} AS SELECT {text} AS {column};
CREATE MATERIALIZED VIEW {matview} AS SELECT {text} AS {column};
CREATE TRIGGER {trigger} BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION {fires}({text});
CREATE RULE {rule} AS ON INSERT TO {view} DO INSTEAD NOTHING;
ALTER TABLE {table} ENABLE ROW LEVEL SECURITY;
CREATE POLICY {policy} ON {table} TO {role} USING ({other_column} <> {text});
CREATE FOREIGN DATA WRAPPER {wrapper};
CREATE SERVER {server} TYPE {text} FOREIGN DATA WRAPPER {wrapper} OPTIONS (a {text});
CREATE USER MAPPING FOR {role} SERVER {server} OPTIONS (password {text});
CREATE EVENT TRIGGER {event_trigger} ON sql_drop EXECUTE FUNCTION {watches}();
SELECT pg_catalog.lo_create(4712);
GRANT SELECT ({column}), UPDATE ON {table} TO {role} WITH GRANT OPTION;
GRANT USAGE ON SCHEMA {schema} TO {role};
ALTER TABLE {child} OWNER TO {role};
ALTER DEFAULT PRIVILEGES FOR ROLE {role} IN SCHEMA {schema} GRANT SELECT ON TABLES TO {member};
INSERT INTO {root} VALUES (1);
"""
#: Objects with a comment, in the order in which a dump has them: the next one is what `_NEXT` stands in.
_COMMENTED: Final = (
    "SCHEMA {schema}", "TYPE {enum}", "DOMAIN {domain}", "CONSTRAINT {check} ON DOMAIN {domain}", "TYPE {composite}",
    "COLUMN {composite}.{column}", "COLLATION {collation}", "SEQUENCE {sequence}", "FUNCTION {function}(int, text)",
    "PROCEDURE {procedure}()", "OPERATOR === (int, text)", "CAST ({composite} AS {domain})",
    "AGGREGATE {aggregate} (int)",
    "CONVERSION {conversion}", "OPERATOR FAMILY {family} USING btree", "TEXT SEARCH DICTIONARY {dictionary}",
    "TEXT SEARCH CONFIGURATION {configuration}", "TABLE {table}", "COLUMN {table}.{column}",
    "COLUMN {table}.{other_column}", "CONSTRAINT {unique} ON {table}", "INDEX {index}", "STATISTICS {statistics}",
    "VIEW {view}", "MATERIALIZED VIEW {matview}", "TRIGGER {trigger} ON {table}", "RULE {rule} ON {view}",
    "POLICY {policy} ON {table}", "FOREIGN DATA WRAPPER {wrapper}", "SERVER {server}", "EVENT TRIGGER {event_trigger}",
    "LARGE OBJECT 4712",
)  # fmt: skip
_KINDS: Final = (
    "schema", "enum", "domain", "check", "composite", "range", "multirange", "collation", "sequence", "function",
    "argument", "equal", "to_domain", "atomic", "fires", "watches", "procedure", "aggregate", "conversion", "family",
    "dictionary", "configuration", "table", "column", "other_column", "primary", "unique", "child", "foreign", "root",
    "leaf", "index", "statistics", "view", "matview", "trigger", "rule", "policy", "wrapper", "server", "event_trigger",
)  # fmt: skip
_RIGHTS: Final = """
SELECT rolname, rolsuper, rolinherit, rolcreaterole, rolcreatedb, rolcanlogin, rolreplication, rolbypassrls,
       rolconnlimit
  FROM pg_roles WHERE rolname ~ '{pid}' AND rolname !~ '^known' ORDER BY 1"""
_MEMBERS: Final = """
SELECT m.roleid::regrole::text, m.member::regrole::text, m.admin_option FROM pg_auth_members AS m
  JOIN pg_roles AS r ON r.oid = m.member WHERE r.rolname ~ '{pid}' ORDER BY 1, 2"""


def _name(kind: str) -> str:
    """Return a name that ends every kind of quotes, is as long as one may be, and begins as an option would."""
    text = f"-{kind} \"'\\;\n\\restrict x\n$$%s{{0}}\x1b[2J--é<b>" + "é" * 20
    return text.encode()[:_NAME_BYTES].decode(errors="ignore")


class _Roles:
    """Roles of one test: servers are shared."""

    def __init__(self) -> None:
        self.pid = f"of{os.getpid()}"
        self.mallory = f"mallory_{self.pid}"
        names = [f"{self.pid} {kind} \"'\\;\n$$%s{{0}}--" for kind in ("owner", "member", "boss")]
        self.owner, self.member, self.boss = names
        #: A role that the target has already, with more rights than on the publisher.
        self.known = f"known_{self.pid}"
        #: The same by a membership.
        self.joined = f"known_{os.getpid()}"
        self.all = (self.owner, self.member, self.boss, self.mallory, self.known, self.joined)


@pytest.fixture
def roles(request: pytest.FixtureRequest, server_of: ServerOf) -> Iterator[_Roles]:
    """Names; what the test has made of them goes after the databases."""
    made = _Roles()
    yield made
    versions = request.node.callspec.params["versions"]
    for server in (server_of("source", versions[0]), server_of("target", versions[1])):
        for name in made.all:
            server.execute(sql.SQL("DROP ROLE IF EXISTS {}").format(sql.Identifier(name)))


@pytest.fixture
def hostile(roles: _Roles, versions: tuple[int, int], server_of: ServerOf) -> Iterator[Route]:
    """A source full of such texts, and an empty target."""
    source = create_database(server_of("source", versions[0]), _name(f"source {roles.pid}"))
    target = create_database(server_of("target", versions[1]), _name(f"target {roles.pid}"))
    try:
        _fill(source, roles, versions[0])
        more = "CREATE ROLE {} SUPERUSER; CREATE ROLE {} IN ROLE pg_execute_server_program"
        target.execute(sql.SQL(more).format(sql.Identifier(roles.known), sql.Identifier(roles.joined)))
        publication = _name("publication")
        source.execute(sql.SQL("CREATE PUBLICATION {} FOR ALL TABLES").format(sql.Identifier(publication)))
        yield Route(
            source=source, target=target, publication=publication, settings=FAST, source_dsn=source.dsn,
            target_dsn=target.dsn,
        )  # fmt: skip
    finally:
        for database in (target, source):
            drop_database(database)


def _fill(source: Database, roles: _Roles, version: int) -> None:
    lines, after = (text.replace("MALLORY", roles.mallory) for text in (_LINES, _NEXT))
    words: dict[str, sql.Composable] = {kind: sql.Identifier(_name(kind)) for kind in _KINDS}
    words |= {
        "role": sql.Identifier(roles.owner),
        "member": sql.Identifier(roles.member),
        "label": sql.Literal(_name("label")),
        "other_label": sql.Literal(_name("other label")),
        "text": sql.Literal(lines),
        "other_text": sql.Literal(after),
        "sequence_text": sql.Literal(sql.Identifier(_name("schema"), _name("sequence")).as_string()),
        "body": sql.Literal(f"SELECT {sql.Literal(lines).as_string()} = ''"),
        "body_of_trigger": sql.Literal(f"BEGIN\n/* {lines} */\nRETURN NEW; END"),
    }
    options = " WITH INHERIT FALSE, SET FALSE" if version >= 16 else ""
    for text in (
        "CREATE ROLE {mallory} LOGIN",
        "CREATE ROLE {role} LOGIN PASSWORD {text} CONNECTION LIMIT 7",
        "CREATE ROLE {member} NOINHERIT",
        "CREATE ROLE {boss} CREATEROLE",
        "GRANT {boss} TO {member}" + options,
        "GRANT {role} TO {member} WITH ADMIN OPTION",
        "CREATE ROLE {known}; CREATE ROLE {joined}",
        "GRANT {known}, {joined}, pg_monitor TO {mallory}",
        "ALTER ROLE {role} SET search_path = {schema}, \"$user\", 'A b', {text}",
        "ALTER ROLE {role} SET session_preload_libraries = 'a b', {text}",
        "ALTER ROLE {role} SET local_preload_libraries = {text}, 'C'",
        "ALTER ROLE {role} SET temp_tablespaces = ''",
        "ALTER ROLE {role} SET application_name = {text}",
        'ALTER ROLE {role} SET "my.own" = {other_text}',
        "SELECT set_config('search_path', {path}, true); ALTER ROLE {mallory} SET search_path FROM CURRENT",
    ):
        roled = {
            **words, "mallory": sql.Identifier(roles.mallory), "known": sql.Identifier(roles.known),
            "boss": sql.Identifier(roles.boss), "joined": sql.Identifier(roles.joined),
            "path": sql.Literal(_PATH.replace("MALLORY", roles.mallory)),
        }  # fmt: skip
        source.execute(sql.SQL(text).format(**roled))
    with source.connect() as session:
        session.execute(sql.SQL(_OBJECTS).format(**words))
        for number, what in enumerate(_COMMENTED):
            comment_on = sql.SQL(f"COMMENT ON {what} IS {{comment}}")
            session.execute(comment_on.format(**words, comment=sql.Literal(after if number % 2 else lines)))
        session.commit()


@pytest.mark.in_turn("versions")
@pytest.mark.parametrize(
    "versions",
    [
        pytest.param((15, 18), id="15-to-18", marks=pytest.mark.needs_majors(15, 18)),
        pytest.param((18, 15), id="18-to-15", marks=pytest.mark.needs_majors(15, 18)),
    ],
)
def test_texts_of_the_publisher_stay_texts(
    hostile: Route, roles: _Roles, versions: tuple[int, int], run_command: RunCommand
) -> None:
    """Both sides' schemas are equal, letter by letter, and no role has more rights than on the publisher."""
    done = run_command(
        hostile, "migrate", "--roles", "--large-objects", "copy", "--to", "views", "--pg-bin", _pg_bin(),
        "--daemon-log", os.devnull, code=0,
    )  # fmt: skip
    assert "\x1b" not in done.stdout + done.stderr
    assert _schema(hostile.target) == _schema(hostile.source)
    rights = _RIGHTS.format(pid=roles.pid)
    assert hostile.target.rows(rights) == hostile.source.rows(rights)
    of_source, of_target = (set(database.rows(_MEMBERS.format(pid=roles.pid))) for database in _ends(hostile))
    left_out = [roles.known, roles.joined]
    if versions[1] < 16:
        # One without INHERIT and SET would have more there.
        left_out.append(f"{roles.pid} boss")
    assert all(f"membership in {name}" in done.stderr for name in left_out)
    assert (len(of_source - of_target), of_target - of_source) == (len(left_out), set())
    settings = sql.SQL(
        "SELECT s.setconfig FROM pg_db_role_setting AS s JOIN pg_roles AS r ON r.oid = s.setrole WHERE r.rolname = {}"
    )
    own, of_mallory = (settings.format(sql.Literal(name)) for name in (roles.owner, roles.mallory))
    assert hostile.target.rows(own) == hostile.source.rows(own)
    path = _PATH.replace("MALLORY", roles.mallory).lower()
    assert hostile.target.rows(of_mallory) == [([f'search_path="{path}"'],)]


def test_statements_to_be_copied_mean_the_same(source_db: Database) -> None:
    """A server reads names and values whose characters all print as those for which they stand."""
    name, value = _name("column"), _LINES + "\\ \U0001f600\U000e0001"
    statement = copyable(f"SELECT {literal(value)} AS {identifier(name)}")
    assert statement.isprintable()
    with source_db.connect() as session:
        cursor = session.execute(statement.encode())
        assert [one.name for one in cursor.description or ()] == [name]
        assert cursor.fetchone() == (value,)


def _ends(route: Route) -> tuple[Database, Database]:
    return route.source, route.target


def _schema(database: Database) -> list[str]:
    """Return the statements of a dump that a server of any version prints alike."""
    program = find_program("pg_dump", find_binaries())
    said = subprocess.run(
        [program, "-s", f"--restrict-key={_KEY}", "--exclude-schema=parapply", "--no-publications", database.dsn],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    text = said.stdout.replace(f"\\restrict {_KEY}\n", "").replace(f"\\unrestrict {_KEY}\n", "")
    # Servers before 18 know no names of NOT NULL.
    text = re.sub(r' CONSTRAINT "(?:[^"]|"")*_not_null" NOT NULL', " NOT NULL", text)
    return [one.text for one in statements(text) if not one.skeleton.startswith("SET ")]


def _pg_bin() -> str:
    return str(find_program("pg_dump", find_binaries()).parent)

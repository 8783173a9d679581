"""An ordinary schema of the application's role is applied, and one with code as soon as its owner is trusted.

The daemon's role is the one of `config/roles/subscriber.sql`: no superuser, no owner, no member of the application's
role.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.daemon import Daemon
from tests.fixtures.plain import FAST
from tests.fixtures.route import Route
from tests.fixtures.table_rows import contents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.fixtures.daemon import RunCommand
    from tests.fixtures.databases import Database

#: Objects that applications have; nothing in them calls the applications' functions.
_ORDINARY = """
CREATE TYPE app.mood AS ENUM ('calm', 'wild');
CREATE DOMAIN app.email AS text CHECK (VALUE ~ '@');
CREATE TABLE app.person (
  id bigserial PRIMARY KEY, n int GENERATED ALWAYS AS IDENTITY, key uuid NOT NULL DEFAULT gen_random_uuid() UNIQUE,
  name varchar(40) NOT NULL CHECK (length(name) > 1 AND name = btrim(name)), mood app.mood DEFAULT 'calm',
  moods app.mood[] DEFAULT '{}', price numeric(9, 2) CHECK (price >= 0 AND price < 1000), tags text[] DEFAULT '{}',
  doc jsonb DEFAULT '{}' CHECK (jsonb_typeof(doc) = 'object' AND doc ? 'a'), born date CHECK (born <= current_date),
  mail app.email DEFAULT 'a@b' CHECK (mail <> ''),
  made timestamptz DEFAULT now() CHECK (made > '2000-01-01'), low text GENERATED ALWAYS AS (lower(name)) STORED,
  kind text CHECK (kind IN ('x', 'y') AND kind LIKE '_' AND coalesce(kind, '') <> ''), spare text DEFAULT current_user,
  CHECK (mood IS NOT NULL OR price IS NULL), CHECK (mood IN ('calm', 'wild'))
);
CREATE INDEX ON app.person (lower(name), date_trunc('day', made AT TIME ZONE 'UTC')) WHERE price > 10 AND mood = 'wild';
CREATE INDEX ON app.person USING gin (to_tsvector('english'::regconfig, name));
CREATE INDEX ON app.person USING gin (doc jsonb_path_ops);
CREATE STATISTICS app.likely ON lower(name), kind FROM app.person;
CREATE TABLE app.visit (id int, at date, person bigint REFERENCES app.person, PRIMARY KEY (id, at))
  PARTITION BY RANGE (at);
CREATE TABLE app.visit_25 PARTITION OF app.visit FOR VALUES FROM ('2025-01-01') TO ('2026-01-01');
CREATE TABLE app.visit_rest PARTITION OF app.visit DEFAULT;
"""
_ROWS = """
INSERT INTO app.person (name, price, doc, born, kind, mood, moods)
  VALUES ('Ann', 12, '{"a": 1}', '1990-01-01', 'x', 'wild', '{calm,wild}');
INSERT INTO app.visit VALUES (1, '2025-02-02', 1), (2, '2026-02-02', 1);
UPDATE app.person SET name = 'Anna', tags = '{q}'; UPDATE app.visit SET id = 3 WHERE id = 2;
"""
#: Its domain and its function are code of the application's.
_CODE = """
CREATE FUNCTION app.is_mail(text) RETURNS bool LANGUAGE sql AS 'SELECT $1 LIKE ''%@%''';
CREATE DOMAIN app.checked AS text CHECK (app.is_mail(VALUE));
CREATE TABLE app.mail (id int PRIMARY KEY, sender app.checked);
CREATE FUNCTION app.calm(int) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT $1';
CREATE INDEX ON app.mail (app.calm(id));
"""
_MAIL = "INSERT INTO app.mail VALUES (1, 'a@b')"


class App:
    """The application's role and its schema on both sides."""

    def __init__(self, source: Database, target: Database, role: str) -> None:
        self.role = role
        self.route = Route(source=source, target=target, settings=FAST)

    def make(self, tables: str) -> None:
        """Make the tables as the application's role, and give the daemon's roles what the scripts give."""
        for end, daemon in ((self.route.source, self.route.source.source_role), (self.route.target, self.target_role)):
            end.execute(
                f"CREATE SCHEMA app AUTHORIZATION {self.role}; SET ROLE {self.role}; {tables}; RESET ROLE;"
                f" GRANT USAGE ON SCHEMA app TO {daemon}; GRANT ALL ON ALL TABLES IN SCHEMA app TO {daemon}"
            )
        self.route.source.execute("CREATE PUBLICATION pub FOR TABLES IN SCHEMA app WITH (publish_via_partition_root)")

    @property
    def target_role(self) -> str:
        """Name of the daemon's role on the target."""
        return self.route.target.target_role


@pytest.fixture
def app(source_db: Database, target_db: Database) -> Iterator[App]:
    """An application's role without anything else."""
    role = f"app_{secrets.token_hex(4)}"
    for end in (source_db, target_db):
        end.execute(f"CREATE ROLE {role}")
    yield App(source_db, target_db, role)
    for end in (source_db, target_db):
        end.execute(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")


@pytest.mark.pg_majors(15, 18)
def test_an_ordinary_schema_is_applied(app: App, run_command: RunCommand) -> None:
    """Serials, identities, enums, checks, generated columns, indexes on expressions and partitions are no code."""
    app.make(_ORDINARY)
    app.route.source.execute("INSERT INTO app.visit VALUES (9, '2025-03-03', NULL)")
    run_command(app.route, "init", "--copy", code=0)
    app.route.source.execute(_ROWS)
    daemon = Daemon(app.route)
    try:
        daemon.wait_caught_up()
    finally:
        daemon.end()
    assert contents(app.route.target, "app") == contents(app.route.source, "app")


@pytest.mark.parametrize("way", ["grant", "setting", "owner"])
def test_each_way_out_of_the_hint_is_one(
    app: App, way: str, run_command: RunCommand, new_slot: Callable[[Route], None]
) -> None:
    """The refusal names what the code is and whose; each of the three ways makes the same change come."""
    app.make(_CODE)
    route = app.route
    new_slot(route)
    route.source.execute(_MAIL)
    daemon = Daemon(route)
    try:
        assert daemon.exit_code(60) == 4, daemon.log_tail()
        said = daemon.failure
    finally:
        daemon.end()
    assert f"target table app.mail belongs to {app.role}," in said.replace('"', "")
    assert "domain app.checked, index app.mail_calm_idx" in said
    assert "app.mail" in run_command(route, "check").stdout
    settings: dict[str, str | float] = {}
    if way == "grant":
        grant = re.search(r"GRANT \S+ TO [^\s;]+", said.replace('\\"', '"'))
        assert grant
        route.target.execute(grant[0])
    elif way == "owner":
        trusted = f"ALTER TABLE app.mail OWNER TO {route.target.target_role};"
        trusted += f" ALTER DOMAIN app.checked OWNER TO {route.target.target_role}"
        route.target.execute(f"GRANT CREATE ON SCHEMA app TO {route.target.target_role}; {trusted}")
    else:
        assert "target.apply_as = 'role'" in said
        settings["target.apply_as"] = "role"
    daemon = Daemon(route, settings=settings)
    try:
        daemon.wait_caught_up()
    finally:
        daemon.end()
        if way == "grant":
            route.target.execute(f"REVOKE {route.target.target_role} FROM {app.role}")
    assert route.target.rows("SELECT * FROM app.mail") == [(1, "a@b")]


@pytest.mark.pg_majors(15, 18)
def test_no_switch_of_role_is_a_boundary(target_db: Database, pg_major: int) -> None:
    """Code that runs after SET LOCAL ROLE becomes the session's role again, by RESET ROLE or by a cursor WITH HOLD.

    A SECURITY DEFINER function is no boundary either: the cursor runs at COMMIT, and so does a deferred trigger before
    PostgreSQL 18. This is why code of a table's owner is refused, and not run as its owner.
    """
    role = f"app_{secrets.token_hex(4)}"
    target_db.execute(
        f"CREATE ROLE {role}; CREATE SCHEMA app AUTHORIZATION {role}; SET ROLE {role};"
        " CREATE TABLE app.t (id int); CREATE TABLE app.u (id int); CREATE TABLE app.who (way text, name text);"
        " CREATE FUNCTION app.note(way text) RETURNS int LANGUAGE plpgsql AS $$ BEGIN"
        "   INSERT INTO app.who VALUES (way, current_user); RETURN 1; END $$;"
        " CREATE FUNCTION app.reset() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        "   RESET ROLE; PERFORM app.note('reset'); RETURN NEW; END $$;"
        " CREATE TRIGGER reset BEFORE INSERT ON app.t FOR EACH ROW EXECUTE FUNCTION app.reset();"
        " CREATE FUNCTION app.late() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        "   PERFORM app.note('deferred'); RETURN NULL; END $$;"
        " CREATE CONSTRAINT TRIGGER late AFTER INSERT ON app.u DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
        "   EXECUTE FUNCTION app.late();"
        " CREATE FUNCTION app.write() RETURNS void SECURITY DEFINER LANGUAGE plpgsql AS $$ BEGIN"
        "   INSERT INTO app.u VALUES (1);"
        "   EXECUTE 'DECLARE late CURSOR WITH HOLD FOR SELECT app.note(''held'')'; END $$;"
        " RESET ROLE"
    )
    try:
        session = target_db.rows("SELECT current_user")[0][0]
        target_db.execute(f"BEGIN; SET LOCAL ROLE {role}; INSERT INTO app.t VALUES (1); COMMIT")
        target_db.execute("SELECT app.write()")
        deferred = session if pg_major < 18 else role
        expected = [("deferred", deferred), ("held", session), ("reset", session)]
        assert target_db.rows("SELECT way, name FROM app.who ORDER BY way") == expected
    finally:
        target_db.execute(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")

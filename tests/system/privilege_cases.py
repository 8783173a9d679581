"""Every privilege that the scripts in config/roles give: what it is taken away by, and what is said without it.

The cases are the rows of the tables in docs/PRIVILEGES.md.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

#: On both sides. `gone` is only truncated, `owned` gets an index on the target, where a default of `drawn` is nextval.
TABLES: Final = """
CREATE SCHEMA shop; CREATE TABLE shop.good (id int PRIMARY KEY);
CREATE TABLE item (id int PRIMARY KEY, v int);
CREATE TABLE gone (id int PRIMARY KEY);
CREATE TABLE owned (id int PRIMARY KEY, v int);
CREATE SEQUENCE ticket;
CREATE TABLE drawn (id int PRIMARY KEY{});
"""
SOURCE_TABLES: Final = TABLES.format("")
TARGET_TABLES: Final = TABLES.format(", n int DEFAULT nextval('ticket')")


class Case(NamedTuple):
    """One privilege.

    Attributes:
        name: the row in the table of docs/PRIVILEGES.md.
        end: whose role lacks it.
        take: SQL that takes it away, with {role} and {database}.
        give: SQL that gives it back.
        command: words of the command that needs it.
        change: SQL on the source before that, for the daemon to apply.
        code: exit code.
        words: of the message, in this order.
    """

    name: str
    end: Literal["source", "target"]
    take: str
    give: str
    command: str
    code: int
    words: tuple[str, ...]
    change: str = ""


RUN: Final = "run"
CASES: Final = (
    Case(
        "LOGIN", "source", "ALTER ROLE {role} NOLOGIN", "ALTER ROLE {role} LOGIN", RUN, 3,
        ("source, connecting", "is not permitted to log in"),
    ),
    Case(
        "CONNECT", "source", "REVOKE CONNECT ON DATABASE {database} FROM {role}, PUBLIC",
        "GRANT CONNECT ON DATABASE {database} TO {role}, PUBLIC", RUN, 3,
        ("permission denied for database", "Hint: GRANT CONNECT"),
    ),
    Case(
        "REPLICATION", "source", "ALTER ROLE {role} NOREPLICATION", "ALTER ROLE {role} REPLICATION", RUN, 3,
        ("source", "WAL sender", "Hint: ", "ALTER ROLE ... REPLICATION"),
    ),
    Case(
        "SELECT on tables", "source", "REVOKE SELECT ON item FROM {role}", "GRANT SELECT ON item TO {role}",
        "refresh --table public.item --truncate", 3, ("may not read public.item", "Hint: GRANT SELECT"),
    ),
    Case(
        "USAGE on schemas", "source", "REVOKE USAGE ON SCHEMA shop FROM {role}",
        "GRANT USAGE ON SCHEMA shop TO {role}", "refresh --table shop.good --truncate", 3,
        ("may not read shop.good", "Hint: GRANT ", "USAGE on their schemas"),
    ),
    Case(
        "SELECT on sequences", "source", "REVOKE SELECT ON SEQUENCE ticket FROM {role}",
        "GRANT SELECT ON SEQUENCE ticket TO {role}", "sequences", 3, ("permission denied", "ticket", "Hint: GRANT "),
    ),
    Case(
        "LOGIN", "target", "ALTER ROLE {role} NOLOGIN", "ALTER ROLE {role} LOGIN", RUN, 4,
        ("target, connecting", "is not permitted to log in"),
    ),
    Case(
        "CREATE on the database", "target",
        "REVOKE CREATE ON DATABASE {database} FROM {role}", "GRANT CREATE ON DATABASE {database} TO {role}",
        "init --despite slot_read --set target.state_schema=another", 4,
        ("state_schema: role ", 'may not create schema "another"', "GRANT CREATE ON DATABASE"),
    ),
    Case(
        "SET on session_replication_role", "target",
        "REVOKE SET ON PARAMETER session_replication_role FROM {role}",
        "GRANT SET ON PARAMETER session_replication_role TO {role}", RUN, 4,
        ("permission denied to set parameter", "GRANT SET ON PARAMETER session_replication_role"),
    ),
    Case(
        "USAGE on schemas", "target", "REVOKE USAGE ON SCHEMA shop FROM {role}",
        "GRANT USAGE ON SCHEMA shop TO {role}", RUN, 4,
        ("lacks privileges on target table shop.good", "USAGE on schema shop"), "INSERT INTO shop.good VALUES (1)",
    ),
    Case(
        "SELECT, INSERT, UPDATE, DELETE on tables", "target",
        "REVOKE SELECT, INSERT, UPDATE, DELETE ON item FROM {role}",
        "GRANT SELECT, INSERT, UPDATE, DELETE ON item TO {role}", RUN, 4,
        ("lacks privileges on target table public.item: ", "SELECT", "Hint: grant them"), "INSERT INTO item VALUES (1)",
    ),
    Case(
        "TRUNCATE on tables", "target", "REVOKE TRUNCATE ON gone FROM {role}", "GRANT TRUNCATE ON gone TO {role}",
        RUN, 5, ("truncate on public.gone", "insufficient_privilege", "Hint: grant"), "TRUNCATE gone",
    ),
    Case(
        "USAGE on sequences", "target", "REVOKE ALL ON SEQUENCE ticket FROM {role}",
        "GRANT USAGE, SELECT, UPDATE ON SEQUENCE ticket TO {role}", RUN, 5,
        ("insert on public.drawn", "insufficient_privilege", "Hint: grant"), "INSERT INTO drawn VALUES (1)",
    ),
    Case(
        "UPDATE on sequences", "target", "REVOKE UPDATE, USAGE ON SEQUENCE ticket FROM {role}",
        "GRANT USAGE, UPDATE ON SEQUENCE ticket TO {role}", "sequences", 1,
        ("public.ticket: refused", "permission denied for sequence ticket"), "SELECT setval('ticket', 100)",
    ),
    Case(
        "ownership of tables", "target", "CREATE INDEX ON owned (v)",
        "ALTER TABLE owned OWNER TO {role}; GRANT CREATE ON SCHEMA public TO {role}",
        "refresh --table public.owned --truncate --defer-indexes", 4,
        ("may not drop the indexes of public.owned", "Hint: leave out --defer-indexes"),
    ),
    Case(
        "EXECUTE on pg_replication_origin_*", "target",
        "REVOKE EXECUTE ON FUNCTION pg_replication_origin_session_setup FROM {role}",
        "GRANT EXECUTE ON FUNCTION pg_replication_origin_session_setup TO {role}",
        "run --set conflict.update_origin_differs=error", 4,
        ("needs replication origins", "permission denied for function", "GRANT EXECUTE ON FUNCTION"),
    ),
)  # fmt: skip

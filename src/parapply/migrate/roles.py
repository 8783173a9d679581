"""Roles of the publisher that the target does not have, made there with their attributes, memberships and settings.

Passwords come over as the verifiers that the publisher keeps, where its role may read them (a superuser); they are in
the target's log where `log_statement` has DDL in it, as with pg_dumpall. A role that is there stays as it is.

Source: PostgreSQL manual, "CREATE ROLE", "pg_authid"; `pg_dumpall.c`, dumpRoles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from psycopg import sql

from parapply.check.server import read_rows
from parapply.source.slot import source_errors
from parapply.target.session.settings import rows, target_errors

if TYPE_CHECKING:
    from parapply.connect import Connections

_ROLES: Final = """
SELECT r.rolname, r.rolsuper, r.rolinherit, r.rolcreaterole, r.rolcreatedb, r.rolcanlogin, r.rolreplication,
       r.rolbypassrls, r.rolconnlimit, r.rolvaliduntil::text, COALESCE(s.setconfig, '{}')
  FROM pg_catalog.pg_roles AS r
  LEFT JOIN pg_catalog.pg_db_role_setting AS s ON s.setrole = r.oid AND s.setdatabase = 0
 WHERE r.rolname !~ '^pg_' ORDER BY 1"""
_MEMBERS: Final = """
SELECT g.rolname, m.rolname, a.admin_option FROM pg_catalog.pg_auth_members AS a
  JOIN pg_catalog.pg_roles AS g ON g.oid = a.roleid JOIN pg_catalog.pg_roles AS m ON m.oid = a.member ORDER BY 1, 2"""
#: What only a superuser gives, by column.
_HIGH: Final = ("SUPERUSER", "REPLICATION", "BYPASSRLS")


class RolesMade(msgspec.Struct, frozen=True, kw_only=True):
    """What was done."""

    made: tuple[str, ...]
    without_password: tuple[str, ...]  # that may log in
    without_attributes: tuple[str, ...]  # role and what it lacks


async def bring(ends: Connections) -> RolesMade:
    """Make the roles that are missing, in one transaction.

    Raises:
        SourceRefused, SourceLost, TargetRefused, TargetLost: they could not be read, or not be made.
    """
    with source_errors("reading the roles"):
        there = await read_rows(ends.source, _ROLES)
        members = await read_rows(ends.source, _MEMBERS)
        ((may_read,),) = await read_rows(
            ends.source, "SELECT pg_catalog.has_table_privilege('pg_catalog.pg_authid', 'SELECT')"
        )
        verifiers: dict[str, str | None] = {}
        if may_read:
            verifiers = dict(await read_rows(ends.source, "SELECT rolname, rolpassword FROM pg_catalog.pg_authid"))
    made: list[str] = []
    lacking: list[str] = []
    bare: list[str] = []
    with target_errors("making the roles"):
        known = {name for (name,) in await rows(ends.target, sql.SQL("SELECT rolname FROM pg_catalog.pg_roles"))}
        ((is_superuser,),) = await rows(
            ends.target, sql.SQL("SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = CURRENT_USER")
        )
        async with ends.target.transaction():
            for row in there:
                if row[0] in known:
                    continue
                made.append(row[0])
                text, lacks = _make(row, verifiers.get(row[0]), is_superuser=is_superuser)
                lacking += [f"{row[0]}: {one}" for one in lacks]
                if row[5] and not verifiers.get(row[0]):
                    bare.append(row[0])
                await rows(ends.target, text)
                for one in row[10]:
                    name, _, value = one.partition("=")
                    await rows(
                        ends.target,
                        sql.SQL("ALTER ROLE {} SET {} TO {}").format(
                            sql.Identifier(row[0]), sql.Identifier(*name.split(".")), _setting(name, value)
                        ),
                    )
            for group, member, is_admin in members:
                if member not in made or (group not in made and group not in known):
                    continue
                admin = sql.SQL(" WITH ADMIN OPTION" if is_admin else "")
                await rows(
                    ends.target,
                    sql.SQL("GRANT {} TO {}{}").format(sql.Identifier(group), sql.Identifier(member), admin),
                )
    return RolesMade(made=tuple(made), without_password=tuple(bare), without_attributes=tuple(lacking))


def _make(row: tuple[Any, ...], verifier: str | None, *, is_superuser: bool) -> tuple[sql.Composed, list[str]]:
    name, superuser, inherits, makes_roles, makes_databases, logs_in, replicates, bypasses, limit, until, _ = row
    high = dict(zip(_HIGH, (superuser, replicates, bypasses), strict=True))
    words = [
        *[word for word, has in high.items() if has and is_superuser],
        "INHERIT" if inherits else "NOINHERIT",
        *[
            word
            for word, has in (("CREATEROLE", makes_roles), ("CREATEDB", makes_databases), ("LOGIN", logs_in))
            if has
        ],
        *([f"CONNECTION LIMIT {limit:d}"] if limit >= 0 else []),
    ]
    text = sql.SQL("CREATE ROLE {} {}").format(sql.Identifier(name), sql.SQL(" ".join(words)))
    if verifier:
        text += sql.SQL(" PASSWORD {}").format(sql.Literal(verifier))
    if until:
        text += sql.SQL(" VALID UNTIL {}").format(sql.Literal(until))
    return text, [word for word, has in high.items() if has and not is_superuser]


#: Settings that are lists of names, each quoted by itself. (guc_tables.c, GUC_LIST_QUOTE)
_LISTS: Final = frozenset(
    {"local_preload_libraries", "search_path", "session_preload_libraries", "shared_preload_libraries",
     "temp_tablespaces", "unix_socket_directories"}
)  # fmt: skip


def _setting(name: str, value: str) -> sql.Composable:
    # The value of a list is SQL by itself, as the publisher has checked and printed it.
    return sql.SQL(value or "''") if name in _LISTS else sql.Literal(value)

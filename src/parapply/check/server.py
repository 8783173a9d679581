"""A server as it is now: settings, the session's role, room for connections, encoding and locale; of either end.

In: an open session. Out: `Server`. Changes nothing.

Source: PostgreSQL manual, "pg_settings", "pg_roles", "pg_database", "pg_stat_database".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from parapply.source.slot import read_rows

if TYPE_CHECKING:
    import psycopg


#: server_version_num of the versions that parapply is tested with: from the first, below the second.
TESTED: Final = (150000, 190000)
#: pg_database_collation_actual_version came with PostgreSQL 15.
_COLLATION_VERSION_SINCE: Final = 150000

#: Settings that are looked at on either end; those that a server does not know are missing.
SETTINGS: Final = (
    "cloudsql.logical_decoding", "idle_replication_slot_timeout", "lc_numeric", "lc_time",
    "max_active_replication_origins", "max_connections", "max_prepared_transactions", "max_replication_slots",
    "max_slot_wal_keep_size", "max_wal_senders", "rds.iam_auth_for_replication", "rds.logical_replication",
    "reserved_connections", "superuser_reserved_connections", "track_commit_timestamp",
)  # fmt: skip

_SERVER: Final = """
SELECT CURRENT_USER::text, d.datname::text, r.rolsuper,
  -- Where a cloud gives the right by a role, its members have no attribute.
  r.rolreplication OR EXISTS (SELECT FROM pg_catalog.pg_roles m WHERE m.rolname = 'rds_replication'
                              AND pg_catalog.pg_has_role(m.oid, 'MEMBER')), r.rolconnlimit, d.datconnlimit,
  (SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_activity a WHERE a.usename = CURRENT_USER),
  (SELECT s.numbackends FROM pg_catalog.pg_stat_database s WHERE s.datid = d.oid),
  (SELECT pg_catalog.sum(s.numbackends)::int FROM pg_catalog.pg_stat_database s WHERE s.datid <> 0),
  pg_catalog.has_database_privilege(d.oid, 'CREATE'),
  pg_catalog.pg_is_in_recovery(), pg_catalog.pg_backend_pid(),
  pg_catalog.pg_encoding_to_char(d.encoding)::text, d.datcollate::text, d.datctype::text,
  coalesce(pg_catalog.to_jsonb(d) ->> 'datlocprovider', 'c'),
  coalesce(pg_catalog.to_jsonb(d) ->> 'datcollversion', ''), {actual},
  (SELECT pg_catalog.json_object_agg(s.name, pg_catalog.current_setting(s.name)) FROM pg_catalog.pg_settings s
   WHERE s.name = ANY ($1))
FROM pg_catalog.pg_roles r, pg_catalog.pg_database d
WHERE r.rolname = CURRENT_USER AND d.datname = pg_catalog.current_database()"""


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """A server, its database of the DSN, and the role of this session."""

    version_num: int  # for example 180004
    role: str
    database: str
    is_superuser: bool
    has_replication: bool
    role_limit: int  # connections of the role; -1: no limit
    database_limit: int  # connections to the database; -1: no limit
    role_connections: int  # now, this session among them
    database_connections: int
    connections: int  # to all databases
    may_create_schema: bool
    is_in_recovery: bool
    backend_pid: int  # as the session reports it; a pooler announced another one
    encoding: str
    collate: str
    ctype: str
    locale_provider: str  # c: libc, i: ICU, b: built-in
    collation_version: str  # recorded; empty: none
    actual_collation_version: str  # of the operating system or ICU now; empty: none, or not known
    settings: dict[str, str]  # as SHOW prints them

    @property
    def version(self) -> str:
        """Return the version as people write it, for example 18.4."""
        return f"{self.version_num // 10000}.{self.version_num % 10000}"

    @property
    def is_tested(self) -> bool:
        """Return whether parapply is tested with this version."""
        return TESTED[0] <= self.version_num < TESTED[1]

    def number(self, name: str) -> int:
        """Return a setting that is a plain number; 0 if the server does not know it."""
        return int(self.settings.get(name, 0))

    def free_connections(self) -> int:
        """Return how many further sessions this role could open; the smallest of all limits.

        Sessions of this command count as free: they are closed before anything else is opened.
        """
        most = self.number("max_connections")
        if not self.is_superuser:
            most -= self.number("superuser_reserved_connections") + self.number("reserved_connections")
        free = [most - self.connections]
        if not self.is_superuser:
            free += [self.role_limit - self.role_connections] if self.role_limit >= 0 else []
            free += [self.database_limit - self.database_connections] if self.database_limit >= 0 else []
        return min(free) + 1


async def read_server(conn: psycopg.AsyncConnection[Any]) -> Server:
    """Return the facts about the server, by one query.

    Raises:
        psycopg.Error: the caller turns it into an error of ours.
    """
    version_num = conn.info.server_version
    known = version_num >= _COLLATION_VERSION_SINCE
    actual = "coalesce(pg_catalog.pg_database_collation_actual_version(d.oid), '')" if known else "''"
    ((*found, settings),) = await read_rows(conn, _SERVER.format(actual=actual), [list(SETTINGS)])
    names = [field.name for field in msgspec.structs.fields(Server)][1:-1]
    return Server(version_num=version_num, settings=settings, **dict(zip(names, found, strict=True)))

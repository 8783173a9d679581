"""The way back: publication and slot on the target, state on the old source, and the configuration of its daemon.

The slot is made before the fence, because that waits for every transaction in progress on the target. The stream begins
later: at a mark that is written once no daemon applies to the target, and before writers are let in. So it brings all
that clients write there and nothing that came from the source, whatever the version of the server and whether or not
replication origins are available.

In: sessions of the reverse configuration, whose source is the target that takes over.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

import click
from psycopg import conninfo, sql

from parapply import connect
from parapply.amounts import few
from parapply.cutover.pooler import without_secrets
from parapply.errors import SourceRefused, TargetRefused
from parapply.quoting import copyable, shown, shown_list, toml_string
from parapply.source import refusals, slot
from parapply.source.slot import read_rows, source_errors
from parapply.target.session import lease, origins, prepared
from parapply.target.session.settings import rows, target_errors
from parapply.target.state import cutovers
from parapply.target.state import slots as state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.config import Config
    from parapply.connect import Connections
    from parapply.copy.published import PublishedTable
    from parapply.login import Login
    from parapply.target.session.settings import Connection

#: server_version_num of the first publisher that can leave out what a subscriber wrote.
ORIGIN_SINCE: Final = 160000
#: Advice about tables that came while the cut-over was under way.
AGAIN: Final = "give the same command again once everything is taken back: it takes them in"
_OPERATIONS: Final = frozenset({"insert", "update", "delete", "truncate"})

#: From 18 on UPDATE and DELETE fail where the identity has a generated column that is not published
#: (execReplication.c, CheckCmdReplicaIdentity).
_WITHOUT_IDENTITY: Final = """
SELECT DISTINCT w.schema_name || '.' || w.table_name
  FROM unnest($1::text[], $2::text[]) AS w(schema_name, table_name)
  JOIN pg_catalog.pg_namespace AS n ON n.nspname = w.schema_name
  JOIN pg_catalog.pg_class AS named ON named.relnamespace = n.oid AND named.relname = w.table_name
  LEFT JOIN LATERAL pg_catalog.pg_partition_tree(named.oid) AS p ON p.isleaf
  JOIN pg_catalog.pg_class AS c ON c.oid = COALESCE(p.relid, named.oid) AND c.relkind = 'r'
 WHERE c.relreplident = 'n' OR (c.relreplident = 'd' AND NOT EXISTS (
       SELECT FROM pg_catalog.pg_index AS i
        WHERE i.indrelid = c.oid AND i.indisprimary AND i.indisvalid AND i.indimmediate))
    OR (pg_catalog.current_setting('server_version_num')::int >= 180000 AND EXISTS (
       SELECT FROM pg_catalog.pg_attribute AS a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated <> ''
          AND (c.relreplident = 'f' OR EXISTS (
              SELECT FROM pg_catalog.pg_index AS i
               WHERE i.indrelid = c.oid AND a.attnum = ANY (i.indkey)
                 AND CASE WHEN c.relreplident = 'd' THEN i.indisprimary ELSE i.indisreplident END))))
 ORDER BY 1"""


_NAMED_ROOTS: Final = """
SELECT n.nspname::text, c.relname::text
  FROM unnest($2::text[], $3::text[]) AS w(schema_name, table_name)
  JOIN pg_catalog.pg_namespace AS n ON n.nspname = w.schema_name
  JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = w.table_name AND c.relkind = 'p'
  JOIN LATERAL pg_catalog.pg_partition_ancestors(c.oid) AS a ON true
  JOIN pg_catalog.pg_class AS above ON above.oid = a.relid
  JOIN pg_catalog.pg_publication AS p ON p.pubname = ANY ($1::text[])
 WHERE p.puballtables OR EXISTS (SELECT FROM pg_catalog.pg_publication_rel AS r
                                  WHERE r.prpubid = p.oid AND r.prrelid = above.oid)
    OR EXISTS (SELECT FROM pg_catalog.pg_publication_namespace AS s
                WHERE s.pnpubid = p.oid AND s.pnnspid = above.relnamespace)"""


_IN_PART: Final = """
SELECT DISTINCT n.nspname || '.' || c.relname
  FROM pg_catalog.pg_publication AS p JOIN pg_catalog.pg_publication_rel AS r ON r.prpubid = p.oid
  JOIN pg_catalog.pg_class AS c ON c.oid = r.prrelid JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE p.pubname = ANY ($1::text[]) AND (r.prqual IS NOT NULL OR r.prattrs IS NOT NULL) ORDER BY 1"""


def publication_sql(config: Config, tables: Sequence[PublishedTable]) -> sql.Composed:
    """Return the statement that makes the publication of the way back."""
    named = sql.SQL(", ").join([sql.Identifier(table.schema, table.name) for table in tables])
    # Where today's publication names a root, its partitions may differ between both ends.
    return sql.SQL("CREATE PUBLICATION {} FOR TABLE {} WITH (publish_via_partition_root = true)").format(
        sql.Identifier(config.source.publications[0]), named
    )


async def missing_publications(conn: slot.Connection, names: Sequence[str]) -> list[str]:
    """Return the publications that are not on a server; raise SourceLost if the connection broke."""
    with source_errors("reading the publications"):
        query = (
            "SELECT one FROM pg_catalog.unnest($1::text[]) AS one"
            " WHERE one NOT IN (SELECT pubname FROM pg_catalog.pg_publication)"
        )
        return [str(name) for (name,) in await read_rows(conn, query, [list(names)])]


async def without_identity(ends: Connections, tables: Sequence[PublishedTable]) -> list[str]:
    """Return the tables whose UPDATE and DELETE a publication would break on the target, and does not on the source."""
    names = [[table.schema for table in tables], [table.name for table in tables]]
    with target_errors("reading the replica identities"):
        there = await rows(ends.target, sql.SQL(_WITHOUT_IDENTITY), names)
    with source_errors("reading the replica identities"):
        here = await rows(ends.source, sql.SQL(_WITHOUT_IDENTITY), names)
    return [str(name) for (name,) in there if (name,) not in here]


async def check_covers(
    conn: slot.Connection, config: Config, tables: Sequence[PublishedTable], *, is_made: bool
) -> list[str]:
    """Refuse publications of the way back that leave out a table, rows, columns or an operation: they would be lost.

    `conn` leads to the target that takes over. A publication that `is_made` by the cut-over is dropped when everything
    is taken back. Return the partitioned tables of which only the partitions are published, so that one that is made
    later would be left out.
    """
    operations = await slot.check_publications(conn, config.source.publications)
    if left_out := _OPERATIONS - operations:
        raise SourceRefused(
            f"the publication of the way back leaves out {', '.join(sorted(left_out))}",
            hint="ALTER PUBLICATION ... SET (publish = 'insert, update, delete, truncate') on the target",
        )
    there = set(await slot.published_tables(conn, config.source.publications))
    leaves = {table: {(leaf.schema, leaf.name) for leaf in table.leaves} for table in tables}
    unnamed = [table for table in tables if table.full_name not in there]
    if unnamed:
        # Without publish_via_partition_root a root that is named shows as its leaves, of which it may have none.
        names = [[table.schema for table in unnamed], [table.name for table in unnamed]]
        with source_errors("reading the publications"):
            roots = set(await read_rows(conn, _NAMED_ROOTS, [list(config.source.publications), *names]))
        unnamed = [table for table in unnamed if table.full_name not in roots]
    missing = [table for table in unnamed if not leaves[table] or not leaves[table] <= there]
    if missing:
        named = shown_list([table.full_name for table in missing])
        raise SourceRefused(
            f"the publication of the way back leaves out {few([table.text for table in missing])}",
            hint=AGAIN
            if is_made
            else f"ALTER PUBLICATION {shown(config.source.publications[0])} ADD TABLE {named} on the target",
        )
    with source_errors("reading the publications"):
        in_part = [str(name) for (name,) in await read_rows(conn, _IN_PART, [list(config.source.publications)])]
    if in_part:
        raise SourceRefused(
            f"the publication of the way back has a row filter or a column list for {few(in_part)}",
            hint="name the tables there without them, on the target: what they leave out would be lost on the way back",
        )
    return [table.text for table in unnamed]


async def make_publication(conn: Connection, config: Config, tables: Sequence[PublishedTable]) -> None:
    """Make the publication, with the role of the daemon that applies there.

    Raises:
        TargetRefused: the role does not own the tables; the hint has the statement.
    """
    statement = publication_sql(config, tables)
    try:
        with target_errors("making the publication of the way back"):
            await conn.execute(statement)
    except TargetRefused as error:
        raise TargetRefused(
            str(error), hint=f"let the owner of the tables run it there: {copyable(statement.as_string(None))}"
        ) from error


async def drop_publication(conn: Connection, config: Config) -> None:
    """Drop it, if it exists; raise TargetRefused or TargetLost if it could not be dropped."""
    with target_errors("dropping the publication of the way back"):
        name = sql.Identifier(config.source.publications[0])
        await conn.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(name))


async def state_of(ends: Connections, config: Config) -> state.SlotState | None:
    """Return the state of the way back on the old source, None if there is none."""
    schema = config.target.state_schema
    if not await state.has_schema(ends.target, schema):
        return None
    facts = await slot.inspect(ends.source, config.source.slot)
    return await state.load(ends.target, schema, config.source.slot, facts.system_identifier)


async def stale_state(ends: Connections, config: Config) -> tuple[int | None, str]:
    """Return the id of the state that an earlier cut-over left of the slot on the old source, and the fence it used.

    Returns:
        None and empty if there is nothing.

    Raises:
        TargetRefused: a daemon applies the slot, or did, and no cut-over has ended that.
    """
    schema, name = config.target.state_schema, config.source.slot
    found = await state_of(ends, config)
    if found is None:
        return None, ""
    before = await cutovers.read(ends.target, schema, found.slot_id)
    if before is None or not before.is_done:
        raise TargetRefused(
            f"slot {name!r} of the way back is applied on the old source already",
            hint="end it with `parapply drop`, or give the way back another slot",
        )
    return found.slot_id, before.fence


async def check_none_under_way(ends: Connections, config: Config, other_way: str) -> None:
    """Refuse to begin, to go on or to undo while a cut-over in the other direction is under way.

    Raises:
        TargetRefused: it is.
    """
    schema, name = config.target.state_schema, config.source.slot
    found = await state_of(ends, config)
    other = None if found is None else await cutovers.read(ends.target, schema, found.slot_id)
    if other is None or other.is_done:
        return
    undo = "" if other.is_open else "; --undo takes it back"
    raise TargetRefused(
        f"the cut-over of slot {name!r}, in the other direction, is under way, at the step {other.step}",
        hint=f"`{other_way}` goes on with it{undo}",
    )


async def make_state(ends: Connections, config: Config, takeover_lsn: int) -> None:
    """Write the state of the way back on the old source: everything that commits after an LSN is to be applied."""
    schema, name = config.target.state_schema, config.source.slot
    facts = await slot.inspect(ends.source, name)
    refusals.check_slot(facts, name, None, two_phase=config.source.two_phase)
    if await state.load(ends.target, schema, name, facts.system_identifier) is not None:
        return
    await state.create(ends.target, schema, connect.new_slot(config, facts, takeover_lsn))


async def drop_state(ends: Connections, config: Config, slot_id: int) -> None:
    """Remove the state of a slot on the old source, with its origins.

    Raise LeaseHeld if a daemon applies it, TargetRefused or TargetLost if it could not be removed.
    """
    await lease.take_lease(ends.target, slot_id, 0)
    held = [gid for gid, _ in (await prepared.pending(ends.target, config.target.state_schema, slot_id)).values()]
    if held:
        raise TargetRefused(
            f"transactions are prepared on the old source: {few(held)}", hint="`parapply drop` rolls them back"
        )
    await state.drop_slot_state(ends.target, config.target.state_schema, slot_id)
    await origins.drop_origins(ends.target, slot_id)


async def drop_known_state(ends: Connections, config: Config) -> None:
    """Remove the state of the way back on the old source, if it exists; errors as `drop_state` and `state_of`."""
    found = await state_of(ends, config)
    if found is not None:
        await drop_state(ends, config, found.slot_id)


async def can_filter(ends: Connections) -> bool:
    """Return whether the way back can leave out by origin the changes of the old source.

    Both ends of the stream that runs take part in it: its source's role writes under origins in the way back.
    """
    with source_errors("looking whether the role may use replication origins"):
        ((may_use,),) = await rows(ends.source, sql.SQL(origins.MAY_USE_SQL))
    return bool(may_use) and ends.target.info.server_version >= ORIGIN_SINCE


def config_text(forward: Config, *, is_filtering: bool) -> str:
    """Return a configuration file for the way back, as TOML; passwords are left out.

    Without a filter by origin nothing goes round either: only one of the two streams exists at a time.
    """
    name = f"{forward.source.slot}_back"
    values: dict[str, dict[str, Any]] = {
        "source": {
            **_way_in(forward.target.login),
            "slot": name,
            "publications": [name],
            "origin": "none" if is_filtering else "any",
        },
        "target": {
            **_way_in(forward.source.login),
            "state_schema": forward.target.state_schema,
            "session_replication_role": forward.target.session_replication_role,
        },
        "apply": {"workers": forward.apply.workers, "commit_order": forward.apply.commit_order},
    }
    if (settings := forward.cutover).poolers:
        source: dict[str, Any] = conninfo.conninfo_to_dict(forward.source.login.dsn)
        values["cutover"] = {
            "poolers": [without_secrets(one.get_secret_value()) for one in settings.poolers],
            "pooler_databases": list(settings.pooler_databases or [source.get("dbname", "")]),
            "pooler_files": list(settings.pooler_files),
            "pause_timeout_s": settings.pause_timeout_s,
        }
    hooked = settings.holds_clients
    head = [
        f"# The way back of slot {forward.source.slot}: from the target to the source.",
        "# Look at both roles: source.dsn's needs REPLICATION, target.dsn's writes to the tables of the old source.",
        "# Passwords belong into ~/.pgpass, where no password_command prints them.",
        *(["# Look at [cutover], also: pooler_target, and the commands of this direction."] if hooked else []),
    ]
    for section, pairs in values.items():
        head += ["", f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in pairs.items())]
    return "\n".join(head) + "\n"


def _toml(value: Any) -> str:  # noqa: ANN401  what a configuration holds
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return toml_string(value) if isinstance(value, str) else json.dumps(value)


def _way_in(login: Login) -> dict[str, str]:
    command = {} if login.command is None else {"password_command": str(login.command)}
    return {"dsn": without_secrets(login.dsn), **command}


def print_reverse(forward: Config) -> int:
    """Print a configuration of the way back, as far as it follows from the configuration of the stream that runs.

    Raises:
        SourceRefused, SourceLost, TargetLost, TargetRefused: an end, whose version and role it follows, is not there.
    """

    async def text() -> str:
        async with connect.open_both(forward, "cutover") as ends:
            return config_text(forward, is_filtering=await can_filter(ends))

    click.echo(asyncio.run(text()), nl=False)
    return 0

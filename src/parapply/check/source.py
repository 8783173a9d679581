"""The publisher as a server and its publications, as far as a slot, a copy and a stream need them.

In: a plain session on the publisher. Out: `SourceSide`, and findings by `findings_of_source`. Changes nothing.

Source: PostgreSQL manual, "Logical Replication: Publication", "pg_locks", "pg_prepared_xacts", "pg_publication_tables".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from psycopg import sql

from parapply.amounts import few
from parapply.check.kinds import Code, Finding
from parapply.check.server import Server, read_server
from parapply.check.shapes import TableShape, UserType, read_shapes, read_types
from parapply.copy.published import PublishedTable, published_tables, schema_only_tables, unreadable
from parapply.errors import SourceRefused, TargetRefused
from parapply.model import Column, Relation
from parapply.plan.copy_starts import Name
from parapply.quoting import shown
from parapply.source import failover, refusals, slot
from parapply.source.options import start_options, streaming_of
from parapply.source.slot import SourceFacts, read_rows, source_errors
from parapply.vocabulary import Provider
from parapply.wire.ddl_queue import QUEUE
from parapply.wire.partitions import narrowed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from parapply.config import Config

#: Seconds that a transaction is open before it is reported, because making the slot waits for its end.
_OLD_TRANSACTION_S: Final = 60
#: Seconds; a shorter wal_sender_timeout leaves the daemon no room for one long pause.
_SHORT_SENDER_TIMEOUT_S: Final = 10.0

# Transactions with an xid hold a lock on it, which every role may see; when they began, not every role may.
_OPEN: Final = """
SELECT pg_catalog.format('transaction %s of process %s', l.transactionid, l.pid),
  (SELECT pg_catalog.concat_ws(', ', 'role ' || a.usename, 'database ' || a.datname)
   FROM pg_catalog.pg_stat_activity a WHERE a.pid = l.pid),
  pg_catalog.format('SELECT pg_terminate_backend(%s);', l.pid),
  (SELECT extract(epoch FROM pg_catalog.clock_timestamp() - a.xact_start)::float8
   FROM pg_catalog.pg_stat_activity a WHERE a.pid = l.pid)
FROM pg_catalog.pg_locks l
WHERE l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.granted AND l.pid <> pg_catalog.pg_backend_pid()
UNION ALL
SELECT pg_catalog.format('prepared transaction %L', gid), pg_catalog.format('role %s, database %s', owner, database),
  pg_catalog.format('ROLLBACK PREPARED %L;', gid) || '  -- or COMMIT PREPARED, in database ' || database,
  extract(epoch FROM pg_catalog.clock_timestamp() - prepared)::float8
FROM pg_catalog.pg_prepared_xacts"""

_PUBLICATIONS: Final = """
SELECT pubname::text, pubinsert, pubupdate, pubdelete, pubtruncate, {} FROM pg_catalog.pg_publication ORDER BY 1"""
#: server_version_num of the first server whose publications may be of all sequences.
_SEQUENCES_SINCE: Final = 190000

# A published table and the partitions that hold its rows: whether UPDATE works is decided by the partition.
_IDENTITIES: Final = """
WITH published AS (
  SELECT c.oid, pg_catalog.bool_or(b.pubupdate) AS updates, pg_catalog.bool_or(b.pubdelete) AS deletes
  FROM pg_catalog.pg_publication_tables p
  JOIN pg_catalog.pg_publication b ON b.pubname = p.pubname
  JOIN pg_catalog.pg_namespace n ON n.nspname = p.schemaname
  JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = p.tablename
  WHERE p.pubname = ANY ($1::name[]) GROUP BY 1
), one AS (
  SELECT p.oid AS root, p.oid, p.updates, p.deletes FROM published p
  UNION
  SELECT p.oid, t.relid, p.updates, p.deletes FROM published p
  CROSS JOIN LATERAL pg_catalog.pg_partition_tree(p.oid::pg_catalog.regclass) t WHERE t.isleaf
)
SELECT one.root::int8, n.nspname::text, c.relname::text, c.relreplident::text, c.relkind = 'p', one.updates,
  one.deletes,
  ARRAY(
    SELECT a.attname::text FROM pg_catalog.pg_index i
    JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY (i.indkey::int2[])
    WHERE i.indrelid = c.oid AND i.indisvalid AND i.indimmediate
      AND CASE c.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident ELSE false END
    ORDER BY a.attnum),
  (SELECT pg_catalog.min(k.relname::text) FROM pg_catalog.pg_index i
   JOIN pg_catalog.pg_class k ON k.oid = i.indexrelid
   WHERE i.indrelid = c.oid AND i.indisunique AND i.indisvalid AND i.indimmediate AND i.indpred IS NULL
     AND i.indexprs IS NULL AND NOT EXISTS (
       SELECT FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attnum = ANY (i.indkey::int2[])
       AND NOT a.attnotnull))
FROM one JOIN pg_catalog.pg_class c ON c.oid = one.oid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
ORDER BY 2, 3"""

# Columns that a row filter or a column list of a published table names.
_FILTERS: Final = """
SELECT r.prrelid::int8, r.prqual IS NOT NULL, r.prattrs IS NOT NULL,
  coalesce(pg_catalog.pg_get_expr(r.prqual, r.prrelid), ''),
  ARRAY(SELECT a.attname::text FROM pg_catalog.pg_depend d
    JOIN pg_catalog.pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
    WHERE d.classid = 'pg_catalog.pg_publication_rel'::pg_catalog.regclass AND d.objid = r.oid
      AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.refobjid = r.prrelid AND d.refobjsubid > 0
    ORDER BY 1),
  ARRAY(SELECT a.attname::text FROM pg_catalog.pg_attribute a
    WHERE a.attrelid = r.prrelid AND a.attnum = ANY (r.prattrs::int2[]))
FROM pg_catalog.pg_publication_rel r JOIN pg_catalog.pg_publication b ON b.oid = r.prpubid
WHERE b.pubname = ANY ($1::name[]) AND (b.pubupdate OR b.pubdelete)
  AND (r.prqual IS NOT NULL OR r.prattrs IS NOT NULL)"""

# Tables of extensions come with the extension.
_OTHERS: Final = """
SELECT CASE c.relkind WHEN 'm' THEN 'materialized view' WHEN 'f' THEN 'foreign table' WHEN 'S' THEN 'sequence'
    ELSE CASE c.relpersistence WHEN 'u' THEN 'unlogged table' ELSE 'table' END END,
  n.nspname::text, c.relname::text
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'm', 'f', 'S') AND c.relpersistence <> 't'
  AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
  AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend d WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass
    AND d.objid = c.oid AND d.deptype = 'e')
ORDER BY 2, 3"""

_COUNTS: Final = """
SELECT (SELECT pg_catalog.count(*) FROM pg_catalog.pg_replication_slots),
  (SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_get_wal_senders()),
  (SELECT pg_catalog.count(*) FROM pg_catalog.pg_largeobject_metadata)"""


class CheckOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The set-up that is planned."""

    is_copy: bool = False
    truncates: bool = False
    brings_schema: bool = False  # tables that are missing are made before the copy
    brings_roles: bool = False  # the same for roles
    connections: int = 4  # of the copy
    provider: Provider | None = None  # of the publisher, whose rules are also looked at
    target_provider: Provider | None = None


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """How one relation's old rows are sent: of a published table, or of a partition of it."""

    root_oid: int  # of the published table
    name: Name
    replica_identity: str  # d: default, n: nothing, f: full, i: index
    is_partitioned: bool
    publishes_updates: bool
    publishes_deletes: bool
    columns: tuple[str, ...]  # of the identity's index; () if there is none, or FULL
    unique_index: str | None  # that could be named as the identity


class SourceSide(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was read of the publisher."""

    server: Server
    facts: SourceFacts
    operations: frozenset[str]  # that the publications send, all together: insert, update, delete, truncate
    tables: tuple[PublishedTable, ...]
    relations: tuple[Relation, ...]  # as the stream would announce `tables`, as far as their partitions have it
    identities: tuple[Identity, ...]
    shapes: dict[Name, TableShape]
    types: dict[str, UserType]
    findings: tuple[Finding, ...]
    schema_only: tuple[str, ...]  # published tables whose rows are left out, as schema.table

    def changing(self) -> set[int]:
        """Return the OIDs of the published tables of which updates or deletes can come."""
        return {
            each.root_oid
            for each in self.identities
            if (each.publishes_updates or each.publishes_deletes) and (each.columns or each.replica_identity == "f")
        }


async def read_source(conn: slot.Connection, config: Config, facts: SourceFacts, options: CheckOptions) -> SourceSide:
    """Read the publisher, by a number of queries that does not depend on the number of tables."""
    source = config.source
    with source_errors("checking the publisher"):
        server = await read_server(conn)
        (used_slots, senders, n_large), *_ = await read_rows(conn, _COUNTS)
        open_ = await read_rows(conn, _OPEN)
        publications = await read_rows(conn, publications_query(server.version_num))
        identities = [_identity(row) for row in await read_rows(conn, _IDENTITIES, [list(source.publications)])]
        filters = await read_rows(conn, _FILTERS, [list(source.publications)])
        others = await read_rows(conn, _OTHERS)
    findings = [
        *findings_of_publisher(facts, config),
        *_of_server(server, connections=options.connections if options.is_copy else 0),
    ]
    if facts.slot is not None and not options.is_copy and await slot.has_sent(conn, source.slot):
        told = f"slot {source.slot!r} was read before, and the target has no state of it"
        findings.append(Finding(Code.SLOT_READ, told, source.slot))
    findings += _of_room(server, facts, used_slots, senders, is_copy=options.is_copy)
    findings += _of_transactions(open_)
    tables: list[PublishedTable] = []
    findings += findings_of_publications(publications, config)
    publications = [row for row in publications if row[0] in source.publications]
    operations = frozenset([word for _, *flags, _ in publications for word, is_on in _operations(flags) if is_on])
    left_out: list[PublishedTable] = []
    try:
        tables = await published_tables(conn, source.publications, config.mapping)
        left_out = await schema_only_tables(conn, source.publications, config.mapping)
    except (SourceRefused, TargetRefused) as error:
        findings.append(Finding(Code.PUBLICATION_REFUSED, str(error)))
    else:
        if not (tables or left_out) and publications:
            findings.append(Finding(Code.PUBLICATION_EMPTY, "the publications have no table"))
    # Their rows are neither copied nor applied: `published_tables` and the stream leave them out.
    names = {each.name for each in identities}
    findings += [_of_state(schema) for schema in sorted(facts.state_schemas & {name[0] for name in names - {QUEUE}})]
    findings += _of_queue(config, is_published=QUEUE in names)
    findings += [_of_schema_only(table) for table in left_out]
    identities = [each for each in identities if each.name[0] not in facts.state_schemas]
    findings += _of_identities(identities)
    findings += _of_filters(filters, identities)
    if options.is_copy or config.source.on_lost_slot == "heal":
        code = Code.SOURCE_SELECT if options.is_copy else Code.HEAL_SELECT
        findings += _of_select(await unreadable(conn, tables), server, code)
    findings += _of_others(others, {each.name for each in identities}, facts.state_schemas, n_large)
    by_name = {(each.root_oid, each.name): each for each in identities}
    held: dict[int, set[frozenset[str]]] = {}
    for each in identities:
        # The identity of the root itself is in its relation.
        if each.columns and not each.is_partitioned:
            held.setdefault(each.root_oid, set()).add(frozenset(each.columns))
    with source_errors("checking the published tables"):
        shapes = await read_shapes(conn, [table.full_name for table in tables])
        types = await read_types(conn, [table.full_name for table in tables])
    return SourceSide(
        server=server, facts=facts, operations=operations, tables=tuple(tables),
        relations=tuple(
            narrowed(_relation(table, by_name[table.oid, table.full_name]), held.get(table.oid, ())) for table in tables
        ),
        identities=tuple(identities), shapes=shapes, types=types, findings=tuple(findings),
        schema_only=tuple([table.text for table in left_out]),
    )  # fmt: skip


def _of_schema_only(table: PublishedTable) -> Finding:
    name = shown(*table.full_name)
    return Finding(Code.SCHEMA_ONLY, f"{name} is published, and gets no rows here", name)


def _identity(row: tuple[Any, ...]) -> Identity:
    root, schema, name, kind, is_partitioned, updates, deletes, columns, unique = row
    return Identity(
        root_oid=root, name=(schema, name), replica_identity=kind, is_partitioned=is_partitioned,
        publishes_updates=updates, publishes_deletes=deletes, columns=tuple(columns), unique_index=unique,
    )  # fmt: skip


def _relation(table: PublishedTable, identity: Identity) -> Relation:
    is_full = identity.replica_identity == "f"
    columns = [
        Column(name=name, type_oid=oid, type_modifier=modifier, is_key=is_full or name in identity.columns)
        for name, oid, modifier in zip(table.columns, table.types, table.modifiers, strict=True)
    ]
    return Relation(
        oid=table.oid, schema=table.schema, name=table.name, replica_identity=identity.replica_identity,
        columns=tuple(columns),
    )  # fmt: skip


def findings_of_publisher(facts: SourceFacts, config: Config) -> Iterator[Finding]:
    """Yield findings of a publisher and its slot that the daemon itself would refuse. Pure."""
    try:
        refusals.check_server(facts)
    except SourceRefused as error:
        code = Code.SOURCE_STANDBY if refusals.decodes(facts) else Code.WAL_LEVEL
        fix = "" if code is Code.SOURCE_STANDBY else "ALTER SYSTEM SET wal_level = 'logical';  -- then restart"
        yield Finding(code, str(error).removeprefix("source: "), fix=fix)
    if facts.is_in_recovery and not facts.hot_standby_feedback:
        yield Finding(
            Code.STANDBY_FEEDBACK,
            "the publisher is a standby with hot_standby_feedback = off",
            fix="ALTER SYSTEM SET hot_standby_feedback = on; SELECT pg_reload_conf();  -- on the standby",
        )
    source, version_num, streaming = config.source, facts.server_version_num, ""
    try:
        wanted = streaming_of(version_num, source.streaming)
        start_options(version_num, source.publications, source.origin, streaming=wanted, two_phase=source.two_phase)
        streaming = wanted
    except SourceRefused as error:
        yield Finding(Code.STREAM_OPTIONS, str(error), fix=error.hint)
    try:
        failover.check(source, facts)
    except SourceRefused as error:
        yield Finding(Code.SLOT_REFUSED, str(error), source.slot, error.hint)
    if 0 < facts.wal_sender_timeout_s < _SHORT_SENDER_TIMEOUT_S:
        yield Finding(
            Code.WAL_SENDER_TIMEOUT,
            f"wal_sender_timeout is {facts.wal_sender_timeout_s:g} s",
            fix="ALTER SYSTEM SET wal_sender_timeout = '60s'; SELECT pg_reload_conf();",
        )
    if streaming == "off":
        yield Finding(
            Code.DECODING_SPILL,
            f"streaming is off, and logical_decoding_work_mem is {facts.decoding_memory_bytes:,} bytes",
        )
    yield from _of_slot(facts, config)


def _of_server(server: Server, *, connections: int) -> Iterator[Finding]:
    role = sql.Identifier(server.role).as_string(None)
    if not server.is_tested:
        yield Finding(Code.SOURCE_VERSION, f"the publisher is PostgreSQL {server.version}")
    if not (server.is_superuser or server.has_replication):
        yield Finding(Code.SOURCE_REPLICATION, "the role has no REPLICATION", role, f"ALTER ROLE {role} REPLICATION;")
    # The plain session of the daemon or of a command, and the sessions of the copy.
    needed, free = 2 + connections, server.free_connections()
    if free < needed:
        yield Finding(
            Code.SOURCE_CONNECTIONS, f"{needed} connections are needed, and the role can open {max(free, 0)}", role
        )
    idle = server.settings.get("idle_replication_slot_timeout", "0")
    if idle not in {"0", ""}:
        yield Finding(Code.IDLE_SLOT_TIMEOUT, f"idle_replication_slot_timeout is {idle}")
    keep = server.settings.get("max_slot_wal_keep_size", "-1")
    limit = "without a limit" if keep == "-1" else f"up to {keep}, and then the slot is lost"
    yield Finding(Code.WAL_RETENTION, f"max_slot_wal_keep_size is {keep}: WAL is kept {limit}")


def _of_room(server: Server, facts: SourceFacts, used_slots: int, senders: int, *, is_copy: bool) -> Iterator[Finding]:
    most = server.number("max_replication_slots")
    # A slot that is adopted has lost its snapshot: the copy makes a temporary one.
    needed = 1 if facts.slot is None or is_copy else 0
    if most - used_slots < needed:
        yield Finding(
            Code.SLOTS_EXHAUSTED,
            f"all {most} of max_replication_slots are in use",
            fix=f"ALTER SYSTEM SET max_replication_slots = {most + 4};  -- then restart",
        )
    most = server.number("max_wal_senders")
    if senders >= most:
        yield Finding(
            Code.WAL_SENDERS_EXHAUSTED,
            f"all {most} of max_wal_senders are in use",
            fix=f"ALTER SYSTEM SET max_wal_senders = {most + 4};  -- then restart",
        )


def _of_slot(facts: SourceFacts, config: Config) -> Iterator[Finding]:
    name, found = config.source.slot, facts.slot
    if found is None or not refusals.decodes(facts):
        return
    try:
        refusals.check_slot(facts, name, None, two_phase=config.source.two_phase)
    except SourceRefused as error:
        yield Finding(Code.SLOT_REFUSED, str(error), name, error.hint)
        return
    yield Finding(Code.SLOT_ADOPTED, f"slot {name!r} exists already", name)
    if found.active_pid is not None:
        yield Finding(Code.SLOT_IN_USE, f"slot {name!r} is read by process {found.active_pid} of the publisher", name)


def _of_transactions(rows: Sequence[tuple[Any, ...]]) -> Iterator[Finding]:
    for what, who, fix, age_s in rows:
        if age_s is None or age_s < _OLD_TRANSACTION_S:
            continue
        yield Finding(Code.OPEN_TRANSACTION, f"{what} ({who}) is {age_s:,.0f} s old", what, fix)


def publications_query(version_num: int) -> str:
    """Return the query for the publications of a server of this version, and what they publish."""
    return _PUBLICATIONS.format("puballsequences" if version_num >= _SEQUENCES_SINCE else "false")


def findings_of_publications(rows: Sequence[tuple[Any, ...]], config: Config) -> Iterator[Finding]:
    """Yield findings of the publications, as `publications_query` gives them. Pure."""
    there = {row[0]: sql.Identifier(row[0]).as_string(None) for row in rows}
    for name in config.source.publications:
        if name not in there:
            quoted_name = sql.Identifier(name).as_string(None)
            yield Finding(
                Code.PUBLICATION_MISSING,
                f"no publication {quoted_name} in this database; there is {few(list(there.values())) or 'none'}",
                quoted_name,
                f"CREATE PUBLICATION {quoted_name} FOR TABLE ...;",
            )
    for name, *published, has_sequences in rows:
        if has_sequences and name in config.source.publications:
            yield Finding(Code.SEQUENCES_PUBLISHED, f"publication {there[name]} publishes all sequences", there[name])
        left_out = [word for word, is_on in _operations(published) if not is_on]
        if left_out and name in config.source.publications:
            quoted_name = there[name]
            yield Finding(
                Code.PUBLICATION_OPERATIONS,
                f"publication {quoted_name} does not publish {', '.join(left_out)}",
                quoted_name,
            )


def _operations(flags: Sequence[bool]) -> Iterator[tuple[str, bool]]:
    return zip(("insert", "update", "delete", "truncate"), flags, strict=True)


def _of_queue(config: Config, *, is_published: bool) -> list[Finding]:
    """Report that commands of the publisher are expected and cannot come, or come and are not run."""
    if is_published == config.ddl.apply:
        return []
    found = "ddl.apply is on, and no publication has the table" if config.ddl.apply else "ddl.apply is off"
    return [Finding(Code.DDL_QUEUE, f"{'.'.join(QUEUE)}: {found}", ".".join(QUEUE))]


def _of_state(schema: str) -> Finding:
    name = sql.Identifier(schema).as_string(None)
    return Finding(
        Code.STATE_PUBLISHED,
        f"schema {name} holds the progress of a parapply that applies, or applied, there, and is published",
        name,
    )


def _of_identities(identities: Sequence[Identity]) -> Iterator[Finding]:
    for each in identities:
        changes = [
            word for word, is_on in (("UPDATE", each.publishes_updates), ("DELETE", each.publishes_deletes)) if is_on
        ]
        if each.is_partitioned or each.columns or each.replica_identity == "f" or not changes:
            continue
        table = shown(*each.name)
        index = sql.Identifier(each.unique_index).as_string(None) if each.unique_index else ""
        way = f"USING INDEX {index}" if index else "FULL"
        why = {"n": "NOTHING", "d": "DEFAULT without a primary key", "i": "an index that is gone"}
        yield Finding(
            code=Code.REPLICA_IDENTITY, object=table, fix=f"ALTER TABLE {table} REPLICA IDENTITY {way};",
            found=f"replica identity {why[each.replica_identity]}: {' and '.join(changes)} of {table} fail on the"
            " publisher",
        )  # fmt: skip


def _of_filters(rows: Sequence[tuple[Any, ...]], identities: Sequence[Identity]) -> Iterator[Finding]:
    by_root: dict[int, list[Identity]] = {}
    for each in identities:
        by_root.setdefault(each.root_oid, []).append(each)
    for oid, has_filter, has_list, text, named, listed in rows:
        for each in by_root.get(oid, ()):
            if each.is_partitioned or not (each.columns or (each.replica_identity == "f" and has_list)):
                continue
            table = shown(*each.name)
            # Dependencies of a list and of a filter are not distinguished: a column of both must be in the text.
            read = [name for name in named if not has_list or sql.Identifier(name).as_string(None).strip('"') in text]
            outside = [name for name in read if name not in each.columns] if each.replica_identity != "f" else []
            if has_filter and outside:
                yield Finding(
                    Code.FILTER_OUTSIDE_IDENTITY,
                    f"the row filter of {table} reads {_columns(outside)}",
                    table,
                    f"ALTER TABLE {table} REPLICA IDENTITY FULL;",
                )
            unsent = [name for name in each.columns if name not in listed] if has_list else []
            if unsent or (has_list and each.replica_identity == "f"):
                told = f"leaves out {_columns(unsent)}" if unsent else "is not allowed with REPLICA IDENTITY FULL"
                yield Finding(Code.COLUMNS_OUTSIDE_IDENTITY, f"the column list of {table} {told}", table)


def _columns(names: Sequence[str]) -> str:
    return ", ".join(sql.Identifier(name).as_string(None) for name in names)


def _of_select(names: Mapping[Name, bool], server: Server, code: Code) -> Iterator[Finding]:
    role = sql.Identifier(server.role).as_string(None)
    for (schema, table), is_hidden in names.items():
        grants = f"GRANT USAGE ON SCHEMA {sql.Identifier(schema).as_string(None)} TO {role};"
        yield Finding(
            code=code, object=shown(schema, table),
            found=f"role {role} may not read {shown(schema, table)}"
            + (", whose row-level security applies" if is_hidden else ""),
            fix=f"ALTER ROLE {role} BYPASSRLS;" if is_hidden
            else f"{grants} GRANT SELECT ON {shown(schema, table)} TO {role};",
        )  # fmt: skip


def _of_others(
    rows: Sequence[tuple[Any, ...]], published: set[Name], states: frozenset[str], n_large: int
) -> Iterator[Finding]:
    by_kind: dict[str, list[str]] = {}
    # Tables that `init --ddl` has made besides the queue.
    left_out = states | {QUEUE[0]} if QUEUE in published else states
    for kind, schema, name in rows:
        if schema not in left_out and (schema, name) not in published:
            by_kind.setdefault(kind, []).append(shown(schema, name))
    for kind, names in by_kind.items():
        codes = {"sequence": Code.SEQUENCES, "table": Code.TABLE_UNPUBLISHED}
        plural = "s" if len(names) > 1 else ""
        yield Finding(codes.get(kind, Code.NOT_REPLICATED), f"{len(names):,} {kind}{plural}: {few(names)}")
    if n_large:
        yield Finding(Code.LARGE_OBJECTS, f"{n_large:,} large object" + ("s" if n_large > 1 else ""))

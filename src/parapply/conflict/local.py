"""Rows of the target that a change finds: the row it is about, and rows in its way. Read inside its transaction.

Every row found is locked until the end of the transaction, so what is decided about it still holds when it is acted on
(a row read and then written by its ctid would else miss a foreign update between the two, trap T-43).

The unique indexes by which a row is in the way are computed from the catalogue: each index's expressions and predicate
are evaluated for the new row, then looked up in the table by that very index. So indexes on expressions, partial
indexes and NULLS NOT DISTINCT are seen as the server sees them (trap T-22). Exclusion constraints and deferrable ones
make no conflicts in PostgreSQL either: a refusal by them is an error of the data.

Of a partitioned table only the indexes of one leaf are read: the one that the server's error names. A unique index of
an ancestor has its part there, and holds the partition key, so no row of another leaf has the same value in it.

Source: PostgreSQL manual, "System Catalogs": pg_index, pg_opclass, pg_amop; "System Information Functions":
pg_get_indexdef, pg_xact_commit_timestamp_origin.
"""

# ruff: noqa: S608 - this module makes SQL: names are quoted or come from the catalogue's own deparsing, values are parameters
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from parapply.conflict.kinds import LocalRow
from parapply.conflict.statements import found_by, only, row_as_text, statement
from parapply.quoting import identifier
from parapply.wire.rows import UNCHANGED, text_of

if TYPE_CHECKING:
    from parapply.conflict.changes import RowChange
    from parapply.errors import StatementFailed
    from parapply.plan.table import TablePlan
    from parapply.target.session.session import WorkerSession
    from parapply.wire.rows import Row

#: Nodes of an index, its plain columns written as in an expression.
_NODES: Final = """
      (SELECT pg_catalog.concat(i.indexprs, i.indpred, pg_catalog.string_agg(':varattno ' || k.at || ' ', ''))
       FROM unnest((i.indkey::int2[])[0:i.indnkeyatts - 1]) AS k(at) WHERE k.at > 0)"""
#: Names of the columns that an expression's nodes read; 0 is a row as a whole.
_READ: Final = """
    coalesce((SELECT pg_catalog.json_agg(r.attname) FROM pg_catalog.pg_attribute r WHERE r.attrelid = named.oid
      AND r.attnum > 0 AND {nodes} ~ (':varattno (0|' || r.attnum || ') ')), '[]')"""
#: Columns with their full type and generation expression, unique indexes with what they compare: of the table with the
#: schema $2 and the name $3, if it is the table with the OID $1 or a leaf of it; else no row. An index belongs to the
#: key if it is, or is the leaf's part of, the index that identifies rows of the table with the OID $1. Defaults
#: are of that table; one that is volatile, as an identity's, is null.
_SHAPE: Final = f"""
SELECT pg_catalog.json_build_object(
  'table', named.oid::pg_catalog.regclass::text,
  'columns', (
    SELECT pg_catalog.json_agg(pg_catalog.json_build_object(
      'name', a.attname,
      'type', pg_catalog.format_type(a.atttypid, a.atttypmod),
      'generated', CASE WHEN a.attgenerated <> '' THEN pg_catalog.pg_get_expr(d.adbin, d.adrelid) END,
      'default', CASE WHEN b.attidentity <> '' OR EXISTS (
          SELECT FROM pg_catalog.regexp_matches(e.made::text, ':(?:op)?funcid (\\d+)', 'g') m
          JOIN pg_catalog.pg_proc p ON p.oid = m[1]::oid AND p.provolatile = 'v') THEN NULL
        ELSE coalesce(pg_catalog.pg_get_expr(e.made, b.attrelid), 'NULL') END,
      'reads', CASE WHEN a.attgenerated <> '' THEN {_READ.format(nodes="d.adbin::text")} ELSE '[]' END)
      ORDER BY a.attnum)
    FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type y ON y.oid = a.atttypid
    LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    JOIN pg_catalog.pg_attribute b ON b.attrelid = $1::oid AND b.attname = a.attname
    LEFT JOIN pg_catalog.pg_attrdef f ON f.adrelid = b.attrelid AND f.adnum = b.attnum
    CROSS JOIN LATERAL (SELECT coalesce(f.adbin, y.typdefaultbin)) AS e(made)
    WHERE a.attrelid = named.oid AND a.attnum > 0 AND NOT a.attisdropped),
  'indexes', (
    SELECT coalesce(pg_catalog.json_agg(pg_catalog.json_build_object(
      'name', c.relname,
      'is_key', k.indexrelid IS NOT NULL,
      'predicate', pg_catalog.pg_get_expr(i.indpred, i.indrelid),
      'reads', {_READ.format(nodes=_NODES)},
      'is_nulls_distinct', NOT coalesce((pg_catalog.to_jsonb(i) ->> 'indnullsnotdistinct')::bool, false),
      'parts', (
        SELECT pg_catalog.json_agg(pg_catalog.json_build_object(
          'expression', pg_catalog.pg_get_indexdef(i.indexrelid, n.ord, false),
          'type', (
            WITH RECURSIVE base(typid) AS (
              -- An index on a name stores it as a cstring, which is the text of no cast.
              SELECT CASE x.atttypid WHEN 'cstring'::pg_catalog.regtype THEN 'name'::pg_catalog.regtype
                ELSE x.atttypid END::oid
              UNION ALL
              SELECT d.typbasetype FROM base JOIN pg_catalog.pg_type d ON d.oid = base.typid AND d.typtype = 'd')
            SELECT pg_catalog.format_type(b.oid, -1) FROM base JOIN pg_catalog.pg_type b ON b.oid = base.typid
            WHERE b.typtype <> 'd'),
          'operator', 'OPERATOR(' || pg_catalog.quote_ident(ns.nspname) || '.' || o.oprname || ')',
          'collation', CASE WHEN co.oid IS NOT NULL THEN
            ' COLLATE ' || pg_catalog.quote_ident(cn.nspname) || '.' || pg_catalog.quote_ident(co.collname) ELSE '' END)
          ORDER BY n.ord)
        FROM pg_catalog.generate_series(1, i.indnkeyatts) n(ord)
        JOIN pg_catalog.pg_attribute x ON x.attrelid = i.indexrelid AND x.attnum = n.ord
        JOIN pg_catalog.pg_opclass oc ON oc.oid = i.indclass[n.ord - 1]
        JOIN pg_catalog.pg_amop s ON s.amopfamily = oc.opcfamily AND s.amoplefttype = oc.opcintype
          AND s.amoprighttype = oc.opcintype AND s.amopstrategy = 3
        JOIN pg_catalog.pg_operator o ON o.oid = s.amopopr
        JOIN pg_catalog.pg_namespace ns ON ns.oid = o.oprnamespace
        LEFT JOIN pg_catalog.pg_collation co ON co.oid = i.indcollation[n.ord - 1] AND co.collname <> 'default'
        LEFT JOIN pg_catalog.pg_namespace cn ON cn.oid = co.collnamespace)
      ) ORDER BY k.indisreplident DESC NULLS LAST, k.indisprimary DESC NULLS LAST, c.relname), '[]')
    FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
    JOIN pg_catalog.pg_am m ON m.oid = c.relam AND m.amname = 'btree'
    LEFT JOIN pg_catalog.pg_index k ON k.indrelid = $1::oid AND (k.indisreplident OR k.indisprimary)
      AND (k.indexrelid = i.indexrelid
        OR k.indexrelid IN (SELECT relid FROM pg_catalog.pg_partition_ancestors(i.indexrelid)))
    WHERE i.indisunique AND i.indimmediate AND i.indislive AND i.indisready AND NOT i.indisexclusion
      AND i.indrelid = named.oid))
FROM pg_catalog.pg_class named JOIN pg_catalog.pg_namespace nn ON nn.oid = named.relnamespace
WHERE nn.nspname = $2 AND named.relname = $3 AND (
  named.oid = $1::oid OR named.oid IN (SELECT relid FROM pg_catalog.pg_partition_tree($1::oid::pg_catalog.regclass)))"""

#: Differs when the shape may have changed; parameters as there. It costs a tenth of it. xmin is a row's version.
_STAMP: Final = """
SELECT pg_catalog.concat_ws(' ', named.oid,
  (SELECT h.inhparent FROM pg_catalog.pg_inherits h WHERE h.inhrelid = named.oid AND named.relispartition),
  (SELECT pg_catalog.sum(pg_catalog.hashtextextended(pg_catalog.concat_ws(' ',
    i.indexrelid, i.xmin, c.relname, h.inhparent), 0))
  FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
  LEFT JOIN pg_catalog.pg_inherits h ON h.inhrelid = i.indexrelid WHERE i.indrelid IN (named.oid, $1::oid)),
  (SELECT pg_catalog.sum(pg_catalog.hashtextextended(pg_catalog.concat_ws(' ', a.attnum, a.xmin), 0))
  FROM pg_catalog.pg_attribute a WHERE a.attrelid = named.oid AND a.attnum > 0),
  (SELECT pg_catalog.sum(pg_catalog.hashtextextended(pg_catalog.concat_ws(' ', d.oid, d.xmin), 0))
  FROM pg_catalog.pg_attrdef d WHERE d.adrelid IN (named.oid, $1::oid)))
FROM pg_catalog.pg_class named JOIN pg_catalog.pg_namespace nn ON nn.oid = named.relnamespace
WHERE nn.nspname = $2 AND named.relname = $3"""
#: Shapes kept; plans come and go.
_MOST_SHAPES: Final = 1_000

#: When, whether that is known, and by which origin. No name: an origin dropped since, or a session of this server.
_WRITTEN: Final = """
(EXTRACT(epoch FROM w.timestamp - '2000-01-01 00:00:00+00'::timestamptz) * 1000000)::bigint, w.timestamp IS NOT NULL,
CASE WHEN w.roident <> 0 THEN coalesce(o.roname, 'dropped origin ' || w.roident) END
FROM held LEFT JOIN LATERAL pg_catalog.pg_xact_commit_timestamp_origin(held.x) AS w ON true
LEFT JOIN pg_catalog.pg_replication_origin o ON o.roident = w.roident"""


class _Column(msgspec.Struct, frozen=True):
    name: str
    type: str
    generated: str | None
    default: str | None  # None: volatile, so not known before the row is stored
    reads: list[str]  # columns that a generated one is computed from


class _Part(msgspec.Struct, frozen=True):
    expression: str
    type: str
    operator: str
    collation: str


class _Index(msgspec.Struct, frozen=True):
    name: str
    is_key: bool
    predicate: str | None
    reads: list[str]
    is_nulls_distinct: bool
    parts: list[_Part]


class _Shape(msgspec.Struct, frozen=True):
    table: str
    columns: list[_Column]
    indexes: list[_Index]


class _Kept(NamedTuple):
    plan: TablePlan  # keeps its id from being another's
    stamp: bytes | None  # read before the shape
    shape: _Shape | None


class LocalRows:
    """Asks one worker's session, inside its target transactions. Keeps the catalogue's answers about each plan.

    A plan does not have the predicates and expressions of its indexes, which may change under it.
    """

    def __init__(self, session: WorkerSession, *, tracks_commits: bool, locks: bool = True) -> None:
        """Start with nothing read.

        Args:
            session: in the target transaction.
            tracks_commits: False: the time and origin of a row are not known, without track_commit_timestamp.
            locks: False: the role may not, because nothing that it applies changes a row.
        """
        self._session = session
        self._tracks_commits = tracks_commits
        self._lock = " FOR UPDATE OF t" if locks else ""
        self._shapes: dict[tuple[int, str, str], _Kept] = {}
        #: Shapes that hold until the end of the transaction, because it has locked the table.
        self._sure: set[tuple[int, str, str]] = set()

    def begin(self) -> None:
        """Begin a target transaction: nothing is locked."""
        self._sure.clear()
        if len(self._shapes) > _MOST_SHAPES:
            self._shapes.clear()

    async def subject(self, change: RowChange) -> LocalRow | None:
        """Return the row that an update or delete is about, locked; None if it does not exist.

        Raises:
            StatementFailed, TargetLost: as everywhere.
        """
        condition, positions = found_by(change.plan, 1)
        values = [_parameter(change.found_by[position]) for position in positions]
        found = await self._rows(change.plan, only(change.plan), f"{condition} LIMIT 1", values)
        return found[0] if found else None

    async def in_the_way(
        self, change: RowChange, own: LocalRow | None, failure: StatementFailed
    ) -> tuple[tuple[LocalRow, ...], bool]:
        """Return all rows with the new row's value in some unique index, locked; and whether the first has its key.

        None where the indexes have changed since they were read. The rows' `constraints` are indexes of one table, so
        their names differ. Values of `own`, the row that is updated, replace columns that were not sent, and it is not
        in the way.

        Raise StatementFailed, the failure itself, if that is about another table than the change's (a trigger wrote to
        it).
        """
        shape = await self._shape(change.plan, failure)
        if shape is None:
            raise failure
        values = await self._index_values(change, own, shape)
        found: dict[tuple[str, str], LocalRow] = {}
        names: dict[tuple[str, str], list[str]] = {}
        first_by_key = False
        for index, parts in zip(shape.indexes, values, strict=True):
            if parts is None:
                continue
            for row in await self._looked_up(change.plan, shape.table, index, parts):
                place = (row.table, row.ctid)
                if own is not None and place == (own.table, own.ctid):
                    continue
                first_by_key = first_by_key or (index.is_key and not found)
                found.setdefault(place, row)
                names.setdefault(place, []).append(index.name)
        if not found:
            # A new index may be what refuses the row: the lock keeps indexes from going, not from coming.
            self._sure.discard(_name(change.plan, failure))
        has_looked = any(parts is not None for parts in values)
        if not await self._holds(change.plan, failure, is_locked=has_looked):
            return (), False
        rows = [msgspec.structs.replace(row, constraints=tuple(names[place])) for place, row in found.items()]
        return tuple(rows), first_by_key

    async def _looked_up(self, plan: TablePlan, table: str, index: _Index, parts: list[bytes | None]) -> list[LocalRow]:
        conditions: list[str] = []
        parameters: list[bytes | None] = []
        for part, value in zip(index.parts, parts, strict=True):
            if value is None:
                # Unlike IS NULL it does not hold for a composite of NULLs.
                conditions.append(f"({part.expression}) IS NOT DISTINCT FROM NULL")
                continue
            parameters.append(value)
            # Compare both as the base type, because the operator of enums does not see through a domain.
            wanted = f"${len(parameters)}::{part.type}{part.collation}"
            conditions.append(f"({part.expression})::{part.type} {part.operator} {wanted}")
        if index.predicate:
            conditions.append(f"({index.predicate})")
        return await self._rows(plan, f"ONLY {table}", " AND ".join(conditions), parameters)

    async def _rows(self, plan: TablePlan, table: str, where: str, values: list[bytes | None]) -> list[LocalRow]:
        # Lock in a CTE, so that what is read of the row belongs to the locked version. The time and origin of a row
        # that this very transaction wrote are unknown, as for a very old row.
        text = (
            f"WITH held AS MATERIALIZED (SELECT t.tableoid AS place, t.ctid AS at, t.xmin AS x,"
            f" {row_as_text(plan.facts.columns)} AS r FROM {table} AS t WHERE {where}{self._lock})"
            " SELECT place::pg_catalog.regclass::text, at::text, r::text, "
        )
        text += _WRITTEN if self._tracks_commits else "NULL, NULL, NULL FROM held"
        return [_local_row(row) for row in await self._session.fetch(statement(text, values))]

    async def _shape(self, plan: TablePlan, failure: StatementFailed) -> _Shape | None:
        """Return the shape of the table that a failure names; None if no row of the plan's table is stored there."""
        name = _name(plan, failure)
        kept = self._shapes.get(name)
        if kept is not None and name in self._sure:
            return kept.shape
        stamp = await self._stamp(plan, failure)
        if kept is None or kept.stamp != stamp:
            found = await self._session.fetch(statement(_SHAPE, _where(plan, failure)))
            shape = msgspec.json.decode(found[0][0] or b"", type=_Shape) if found else None
            kept = self._shapes[name] = _Kept(plan, stamp, shape)
        return kept.shape

    async def _stamp(self, plan: TablePlan, failure: StatementFailed) -> bytes | None:
        found = await self._session.fetch(statement(_STAMP, _where(plan, failure)))
        return found[0][0] if found else None

    async def _holds(self, plan: TablePlan, failure: StatementFailed, *, is_locked: bool) -> bool:
        """Return whether the shape by which rows were looked for still is the table's.

        A look locks the table as well, even if it finds no row.
        """
        name = _name(plan, failure)
        if name in self._sure:
            return True
        holds = await self._stamp(plan, failure) == self._shapes[name].stamp
        if holds and is_locked:
            self._sure.add(name)
        return holds

    async def _index_values(
        self, change: RowChange, own: LocalRow | None, shape: _Shape
    ) -> list[list[bytes | None] | None]:
        """Return, for each index, the new row's values as text; None if it cannot violate it, or they are not known."""
        if not shape.indexes:
            return []
        row, parameters, unknown = _new_row(change, own, shape)
        wanted = []
        for index in shape.indexes:
            wanted.append(f"({index.predicate})::text" if index.predicate else "'true'")
            wanted += [f"({part.expression})::text" for part in index.parts]
        ((*found,),) = await self._session.fetch(statement(f"SELECT {', '.join(wanted)} FROM {row}", parameters))
        values: list[list[bytes | None] | None] = []
        for index in shape.indexes:
            applies, *parts = found[: len(index.parts) + 1]
            del found[: len(index.parts) + 1]
            is_free = applies != b"true" or (index.is_nulls_distinct and None in parts)
            # The row that such an index refuses cannot be told from others.
            is_free = is_free or not unknown.isdisjoint(index.reads)
            values.append(None if is_free else parts)
        return values


def _where(plan: TablePlan, failure: StatementFailed) -> list[bytes | None]:
    return [str(plan.facts.oid).encode(), failure.schema.encode(), failure.table.encode()]


def _name(plan: TablePlan, failure: StatementFailed) -> tuple[int, str, str]:
    return id(plan), failure.schema, failure.table


def _new_row(change: RowChange, own: LocalRow | None, shape: _Shape) -> tuple[str, list[bytes | None], set[str]]:
    """Return the new row as a relation with the table's columns, its parameters, and the columns that are not known."""
    sent: dict[str, bytes | None] = {one.column.name: one.text.encode() for one in change.plan.constants}
    new: Row = change.new or []
    for facts, value in zip(change.plan.columns, new, strict=True):
        if value is not UNCHANGED:
            sent[facts.name] = _parameter(value)
    if own is not None:
        for name, text in own.values.items():
            sent.setdefault(name, None if text is None else text.encode())
    parameters: list[bytes | None] = []
    columns = []
    unknown = set()
    for column in shape.columns:
        if column.generated is not None:
            continue
        if column.name in sent:
            parameters.append(sent[column.name])
            columns.append(f"${len(parameters)}::text::{column.type} AS {identifier(column.name)}")
        else:
            columns.append(f"({column.default or 'NULL'})::{column.type} AS {identifier(column.name)}")
            unknown |= {column.name} if column.default is None else set()
    unknown |= {one.name for one in shape.columns if not unknown.isdisjoint(one.reads)}
    made = [f"({one.generated}) AS {identifier(one.name)}" for one in shape.columns if one.generated is not None]
    row = f"(SELECT {', '.join(columns)}) AS sent"
    return (f"(SELECT sent.*, {', '.join(made)} FROM {row}) AS made" if made else row), parameters, unknown


def _parameter(value: bytes | None) -> bytes | None:
    return None if value is None else text_of(value)


def _local_row(row: tuple[bytes | None, ...]) -> LocalRow:
    table, ctid, values, time_us, is_known, origin = row
    name: str | None = None
    if is_known == b"t":
        name = (origin or b"").decode()
    decoded: dict[str, Any] = msgspec.json.decode(values or b"{}")
    return LocalRow(
        table=(table or b"").decode(),
        ctid=(ctid or b"").decode(),
        values=decoded,
        commit_time_us=int(time_us) if time_us is not None else None,
        origin=name,
    )

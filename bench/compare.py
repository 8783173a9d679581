"""Comparison of the rows of two databases: every published table, counted and summed up on both ends.

In go two connection strings; out comes one comparison for each table. Both ends must be at rest. It is the benchmark's
own, because it judges parapply and the other systems alike; `parapply verify` needs a running daemon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from psycopg import sql

from parapply.demo.errors import DemoError
from parapply.demo.server import execute
from parapply.demo.stage import BANK, PUBLICATION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.demo.stage import Stage

# Everything that changes how a value prints, the same on both ends. No schema is on the path, so that names of types
# and tables inside values print in full.
_SETTINGS = sql.SQL(
    "SET TimeZone = 'UTC'; SET DateStyle = 'ISO, YMD'; SET IntervalStyle = 'postgres'; SET extra_float_digits = 3;"
    " SET bytea_output = 'hex'; SET lc_monetary = 'C'; SET search_path = pg_catalog; "
)


@dataclass(frozen=True, kw_only=True)
class Digest:
    """Rows of a table on one end, summed up.

    Attributes:
        rows: number of rows.
        checksum: sum of a 64-bit hash of each row's text: independent of order, and a row held twice counts twice.
    """

    rows: int
    checksum: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One table on both ends."""

    schema: str
    table: str
    source: Digest
    target: Digest

    @property
    def is_equal(self) -> bool:
        """Return whether both ends hold the same rows."""
        return self.source == self.target


def is_equal(stage: Stage, dbname: str) -> bool:
    """Return whether the publisher's tables hold the same rows as the tables of a database on the subscriber.

    Raises:
        DemoError: a table is missing, or a server failed.
    """
    return all(table.is_equal for table in compare(stage.source.dsn(BANK), stage.target.dsn(dbname), PUBLICATION))


def compare(source_dsn: str, target_dsn: str, publication: str) -> list[Comparison]:
    """Compare every table of a publication.

    Args:
        source_dsn: publisher.
        target_dsn: subscriber; the tables have the same columns in the same order there.
        publication: whose tables.

    Raises:
        DemoError: the publication has no tables, a table is missing, or a server failed.
    """
    query = "SELECT schemaname, tablename FROM pg_catalog.pg_publication_tables WHERE pubname = %s ORDER BY 1, 2"
    tables = [(str(schema), str(table)) for schema, table in execute(source_dsn, query, [publication])]
    if not tables:
        raise DemoError(f"The publication {publication!r} has no tables to compare.")
    pairs = zip(tables, digests(source_dsn, tables), digests(target_dsn, tables), strict=True)
    return [
        Comparison(schema=schema, table=table, source=source, target=target)
        for (schema, table), source, target in pairs
    ]


def digests(dsn: str, tables: Sequence[tuple[str, str]]) -> list[Digest]:
    """Return the digests of tables (schema, name), in their order, all of one moment.

    Raises:
        DemoError: a table is missing, or the server failed.
    """
    # One statement sees one snapshot. The alias is one that no column has: a column would be taken before the row.
    parts = [
        sql.SQL(
            'SELECT {}, count(*), coalesce(sum(hashtextextended("the whole row"::text, 0)::numeric), 0)'
            ' FROM {} AS "the whole row"'
        ).format(sql.Literal(number), sql.Identifier(*name))
        for number, name in enumerate(tables)
    ]
    union = sql.SQL(" UNION ALL ").join(parts)
    rows = execute(dsn, sql.Composed([_SETTINGS, union, sql.SQL(" ORDER BY 1")]))
    return [Digest(rows=int(count), checksum=int(total)) for _, count, total in rows]

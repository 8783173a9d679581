"""How is a table published, and was that so without a gap between two looks?

A look sees the catalogue as it is then, so a table that left the publication and came back looks as before, and the
changes of the time between never come. The entry that publishes it shows the gap: entries of publications have OIDs,
and a partition's place and a place in a schema have the xmin of their row. So a text of marks is kept for each table:

| mark               | is                                                                                |
|--------------------|-----------------------------------------------------------------------------------|
| ``r42:iudt``       | entry of the table (``n``: of its schema, ``a``: of all), and which changes it sends |
| ``r42*:iudt``      | with a row filter or a column list: if that is changed the entry has another OID  |
| ``r42:iudt<7@900`` | by way of the partitioned table 7, below which transaction 900 has put it         |
| ``n42:iudt&800``   | in its schema since transaction 800                                               |
| ``e8<7@900``       | of a root that is published as one: transaction 900 has put partition 8 below 7   |
| ``p5@990:10``      | the row of publication 5 was written by transaction 990; its owner                |

No mark: it is not published, and neither is an UNLOGGED table. A publication that is altered and altered back leaves
no trace but the last kind of mark, and a table that is made UNLOGGED and LOGGED again leaves none.

In: a plain session on the publisher. Out: marks, and reasons. No lock on a published table is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from parapply.source.late_tables import WAS_MADE_THERE, entry_rows
from parapply.source.slot import source_errors

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from typing import LiteralString

    from parapply.source.slot import Connection

#: Marks of tables as the stream names them: a root that is published as one stands for its partitions.
_WAYS: LiteralString = """
    , line AS (
        SELECT c.oid AS table_oid, c.oid, c.relnamespace, '' AS path FROM pg_catalog.pg_class AS c
         WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND pg_catalog.pg_relation_is_publishable(c.oid)
           AND ($2::oid[] IS NULL OR c.oid = ANY ($2::oid[]))
        UNION ALL
        SELECT line.table_oid, above.oid, above.relnamespace, line.path || '<' || i.inhparent || '@' || i.xmin FROM line
          JOIN pg_catalog.pg_class AS c ON c.oid = line.oid AND c.relispartition
          JOIN pg_catalog.pg_inherits AS i ON i.inhrelid = line.oid
          JOIN pg_catalog.pg_class AS above ON above.oid = i.inhparent)
    , entry AS (
        SELECT e.relid, e.nspid, p.pubviaroot AS is_by_root, 'p' || p.oid || '@' || p.xmin || ':' || p.pubowner AS row,
               e.excepted, split_part(split_part(e.mark, '!', 1), '@', 1)
               || CASE WHEN e.is_part THEN '*' ELSE '' END || ':'
               || CASE WHEN p.pubinsert THEN 'i' ELSE '' END
               || CASE WHEN p.pubupdate THEN 'u' ELSE '' END || CASE WHEN p.pubdelete THEN 'd' ELSE '' END
               || CASE WHEN p.pubtruncate THEN 't' ELSE '' END || CASE WHEN p.pubviaroot THEN 'v' ELSE '' END
               || CASE WHEN to_jsonb(p) ->> 'pubgencols' IN ('s', 'true') THEN 'g' ELSE '' END AS way
          FROM entries AS e JOIN pg_catalog.pg_publication AS p ON p.oid = e.pubid)
    , cover AS (
        SELECT table_oid, oid, e.row, e.is_by_root, e.way || path AS way
          FROM line JOIN entry AS e ON e.relid = line.oid
        UNION ALL
        SELECT table_oid, line.oid, e.row, e.is_by_root, e.way || path || '&' || COALESCE(d.xmin::text, '')
          FROM line JOIN entry AS e ON e.nspid = line.relnamespace
          LEFT JOIN pg_catalog.pg_depend AS d
            ON d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = line.oid AND d.objsubid = 0
           AND d.refclassid = 'pg_catalog.pg_namespace'::regclass
        UNION ALL
        SELECT table_oid, line.oid, e.row, e.is_by_root, CASE WHEN table_oid = line.oid THEN e.way END
          FROM line CROSS JOIN entry AS e WHERE e.relid IS NULL AND e.nspid IS NULL
           AND NOT EXISTS (SELECT FROM line AS one WHERE one.table_oid = line.table_oid AND one.oid = ANY (e.excepted)))
    SELECT cover.table_oid::bigint, c.relkind = 'p', array_agg(DISTINCT way) || array_agg(DISTINCT cover.row)
      FROM cover JOIN pg_catalog.pg_class AS c ON c.oid = cover.table_oid
     GROUP BY cover.table_oid, c.relkind
    HAVING NOT bool_or(is_by_root AND cover.oid <> cover.table_oid)
       AND (c.relkind = 'r' OR bool_or(is_by_root AND cover.oid = cover.table_oid))"""

_BELOW: LiteralString = """
    , below AS (
        SELECT t.oid AS root, t.oid, c.relkind, c.relpersistence
          FROM unnest($2::oid[]) AS t(oid) JOIN pg_catalog.pg_class AS c ON c.oid = t.oid
        UNION ALL
        SELECT below.root, c.oid, c.relkind, c.relpersistence FROM below
          JOIN pg_catalog.pg_inherits AS i ON i.inhparent = below.oid
          JOIN pg_catalog.pg_class AS c ON c.oid = i.inhrelid WHERE below.relkind = 'p')"""

_EDGES: LiteralString = """
    SELECT below.root::bigint, array_agg('e' || i.inhrelid || '<' || i.inhparent || '@' || i.xmin)
      FROM below JOIN pg_catalog.pg_inherits AS i ON i.inhrelid = below.oid
     WHERE below.oid <> below.root AND (below.relkind = 'p' OR below.relkind = 'r' AND below.relpersistence = 'p')
     GROUP BY 1"""

#: Partitions that may have come with rows: not made there, and a leaf is not empty.
_FULL: LiteralString = """
    SELECT c.oid::bigint, n.nspname || '.' || c.relname FROM pg_catalog.pg_class AS c
      JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
      JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = -1
     WHERE c.oid = ANY ($2::oid[])
       AND NOT (WAS_MADE_THERE AND (c.relkind <> 'r' OR c.relfilenode = c.oid))
       AND EXISTS (SELECT FROM below WHERE below.root = c.oid AND below.relkind = 'r'
                      AND pg_catalog.pg_relation_size(below.oid) <> 0)
     ORDER BY 2""".replace("WAS_MADE_THERE", WAS_MADE_THERE)

#: Changes that a publication sends by default.
_ALL: Final = frozenset("iudt")
_NOT_FOR_A_TIME: Final = (
    "it was not published for a time: the publication was dropped, or the table was taken out of it, detached or"
    " UNLOGGED"
)
_MADE_AGAIN: Final = (
    "what publishes it was made again: the publication, its entry of the table, or the entry's row filter or column"
    " list; changes from before may be missing"
)
_SENDS_OTHERS: Final = "its publication sends other changes now: earlier changes may be missing"
_CAME_BACK: Final = "it was attached, or moved into its schema, again: changes from before may be missing"


async def published(conn: Connection, publications: Sequence[str], oids: Collection[int] | None) -> dict[int, str]:
    """Return how tables are published, as the stream names them, without tables that are not.

    In a transaction with a snapshot the session shows that time. Without OIDs all tables are returned.
    """
    with source_errors("reading how tables are published"):
        found = await entry_rows(conn, _WAYS, [list(publications), None if oids is None else list(oids)])
        roots = [oid for oid, is_root, _ in found if is_root]
        edges = dict(await entry_rows(conn, _BELOW + _EDGES, [list(publications), roots])) if roots else {}
    return {oid: " ".join(sorted([mark for mark in marks if mark] + edges.get(oid, []))) for oid, _, marks in found}


async def attached_full(conn: Connection, publications: Sequence[str], oids: Collection[int]) -> list[tuple[int, str]]:
    """Return those partitions, with their names, that may have had rows when they were put in their place."""
    with source_errors("looking into partitions"):
        return [(oid, name) for oid, name in await entry_rows(conn, _BELOW + _FULL, [list(publications), list(oids)])]


def why_incomplete(before: str, now: str) -> str:
    """Return why changes of a table may be missing that was published one way and is now another; empty: none are.

    Marks are of an earlier look, empty if it was not published then, and of now.
    """
    known, ways = set(_ways(before)), set(_ways(now))
    # Fewer kinds of changes than before is what the operator wanted, and loses nothing that was to come.
    new = sorted(way for way in ways - known if not any(_is_narrower(way, one) for one in known))
    if not new or any(_is_whole(way) for way in ways & known):
        return ""
    if not known:
        return _NOT_FOR_A_TIME
    entry, _, rest = new[0].partition(":")
    older = [way.partition(":")[2] for way in sorted(known) if way.startswith(f"{entry}:")]
    if not older:
        return _MADE_AGAIN
    return _CAME_BACK if _sends(older[0]) == _sends(rest) else _SENDS_OTHERS


def new_partitions(before: str, now: str) -> dict[int, str]:
    """Return the partitions that were put below a root since, by OID, each with its mark."""
    marks = {mark for mark in now.split() if mark[0] == "e"} - set(before.split())
    return {int(mark[1 : mark.index("<")]): mark for mark in marks}


def altered(before: str, now: str) -> bool:
    """Return whether a publication was altered since, although nothing is different.

    It may have differed for a time. A change of its owner explains it.
    """
    known = _rows(before)
    return set(_ways(before)) == set(_ways(now)) and any(
        oid in known and known[oid][0] != xmin and known[oid][1] == owner for oid, (xmin, owner) in _rows(now).items()
    )


def is_by_root(marks: str) -> bool:
    """Return whether partitions are published under the name of the partitioned table that has these marks."""
    return any("v" in _sends(way.partition(":")[2]) for way in _ways(marks))


def _ways(marks: str) -> Iterator[str]:
    return (mark for mark in marks.split() if mark[0] in "arn")


def _rows(marks: str) -> dict[str, tuple[str, str]]:
    """Return xmin and owner of the publications' rows."""
    found = {}
    for mark in marks.split():
        if mark[0] == "p":
            oid, _, rest = mark.partition("@")
            xmin, _, owner = rest.partition(":")
            found[oid] = xmin, owner
    return found


def _sends(rest: str) -> str:
    return rest.partition("<")[0].partition("&")[0]


def _is_narrower(way: str, known: str) -> bool:
    """Return whether an entry sends some of the kinds of changes that it sent before, and nothing else is different."""
    entry, _, rest = way.partition(":")
    before, _, rest_before = known.partition(":")
    sent, sent_before = _sends(rest), _sends(rest_before)
    is_same = entry == before and rest.removeprefix(sent) == rest_before.removeprefix(sent_before)
    return is_same and set(sent) < set(sent_before) and set(sent_before) - set(sent) <= _ALL


def _is_whole(way: str) -> bool:
    entry, _, rest = way.partition(":")
    return not entry.endswith("*") and set(_sends(rest)) >= _ALL

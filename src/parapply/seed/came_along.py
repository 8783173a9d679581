"""Objects of the publisher that a physical copy has as well, and that would act on the target or hold it up.

`pg_createsubscriber` removes some of them unasked. Here each is refused by name, and ended only if its kind is named.
Prepared transactions are rolled back without a loss: each was begun after the slot, or the slot would have waited for
its end, so the stream brings it whole with its commit. A subscription is not dropped, because a DROP would also drop
slots of its table copies, which are still the publisher's.

In: a session on the copy. Out: their names, by kind, and their end.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from psycopg import sql

from parapply.errors import TargetRefused
from parapply.printable import printable
from parapply.source.publishing import published
from parapply.state_mark import STATE_SCHEMAS_SQL
from parapply.target.session.settings import rows, target_errors
from parapply.target.state import slots as state

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from typing import LiteralString

    from parapply.target.session.settings import Connection

#: Names that a message lists.
_NAMED: Final = 5


class CameAlong(StrEnum):
    """Kinds that can be cleaned."""

    PREPARED = "prepared"
    SUBSCRIPTIONS = "subscriptions"
    SLOTS = "slots"
    JOBS = "jobs"
    STATES = "states"
    PUBLICATIONS = "publications"


#: Kinds that may stay.
ARGUABLE: Final = (CameAlong.SUBSCRIPTIONS, CameAlong.SLOTS, CameAlong.JOBS, CameAlong.STATES)


class _Way(NamedTuple):
    query: LiteralString  # the names
    what: str  # they are, and the harm
    doing: str  # the act of cleaning, as it is reported
    statements: tuple[LiteralString, ...]  # for each, with its name in the place of {}


_HERE: LiteralString = "database = pg_catalog.current_database()"
_WAYS: Final[dict[CameAlong, _Way]] = {
    CameAlong.PREPARED: _Way(
        f"SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE {_HERE} ORDER BY prepared",  # noqa: S608  ours
        "prepared transactions, whose locks would hold up the stream; it brings each whole with its commit",
        "rolled back",
        ("ROLLBACK PREPARED {}",),
    ),
    CameAlong.SUBSCRIPTIONS: _Way(
        "SELECT subname::text FROM pg_catalog.pg_subscription WHERE (subenabled OR subslotname IS NOT NULL)"
        " AND subdbid = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())"
        " ORDER BY 1",
        "subscriptions, which take changes out of the slots of the publisher's own, and drop these slots if dropped",
        "disabled, and have no slot any longer",
        ("ALTER SUBSCRIPTION {} DISABLE", "ALTER SUBSCRIPTION {} SET (slot_name = NONE)"),
    ),
    CameAlong.SLOTS: _Way(
        f"SELECT slot_name::text FROM pg_catalog.pg_replication_slots WHERE {_HERE} AND NOT active ORDER BY 1",  # noqa: S608
        "logical slots that nothing reads, for which the target keeps its WAL",
        "dropped",
        ("SELECT pg_catalog.pg_drop_replication_slot({})",),
    ),
    CameAlong.JOBS: _Way(
        "SELECT jobid::text FROM cron.job WHERE active ORDER BY jobid",
        "active jobs of pg_cron, which write here what the publisher's also write",
        "deactivated",
        # A trigger has its scheduler read them again.
        ("SET LOCAL session_replication_role = 'origin'; UPDATE cron.job SET active = false WHERE jobid = {}::bigint",),
    ),
    CameAlong.PUBLICATIONS: _Way(
        "SELECT pubname::text FROM pg_catalog.pg_publication ORDER BY 1",
        "publications",
        "dropped",
        ("DROP PUBLICATION {}",),
    ),
}
#: Kinds whose statements have the name as an identifier; the others have it as a text.
_OBJECTS: Final = frozenset({CameAlong.SUBSCRIPTIONS, CameAlong.PUBLICATIONS})

_UNLOGGED: Final[LiteralString] = (
    "SELECT pg_catalog.format('%I.%I', n.nspname, c.relname) FROM pg_catalog.pg_class AS c"
    " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace WHERE c.relkind = 'r' AND c.relpersistence = 'u'"
    " AND n.nspname <> 'parapply' ORDER BY 1"
)
_PHYSICAL: Final[LiteralString] = (
    "SELECT slot_name::text FROM pg_catalog.pg_replication_slots WHERE slot_type = 'physical' AND NOT active ORDER BY 1"
)
#: Objects that need nothing, with the words for people.
_NOTES: Final[tuple[tuple[LiteralString, str], ...]] = (
    (_UNLOGGED, "UNLOGGED tables are empty here, and the stream does not bring them"),
    (_PHYSICAL, "physical slots keep WAL that nothing reads"),
)


async def found(conn: Connection, schema: str, slot_name: str) -> dict[CameAlong, list[str]]:
    """Return the names of all that came along, by kind; raise TargetRefused or TargetLost if it cannot be asked."""
    names: dict[CameAlong, list[str]] = {}
    with target_errors("looking for what came along"):
        ((has_jobs,),) = await rows(conn, sql.SQL("SELECT pg_catalog.to_regclass('cron.job') IS NOT NULL"))
        for kind, way in _WAYS.items():
            if kind is not CameAlong.JOBS or has_jobs:
                names[kind] = [str(name) for (name,) in await rows(conn, sql.SQL(way.query))]
    names[CameAlong.STATES] = []
    if await state.has_schema(conn, schema):
        query = "SELECT slot_name FROM {s}.slots WHERE slot_name <> $1 ORDER BY 1"
        with target_errors("looking for what came along"):
            names[CameAlong.STATES] = [
                str(name) for (name,) in await rows(conn, state.in_schema(query, schema), [slot_name])
            ]
    return {kind: some for kind, some in names.items() if some}


_STATES: Final = "states of slots that are applied to the publisher; `parapply drop` here would drop those slots"


def refusals_of(
    names: dict[CameAlong, list[str]], cleaned: Collection[CameAlong], despite: Collection[str]
) -> list[TargetRefused]:
    """Return why the copy is no target as it is, an error for each kind that neither is cleaned nor may stay."""
    return [
        TargetRefused(
            f"target: {len(some)} {kind.value} came along ({_few(some)}): {_what(kind)}",
            hint=f"--clean {kind.value}: they are {_doing(kind)}{_or_stay(kind)}",
        )
        for kind, some in names.items()
        if kind not in cleaned and kind is not CameAlong.PUBLICATIONS
        if kind is CameAlong.PREPARED or kind.value not in despite
    ]


def _or_stay(kind: CameAlong) -> str:
    return "" if kind is CameAlong.PREPARED else f"; --despite {kind.value}: they stay"


def _doing(kind: CameAlong) -> str:
    return "forgotten" if kind is CameAlong.STATES else _WAYS[kind].doing


def _what(kind: CameAlong) -> str:
    return _STATES if kind is CameAlong.STATES else _WAYS[kind].what


async def clean(
    conn: Connection, schema: str, names: dict[CameAlong, list[str]], cleaned: Collection[CameAlong]
) -> list[str]:
    """End what came along, of the kinds that are named, and return lines that say so."""
    lines = []
    for kind, some in names.items():
        if kind not in cleaned:
            continue
        if kind is CameAlong.STATES:
            for name in some:
                for slot_id in await state.find_slots(conn, schema, name):
                    await state.drop_slot_state(conn, schema, slot_id)
        else:
            with target_errors(f"cleaning {kind.value}"):
                for name in some:
                    for statement in _WAYS[kind].statements:
                        text = sql.Identifier(name) if kind in _OBJECTS else sql.Literal(name)
                        await conn.execute(sql.SQL(statement).format(text))
        lines.append(printable(f"target: {kind.value} {_doing(kind)}: {', '.join(some)}"))
    return lines


async def notes(conn: Connection) -> list[str]:
    """Return lines about objects that need nothing, and that people should know of."""
    lines = []
    with target_errors("looking for what came along"):
        for query, words in _NOTES:
            if some := [str(name) for (name,) in await rows(conn, sql.SQL(query))]:
                lines.append(printable(f"target: {words}: {_few(some)}"))
    return lines


async def marks(conn: Connection, publications: Sequence[str]) -> dict[int, str]:
    """Return how tables were published at the end of the copy's recovery, by OID: the copy's own catalogue says it.

    Raises:
        TargetRefused: a publication is not there.
    """
    query = sql.SQL("SELECT pubname::text FROM pg_catalog.pg_publication")
    with target_errors("reading the publications"):
        there = {str(name) for (name,) in await rows(conn, query)}
    if missing := [name for name in publications if name not in there]:
        raise TargetRefused(
            f"target: no publication {', '.join(map(repr, missing))} on the copy: the publisher made it after the"
            " copy's end, and changes before are not sent",
            hint="make the copy again: `parapply seed --prepare` first",
        )
    return await published(conn, publications, None)


async def check_untouched(conn: Connection, oids: Collection[int]) -> list[TargetRefused]:
    """Return why rows may have been written since the recovery: an error, or none.

    The server counts the rows that sessions write, and not those that recovery brings. It begins with zeros unless its
    files came from a server that was shut down: then it has the publisher's counts, which began at `counts_since`, and
    nothing can be seen.
    """
    query = sql.SQL(
        "SELECT pg_catalog.format('%I.%I', t.schemaname, t.relname) FROM pg_catalog.pg_stat_user_tables AS t"  # noqa: S608
        " WHERE t.n_tup_ins + t.n_tup_upd + t.n_tup_del > 0 AND (t.relid = ANY ($1::oid[]) OR EXISTS (SELECT FROM"
        " pg_catalog.pg_partition_ancestors(t.relid) AS a(oid) WHERE a.oid = ANY ($1::oid[])))"
        f" AND t.schemaname NOT IN (SELECT schema_name FROM {STATE_SCHEMAS_SQL} AS own) ORDER BY 1"
    )
    with target_errors("looking for rows written here"):
        written = [str(name) for (name,) in await rows(conn, query, [list(oids)])]
    if not written:
        return []
    return [
        TargetRefused(
            f"target: sessions have written to published tables since the copy's recovery ended: {_few(written)}",
            hint="make the copy again, with default_transaction_read_only = on until it has joined; or --despite writes"
            " if they were rolled back, or are to stay",
        )
    ]


async def counts_since(conn: Connection) -> str | None:
    """Return since when a server counts, as text; None: it does not say. The caller turns errors into ours."""
    query = sql.SQL("SELECT stats_reset::text FROM pg_catalog.pg_stat_bgwriter")
    ((since,),) = await rows(conn, query)
    return None if since is None else str(since)


def _few(names: Sequence[str]) -> str:
    return ", ".join(_cut(names))


def _cut(names: Sequence[str]) -> Iterator[str]:
    yield from names[:_NAMED]
    if len(names) > _NAMED:
        yield f"and {len(names) - _NAMED:,} more"

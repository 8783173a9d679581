"""Tables copied at different times that a foreign key ties: a change of one before the other's copy would change it.

Under session_replication_role = origin a parent's DELETE or UPDATE also changes rows of the child. A copy of the child
has what became of these rows on the publisher, and of rows that came to the key later. So where the parent is applied
from an earlier LSN on, its older changes would change rows that are newer, and the stream does not bring these again.
Both of one copy join at one LSN, before which neither is changed; a child behind its parent is changed by its own part
of the stream.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

from psycopg import sql

from parapply.amounts import few
from parapply.errors import TargetRefused
from parapply.printable import printable
from parapply.source import slot
from parapply.target.session.settings import may_take_role, rows, target_errors
from parapply.vocabulary import CopyState

if TYPE_CHECKING:
    from collections.abc import Collection

    from parapply.config import Config
    from parapply.plan.copy_starts import Name
    from parapply.target.session.settings import Connection
    from parapply.target.state.copies import Copies

#: The LSN of a copy that has none yet, after all others.
_LATER: Final = 1 << 64
_HINT_REST: Final = (
    '; or apply and copy with target.session_replication_role = "replica" until lowest_remote_lsn has passed all copies'
)

#: Numbers among $3 and $4 of tables whose changes may change rows of tables among $1 and $2 in this session, be it by
#: way of others, each with the number of one of these. All are a text[], of schemas and of names: a cast to regclass
#: would ask for privileges on the schemas.
_PARENTS: Final = sql.SQL(
    "WITH RECURSIVE acting AS MATERIALIZED (SELECT DISTINCT k.conrelid, k.confrelid FROM pg_catalog.pg_constraint AS k"
    " JOIN pg_catalog.pg_trigger AS t ON t.tgconstraint = k.oid AND t.tgrelid = k.confrelid AND t.tgenabled IN ('A',"
    " CASE pg_catalog.current_setting('session_replication_role') WHEN 'replica' THEN 'R' ELSE 'O' END)"
    " WHERE k.contype = 'f' AND (k.confdeltype IN ('c', 'n', 'd') OR k.confupdtype IN ('c', 'n', 'd'))),"
    " line (number, oid, is_parent) AS ("
    " SELECT w.n, c.oid, false FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS w(schema_name, name, n)"
    " JOIN pg_catalog.pg_namespace AS s ON s.nspname = w.schema_name"
    " JOIN pg_catalog.pg_class AS c ON c.relnamespace = s.oid AND c.relname = w.name"
    " UNION SELECT line.number, acting.confrelid, true FROM line CROSS JOIN LATERAL (SELECT line.oid"
    " UNION SELECT p.relid FROM pg_catalog.pg_partition_tree(line.oid) AS p"
    " UNION SELECT p.relid FROM pg_catalog.pg_partition_ancestors(line.oid) AS p) AS own(oid)"
    " JOIN acting ON acting.conrelid = own.oid)"
    " SELECT DISTINCT line.number, w.n FROM line CROSS JOIN LATERAL (SELECT line.oid"
    " UNION SELECT p.relid FROM pg_catalog.pg_partition_ancestors(line.oid) AS p) AS own(oid)"
    " JOIN pg_catalog.pg_class AS c ON c.oid = own.oid JOIN pg_catalog.pg_namespace AS s ON s.oid = c.relnamespace"
    " JOIN unnest($3::text[], $4::text[]) WITH ORDINALITY AS w(schema_name, name, n)"
    " ON w.schema_name = s.nspname AND w.name = c.relname"
    " WHERE line.is_parent ORDER BY 1, 2"
)


async def check(  # noqa: PLR0913  what the look knows
    source: slot.Connection,
    target: Connection,
    config: Config,
    known: Copies,
    low_lsn: int,
    *,
    copied: Collection[Name] = (),
) -> None:
    """Refuse copies of tables that the stream would change before it has come to their LSN.

    Args:
        source: to ask for the published tables, if the state does not list all.
        target: with the session_replication_role that applies.
        config: the slot's.
        known: the tables, as the state has them.
        low_lsn: the stream is applied up to there.
        copied: tables to be copied now, by their names on the publisher; none: those that have been are looked at.

    Raises:
        TargetRefused: there is one.
        SourceLost, TargetLost: an end did not answer.
    """
    starts = known.starts(low_lsn)
    lsns = {
        row.name: lsn
        for row in known.tables
        # One whose copy was interrupted waits once another copy begins.
        if not row.is_schema_only and (row.state == CopyState.COPIED or not copied)
        if (lsn := starts[row.source_oid].lsn) is not None
    }
    if not (copied or any(lsns.values())):
        return
    if not known.is_listed:
        expected = await slot.tables_to_expect(source, config.source.publications)
        lsns |= dict.fromkeys({*expected} - {row.name for row in known.tables}, 0)
    lsns |= dict.fromkeys(copied, _LATER)
    for start_lsn in {_LATER} if copied else {*lsns.values()} - {0}:
        children = [name for name, lsn in lsns.items() if lsn == start_lsn]
        parents = [name for name, lsn in lsns.items() if lsn < start_lsn]
        here = [[config.mapping.target_of(name)[at] for name in some] for some in (children, parents) for at in (0, 1)]
        with target_errors("looking for foreign keys that act on copied rows"):
            found = await rows(target, _PARENTS, here)
            rest = _HINT_REST if found and await may_take_role(target, "replica") else ""
        if found:
            ahead = _texts([children[number - 1] for number, _ in found])
            behind = _texts([parents[number - 1] for _, number in found])
            both = " --table ".join(map(shlex.quote, [*behind, *ahead]))
            raise TargetRefused(
                f"target: older changes of {few(behind)} would change copied rows of {few(ahead)} by foreign keys with"
                " ON DELETE or ON UPDATE",
                hint=f"copy them together: `parapply refresh --truncate --table {both}`{rest}",
            )


def _texts(names: Collection[Name]) -> list[str]:
    return [printable(".".join(name)) for name in dict.fromkeys(names)]

"""Contents of a target after a random case: the rows of publisher and built-in subscription, and no more.

In go databases that show the end of one stream; out comes an AssertionError with a few of the rows that differ.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.differential.tables import RandomTable
    from tests.fixtures.databases import Database

    Rows = list[tuple[object, ...]]

_AUDITS = ("audit_always", "audit_ordinary")
_CONFLICTS = "SELECT conflict_type, table_name, constraints FROM parapply.conflicts LIMIT 3"


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Contents of a target.

    Attributes:
        sent: by table, the rows as the publication sends them.
        whole: by table, the rows with all columns.
        audits: by audit table, what triggers noted, in their order.
    """

    sent: Mapping[str, Rows]
    whole: Mapping[str, Rows]
    audits: Mapping[str, Rows]


def read_source(source: Database, tables: Sequence[RandomTable]) -> Mapping[str, Rows]:
    """Return by table the rows of the publisher that are published."""
    return _read(source, {table.name: table.sent_rows_sql(on_target=False) for table in tables})


def read_target(target: Database, tables: Sequence[RandomTable]) -> Contents:
    """Return what a target holds."""
    return Contents(
        sent=_read(target, {table.name: table.sent_rows_sql(on_target=True) for table in tables}),
        whole=_read(target, {table.name: table.target_rows_sql() for table in tables}),
        audits=_read(target, {audit: f"SELECT entry FROM {audit} ORDER BY id" for audit in _AUDITS}),
    )


def _read(database: Database, queries: Mapping[str, str]) -> Mapping[str, Rows]:
    with database.connect() as connection:
        return {name: connection.execute(query.encode()).fetchall() for name, query in queries.items()}


def check_builtin(source: Mapping[str, Rows], builtin: Contents, tables: Sequence[RandomTable]) -> None:
    """Fail unless the built-in subscription has what was published: otherwise it is no oracle.

    Raises:
        AssertionError: something differs; the message names the table and some rows.
    """
    for table in tables:
        if table.is_copied and not table.is_ambiguous:
            check_equal(source[table.name], builtin.sent[table.name], f"{table.name} of the built-in subscription")


def check_target(
    source: Mapping[str, Rows], builtin: Contents, target: Database, tables: Sequence[RandomTable], *, role: str
) -> None:
    """Compare every table with all its columns, and what the triggers noted, in their order; look for conflicts.

    Args:
        source: what the publisher holds.
        builtin: what the built-in subscription made of it.
        target: the daemon's database.
        tables: what to compare.
        role: session_replication_role of the daemon: whether ordinary triggers fired.

    Raises:
        AssertionError: something differs; the message names the table and some rows.
    """
    found = read_target(target, tables)
    for table in tables:
        if not table.is_ambiguous:
            check_equal(builtin.whole[table.name], found.whole[table.name], f"{table.name}, against the built-in one")
        if table.is_copied:
            check_equal(source[table.name], found.sent[table.name], f"{table.name}, against the publisher")
    _check_audits(builtin.audits["audit_always"], found.audits, role)
    conflicts = target.rows(_CONFLICTS)
    assert not conflicts, f"a stream without conflicts has made some: {conflicts}"


def _check_audits(notes: Rows, found: Mapping[str, Rows], role: str) -> None:
    for audit in _AUDITS:
        # The built-in subscription has the role replica, so ordinary triggers are measured by the other ones.
        wanted = notes if audit == "audit_always" or role == "origin" else []
        pairs = enumerate(zip(wanted, found[audit], strict=False))
        first = next((number for number, (one, other) in pairs if one != other), "the end")
        counts = f"{len(wanted)} and {len(found[audit])}"
        assert found[audit] == wanted, f"{audit} differs from entry {first} on, of {counts}"


def check_equal(wanted: Rows, found: Rows, name: str) -> None:
    """Compare rows in any order.

    Raises:
        AssertionError: rows are missing, or there are too many; `name` says of what.
    """
    missing, extra = Counter(wanted) - Counter(found), Counter(found) - Counter(wanted)
    rows = [_cut(list(some)) for some in (missing, extra)]
    assert not missing + extra, (
        f"{name}: {missing.total()} rows missing, such as {rows[0]}, {extra.total()} too many, such as {rows[1]}"
    )


def _cut(rows: Rows) -> list[str]:
    return [str(row) if len(str(row)) < 300 else f"{str(row)[:300]}..." for row in rows[:3]]

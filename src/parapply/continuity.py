"""Was every copied table published without a gap? The daemon looks from time to time, and each command that copies.

In: a plain session on both ends, and what is known of the tables. Out: tables of which changes may be missing wait from
then on, with the reason; `source/publishing.py` says what shows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
from psycopg import sql

from parapply import sharing
from parapply.logs import get_logger
from parapply.source import late_tables, publishing, slot
from parapply.target.session import settings
from parapply.target.state import copies
from parapply.vocabulary import CopyState
from parapply.wire.ddl_queue import QUEUE

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from parapply.config import Config
    from parapply.plan.copy_starts import Name
    from parapply.source.slot import Connection
    from parapply.target.state.copies import Copies, CopyRow

#: Tables named in one warning.
_MOST_NAMES = 5
#: Said of publications that were altered and altered back.
ALTERED = "a publication was altered, and is as it was at the last look; what it did not publish in between is missing"
ALTERED_HINT = "`parapply verify` says which tables differ; `parapply refresh --table ... --truncate` copies one again"


class Found(NamedTuple):
    """The result of a look."""

    has_changed: bool  # the facts of the tables are to be read again
    altered: list[Name]  # tables whose publication was altered, and is as it was


async def look(  # noqa: PLR0913  both ends, and what is known
    source: Connection,
    target: settings.Connection,
    config: Config,
    slot_id: int,
    known: Copies,
    *,
    gap_lsn: int | None = None,
) -> Found:
    """Compare how tables are published with how they were, and make tables wait of which changes may be missing.

    At `gap_lsn` a publication was missing while changes before it were decoded, since the last look.
    """
    publications = config.source.publications
    rows = [row for row in known.tables if row.state == CopyState.COPIED]
    oids = None if not known.is_listed else [row.source_oid for row in rows]
    now = await publishing.published(source, publications, oids)
    changes: list[copies.PublishedChange] = []
    altered: list[Name] = []
    parts: dict[int, list[CopyRow]] = {}
    for row in rows:
        oid = row.source_oid
        is_before = gap_lsn is not None and (row.start_lsn or 0) <= gap_lsn
        before, marks = "" if is_before else row.published_by, now.get(oid, "")
        if before != marks or row.published_by != marks:
            reason = publishing.why_incomplete(before, marks) if before is not None and marks else ""
            changes.append(copies.PublishedChange(oid, row.published_by, marks, reason))
            if before and not reason:
                altered += [row.name] * publishing.altered(before, marks)
                for part in publishing.new_partitions(before, marks):
                    parts.setdefault(part, []).append(row)
    if parts:
        changes = await _with_partitions(source, target, config, known, changes, parts)
    if not known.is_listed:
        changes += await _unlisted(source, target, config, slot_id, known, now, is_gap=gap_lsn is not None)
    if gap_lsn is not None:
        seen = [row.source_oid for row in rows]
        await copies.note_gap(target, config.target.state_schema, slot_id, gap_lsn, seen)
    await copies.note_published(target, config.target.state_schema, slot_id, changes)
    return Found(bool(changes), altered)


def warn_of_altered(found: Found) -> None:
    """Log which tables' publication was altered and altered back."""
    if found.altered:
        names = ", ".join(sorted([".".join(name) for name in found.altered])[:_MOST_NAMES])
        get_logger().warning("publication_altered", relation=names, reason=ALTERED, hint=ALTERED_HINT)


async def leave_out(
    source: Connection, target: settings.Connection, config: Config, slot_id: int, known: Copies
) -> Copies:
    """Have the state say which tables' rows the configuration leaves out, and return what is known then."""
    left = config.mapping.schema_only
    if not (left or any(row.is_schema_only for row in known.tables)):
        return known
    names = [name for name in await slot.tables_to_expect(source, config.source.publications) if ".".join(name) in left]
    oids, schema = await late_tables.oids(source, names), config.target.state_schema
    if {row.source_oid for row in known.tables if row.is_schema_only} == set(oids.values()):
        return known
    await copies.leave_out(target, schema, slot_id, oids)
    return await copies.load(target, schema, slot_id)


async def drop_marks(
    source: Connection, target: settings.Connection, config: Config, slot_id: int, known: Copies
) -> None:
    """Forget entries of publications that the stream which begins now is not asked for, or that are not there.

    A table that is made before they are read again may have had rows by then.
    """
    schema = config.target.state_schema
    if known.is_listed and (kept := await copies.load_marks(target, schema, slot_id)):
        left = await late_tables.still_published(source, config.source.publications, kept)
        if len(left) != len(kept):
            await copies.keep_marks(target, schema, slot_id, left)


async def _with_partitions(  # noqa: PLR0913, PLR0917  what the look knows
    source: Connection,
    target: settings.Connection,
    config: Config,
    known: Copies,
    changes: Sequence[copies.PublishedChange],
    parts: dict[int, list[CopyRow]],
) -> list[copies.PublishedChange]:
    """Return changes, with more for roots below which partitions with rows were put.

    A partition that was published separately before has its rows here, and is complete once it is below the root here.
    """
    by_oid = {row.source_oid: row for row in known.tables}
    found = {change.source_oid: change for change in changes}
    for part, name in await publishing.attached_full(source, config.source.publications, list(parts)):
        for root in parts[part]:
            change = found[root.source_oid]
            own = by_oid.get(part)
            if own is None or own.state != CopyState.COPIED:
                reason = f"partition {name} was attached, and may have had rows that were not published"
                found[change.source_oid] = change._replace(reason=change.reason or reason)
            elif not await _is_below(target, config.mapping.target_of(own.name), config.mapping.target_of(root.name)):
                mark = publishing.new_partitions(root.published_by or "", change.marks)[part]
                marks = " ".join([one for one in change.marks.split() if one != mark])
                found[change.source_oid] = change._replace(marks=marks)
    return list(found.values())


async def _is_below(target: settings.Connection, part: Name, root: Name) -> bool:
    query = sql.SQL(
        "SELECT EXISTS (SELECT FROM pg_catalog.pg_partition_ancestors(pg_catalog.to_regclass("
        "pg_catalog.format('%I.%I', $1::text, $2::text))) AS a(relid)"
        " WHERE a.relid = pg_catalog.to_regclass(pg_catalog.format('%I.%I', $3::text, $4::text)))"
    )
    with settings.target_errors("looking for a partition"):
        ((is_below,),) = await settings.rows(target, query, [*part, *root])
    return bool(is_below)


def kept_without_copy(marks: Mapping[int, str], kept: Collection[str] | None = None) -> list[str]:
    """Return the marks to keep for a slot that was begun without a copy: how each table is published, by its OID.

    Names of tables and numbers of columns that were kept before stay.
    """
    return [*[f"w{oid} {text}" for oid, text in marks.items()], *[text for text in kept or () if text[0] in "nc"]]


def known_without_copy(kept: Collection[str] | None) -> dict[int, str]:
    """Return how each table was published, by its OID, from the marks that were kept; empty if it was not."""
    return {int(oid[1:]): marks for oid, _, marks in [text.partition(" ") for text in kept or () if text[0] == "w"]}


def known_names(kept: Collection[str] | None) -> dict[int, Name]:
    """Return the names that were kept of tables without a row in the state, by OID."""
    found = [text.partition(" ") for text in kept or () if text[0] == "n"]
    return {int(oid[1:]): msgspec.json.decode(name, type=tuple[str, str]) for oid, _, name in found}


async def keep_names(
    source: Connection, target: settings.Connection, config: Config, slot_id: int, known: Copies
) -> dict[int, Name]:
    """Note the names of published tables for a slot that was begun without a copy, and return those that are kept.

    A table whose new name has other constants, expressions or columns keeps the name under which its rows came. Tables
    of the state are left out, as are tables with the same rows as on the publisher.
    """
    mapping, schema = config.mapping, config.target.state_schema
    if known.is_listed or not mapping.changes_rows:
        return {}
    kept = await copies.load_marks(target, schema, slot_id)
    before = known_names(kept)
    oids = {*before, *await publishing.published(source, config.source.publications, None)}
    now = await late_tables.names(source, oids.difference([row.source_oid for row in known.tables]))
    names = {oid: name if mapping.is_alike(old := before.get(oid, name), name) else old for oid, name in now.items()}
    if names != before:
        marks = [f"n{oid} {msgspec.json.encode(name).decode()}" for oid, name in names.items()]
        marks += [text for text in kept or () if text[0] == "c"]
        await copies.keep_marks(target, schema, slot_id, kept_without_copy(known_without_copy(kept), marks))
    return names


async def keep_columns(
    source: Connection, target: settings.Connection, config: Config, slot_id: int, known: Copies
) -> dict[int, dict[str, str]]:
    """Note the numbers of columns whose values are kept from the target; return their present names by the former.

    By table, and without columns that are gone. A table is noted again if the configuration names others.
    """
    mapping, schema = config.mapping, config.target.state_schema
    masked = [name for name in mapping.withholding if mapping.masked_of(name)]
    if not masked:
        return {}
    kept = await copies.load_marks(target, schema, slot_id) or frozenset()
    found = [text.partition(" ") for text in kept if text[0] == "c"]
    before = {int(oid[1:]): msgspec.json.decode(numbers, type=dict[str, int]) for oid, _, numbers in found}
    wanted = {oid: mapping.masked_of(name) for name, oid in (await late_tables.oids(source, masked)).items()}
    now = await late_tables.columns(source, {*before, *wanted})
    numbers = {}
    for oid, its in now.items():
        old = before.get(oid, {})
        names = wanted.get(oid, old)
        is_same = old.keys() == {*names}
        numbers[oid] = {
            name: old[name] if is_same and old[name] in its.values() else its.get(name, 0) for name in names
        }
    # A state of an older version has no marks, and gets all of them at a look.
    if numbers != before and (kept or not known.is_listed):
        marks = [f"c{oid} {msgspec.json.encode(one).decode()}" for oid, one in numbers.items()]
        await copies.keep_marks(target, schema, slot_id, [*marks, *[text for text in kept if text[0] != "c"]])
    return {
        oid: {former: name for former, number in one.items() for name, at in now[oid].items() if at == number}
        for oid, one in numbers.items()
    }


async def _unlisted(  # noqa: PLR0913, PLR0917  what the look knows
    source: Connection,
    target: settings.Connection,
    config: Config,
    slot_id: int,
    known: Copies,
    now: dict[int, str],
    *,
    is_gap: bool,
) -> list[copies.PublishedChange]:
    """Note tables of which changes may be missing, and how all are published, for a slot that was begun without a copy.

    A table that was not published before is applied from its first change on, unless a publication was missing since
    the last look: changes of a table may be missing then that no look has seen.
    """
    schema = config.target.state_schema
    listed = {row.source_oid for row in known.tables}
    kept = await copies.load_marks(target, schema, slot_id)
    before = known_without_copy(kept)
    reasons = {
        oid: reason
        for oid, marks in now.items()
        if (is_gap or oid in before) and oid not in listed
        if (reason := publishing.why_incomplete("" if is_gap else before[oid], marks))
    }
    # A partition that left a table whose rows are left out is published for the first time, and has rows.
    roots = [row.source_oid for row in known.tables if row.is_schema_only and row.source_oid is not None]
    parts = {part for oid in roots for part in publishing.new_partitions("", before.get(oid, ""))}
    reasons |= dict.fromkeys(parts & now.keys() - before.keys() - listed, copies.WAS_SCHEMA_ONLY)
    names = await late_tables.names(source, reasons)
    schemas = await slot.state_schemas(source) if names else frozenset()
    for oid in [oid for oid, name in names.items() if name == QUEUE or name[0] in schemas]:
        del names[oid], reasons[oid]
    if any(row.name in names.values() for row in known.tables):
        # A table that has given its name away keeps its row.
        others = await late_tables.names(source, list(listed))
        for row in known.tables:
            if not row.is_schema_only:
                sharing.check_renamed(config.mapping, row.name, others.get(row.source_oid, row.name))
        await copies.rename(target, schema, slot_id, others)
    noted = [oid for oid in names if await copies.settle(target, schema, slot_id, names[oid], oid, reasons[oid])]
    # A table that is not noted keeps what the next look must find.
    left = {oid: "" if is_gap else before.get(oid, "") for oid in reasons if oid not in noted}
    marks = {**dict.fromkeys(before, ""), **now, **left}
    if marks != before:
        await copies.keep_marks(target, schema, slot_id, kept_without_copy(marks, kept))
    await keep_names(source, target, config, slot_id, known)
    return [copies.PublishedChange(oid, None, now[oid], reasons[oid]) for oid in noted]

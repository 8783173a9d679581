"""Tables of the target in which a slot's rows have constants: a slot whose rows are not apart must not write there.

A TRUNCATE of its publisher would empty the whole table, or remove the rows of the other one, and its changes could find
them. So each slot notes in the state where its rows have constants, before it applies, and each one looks at the
notes of others: when it begins, when one of them changes, and from time to time, because tables are published later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from parapply.config_mapping import are_apart
from parapply.errors import TargetRefused
from parapply.source import slot
from parapply.target.state import copies
from parapply.target.state.schema import state_rows

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from parapply.config import Config
    from parapply.config_mapping import MappingConfig
    from parapply.plan.copy_starts import Name
    from parapply.target.session.settings import Connection

#: Other slots and the constants of their rows, by the table on the target, as schema.table.
Taken: TypeAlias = "Mapping[str, list[tuple[str, Mapping[str, str]]]]"

#: The partitions of tables, and what these are partitions of, each with the tables; a TRUNCATE of one empties others.
_RELATED: Final = """
    WITH RECURSIVE tree (place, oid) AS (
        SELECT n.nspname || '.' || c.relname, c.oid FROM pg_catalog.pg_class AS c
          JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
         WHERE c.relkind IN ('r', 'p') AND n.nspname || '.' || c.relname = ANY ($1::text[])
        UNION SELECT tree.place, i.inhrelid FROM tree JOIN pg_catalog.pg_inherits AS i ON i.inhparent = tree.oid
          JOIN pg_catalog.pg_class AS c ON c.oid = i.inhrelid AND c.relispartition)
    SELECT n.nspname || '.' || c.relname AS name, array_agg(DISTINCT line.place)
      FROM (TABLE tree UNION SELECT tree.place, above.relid
              FROM tree CROSS JOIN pg_catalog.pg_partition_ancestors(tree.oid) AS above) AS line (place, oid)
      JOIN pg_catalog.pg_class AS c ON c.oid = line.oid
      JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
     WHERE n.nspname || '.' || c.relname <> line.place GROUP BY 1 ORDER BY 1"""

#: Advice for each problem.
HINT = "give this slot's rows other values of the same columns in `set` of [mapping], or `parapply drop` the other slot"


async def others(conn: Connection, schema: str, slot_id: int) -> Taken:
    """Return the slots whose rows have constants, but for one; the target has the state schema."""
    query = (
        "SELECT slot_name, constants_in::text FROM {s}.slots WHERE slot_id <> $1::int AND constants_in <> '{{}}'"
        " ORDER BY slot_id"
    )
    taken: dict[str, list[tuple[str, Mapping[str, str]]]] = {}
    for name, text in await state_rows(conn, schema, "looking where rows of others have constants", query, [slot_id]):
        for place, several in msgspec.json.decode(text, type=dict[str, list[dict[str, str]]]).items():
            taken.setdefault(place, []).extend([(name, one) for one in several])
    if taken:
        found = await state_rows(conn, schema, "looking for partitions of shared tables", _RELATED, [list(taken)])
        for other, own in [(other, [one for place in places for one in taken[place]]) for other, places in found]:
            taken.setdefault(other, []).extend(own)
    return taken


def problems(config: Config, names: Collection[Name], taken: Taken) -> list[str]:
    """Return why tables of the publisher may not be written, by what `others` returned; nothing if they may."""
    found: list[str] = []
    # Nearly always: each batch of announcements asks.
    if not taken:
        return found
    for name in names:
        place, mine = ".".join(config.mapping.target_of(name)), config.mapping.constants_of(name)
        met = [slot_name for slot_name, theirs in taken.get(place, ()) if not are_apart([mine, theirs])]
        if met and not config.mapping.is_schema_only(name):
            given = ", ".join([f"{column} = {text}" for column, text in mine.items()])
            found.append(
                f"target table {place} has rows of slot {met[0]!r} with constants, and rows of {'.'.join(name)}"
                f" would {f'not be apart from them by {given}' if given else 'have none'}"
            )
    return found


def check(config: Config, names: Collection[Name], taken: Taken) -> None:
    """Refuse tables whose rows would not be apart from the rows of another slot.

    Raises:
        TargetRefused: there is one.
    """
    if found := problems(config, names, taken):
        raise TargetRefused(f"[mapping] lacks constants: {'; '.join(found)}", hint=HINT)


def check_renamed(mapping: MappingConfig, before: Name, now: Name) -> None:
    """Refuse a table that was renamed if its rows here have the constants, expressions or columns of its name before.

    To be called before a new name is noted in the state: the daemon takes a noted name as settled.

    Raises:
        TargetRefused: they do.
    """
    if mapping.masks_of(before) != mapping.masks_of(now):
        raise TargetRefused(
            f"{'.'.join(before)} became {'.'.join(now)}, which has another `replace` or `omit` in [mapping]",
            hint="give the new name what the old one has there, and keep both; or, for another one, `parapply"
            f" refresh --table {'.'.join(now)} --truncate`",
        )
    constants = mapping.constants_of(before)
    if constants != mapping.constants_of(now):
        name, given = ".".join(now), ", ".join([f"{column} = {text}" for column, text in constants.items()])
        raise TargetRefused(
            f"{'.'.join(before)} became {name}, which has other constants in [mapping]: its rows in target table"
            f" {'.'.join(mapping.target_of(before))} have {given or 'none'}",
            hint=f"delete these rows, run `parapply refresh --table {name} --truncate`, and start the daemon again",
        )


def of_other_partitions(
    mapping: MappingConfig, tables: Mapping[Name, int], relatives: Mapping[int, Sequence[Name]]
) -> dict[Name, TargetRefused]:
    """Return why tables, with OIDs, may not come under their own names: a root or partition of one has other settings.

    Their rows may be the other's, from which values or all rows are to be kept. `relatives` are as of `late_tables`.
    """
    return {
        name: TargetRefused(
            f"{'.'.join(name)} is sent by its own name, and its root or partition {'.'.join(other)} has another"
            " `replace`, `omit` or schema_only in [mapping]",
            hint="give both the same there",
        )
        for name, oid in tables.items()
        for other in relatives.get(oid, ())
        if not mapping.withholds_alike(name, other)
    }


async def _noted(target: Connection, config: Config, slot_id: int) -> dict[str, list[dict[str, str]]]:
    """Return where the state says that this slot's rows have constants; refuse a configuration without these."""
    query = "SELECT constants_in::text FROM {s}.slots WHERE slot_id = $1::int"
    found = await state_rows(target, config.target.state_schema, "looking where rows have constants", query, [slot_id])
    noted = msgspec.json.decode(found[0][0], type=dict[str, list[dict[str, str]]]) if found else {}
    for place, several in noted.items():
        for one in several:
            if one not in config.mapping.all_constants:
                given = ", ".join([f"{column} = {text}" for column, text in one.items()])
                raise TargetRefused(
                    f"target table {place} has rows of this slot with {given}, which [mapping] does not have",
                    hint="use the daemon's configuration; if `set` is to change, start the daemon with it first",
                )
    return noted


async def claim(
    source: slot.Connection, target: Connection, config: Config, slot_id: int, *, is_daemon: bool = False
) -> Taken:
    """Note where this slot's rows have constants, and call the others; return where theirs have them.

    Only the daemon removes what was noted: a command may have been given another file.

    Raises:
        TargetRefused: rows would not be apart from theirs, a command's configuration lacks constants of this slot, or
            the state cannot be written.
    """
    schema, mapping = config.target.state_schema, config.mapping
    taken = await others(target, schema, slot_id)
    noted = {} if is_daemon else await _noted(target, config, slot_id)
    # Without either nothing needs the publisher's tables, which may be many.
    mine: dict[str, list[Mapping[str, str]]] = {}
    if taken or mapping.has_constants:
        names = await slot.tables_to_expect(source, config.source.publications)
        check(config, names, taken)
        for name in sorted(names):
            if (constants := mapping.constants_of(name)) and not mapping.is_schema_only(name):
                mine.setdefault(".".join(mapping.target_of(name)), []).append(constants)
    for place, several in noted.items():
        mine[place] = [*several, *[one for one in mine.get(place, []) if one not in several]]
    query = (
        "UPDATE {s}.slots AS mine SET constants_in = $2::jsonb WHERE slot_id = $1::int AND constants_in <> $2::jsonb"
        " RETURNING ARRAY(SELECT slot_id FROM {s}.slots AS one WHERE one.slot_id <> mine.slot_id)"
    )
    values = [slot_id, msgspec.json.encode(mine).decode()]
    for (called,) in await state_rows(target, schema, "noting where rows have constants", query, values):
        for other_id in called:
            await copies.notify(target, other_id)
    return taken

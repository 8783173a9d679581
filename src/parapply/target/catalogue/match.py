"""Match a published relation to a target table by column name, and decide how its changes are applied. Pure.

In: a `Relation` and `TableFacts`. Out: a `TablePlan`, or an error that names what is missing. Doubt always widens: the
decision may cost speed, never rows.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from parapply.errors import TargetRefused
from parapply.plan.table import ColumnFacts, Equality, Lane, Replacement, TableFacts, TablePlan
from parapply.target.catalogue.constants import constants_of, marked, within
from parapply.target.catalogue.equality import equality_across
from parapply.target.catalogue.facts import refuse_foreign_code
from parapply.target.catalogue.match_keys import foreign_key_phrases, foreign_keys, unique_keys
from parapply.target.catalogue.row_code import TYPES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from parapply.model import Relation

#: Values of apply.tables."schema.table".parallel.
PARALLEL: Final = ("auto", "ordered", "always", "never")
_NO_CONSTANTS: Final[Mapping[str, str]] = MappingProxyType({})
_NO_REPLACEMENTS: Final[Mapping[str, Replacement]] = MappingProxyType({})


def match(  # noqa: PLR0913  each is a choice of the configuration
    relation: Relation,
    facts: TableFacts,
    *,
    parallel: str = "auto",
    is_relaxed: bool = False,
    apply_as: str = "owner",
    constants: Mapping[str, str] = _NO_CONSTANTS,
    omitted: Collection[str] = (),
    replacements: Mapping[str, Replacement] = _NO_REPLACEMENTS,
) -> TablePlan:
    """Return how changes of a published relation are applied to a target table.

    Args:
        relation: as last announced.
        facts: of the target table of the same schema and name, read under the same session_replication_role as applies.
        parallel: `auto`; `ordered` trusts code to need the order of changes, but not to see which transaction each
            belongs to; `always` trusts triggers, rules, functions and exclusion constraints to be independent of the
            order; `never` makes the table serial.
        is_relaxed: independent transactions commit in any order: foreign keys matter also where nothing enforces them.
        apply_as: `owner` refuses code that would have more rights than its owner; `role` runs it.
        constants: values by column that the relation's rows have on the target, and others have not.
        omitted: columns of the publisher's table that the target's rows do not get.
        replacements: expressions whose values columns get, as the target has judged them for this relation.

    Raises:
        TargetRefused: published columns are missing or generated on the target; all of them are named. Or the table
            has code of another owner, or cannot take the constants, or needs a column that is left out or replaced.
        ValueError: `parallel` is none of the four.
    """
    if parallel not in PARALLEL:
        raise ValueError(f"parallel is {parallel!r}, not one of {', '.join(PARALLEL)}")
    if omitted:
        _check_omitted(relation, facts, omitted)
    columns = _columns(relation, facts)
    fixed = constants_of(facts, constants, {column.name for column in columns}) if constants else ()
    facts, sent = within(facts, fixed), {*constants, *[column.name for column in columns]}
    if apply_as == "role" and facts.foreign is not None:
        facts = replace(facts, foreign=None)
    refuse_foreign_code(f"{facts.schema}.{facts.name}", facts.foreign, sent)
    key_positions, is_full, refusal = _identity(relation, facts, columns)
    if replacements:
        _check_replaced(relation, facts, replacements, is_full=is_full)
    facts = _with_row_triggers(relation, facts, constants, is_trusted=parallel == "always")
    if facts.references is not None and not _are_checkable(facts, {column.name for column in columns}):
        facts = replace(facts, references=None)
    why_no_set = _why_no_set(facts, columns, key_positions) or _why_each_change(relation, facts)
    is_by_row = bool(why_no_set) or (is_full and not refusal)
    acting, enforced = _acting(sent, facts), _enforced(facts) if is_by_row else []
    serial = _why_serial(acting, enforced, parallel)
    lane = Lane.SERIAL if serial else Lane.ROW if why_no_set else Lane.SET
    unique = unique_keys(relation, facts, columns)
    exclusions = [f"exclusion constraint {index.name}" for index in facts.unique if index.is_exclusion]
    if is_relaxed:
        # A later value could commit before an earlier one that it excludes: no retry helps that one (trap T-22).
        exclusions += unique.unpredicted
    width_reasons = _width(columns, key_positions, exclusions if parallel != "always" else [])
    if is_full and lane is Lane.ROW:
        width_reasons.append(_ALL_BY_ROW)
    foreign = foreign_keys(relation, facts, columns, is_relaxed=is_relaxed)
    trusted = [*acting, *enforced, *exclusions] if parallel == "always" else []
    plan = TablePlan(
        relation=relation, facts=facts, columns=columns, key_positions=key_positions, is_full=is_full,
        can_update=not refusal, refusal=refusal, lane=lane,
        is_table_exclusive=lane is Lane.SERIAL or bool(width_reasons), reason="",
        unique_keys=unique.keys, foreign_keys=foreign, is_joined=parallel == "ordered" and lane is Lane.SERIAL,
        keeps_written_over=is_relaxed and bool(unique.keys or foreign),
        replaced={at: replacements[one.name] for at, one in enumerate(relation.columns) if one.name in replacements},
        runs_code=bool(acting),
    )  # fmt: skip
    lane_reason = serial or why_no_set or _as_set(facts, columns, key_positions, is_full=is_full and not refusal)
    plan = replace(plan, reason=_reason(plan, [lane_reason], trusted, width_reasons, unique.phrases))
    return marked(plan, fixed)


def _reason(
    plan: TablePlan, reasons: list[str], trusted: list[str], width_reasons: list[str], unique_phrases: list[str]
) -> str:
    """Return for people why changes are applied so: the lane first, then everything that narrows the table."""
    if plan.facts.row_triggers and plan.lane is Lane.SET:
        names = ", ".join([one.name for one in plan.facts.row_triggers])
        reasons.append(f"{names} computes columns of the row that it gets")
    reasons += [f'parallel = "always" trusts {", ".join(trusted)}'] if trusted else []
    reasons += ['parallel = "ordered" joins transactions'] if plan.is_joined else []
    reasons += width_reasons
    if plan.lane is not Lane.SERIAL:
        # Where all of the table waits anyway, single values do not matter.
        reasons += unique_phrases if plan.lane is Lane.SET and not width_reasons else []
        reasons += foreign_key_phrases(plan.facts, plan.foreign_keys)
    if plan.replaced:
        reasons.append(f"values of {_names(one.name for one in plan.replaced.values())} are replaced")
    if plan.refusal:
        reasons.append("updates and deletes are refused")
    # The phrase for the lane may also be the one for the width.
    return "; ".join(dict.fromkeys(reasons))


def _columns(relation: Relation, facts: TableFacts) -> tuple[ColumnFacts, ...]:
    """Return the target column of each wire column, with the equality that holds for the publisher's type."""
    by_name = {column.name: column for column in facts.columns}
    missing = [column.name for column in relation.columns if column.name not in by_name]
    generated = [
        column.name for column in relation.columns if column.name in by_name and by_name[column.name].is_generated
    ]
    problems = []
    if missing:
        problems.append(f"is missing replicated columns: {_names(missing)}")
    if generated:
        # PostgreSQL takes no value for such a column (428C9, trap T-50).
        problems.append(f"has generated columns where the publisher sends values: {_names(generated)}")
    if problems:
        raise TargetRefused(
            f"target table {facts.schema}.{facts.name} {' and '.join(problems)}",
            hint="alter the target table, or leave the columns out of the publication's column list",
        )
    pairs = [(column, by_name[column.name]) for column in relation.columns]
    return tuple(replace(target, equality=equality_across(wire, target)) for wire, target in pairs)


def _check_omitted(relation: Relation, facts: TableFacts, omitted: Collection[str]) -> None:
    """Refuse to leave out columns that do not exist, that rows are found by, or that target rows cannot be without.

    A unique index with such a column would hold the target's own values, so that rows could clash there which do not
    clash on the publisher, in an order that nothing sent shows.
    """
    sent = {column.name for column in relation.columns}
    required = {column.name for column in facts.columns if column.is_required}
    problems = []
    for name in omitted:
        indexes = [index.name for index in facts.unique if name in (*index.columns, *index.named)]
        if name in relation.lacks:
            problems.append(f'column "{name}" is not published')
        elif name in sent:
            problems.append(f'column "{name}" is part of the replica identity')
        elif name in facts.key_columns:
            problems.append(f'column "{name}" is part of the key of the target table')
        elif indexes:
            problems.append(f'column "{name}" is part of unique index "{indexes[0]}" of the target table')
        elif name in required:
            problems.append(f'column "{name}" of the target table is NOT NULL and has no default')
    if problems:
        raise TargetRefused(
            f"`omit` of {relation.qualified_name} cannot be followed in {facts.schema}.{facts.name}:"
            f" {'; '.join(problems)}",
            hint="correct `omit` in [mapping], or drop the rule of the target table; give a renamed column's old name,"
            " or none of an added one, until all transactions from before are applied (`run --until`), then only the"
            " new one; take a name out only if its column is gone or not published, and nothing older is left to come",
        )


def _check_replaced(
    relation: Relation, facts: TableFacts, replacements: Mapping[str, Replacement], *, is_full: bool
) -> None:
    """Refuse to replace columns by whose values rows are found, or compared with other rows or tables.

    The values in the stream are compared, and the target's rows have others.
    """
    keys = {column.name for column in relation.columns if column.is_key and relation.replica_identity != "f"}
    always = {column.name for column in facts.columns if column.is_identity_always}
    generated = {column.name for column in facts.columns if column.is_generated}
    problems = ["rows are found by all their columns"] if is_full else []
    problems += [
        f'unique index "{index.name}" has an expression or a condition'
        for index in facts.unique
        if index.is_partial or not index.columns or not generated.isdisjoint(index.columns)
    ]
    for name in replacements:
        indexes = [index.name for index in facts.unique if name in (*index.columns, *index.named)]
        foreign = [one.name for one in facts.foreign_keys if name in one.columns]
        if name in keys:
            problems.append(f'column "{name}" is part of the replica identity')
        elif name in facts.key_columns:
            problems.append(f'column "{name}" is part of the key of the target table')
        elif indexes:
            problems.append(f'column "{name}" is part of unique index "{indexes[0]}" of the target table')
        elif foreign:
            problems.append(f'column "{name}" is part of foreign key "{foreign[0]}" of the target table')
        elif name in always:
            problems.append(f'column "{name}" is GENERATED ALWAYS AS IDENTITY on the target')
    if len(replacements) == len(relation.columns):
        problems.append("no column is left as it is")
    if problems:
        raise TargetRefused(
            f"`replace` of {relation.qualified_name} cannot be kept in {facts.schema}.{facts.name}:"
            f" {'; '.join(problems)}",
            hint="correct `replace` in [mapping], or drop the rule of the target table",
        )


def _identity(
    relation: Relation, facts: TableFacts, columns: tuple[ColumnFacts, ...]
) -> tuple[tuple[int, ...], bool, str]:
    """Return key positions, whether rows are found by all their columns, and why updates are refused ('' if not).

    The rules and texts come from the built-in subscription (logicalrep_rel_mark_updatable and
    check_relation_updatable), except that a deferrable key serves where the publisher's identity is a key.
    """
    table = f"{facts.schema}.{facts.name}"
    is_sent_full = relation.replica_identity == "f"
    # A deferrable key may hold twice between two rows of one transaction (trap T-49), and under the replica role
    # PostgreSQL does not check it at all: with the whole old row at hand, the whole row is what is matched.
    if not facts.key_columns or (facts.key_is_deferrable and is_sent_full):
        if not is_sent_full:
            return (
                (),
                False,
                (
                    f"target table {table} has neither a replica identity index nor a primary key, "
                    f"and the published relation {relation.qualified_name}, or a partition of it, does not have REPLICA"
                    " IDENTITY FULL"
                ),
            )
        incomparable = [column for column in columns if not column.has_equality]
        if incomparable:
            named = ", ".join(f'"{column.name}" ({_type_name(column)})' for column in incomparable)
            return (
                (),
                True,
                (
                    f"target table {table} has no key, and rows cannot be found by columns whose type has no equality "
                    f"operator: {named}"
                ),
            )
        return (), True, ""
    positions = {column.name: position for position, column in enumerate(relation.columns)}
    unsent = [
        name
        for name in facts.key_columns
        if name not in positions or not (is_sent_full or relation.columns[positions[name]].is_key)
    ]
    if unsent:
        # A key tuple has NULL for what is not in the publisher's identity: looking for it finds nothing (trap T-23b).
        return (
            (),
            False,
            (f"publisher did not send the replica identity column expected by target table {table}: {_names(unsent)}"),
        )
    return tuple(positions[name] for name in facts.key_columns), False, ""


def _why_serial(acting: list[str], enforced: list[str], parallel: str) -> str:
    """Return why transactions with the table run alone, or ''.

    Args:
        acting: what runs with every change.
        enforced: foreign keys that sets would keep, but single rows next to other tables' sets do not.
        parallel: as configured.
    """
    if parallel == "never":
        return 'serial: the configuration says parallel = "never"'
    if parallel == "always":
        return ""
    if acting:
        return f"serial: code on the target can see the order of changes: {', '.join(acting)}"
    if enforced:
        are = "is" if len(enforced) == 1 else "are"
        return f"serial: {', '.join(enforced)} {are} enforced and changes are applied row by row"
    return ""


def _as_set(
    facts: TableFacts, columns: tuple[ColumnFacts, ...], key_positions: tuple[int, ...], *, is_full: bool
) -> str:
    if is_full:
        how = _BY_ROW if any(column.is_identity_always for column in columns) else "set-based; updates and deletes"
        narrowed = "" if any(column.name in facts.indexed_columns for column in columns) else _READ_WHOLE
        return f"{how} {_ALL_BY_ROW}{narrowed}"
    return f"set-based by key ({_names(facts.key_columns)})" if key_positions else "set-based: inserts only"


def _why_no_set(facts: TableFacts, columns: tuple[ColumnFacts, ...], key_positions: tuple[int, ...]) -> str:
    """Return why only single rows in order are exact, or ''."""
    if not columns:
        return "row by row: no columns are published"
    if key_positions and facts.key_is_deferrable:
        return "row by row: the key is deferrable"
    unknown = [columns[position] for position in key_positions if columns[position].equality is Equality.UNKNOWN]
    if unknown:
        return _unknown_key(unknown)
    has_cast = [column.name for column in columns if column.has_text_cast]
    return f"row by row: a cast from text replaces the input function of column {_names(has_cast)}" if has_cast else ""


def _with_row_triggers(
    relation: Relation, facts: TableFacts, constants: Mapping[str, str], *, is_trusted: bool
) -> TableFacts:
    """Return the facts of a table with its row triggers apart if all of them are harmless; else among its triggers.

    No column that they assign may be one by which rows are found or compared with other rows, because the values in the
    stream are compared. Without a key rows may be found by what the triggers have changed.

    Args:
        relation: as announced.
        facts: as read, without the constants in its keys.
        constants: columns that have one value in all rows of the source.
        is_trusted: triggers that need each change of a row are trusted to need only the last.
    """
    if not facts.row_triggers:
        return facts
    plain = {column.name for column in facts.columns if column.type_oid in TYPES and not column.is_generated}
    settable = {column.name for column in facts.columns if column.name in plain and not column.is_identity_always}
    settable -= {*constants, *facts.key_columns, *(name for index in facts.unique for name in index.columns)}
    settable -= {name for foreign in facts.foreign_keys for name in foreign.columns}
    if (
        facts.key_columns
        and not facts.key_is_deferrable
        and not any(index.is_partial or not index.columns for index in facts.unique)
        and all(plain.issuperset(one.reads) and settable.issuperset(one.writes) for one in facts.row_triggers)
        and not (is_trusted and _why_each_change(relation, facts))
    ):
        return facts
    return replace(facts, triggers=(*facts.triggers, *(one.name for one in facts.row_triggers)), row_triggers=())


def _are_checkable(facts: TableFacts, sent: Collection[str]) -> bool:
    """Return whether inserts may run without the triggers of `references`, under another role.

    Not with code of other owners, which was looked for under the session's role, or where the values are not known.
    """
    return facts.foreign is None and not facts.triggers and all(one.column in sent for one in facts.references or ())


def _why_each_change(relation: Relation, facts: TableFacts) -> str:
    """Return why a row's net change is not enough for its row triggers, or ''.

    It is enough where they compute columns from others, all of which the publisher sends, and which no trigger assigns:
    then the last values of these decide, whatever the changes before. A value that is not sent, because it has not
    changed, is also the last one.
    """
    sent = {column.name for column in relation.columns}
    written = {name for one in facts.row_triggers for name in one.writes}
    each = [
        one.name
        for one in facts.row_triggers
        if not one.is_function_of_new or not sent.issuperset(one.reads) or not written.isdisjoint(one.reads)
    ]
    return f"row by row: {', '.join(each)} may depend on earlier values of the row" if each else ""


def _acting(sent: Collection[str], facts: TableFacts) -> list[str]:
    """Return the triggers, rules and functions that applying a change would run."""
    defaults = [
        f"{'expression' if column.is_generated else 'default'} of column {column.name} calls {function}"
        for column in facts.columns
        if column.name not in sent
        for function in column.default_code
    ]
    return [*facts.triggers, *facts.rules, *facts.code, *defaults]


def _enforced(facts: TableFacts) -> list[str]:
    return [f"foreign key {each.name}" for each in facts.foreign_keys if each.is_enforced]


def _width(columns: tuple[ColumnFacts, ...], key_positions: tuple[int, ...], exclusions: list[str]) -> list[str]:
    """Return why batches that touch the table must not run at the same time; empty if they may, by key."""
    reasons = []
    unknown = [columns[position] for position in key_positions if columns[position].equality is Equality.UNKNOWN]
    if unknown:
        reasons.append(_unknown_key(unknown))
    if exclusions:
        # Different values clash there, and the one that is freed is not on the wire (trap T-22).
        reasons.append(f"one batch at a time: {', '.join(exclusions)}")
    return reasons


_BY_ROW: Final = "inserts set-based; updates and deletes row by row,"
_ALL_BY_ROW: Final = "one batch at a time: no key on the target serves, rows are found by all their columns"
_READ_WHOLE: Final = ", without an index that narrows the search"


def _unknown_key(columns: list[ColumnFacts]) -> str:
    named = ", ".join(f'"{column.name}" ({_type_name(column)})' for column in columns)
    return f"row by row, one batch at a time: equal keys may differ in their text: {named}"


def _type_name(column: ColumnFacts) -> str:
    """Return a type's name for people; what is not built in keeps its schema and quotes."""
    if not column.type_sql.startswith("pg_catalog."):
        return column.type_sql
    name = column.type_sql.removeprefix("pg_catalog.").strip('"')
    return f"{name[1:]}[]" if name.startswith("_") else name


def _names(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)

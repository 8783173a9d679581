"""Foreign keys of many new rows, each checked by one query and not by PostgreSQL's trigger for every row.

Where the foreign keys' triggers are all that an insert fires (`TableFacts.references`), it runs under the role
`replica`, which fires none of them, and the end of the batch checks every key by one query. It takes the same lock on
the parents as the trigger, and fails unless each value has one. Then the batch is repeated, at last row by row with the
triggers, so that the error is PostgreSQL's own. All other statements run under the role `origin`.

Each change of the role makes a session plan its statements again, so this pays for many rows only.
"""

from __future__ import annotations

from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Final

from parapply.quoting import identifier, qualified
from parapply.target.session.pipeline import ANY_COUNT
from parapply.target.sql.commands import TEXT_OID, Command, oid_array, text_array
from parapply.target.sql.statements import inserting_code, sql_set

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from parapply.plan.table import Reference, TablePlan
    from parapply.target.sql.statements import Sql

#: References of consecutive inserts from which a change of the role pays, twice, with the plans that are made again.
FEWEST_REFERENCES: Final = 256


def by_references(commands: list[Command]) -> list[Command]:
    """Return the commands of a batch with the foreign keys of large inserts checked by a query each.

    The session's role is `origin`, may be changed by it, and is `origin` again behind them.

    Args:
        commands: of the batch, in order; the same ones come back if nothing is gained.
    """
    made: list[Command] = []
    unchecked: list[Command] = []
    for may_skip, group in groupby(commands, _may_skip_triggers):
        run = list(group)
        if may_skip and sum([each.expected * len(each.plan.facts.references or ()) for each in run]) >= (
            FEWEST_REFERENCES
        ):
            unchecked += [each for each in run if each.expected]
            run = [_role(_REPLICA, run[0].plan), *run, _role(_ORIGIN, run[0].plan)]
        made += run
    return [*made, *_checks(unchecked)] if unchecked else commands


def _may_skip_triggers(command: Command) -> bool:
    return (
        command.plan.facts.references is not None
        and command.operation == "insert"
        and command.prepared.is_set  # with `expected` 0 it is a delete that fails if it finds a row
    )


def _role(prepared: Sql, plan: TablePlan) -> Command:
    return Command(prepared, (), expected=ANY_COUNT, operation="role", plan=plan)


def _checks(inserts: Sequence[Command]) -> Iterator[Command]:
    """Yield the checks of inserts; the last one fails if a table runs something else by now, and all their locks keep.

    A foreign key or a trigger that has come since the catalogue was read has not seen the rows.
    """
    for command in inserts:
        plan = command.plan
        for one in plan.facts.references or ():
            at = command.prepared.positions.index([column.name for column in plan.columns].index(one.column))
            is_text = command.prepared.type_oids[at] == TEXT_OID
            yield Command(
                _missing(one, is_text=is_text), [command.parameters[at]], expected=0, operation="reference", plan=plan
            )
    facts = {command.plan.facts.oid: command.plan.facts for command in inserts}
    known = [one.version for each in facts.values() for one in each.references or ()]
    parameters = [oid_array(list(facts)), text_array(known)]
    yield Command(inserting_code(), parameters, expected=0, operation="code", plan=inserts[0].plan)


@cache
def _missing(reference: Reference, *, is_text: bool) -> Sql:
    """Return the statement that has a row if any of an array's values has no parent, as a set form.

    A table that has taken the parent's name has no rows for it. The cast rounds and cuts blanks off as the assignment
    has, which refuses all else that the cast would cut.
    """
    array = f"$1::{'pg_catalog.text[]::' if is_text else ''}{reference.type_sql}[]"
    parent = qualified(reference.parent_schema, reference.parent_name)
    return sql_set(
        f"WITH held AS MATERIALIZED (SELECT FROM ONLY {parent} AS p"  # noqa: S608  quoted names
        f" WHERE p.{identifier(reference.parent_column)} OPERATOR(pg_catalog.=) ANY ({array})"
        f" AND p.tableoid = {reference.parent_oid:d}::pg_catalog.oid FOR KEY SHARE)"
        " SELECT 1 WHERE (SELECT pg_catalog.count(*) FROM held)"
        f" <> (SELECT pg_catalog.count(DISTINCT v) FROM unnest({array}) AS v)"
    )


_REPLICA: Final = sql_set("SET LOCAL session_replication_role = replica", n_parameters=0)
_ORIGIN: Final = sql_set("SET LOCAL session_replication_role = origin", n_parameters=0)

"""Batches whose foreign keys are checked by queries: which inserts, between which statements, with which arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from parapply.plan.table import Reference
from parapply.target.catalogue.match import match
from parapply.target.session.pipeline import ANY_COUNT
from parapply.target.sql.commands import Command
from parapply.target.sql.references import FEWEST_REFERENCES, by_references
from parapply.target.sql.statements import Statements, counted
from parapply.wire.rows import BINARY_TYPES
from tests.unit import plans as plans_of_tests

if TYPE_CHECKING:
    from parapply.plan.table import TablePlan
    from parapply.target.sql.commands import Operation

_REFERENCE = Reference(
    column="p", type_sql="integer", parent_oid=9, parent_schema="s", parent_name="Up", parent_column="k",
    version="1 2 3",
)  # fmt: skip
_SENT = plans_of_tests.relation(plans_of_tests.sent("id", is_key=True), plans_of_tests.sent("p"))
_COLUMNS = [plans_of_tests.column("id"), plans_of_tests.column("p")]
_CHILD = match(_SENT, plans_of_tests.table(_COLUMNS, ["id"], references=(_REFERENCE,)))
_OTHER = match(_SENT, plans_of_tests.table(_COLUMNS, ["id"], oid=5, references=()))
_CODED = match(_SENT, plans_of_tests.table(_COLUMNS, ["id"], oid=6))


def _insert(plan: TablePlan, n_rows: int, types: frozenset[int] = BINARY_TYPES) -> Command:
    prepared = Statements(plan, types).set_insert((0, 1))
    return Command(prepared, [b"ids", b"parents"], expected=n_rows, operation="insert", plan=plan)


def _delete(plan: TablePlan, n_rows: int, operation: Operation = "delete") -> Command:
    prepared = Statements(plan).set_delete()
    return Command(prepared, [b"ids"], expected=n_rows, operation=operation, plan=plan)


def _text(command: Command) -> bytes:
    return command.prepared.text


def test_large_inserts_run_under_the_replica_role_and_are_checked_at_the_end() -> None:
    """Consecutive inserts have one change of the role, other statements none; a check has its insert's own array."""
    first, absent = _delete(_CHILD, 3), _delete(_CHILD, 0, "insert")
    other, insert, last = _insert(_OTHER, 5), _insert(_CHILD, FEWEST_REFERENCES), _delete(_OTHER, 2)
    made = by_references([first, other, absent, insert, last])
    assert made[0] is first
    assert _text(made[1]) == b"SET LOCAL session_replication_role = replica"
    assert made[2:5] == [other, absent, insert]
    assert _text(made[5]) == b"SET LOCAL session_replication_role = origin"
    assert made[6] is last
    check, code = made[7:]
    assert (check.operation, check.expected, check.parameters) == ("reference", 0, [b"parents"])
    # The interpreted twin makes arrays of texts.
    text = _text(check).replace(b"$1::pg_catalog.text[]::", b"$1::")
    assert b'FROM ONLY "s"."Up" AS p WHERE p."k" OPERATOR(pg_catalog.=) ANY ($1::integer[])' in text
    assert b"p.tableoid = 9::pg_catalog.oid FOR KEY SHARE" in _text(check)
    assert (code.operation, code.expected) == ("code", 0)
    assert code.parameters[1] is not None
    assert code.parameters[1].endswith(b"1 2 3")
    assert all(command.prepared.is_set for command in made)
    assert [command.expected for command in (made[1], made[5])] == [ANY_COUNT, ANY_COUNT]
    assert counted(check.prepared).text.startswith(b"WITH done AS (WITH held")


def test_values_sent_as_text_are_read_as_the_column_reads_them() -> None:
    """An array of texts becomes one of the column's type."""
    made = by_references([_insert(_CHILD, FEWEST_REFERENCES, frozenset())])
    assert b"$1::pg_catalog.text[]::integer[]" in _text(made[3])


def test_few_references_and_tables_with_other_code_are_left_to_triggers() -> None:
    """Nothing is changed where plans made again would cost more, or where an insert runs something else."""
    for commands in (
        [_insert(_CHILD, FEWEST_REFERENCES - 1)],
        [_insert(_OTHER, FEWEST_REFERENCES)],
        [_insert(_CODED, FEWEST_REFERENCES)],
        [_insert(_CHILD, FEWEST_REFERENCES - 1), _delete(_CHILD, 1), _insert(_CHILD, 1)],
    ):
        assert by_references(commands) is commands


def test_references_are_left_to_triggers_where_a_query_could_not_check_them() -> None:
    """Not without the values, beside other triggers, or where a table's owner could run code."""
    unsent = replace(_REFERENCE, column="unsent")
    facts = plans_of_tests.table([*_COLUMNS, plans_of_tests.column("unsent")], ["id"], references=(unsent,))
    assert match(_SENT, facts).facts.references is None
    facts = replace(_CHILD.facts, triggers=("trigger audit",))
    assert match(_SENT, facts).facts.references is None
    assert match(_SENT, _CHILD.facts).facts.references == (_REFERENCE,)

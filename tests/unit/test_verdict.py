"""What a failure at the head means, and what the operator is told of it."""

from __future__ import annotations

import pytest

from parapply.errors import StatementFailed
from parapply.runtime.verdict import Verdict, apply_failed, verdict
from parapply.target.commands import Command, Operation
from parapply.target.statements import Statements
from tests.unit.changes_model import KEYLESS, PAIR, PLAIN, Spec


def command(operation: Operation, spec: Spec = PLAIN) -> Command:
    """Return a command on a table; its parameters hold a value that must not be seen."""
    plan = spec.plan(0)
    prepared = Statements(plan).row_insert(tuple(range(len(plan.columns))))
    return Command(prepared, (b"secret",), expected=1, operation=operation, plan=plan)


@pytest.mark.parametrize(
    ("sqlstate", "expected"),
    [
        ("40P01", Verdict.AGAIN),
        ("40001", Verdict.AGAIN),
        ("55P03", Verdict.AGAIN),
        ("42703", Verdict.STALE),
        ("42P01", Verdict.STALE),
        ("0A000", Verdict.STALE),
        ("22P02", Verdict.STALE),
        ("26000", Verdict.STALE),
        ("23505", Verdict.FINAL),
        ("23503", Verdict.FINAL),
        ("22001", Verdict.FINAL),
        ("", Verdict.FINAL),
    ],
)
def test_verdicts(sqlstate: str, expected: Verdict) -> None:
    """Somebody else's lock is waited for, a stale plan is looked up again, everything else is final (F24, T-48)."""
    assert verdict(StatementFailed("", sqlstate=sqlstate)) is expected


@pytest.mark.parametrize(
    ("operation", "sqlstate", "kind"),
    [
        ("insert", "23505", "insert_exists"),
        ("update", "23505", "update_exists"),
        ("update", "", "update_missing"),
        ("delete", "", "delete_missing"),
        ("insert", "23502", "insert"),
    ],
)
def test_the_error_names_type_table_key_transaction_and_no_value(
    operation: Operation, sqlstate: str, kind: str
) -> None:
    """One line: conflict type, table, key columns, SQLSTATE and constraint, xid and end LSN; never a value."""
    failure = StatementFailed('null value: "secret"', sqlstate=sqlstate, constraint="t_k" if sqlstate else "")
    line = apply_failed(failure, command(operation, PAIR), 4711, 0x16B374D848).line()
    assert line.startswith(f"{kind} on s.t2, key (k0, k1): ")
    assert "transaction 4711, end LSN 16/B374D848" in line
    assert "\n" not in line
    assert "secret" not in line
    if sqlstate:
        assert sqlstate in line
        assert "constraint t_k" in line


def test_the_error_of_a_table_without_a_key_says_so() -> None:
    """There are no key columns to name."""
    failure = StatementFailed("", sqlstate="23514", constraint="positive")
    assert "on s.t8, no key: check_violation (23514), constraint positive" in str(
        apply_failed(failure, command("insert", KEYLESS), 1, 2)
    )


def test_an_unknown_sqlstate_is_still_told() -> None:
    """User code may raise any SQLSTATE; one that psycopg does not know has no name."""
    failure = StatementFailed("", sqlstate="ZZ999")
    assert "(ZZ999)" in str(apply_failed(failure, None, 1, 0))
    assert "not ended yet" in str(apply_failed(failure, None, 1, 0))

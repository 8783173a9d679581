"""The error tree: the table that people read says what the classes do."""

from __future__ import annotations

import inspect

from parapply import errors
from parapply.errors import ParapplyError, StatementFailed

#: The root, and the one that never leaves the worker.
_NOT_LISTED = {ParapplyError, StatementFailed}


def _table() -> dict[str, tuple[int, str]]:
    """Return exit code and retry by class name, as the module's docstring has them."""
    lines = [line for line in (errors.__doc__ or "").splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    # Without the heading and the line under it.
    return {name: (int(code), retry) for name, code, retry, _ in rows[2:]}


def test_the_table_of_errors_agrees_with_the_classes() -> None:
    """Every error an operator can meet is listed with its own exit code and retry, and nothing else is."""
    classes = [
        one
        for _, one in inspect.getmembers(errors, inspect.isclass)
        if issubclass(one, ParapplyError) and one.__module__ == errors.__name__ and one not in _NOT_LISTED
    ]
    assert _table() == {one.__name__: (one.exit_code, one.retry.value) for one in classes}

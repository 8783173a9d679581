"""The comments of the state schema, which are read from its text."""

from __future__ import annotations

import re

from parapply.target.state.schema import _TABLES, comments


def _columns(kind: str, name: str) -> set[str]:
    """Return the columns of a table, or what a view selects: what stands before a comma outside of parentheses."""
    body = re.sub(" *--.*", "", _TABLES.partition(f"CREATE {kind} {{s}}.{name} ")[2])
    if kind == "TABLE":
        return set(re.findall(r"^    ([a-z_]+) ", body.partition(";")[0], re.MULTILINE))
    chosen = body.partition("SELECT ")[2].partition("\n  FROM ")[0]
    while chosen != (chosen := re.sub(r"[(\[][^][()]*[])]", "", chosen)):
        pass
    return {re.findall(r"\w+", one)[-1] for one in chosen.split(",")}


def test_each_comment_is_on_a_column() -> None:
    """A remark elsewhere, as inside the query of a view, would be a comment on no column: no schema could be made."""
    for (kind, name), (own, columns) in comments().items():
        found = _columns(kind, name)
        assert own, name
        assert columns.keys() <= found, (name, columns.keys() - found)
        assert all(re.fullmatch("[a-z_]+", column) for column in columns), columns

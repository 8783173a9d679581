"""Choice of the tables that are copied in binary."""

from __future__ import annotations

import pytest

from parapply.copy.parts import is_binary
from parapply.copy.published import PublishedTable

_INT4, _INT8, _TEXT, _INTERVAL, _INT4_ARRAY, _OF_A_USER = 23, 20, 25, 1186, 1007, 16_400


def _table(**types: int) -> PublishedTable:
    return PublishedTable(
        oid=1,
        schema="s",
        name="t",
        columns=tuple(types),
        types=tuple(types.values()),
        modifiers=(-1,) * len(types),
        row_filter="",
        key=(),
        leaves=(),
    )


def test_built_in_types_that_agree_go_in_binary() -> None:
    """Further columns on the target do not matter, and neither does their order."""
    assert is_binary(_table(a=_INT4, b=_TEXT), {"c": _OF_A_USER, "b": _TEXT, "a": _INT4})


@pytest.mark.parametrize(
    ("source", "target"),
    [(_INT4, _INT8), (_INTERVAL, _INTERVAL), (_INT4_ARRAY, _INT4_ARRAY), (_OF_A_USER, _OF_A_USER), (_INT4, None)],
)
def test_one_other_column_makes_it_text(source: int, target: int | None) -> None:
    """Types that differ, and those whose bytes may mean something else on another server."""
    types = {"a": _TEXT, "b": target} if target is not None else {"a": _TEXT}
    assert not is_binary(_table(a=_TEXT, b=source), types)

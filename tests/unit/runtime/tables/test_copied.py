"""A table that waits is warned of at once and once a day, and not with each look."""

from __future__ import annotations

from parapply.runtime.tables.copied import DailyWarnings

_DAY_S = 86_400.0
_ONE, _TWO = ("s", "one"), ("s", "two")


def test_once_and_each_day() -> None:
    """A table is reported when it is first seen, a day later, and again when it waits a second time."""
    warnings = DailyWarnings()
    assert warnings.due([_ONE], 5.0) == [_ONE]
    assert warnings.due([_ONE, _TWO], 6.0) == [_TWO]
    assert warnings.due([_ONE, _TWO], 4.0 + _DAY_S) == []
    assert warnings.due([_ONE, _TWO], 5.0 + _DAY_S) == [_ONE]
    assert warnings.due([_ONE], 6.0 + _DAY_S) == []
    assert warnings.due([_TWO, _ONE], 7.0 + _DAY_S) == [_TWO]

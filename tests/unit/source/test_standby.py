"""Readers that a setting of the publisher names, as PostgreSQL reads it."""

from __future__ import annotations

import pytest

from parapply.source.standby import is_awaited, is_named


@pytest.mark.parametrize(
    "standby_names",
    [
        "app", "*", "APP", '"app"', "other, app", "2 (other, app)", "FIRST 1 (other,app)", "any 1(app ,\tother)",
        'ANY 1 ("a ""b", "App")', "ANY 1 (*)",
    ],
)  # fmt: skip
def test_it_is_named(standby_names: str) -> None:
    """By its name in any case, quoted or not, wherever it stands in the list, and by the star."""
    assert is_named(standby_names, "app")


@pytest.mark.parametrize("standby_names", ["", "other", "app2", '"app, x"', "FIRST 1 (my_app, app_1)", '"ap""p"'])
def test_it_is_not_named(standby_names: str) -> None:
    """By a part of another name it is not, nor by an empty list."""
    assert not is_named(standby_names, "app")


def test_a_quoted_name_is_any_text() -> None:
    """An application_name may hold what a list is made of."""
    assert is_named('FIRST 1 ("a, ""b"" (c)")', 'a, "b" (c)')


@pytest.mark.parametrize(
    ("standby_names", "senders", "wanted"),
    [
        ("", [("app", "async")], False),
        ("other", [("app", "async")], False),
        ("app", [("app", "sync")], True),
        ("app", [("other", "async")], True),
        ("*", [("other", "sync")], False),
        ("*", [("app", "sync"), ("other", "potential")], True),
        ("*", [("app", None), ("other", None)], True),
        ("other, app", [("app", "potential"), ("OTHER", "sync")], False),
        ("first 2 (other, app)", [("app", "sync"), ("other", "sync")], True),
        ("FIRST 1 (other, app)", [("app", None), ("OTHER", None)], False),
        ("FIRST 1 (app, other)", [("app", None), ("other", None)], True),
        ("FIRST 2 (other, app, third)", [("app", None), ("other", None), ("third", None)], True),
        ('FIRST 1 (other, app, "first")', [("app", None), ("first", None)], True),
        ("ANY 1 (app, other)", [("app", "quorum"), ("other", "quorum")], False),
        ("any 1 (app, other)", [("app", "quorum"), ("unnamed", "async")], True),
        ("ANY 2(app, other, third)", [("app", "quorum"), ("other", "quorum")], True),
    ],
)
def test_others_may_suffice(standby_names: str, senders: list[tuple[str, str | None]], wanted: bool) -> None:  # noqa: FBT001
    """Commits wait for a standby that is away as well, unless enough others are connected."""
    assert is_awaited(standby_names, "app", senders) is wanted

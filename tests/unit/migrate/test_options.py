"""Selection of the tables of a migration."""

from __future__ import annotations

import pytest

from parapply.errors import ConfigError
from parapply.migrate.options import Choice, check_patterns, matches


@pytest.mark.parametrize(
    ("pattern", "name", "is_match"),
    [
        ("public.*", "public.t", True),
        ("public.*", "public2.t", False),
        ("*.audit_?", "a.audit_1", True),
        ("*.audit_?", "a.audit_10", False),
        ("S p.T[1]", "S p.T[1]", True),
        ("S p.T[1]", "S p.T1", False),
        ("public.t", "public.T", False),
        ("public.t", "public.t\n", False),
    ],
)
def test_a_pattern_has_two_signs(pattern: str, name: str, is_match: bool) -> None:  # noqa: FBT001  a column
    """A star and a question mark stand for others; everything else for itself."""
    assert matches(pattern, name) is is_match


def test_what_is_left_out_wins() -> None:
    """Without --include all tables are meant; --exclude takes from that."""
    assert Choice().is_meant("a", "t")
    choice = Choice(include=("a.*",), exclude=("*.t",))
    assert [choice.is_meant(*name) for name in (("a", "s"), ("a", "t"), ("b", "s"))] == [True, False, False]


def test_a_pattern_names_a_schema() -> None:
    """One without a dot would match nothing, without a word."""
    with pytest.raises(ConfigError, match=r"audit_\*: a pattern is schema\.table"):
        check_patterns(["a.*", "audit_*"])

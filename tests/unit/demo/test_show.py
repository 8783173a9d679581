"""Tables and verdicts that the demonstration prints."""

from __future__ import annotations

import io

from rich.console import Console

from parapply.demo.command import Comparison
from parapply.demo.show import show_comparison


def test_a_table_that_was_not_compared_is_told_from_one_that_differs() -> None:
    """`verify` has no rows for it."""
    tables = [
        Comparison(name="public.a", source_rows=1000, target_rows=999, is_equal=False),
        Comparison(name="public.b", source_rows=None, target_rows=None, is_equal=False),
    ]
    printed = io.StringIO()
    show_comparison(Console(file=printed, width=100), tables)
    _, first, second = printed.getvalue().splitlines()
    assert first.split() == ["public.a", "1,000", "999", "DIFFERS"]
    assert second.split() == ["public.b", "NOT", "COMPARED"]

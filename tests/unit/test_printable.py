"""Names and values of others on a terminal, which some bytes act on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parapply.errors import TargetRefused
from parapply.printable import printable, printable_tree


@given(st.text())
def test_nothing_that_acts_is_left(text: str) -> None:
    """Printable text stays as it is; nothing else comes out, so that no sequence begins and no line ends."""
    shown = printable(text)
    assert shown.isprintable()
    assert not text.isprintable() or shown == text


def test_what_does_not_print_is_its_escape() -> None:
    """Control characters and marks of direction are shown by number; quotes and backslashes are left alone."""
    assert printable('a\x1b[2J"\\\n\u202e\U000e0001é') == 'a\\x1b[2J"\\\\x0a\\u202e\\U000e0001é'
    tree = {"a": ["\t", {"b": "\x00"}], "n": 1, "none": None}
    assert printable_tree(tree) == {"a": ["\\x09", {"b": "\\x00"}], "n": 1, "none": None}


def test_an_error_is_one_printable_line() -> None:
    """A name with a line's end or an escape sequence in it cannot make a second line, or move the cursor."""
    error = TargetRefused("target table a.b\n\x1b[2J does not exist", hint="create\r\nit")
    assert error.line() == "target table a.b \\x1b[2J does not exist. Hint: create it"

"""Words that name no actor, or mean something else to a native reader: they do not come back."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from tests.fixtures.documents import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_ACTOR = "name the actor: the worker, another session, the operator"
#: Words in comments, docstrings, texts of the program and documents, and what to write instead.
_WORDS = {
    "nobody": "no worker, no session, none",
    "somebody": _ACTOR,
    "whoever": _ACTOR,
    "anew": "again",
    "meanwhile": "in the meantime, since, or nothing",
    "some hundred": "a few hundred",
    "some thousand": "a few thousand",
    "is told": "is reported, is logged, is shown, learns",
    "are told": "are reported, are logged, are shown, learn",
}
#: How many of them a file has. A count may only go down.
_ALLOWED: dict[str, int] = {
    "src/parapply/check/show.py": 1,
    "src/parapply/commands/snapshot.py": 1,
    "src/parapply/demo/account.py": 1,  # the name of an account
    "src/parapply/source/transport.py": 1,
    "src/parapply/target/session/origins.py": 2,
    "src/parapply/target/session/pipeline.py": 1,
    "src/parapply/target/session/session.py": 3,
    "src/parapply/target/sql/commands.py": 2,
    "src/parapply/target/sql/statements.py": 3,
    "src/parapply/wire/copy.py": 4,
    "src/parapply/wire/rows.py": 1,
}
#: Suffixes below `config/`: what people read there, not its secrets.
_CONFIGURATION = {".toml", ".service", ".env", ".sql", ".sh", ".yml"}
#: Between two words: a phrase may continue in the next line of a comment.
_GAP = r"[\s#:]+"
_PATTERN = re.compile(rf"\b(?:{'|'.join(word.replace(' ', _GAP) for word in _WORDS)})\b", re.IGNORECASE)


class _Find(NamedTuple):
    line: int
    word: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.word!r}: better: {_WORDS[self.word]}"


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield each comment with its first line; comments on lines of their own that follow each other are one."""
    first = last = 0
    lines: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            if lines and (line != last + 1 or token.line.strip() != token.string):
                yield first, "\n".join(lines)
                lines = []
            first, last = (first if lines else line), line
            lines.append(token.string)
    yield first, "\n".join(lines)


def _strings(text: str) -> Iterator[tuple[int, str]]:
    """Yield each string with its first line: docstrings, messages, help, SQL with its comments.

    Strings that follow each other are one, as they are for the reader of the message.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _finds(text: str, *, is_python: bool) -> list[_Find]:
    """Return the words in comments and strings of Python, or anywhere in another text."""
    if not _PATTERN.search(text):
        return []  # most files need no parser
    parts = [*_comments(text), *_strings(text)] if is_python else [(1, text)]
    return sorted(
        _Find(first + part.count("\n", 0, found.start()), re.sub(_GAP, " ", found[0].lower()))
        for first, part in parts
        for found in _PATTERN.finditer(part)
    )


def _files() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield from (ROOT / "docs").glob("*.md")
    yield from (ROOT / "docs" / "design").glob("*.md")
    yield from (path for path in (ROOT / "config").rglob("*") if path.suffix in _CONFIGURATION)
    yield from (ROOT / "src" / "parapply").rglob("*.py")


@cache
def _all_finds() -> dict[str, list[_Find]]:
    """Return the finds of each file that has some, by its path in the repository."""
    found = {
        path.relative_to(ROOT).as_posix(): _finds(path.read_text(encoding="utf-8"), is_python=path.suffix == ".py")
        for path in _files()
    }
    return {path: finds for path, finds in sorted(found.items()) if finds}


def test_no_file_has_more_of_the_words_than_allowed() -> None:
    """A word that names no actor, or is a false friend, is not written again."""
    wrong = [
        f"{path}, {one}" for path, finds in _all_finds().items() if len(finds) > _ALLOWED.get(path, 0) for one in finds
    ]
    assert not wrong, "more than test_language.py allows:\n" + "\n".join(wrong)


def test_no_file_is_allowed_more_than_it_has() -> None:
    """What was mended stays so: the allowed count goes down with the words."""
    counts = {path: len(_all_finds().get(path, [])) for path in _ALLOWED}
    stale = [
        f'"{path}": {counts[path]},' if counts[path] else f'"{path}": take the line out'
        for path, allowed in _ALLOWED.items()
        if counts[path] < allowed
    ]
    assert not stale, "put into _ALLOWED of test_language.py:\n" + "\n".join(stale)


def test_words_are_found_where_people_read_them() -> None:
    """Comments, docstrings, messages and phrases over two lines or two strings count; names do not."""
    text = (
        '"""First, nobody."""\n'
        "x = 'nobody'  # told by somebody\n"
        "#: A size: some\n"
        "#: hundred bytes.\n"
        "y = 0\n"
        '"""Of y: read\n\nanew."""\n'
        'raise Lost(f"{x} is "\n'
        '           f"told")\n'
        "anew = 1\n"
    )
    found = [(1, "nobody"), (2, "nobody"), (2, "somebody"), (3, "some hundred"), (8, "anew"), (9, "is told")]
    assert _finds(text, is_python=True) == found
    assert _finds("It is\ntold.\n", is_python=False) == [(1, "is told")]

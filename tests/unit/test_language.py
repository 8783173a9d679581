"""Words and constructions that no native writer uses here: mended ones do not come back.

`python -m tests.unit.test_language` lowers the allowed numbers of this file to the present ones.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.fixtures.documents import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
#: Between two words: a phrase may continue in the next line of a comment, or in the next string.
_GAP = r"(?:[\s#:]|f?\")+"
#: Constructions, each with its pattern, and what to write instead. A question is no clause as a subject.
_CONSTRUCTIONS = {
    "clause": (
        r"\b(?:What|Whether|Who|How many|How much|Which)\s(?![^.?!|]*\?)",
        "a noun as the subject or title, as in 'Number of', 'Return whether'",
    ),
    "tell": (r"(?i:\btells?\b)", "return whether, report, show"),
    "there": (
        rf"(?i:\b(?:is|are|was|were){_GAP}(?:there|here)\b(?!{_GAP}(?:is|are)\b))",
        "exists, is present, or the noun that is meant",
    ),
    "that_of": (rf"(?i:\b(?:that|those){_GAP}of\b)", "the noun again"),
    "too": (rf"(?i:,{_GAP}too\s*(?:[.;:)]|$))", "also, before the verb"),
}
#: Number of the words that a file may have. It only goes down.
_ALLOWED_WORDS: dict[str, int] = {
    "src/parapply/demo/binaries.py": 1,  # the name of an account
    "src/parapply/wire/copy.py": 4,
    "src/parapply/wire/rows.py": 1,
    "tests/packaging/image.py": 1,  # the name of a system's user, as in the next two
    "tests/packaging/test_kubernetes.py": 2,
    "tests/unit/test_containers.py": 1,
}
#: Number of the constructions that a file may have, all five together. It only goes down.
_ALLOWED_CONSTRUCTIONS: dict[str, int] = {
    "tests/differential/cases.py": 1,  # the name of a parameter, as in the next three
    "tests/faults/campaign.py": 1,
    "tests/migration/run.py": 1,
    "tests/operators/search.py": 1,
}
#: The two tables by name: words or constructions, and the allowed numbers.
_TABLES = {"words": (set(_WORDS), _ALLOWED_WORDS), "constructions": (set(_CONSTRUCTIONS), _ALLOWED_CONSTRUCTIONS)}
_ALLOWED_LINE = re.compile(r'(?P<head> *"(?P<path>[^"]+)": )(?P<number>\d+)(?P<rest>,[^\n]*\n|)')
#: Suffixes below `config/`: what people read there, not its secrets.
_CONFIGURATION = {".toml", ".service", ".env", ".sql", ".sh", ".yml"}
_PATTERN = re.compile(
    "|".join(
        [rf"(?i:\b(?:{'|'.join(word.replace(' ', _GAP) for word in _WORDS)})\b)"]
        + [f"(?P<{name}>{pattern})" for name, (pattern, _) in _CONSTRUCTIONS.items()]
    ),
    re.MULTILINE,
)


class _Find(NamedTuple):
    line: int
    name: str  # the word, or the name of the construction
    text: str

    def __str__(self) -> str:
        better = _CONSTRUCTIONS[self.name][1] if self.name in _CONSTRUCTIONS else _WORDS[self.name]
        return f"line {self.line}: {self.text!r}: better: {better}"


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
    """Return words and constructions in comments and strings of Python, or anywhere in another text."""
    if not _PATTERN.search(text):
        return []  # such files need no parser
    parts = [*_comments(text), *_strings(text)] if is_python else [(1, text)]
    finds = []
    for first, part in parts:
        for found in _PATTERN.finditer(part):
            words = re.sub(_GAP, " ", found[0]).strip()
            line = first + part.count("\n", 0, found.start())
            finds.append(_Find(line, found.lastgroup or words.lower(), words))
    return sorted(finds)


def _files() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield from (ROOT / "docs").rglob("*.md")
    yield from (path for path in (ROOT / "config").rglob("*") if path.suffix in _CONFIGURATION)
    yield from (path for path in (ROOT / "src" / "parapply").rglob("*") if path.suffix in (".py", ".sql"))
    for folder in ("bench", "tests"):
        yield from (ROOT / folder).rglob("*.md")
        yield from (path for path in (ROOT / folder).rglob("*.py") if path != Path(__file__))  # it names the words


@cache
def _all_finds() -> dict[str, list[_Find]]:
    """Return the finds of each file that has some, by its path in the repository."""
    found = {
        path.relative_to(ROOT).as_posix(): _finds(path.read_text(encoding="utf-8"), is_python=path.suffix == ".py")
        for path in _files()
    }
    return {path: finds for path, finds in sorted(found.items()) if finds}


def _lowered(source: str, finds: Mapping[str, Sequence[_Find]]) -> str:
    """Return the source of this file with the present numbers in the place of allowed ones that are higher."""
    for table, (names, _) in _TABLES.items():
        begin = source.index(f"_ALLOWED_{table.upper()}: dict[str, int] = {{")
        end = source.index("}\n", begin)

        def lower(line: re.Match[str], names: set[str] = names) -> str:
            number = min(int(line["number"]), sum(find.name in names for find in finds.get(line["path"], ())))
            return f"{line['head']}{number}{line['rest']}" if number else ""

        source = source[:begin] + _ALLOWED_LINE.sub(lower, source[begin:end]) + source[end:]
    return source


@pytest.mark.slow
@pytest.mark.parametrize("table", _TABLES)
def test_no_file_has_more_of_the_words_than_allowed(table: str) -> None:
    """A sentence has a noun as its subject and names its actor; words and constructions against that only go down."""
    names, allowed = _TABLES[table]
    wrong = [
        f"{path}, {one}"
        for path, finds in _all_finds().items()
        if len(counted := [find for find in finds if find.name in names]) > allowed.get(path, 0)
        for one in counted
    ]
    assert not wrong, "more than test_language.py allows:\n" + "\n".join(wrong)


@pytest.mark.slow
def test_no_file_is_allowed_more_than_it_has() -> None:
    """Mended text stays mended: the allowed numbers go down with the finds."""
    source = Path(__file__).read_text(encoding="utf-8")
    assert _lowered(source, _all_finds()) == source, "run `python -m tests.unit.test_language`"


def test_an_allowed_number_only_goes_down() -> None:
    """The present number takes its place if it is lower, a line without finds goes, and a comment stays."""
    source = (
        '_ALLOWED_WORDS: dict[str, int] = {\n    "a.py": 3,  # a name\n    "b.py": 1,\n    "c.py": 1,\n}\n'
        '_ALLOWED_CONSTRUCTIONS: dict[str, int] = {"a.py": 1}\n'
    )
    finds = {"a.py": [_Find(n, "nobody", "") for n in range(2)], "c.py": [_Find(n, "anew", "") for n in range(9)]}
    assert _lowered(source, finds) == (
        '_ALLOWED_WORDS: dict[str, int] = {\n    "a.py": 2,  # a name\n    "c.py": 1,\n}\n'
        "_ALLOWED_CONSTRUCTIONS: dict[str, int] = {}\n"
    )


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
    assert [(find.line, find.name) for find in _finds(text, is_python=True)] == found
    assert [str(find) for find in _finds("It is\ntold.\n", is_python=False)] == [
        f"line 1: 'is told': better: {_WORDS['is told']}"
    ]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("What is left is dropped.", ["clause"]),
        ("# It ends.\n#: Whether it did.", ["clause"]),
        ("| How many rows | 3 |", ["clause"]),
        ("What is left? Nothing. Note which rows differ, and what is left.", []),
        ("The log tells it. Tell the operator.", ["tell", "tell"]),
        ("The row is\n#: there. Those are here, and were\nnot there.", ["there", "there"]),
        ("It is there are two.", []),
        ("The name is that\nof the slot, or those of both.", ["that_of", "that_of"]),
        ("It is kept, too. (It is read, too) and kept, too\n", ["too", "too", "too"]),
        ("It is kept, too, and read, too late.", []),
    ],
)
def test_constructions_are_found(text: str, names: list[str]) -> None:
    """Each construction is found at the begin or within a sentence, also over two lines; a question is none."""
    assert [find.name for find in _finds(text, is_python=False)] == names


if __name__ == "__main__":
    here = Path(__file__)
    here.write_text(_lowered(here.read_text(encoding="utf-8"), _all_finds()), encoding="utf-8")

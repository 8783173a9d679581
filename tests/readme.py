"""Writes `tests/README.md`: where the tests of each rule are. Run `python -m tests.readme` after a rule got a test.

A rule is a number of docs/TRAPS.md: a trap (`T-n`) or a fault (`Fn`). A file tests it if it names it, in a docstring or
in the name of a test (`test_tn_...`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
README: Final = ROOT / "tests" / "README.md"
_TRAPS: Final = ROOT / "docs" / "TRAPS.md"
_TITLE: Final = re.compile(
    r"^(?:\*\*(?P<trap>T-\d+) (?P<title>[^*]+?)\.?\*\*|\| (?P<fault>F\d+) \| (?P<what>[^|]+?) \|)", re.MULTILINE
)
_NAMED: Final = re.compile(r"\b(T-\d+|F\d+)\b|def test_([tf])(\d+)_(?:([tf]?)(\d+)_)?")
_HEAD: Final = """\
# Tests

| folder | what is real there |
|---|---|
| `unit` | no server. The tests of `src/parapply/wire/rows.py` are `unit/wire/test_rows.py` and `test_rows_*.py` |
| `integration` | one edge of the program and a server |
| `system` | whole daemons and commands, as processes, between two servers |
| `analysis` | the report, on Spark |
| `differential`, `faults` | generators of random cases and faults, and the mutants that they must find |
| `simulate` | no server: the engine between models of both, played through by seeds |
| `migration` | a whole migration under load, with kills, there and back |
| `packaging` | what is given away: archives, packages, manifests |
| `fixtures` | servers, databases, daemons, proxies, and models that tests compare with |

`make test` runs what has its turn, `make test-unit` quick ones, no server, `pytest tests/system/test_kill.py` one file.
Servers keep their files in memory where there is room for them, and are copies of one, so that initdb runs once for a
version. A target has the state schema already, unless its test is marked `bare_target`. Tests that a machine cannot run
are left out, and the last lines say so.

The seed that a run prints chooses what has its turn: one of the variants of a test that are marked `in_turn`, and of
the files in `system`, `integration` and `analysis` those marked `each_session` and one in three of the others. A run
that names files runs them. `--every-variant` runs all, and the tests marked `long`.

## Where the tests of a rule are

The numbers come from [TRAPS.md](../docs/TRAPS.md). `python -m tests.readme` writes this table.

| rule | what goes wrong | tests |
|---|---|---|
"""


def titles() -> dict[str, str]:
    """Return the title of each rule, by its number, in the order of docs/TRAPS.md."""
    found = _TITLE.finditer(_TRAPS.read_text())
    return {one["trap"] or one["fault"]: _short(one["title"] or one["what"]) for one in found}


def named_in(path: Path) -> set[str]:
    """Return the numbers of the rules that a file of tests names."""
    found = set()
    for number, kind, first, kind_too, second in _NAMED.findall(path.read_text()):
        found.add(number or _number(kind, first))
        if second:
            found.add(_number(kind_too or kind, second))
    return found


def table() -> dict[str, list[str]]:
    """Return the files that name each rule, as paths below `tests`, by its number."""
    files: dict[str, list[str]] = {number: [] for number in titles()}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for number in named_in(path) & files.keys():
            files[number].append(path.relative_to(ROOT / "tests").as_posix())
    return files


def document() -> str:
    """Return the text of `tests/README.md`."""
    names = titles()
    lines = []
    for number, files in table().items():
        links = [f"[{file.removesuffix('.py')}]({file})" for file in files]
        lines.append(f"| {number} | {names[number]} | {', '.join(links) or 'none'} |\n")
    return _HEAD + "".join(lines)


def _short(title: str) -> str:
    """Return the beginning of a title, without the marks of its source."""
    words = re.sub(r"\s*\(\*.*?\*\)|[`*]", "", title)
    return words if len(words) <= 90 else f"{words[:87].rsplit(' ', 1)[0]} ..."


def _number(kind: str, digits: str) -> str:
    return f"T-{int(digits)}" if kind == "t" else f"F{int(digits)}"


if __name__ == "__main__":
    README.write_text(document())

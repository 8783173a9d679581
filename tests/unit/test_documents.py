"""Names in the documents exist: commands, options, targets, settings, metrics, events, exit codes, folders, links."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from xml.etree import ElementTree as ET

import click
import msgspec
import pytest

from docs.site.reference import reference
from parapply import config_fleet, errors
from parapply.cli.main import cli
from parapply.config import Config
from parapply.metrics.table import METRICS, PROCESS_METRICS
from tests.fixtures.documents import LANGUAGES, ROOT, Block, blocks, code_spans, pages, prose

_SOURCES = ROOT / "src" / "parapply"
_REASON_LENGTH = 15
_README_WORDS = 900
#: Files beside documents that name some.
_TEXTS = {".py", ".pxd", ".sql", ".toml", ".yml", ".yaml", ".service", ".html"}
_COMMAND_WORDS = ("parapply", "psql", "make", "pip", "docker", "systemctl", "python", "curl", "apt", "$")
#: A word that begins with a letter and is no command is prose: a span with a message, a unit's name.
_COMMAND = re.compile(r"(?:^|(?<=[|&;(]) ?|(?<=/bin/)|(?<= -- ))parapply (?P<words>[a-z][a-z-]*\b[^`|;&#)\n]*)")
_MAKE = re.compile(r"(?:^|\s)make (?P<target>[a-z][a-z-]*)\b(?! sure)")
_SETTING = re.compile(
    r"(?P<section>source|target|apply|conflict|applylog|metrics|sequences|mapping|log)\.(?!py$|pyx$)(?P<key>[a-z_]+)"
)
_VARIABLE = re.compile(r"\bPARAPPLY_(?P<section>[A-Z]+)__(?P<key>[A-Z_]+?)(?:_FILE)?\b")
_LINK = re.compile(r"\]\((?P<target>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")
#: Names of the same form that are no metrics: roles, programs and databases of the examples.
_NO_METRICS = {"parapply_source", "parapply_target", "parapply_template", "parapply_report"}


@pytest.mark.parametrize("block", blocks(), ids=str)
def test_every_block_is_run_or_says_why_not(block: Block) -> None:
    """A block is run, or read by the loader, or is no command; all others name a reason."""
    assert block.language in LANGUAGES, f"{block}: name one of {LANGUAGES} behind the fence"
    if block.language == "text":
        first = [line.split()[0] for line in block.text.splitlines() if line.strip()]
        assert block.reason or not set(first) & set(_COMMAND_WORDS), f"{block}: a command: sh"
    elif block.language != "toml":
        assert block.is_run or len(block.reason) >= _REASON_LENGTH, (
            f"{block}: <!-- run ... --> or <!-- not run: why -->"
        )
        if block.is_run:
            assert block.how["side"] or block.language != "sql", f"{block}: on which side?"


@pytest.mark.parametrize("block", [one for one in blocks() if one.language == "toml"], ids=str)
def test_every_configuration_is_taken(block: Block, tmp_path: Path) -> None:
    """A configuration that a document shows is one that the loader takes."""
    path = tmp_path / "app.toml"
    path.write_text(block.text, encoding="utf-8")
    config_fleet.load(path, (), {}, {}, required=())


def _mentions() -> list[tuple[str, str]]:
    """Return page and text of everything that may hold a command: spans, and lines of shell blocks."""
    lines = [(str(one), line) for one in blocks() if one.language == "sh" for line in one.text.splitlines()]
    return [*code_spans(), *lines]


def test_commands_and_options_exist() -> None:
    """Each `parapply COMMAND --option` of a document is one that the program has."""
    unknown, seen = [], set()
    for page, text in _mentions():
        for found in _COMMAND.finditer(text):
            words = found["words"].split(" -- ")[0].split()
            command = _command(words)
            if command is None:
                unknown.append(f"{page}: parapply {words[0]}")
                continue
            seen.add(words[0])
            have = {one for option in command.params for one in (*option.opts, *option.secondary_opts)} | {"--help"}
            unknown += [
                f"{page}: {found['words']}: {one}" for one in words if one[:2] == "--" and one.split("=")[0] not in have
            ]
    assert unknown == []
    assert seen >= {"init", "run", "status", "skip", "drop"}


def _command(words: list[str]) -> click.Command | None:
    found: click.Command = cli
    for word in words:
        if not isinstance(found, click.Group):
            break
        inner = found.get_command(click.Context(found), word)
        if inner is None:
            return None if found is cli else found
        found = inner
    return found


def test_make_targets_exist() -> None:
    """Each `make X` of a document is a target."""
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert phony is not None
    named = {found["target"] for _, text in _mentions() for found in _MAKE.finditer(text)}
    assert named - set(phony[1].split()) == set()


def test_settings_exist() -> None:
    """Each `section.key`, and each variable PARAPPLY_SECTION__KEY, is a key of the configuration."""
    have = {
        section.name: {key.name for key in msgspec.structs.fields(section.type)}
        for section in msgspec.structs.fields(Config)
    }
    named = {
        (page, found["section"], found["key"])
        for page, span in code_spans()
        if (found := _SETTING.fullmatch(span.split(" = ")[0]))
    }
    named |= {
        (page, found["section"].lower(), found["key"].lower())
        for page, text in pages().items()
        for found in _VARIABLE.finditer(text)
        if found["section"] != "SECTION"
    }
    assert sorted(one for one in named if one[2] not in have.get(one[1], ())) == []
    assert len(named) > 30


def test_metrics_exist() -> None:
    """Each series that a document names is one of the table."""
    have = {metric.name for metric in (*METRICS, *PROCESS_METRICS)} | _NO_METRICS
    named = {
        (page, name)
        for page, text in pages().items()
        for name in re.findall(r"(?<![\w/.-])parapply_[a-z][a-z_]+[a-z](?![\w.(])", text)
        if page != "docs/TRAPS.md"
    }
    assert sorted(one for one in named if re.sub(r"_(bucket|sum|count)$", "", one[1]) not in have) == []
    assert len(named) > 20


@cache
def _texts_of_code() -> str:
    """Return every text of the program, in the order of the files; parts of one f-string are lines of their own."""
    constants = [
        node.value
        for path in sorted(_SOURCES.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return "\n".join(constants)


def test_events_exist() -> None:
    """Each "event `name`" of a document is one that the daemon logs."""
    named = {name for page in pages() for name in re.findall(r"[Ee]vents? `([a-z_]+)`", prose(page))}
    have = set(_texts_of_code().splitlines())
    assert sorted(named - have) == []
    assert len(named) > 5


def test_state_tables_exist() -> None:
    """Each `parapply.NAME` of a document is a table, view or function of the state schema, or a module.

    Or what `init --ddl` makes on the publisher, or the setting that its event triggers read.
    """
    have = set(re.findall(r"\{s\}\.(\w+)", _texts_of_code()))
    have |= set(re.findall(r"(?:TABLE IF NOT EXISTS|REPLACE FUNCTION|SET) parapply\.(\w+)", _texts_of_code()))
    named = {
        (page, name)
        for page, text in pages().items()
        for name in re.findall(r"(?<![\w/@.-])parapply\.([a-z_]+)\b(?!\.json)", text)
        if page != "docs/TRAPS.md"
    }
    assert sorted(one for one in named if one[1] not in have and not _is_there(one[1])) == []
    assert len(named) > 10


def test_the_picture_shows_a_run_that_was_equal() -> None:
    """The picture of the demonstration can be drawn, and its run ended as it must."""
    texts = [element.text or "" for element in ET.parse(ROOT / "docs" / "pictures" / "demo.svg").iter()]
    assert "Every\u00a0comparison\u00a0was\u00a0equal." in texts
    assert not any("DIFFERS" in text for text in texts)


def test_figures_of_the_readme_are_measured() -> None:
    """Each row of the README's table has the medians, and the ratio, of the file that it names."""
    rows = re.findall(r"\| (\d+\.\d+) \| (\d+\.\d+) \| \D*?(\d+\.\d+)[^|]*\| \[file\]\(([^)]+)\)", pages()["README.md"])
    assert len(rows) >= 3
    for *told, name in rows:
        figures = json.loads((ROOT / name).read_text(encoding="utf-8"))["figures"]
        # Behind the name of a system is what was done to the target, if anything.
        by_system = {system.split(",")[0]: one for system, one in figures.items()}
        built_in, ours = by_system["built-in"], by_system["parapply preserve 4"]
        measured = [built_in["median_s"], ours["median_s"], ours["times_built_in"]]
        assert told == [f"{one:.2f}" for one in measured], name


def test_ratios_of_the_benchmark_are_measured() -> None:
    """Each linked ratio of the page about the benchmark is what parapply has in the file behind it."""
    linked = re.findall(r"\[(\d+\.(\d+))\]\(\.\./(bench/results/catch-up[^)]+)\)", pages()["docs/BENCHMARK.md"])
    assert len(linked) > 20
    for told, digits, name in linked:
        figures = json.loads((ROOT / name).read_text(encoding="utf-8"))["figures"]
        (measured,) = [one["times_built_in"] for runner, one in figures.items() if runner.startswith("parapply")]
        assert told == f"{measured:.{len(digits)}f}", name


def test_every_result_is_cited_and_every_cited_result_exists() -> None:
    """`bench/results` keeps what a document names, file by file; a figure without its file cannot be looked up."""
    text = "\n".join(pages().values()) + (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    # `make bench` leaves files there that are no part of the tree; where there is no git, none is listed.
    listed = subprocess.run(["git", "ls-files", "bench/results"], cwd=ROOT, capture_output=True, text=True, check=False)
    have = {Path(name).name for name in listed.stdout.splitlines()}
    patterns = (r"bench/results/([^\s)`,;]+)", r"`([a-z-]+-\d{8}T\d{6}Z[\w-]*\.\w+)`")
    named = {name for pattern in patterns for name in re.findall(pattern, text)}
    assert sorted(have - named) == []
    assert sorted(name for name in named if not (ROOT / "bench" / "results" / name).exists()) == []


def test_exit_codes_are_those_of_the_errors() -> None:
    """Table of the page about troubles, README and --help have the same codes, and every error's is among them."""
    table = re.search(r"\| code \|.*?\n\n", pages()["docs/TROUBLESHOOTING.md"], re.DOTALL)
    assert table is not None
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", table[0], re.MULTILINE)}
    raised = {
        one.exit_code
        for one in vars(errors).values()
        if isinstance(one, type) and issubclass(one, errors.ParapplyError)
    }
    assert raised <= told
    for text in (pages()["README.md"], cli.epilog or ""):
        (line,) = re.findall(r"Exit codes: (.*?)\.(?:\s|$)", text, re.DOTALL)
        assert {int(code) for code in re.findall(r"\b\d+\b", line)} == told


@pytest.mark.slow
def test_links_lead_somewhere() -> None:
    """Each relative link leads to a file of the repository, or to a page made from the code, and to a heading there."""
    broken = []
    made = {ROOT / "docs" / "reference" / name: text for name, text in reference().items()}
    for page in pages():
        for found in _LINK.finditer(prose(page)):
            target, anchor = found["target"], found["anchor"]
            if re.match(r"[a-z]+:", target):
                continue
            path = Path(os.path.normpath((ROOT / page).parent / target)) if target else ROOT / page
            text = made.get(path) or (path.read_text(encoding="utf-8") if anchor and path.exists() else "")
            if not (path.exists() or path in made) or (anchor and anchor not in _anchors(text)):
                broken.append(f"{page}: {found[0]}")
    assert broken == []


def test_pages_that_the_program_names_exist() -> None:
    """Each document that a hint, a comment or a file of the configuration names is one of the repository."""
    files = [path for folder in ("src", "config") for path in (ROOT / folder).rglob("*") if path.suffix in _TEXTS]
    named = {
        (path.relative_to(ROOT), name)
        for path in files
        for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8"))
    }
    assert sorted(one for one in named if one[1] not in pages()) == []
    assert len(named) > 10


def test_a_page_begins_with_its_purpose() -> None:
    """A page about a task, and each tutorial, says in its first sentence what it is for."""
    tasks = [page for page in pages() if page.startswith(("docs/how-to/", "docs/tutorials/"))]
    assert [one for one in tasks if not re.match(r"# .+\n\nThis (page|tutorial) ", pages()[one])] == []
    assert len(tasks) > 20


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_names_every_document_and_is_short() -> None:
    """Each document is one link away from the first page, which is read in minutes, or from a map."""
    text = pages()["README.md"]
    for place, folder in (("ARCHITECTURE", "design"), ("OPERATIONS", "how-to")):
        text += pages()[f"docs/{place}.md"].replace(f"]({folder}/", f"](docs/{folder}/")
    assert [page for page in pages() if page != "README.md" and f"({page})" not in text] == []
    assert len(pages()["README.md"].split()) <= _README_WORDS


def test_the_architecture_is_that_of_the_code() -> None:
    """Every module that the page names exists, and every folder of the program has its row."""
    text = pages()["docs/ARCHITECTURE.md"]
    spans = re.findall(r"`([a-z_]+(?:/[a-z_]+)+(?:\.py|\.pxd)?|[a-z_]+\.(?:py|pxd))`", text)
    gone = [one for one in spans if not _is_there(one.removeprefix("parapply/"))]
    assert gone == []
    packages = sorted(str(path.parent.relative_to(_SOURCES)) for path in _SOURCES.glob("*/**/__init__.py"))
    assert [one for one in packages if f"| `{one}/` |" not in text] == []


def _is_there(name: str) -> bool:
    return any(
        place.exists()
        for base in (_SOURCES, ROOT, _SOURCES / "runtime")
        for place in (base / name, base / f"{name}.py")
    )


def _messages() -> list[tuple[str, str]]:
    """Return page and first cell of each row of a table of messages, and the spans in it."""
    found = []
    page = "docs/TROUBLESHOOTING.md"
    for table in re.findall(r"^\| message \|.*?\n\n", pages()[page], re.DOTALL | re.MULTILINE):
        for row in table.splitlines()[2:]:
            found += [(page, span) for span in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    return found


#: PostgreSQL's own words, and what the program puts together from parts that do not stand in one place.
_OF_THE_SERVER = ("permission denied to set parameter", "read only", "no pg_hba.conf entry")


def test_messages_are_those_of_the_program() -> None:
    """The program says each message that a table of messages quotes, word for word between the dots."""
    code, unknown = _texts_of_code(), []
    for page, message in _messages():
        parts = [part.strip(" :,.'\"") for part in re.split(r"\.\.\.|\b[XY]\b", message)]
        if not message.startswith(_OF_THE_SERVER):
            unknown += [f"{page}: {message}: {part}" for part in parts if part not in code]
    assert unknown == []
    assert len(_messages()) >= 30

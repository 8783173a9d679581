"""The pages of the reference are complete: every setting, command, check, error, event and metric has its row there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import click
import msgspec
import pytest

import parapply
from docs.site import refusals
from docs.site.log_events import EVENTS
from docs.site.reference import cell, explained, reference
from parapply import errors
from parapply.check.kinds import Code, Severity
from parapply.check.providers import RULES
from parapply.cli.main import cli
from parapply.config import SECTIONS
from parapply.metrics.table import METRICS, PROCESS_METRICS

_SOURCES = Path(parapply.__file__).parent
_PLAIN = 12

# The pages are made from every source file.
pytestmark = pytest.mark.slow
#: Heading of the rules behind the checks.
_RULES = "## Rules of providers"


def _rows(page: str) -> list[list[str]]:
    """Return the cells of each row of a page's tables, without the heads."""
    rows = [re.split(r" \| ", line[2:].removesuffix(" |")) for line in page.splitlines() if line.startswith("| ")]
    return [row for row in rows if row[0] not in {"key", "code", "message", "event", "name", "provider"}]


def _names(page: str) -> list[str]:
    return [row[0].strip("`") for row in _rows(page)]


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_every_setting_has_its_row(name: str) -> None:
    """A section's table has each key, with its comment in the sample file and the values that it takes."""
    page = reference()["settings.md"]
    section = re.search(rf"^## {name}$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    inner = {key.partition(".")[2] for key in explained() if key.startswith(f"{name}.")}
    keys = [field.name for field in msgspec.structs.fields(SECTIONS[name]) if field.name not in inner]
    rows = _rows(section[1]) if section else []
    assert [row[0].strip("`") for row in rows] == keys
    assert all(len(row) == 4 and all(row) for row in rows)
    assert all(f"## {name}.{one}" in page for one in inner)


def _commands(group: click.Group, path: str) -> list[str]:
    found = []
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        found.append(f"{path} {name}")
        if isinstance(command, click.Group):
            found += _commands(command, f"{path} {name}")
    return found


def test_every_command_has_its_help() -> None:
    """Each command has its heading, below which its usage is shown."""
    page = reference()["commands.md"]
    for command in _commands(cli, "parapply"):
        assert f"## {command}\n\n```text\nUsage: {command} [OPTIONS]" in page, command


def test_every_check_has_its_row() -> None:
    """One row for each code, worst first, with the words of the program, and no other row."""
    expected = []
    for severity in Severity:
        for code in Code:
            if code.value.severity is severity:
                word = severity.value + (", arguable" if code.value.is_arguable else "")
                expected.append(
                    [f"`{code.text}`", word, code.value.end.value, cell(code.value.why), cell(code.value.advice)]
                )
    assert _rows(reference()["checks.md"].partition(_RULES)[0]) == expected


def test_every_rule_of_a_provider_has_its_row() -> None:
    """One row for each, with the page that states it."""
    assert _rows(reference()["checks.md"].partition(_RULES)[2]) == [
        [rule.provider.value, f"[{rule.name}]({rule.page})", ", ".join(end.value for end in rule.ends),
         cell(rule.says), cell(rule.do)]
        for rule in RULES
    ]  # fmt: skip


def test_every_event_has_its_row() -> None:
    """Each event is listed once, with its level."""
    rows = {row[0].strip("`"): row[1] for row in _rows(reference()["events.md"])}
    assert rows == {name: text.partition(":")[0] for name, text in EVENTS.items()}
    assert len(_rows(reference()["events.md"])) == len(EVENTS)


def test_every_metric_has_its_row() -> None:
    """Each metric is listed in the order of the table, with its help."""
    page = reference()["metrics.md"]
    assert _names(page) == [metric.name for metric in (*METRICS, *PROCESS_METRICS)]
    assert all(cell(metric.help) in page for metric in METRICS)


def test_every_class_of_errors_has_its_exit_code() -> None:
    """Each class that an operator meets has a heading with its exit code."""
    page = reference()["errors.md"]
    inner = {errors.StatementFailed}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.ParapplyError) and kind not in inner:
            assert f"## {kind.__name__}: exit {kind.exit_code}\n" in page


def test_every_hint_is_on_the_page_of_errors() -> None:
    """Each hint that the source writes as one text at an error stands on the page, word for word."""
    hints = {
        " ".join(str(keyword.value.value).split())
        for path in _SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        and isinstance(kind := vars(errors).get(node.func.id), type) and kind is not errors.StatementFailed
        for keyword in node.keywords
        if keyword.arg == "hint" and isinstance(keyword.value, ast.Constant) and keyword.value.value
    }  # fmt: skip
    page = reference()["errors.md"]
    assert sorted(hint for hint in hints if cell(hint) not in page) == []
    assert len(hints) > 100


def test_a_text_is_followed_through_names() -> None:
    """A hint in a constant, in a choice or in a table of the module is found; what is known later stands as dots."""
    found = {one for each in refusals.by_class().values() for one in each}
    assert all(one.message and "<" not in one.message for one in found)
    lost = [one for one in found if one.message.startswith("slot ... was invalidated")]
    assert [one.hint.partition(" makes")[0] for one in lost] == ["`parapply heal`"]
    assert sum(one.message == refusals.OPEN for one in found) < _PLAIN


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a | b", "a &#124; b"),
        ("`a | b` *", r"`a \| b` \*"),
        ("--schema table_name <x>", r"--schema table\_name &lt;x>"),
        ("see docs/CONFLICTS.md", "see [CONFLICTS.md](../CONFLICTS.md)"),
    ],
)
def test_a_text_of_the_code_is_a_cell(text: str, written: str) -> None:
    """Nothing in it ends the cell or is taken for markup, and a page that it names is a link."""
    assert cell(text) == written

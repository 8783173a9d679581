"""The pages of the reference, made from the code: each fact is written once, where the program has it."""

from __future__ import annotations

import re
import tomllib
import types
import typing
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args, get_origin

import click
import msgspec

from docs.site import refusals
from docs.site.log_events import EVENTS
from parapply.check.kinds import Code, Severity
from parapply.check.providers import RULES
from parapply.cli.main import cli
from parapply.config import SECTIONS, TableConfig, TableConflictConfig
from parapply.metrics import table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_SAMPLE: Final = Path(__file__).parents[2] / "config" / "parapply.toml"
#: Types of the settings, as they are written.
_WRITTEN: Final = {"Secret": "a connection string", "Address": "an address", "PasswordCommand": "a command"}
_LEVELS: Final = ("error", "warning", "info", "debug")
#: A page of the documents that a text of the code names.
_PAGE: Final = re.compile(r"docs/([\w/-]+\.md)")


@cache
def reference() -> dict[str, str]:
    """Return the text of each page, by the name of its file."""
    return {
        "settings.md": _settings(),
        "commands.md": _commands(),
        "checks.md": _checks(),
        "errors.md": _errors(),
        "events.md": _events(),
        "metrics.md": _metrics(),
    }


def _page(title: str, purpose: str, lines: Iterable[str]) -> str:
    return "\n".join([f"# {title}", "", purpose, "", *lines]) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield from ("", "| " + " | ".join(head) + " |", "|" + "---|" * len(head))
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def cell(text: str) -> str:
    """Return a text of the code as the cell of a table; what stands between backticks stays as it is."""
    parts = text.replace("\n", " ").replace("|", "&#124;").split("`")
    if len(parts) % 2 == 0:  # one of them begins nothing
        return _escaped(text.replace("`", "'"))
    return "`".join(part.replace("&#124;", r"\|") if n % 2 else _escaped(part) for n, part in enumerate(parts))


def _escaped(text: str) -> str:
    for sign in "*_[]":
        text = text.replace(sign, "\\" + sign)
    return _PAGE.sub(r"[\1](../\1)", text.replace("<", "&lt;"))


# Settings


def _settings() -> str:
    return _page(
        "Settings",
        "Every key of the configuration, from `config/parapply.toml` and `src/parapply/config.py`. A key is overridden"
        " by its variable (`PARAPPLY_SOURCE__SLOT`, or `PARAPPLY_SOURCE__SLOT_FILE` with the name of a file that holds"
        " the value), that by `--set source.slot=app`, and that by an option of the command. Unknown keys are errors.",
        (line for name in explained() for line in _section(name)),
    )


def explained() -> dict[str, dict[str, list[str]]]:
    """Return the comment of each key of the sample file, by section; of keys that share one the same."""
    sections: dict[str, dict[str, list[str]]] = {}
    comment: list[str] = []
    keys: dict[str, list[str]] = {}
    is_key_before = False
    for line in _SAMPLE.read_text(encoding="utf-8").splitlines():
        if head := re.fullmatch(r"\[([\w.]+)\]", line):
            keys = sections.setdefault(head[1], {})
            # What precedes a section of tables is about it.
            if "." in head[1]:
                keys[""] = comment
            comment, is_key_before = [], False
        elif line.startswith("#"):
            comment = [line[1:]] if is_key_before else [*comment, line[1:]]
            is_key_before = False
        elif key := re.match(r"(\w+) = ", line):
            keys[key[1]] = comment
            is_key_before = True
        elif not line:
            comment, is_key_before = [], False
    return sections


def _section(name: str) -> Iterator[str]:
    kind, defaults = SECTIONS.get(name), tomllib.loads(_SAMPLE.read_text(encoding="utf-8"))
    comments = explained()[name]
    yield from (f"## {name}", "")
    if kind is None:  # of single tables
        lines = comments[""]
        yield " ".join(_escaped(line.strip()) for line in lines if not line.startswith("  "))
        if example := [line.strip() for line in lines if line.startswith("  ")]:
            yield from ("", "```toml", *example, "```", "")
        inner = {"apply.tables": TableConfig, "conflict.tables": TableConflictConfig}.get(name)
        if inner is not None:
            hints = typing.get_type_hints(inner, include_extras=True)
            yield from _table(("key", "takes"), ((f"`{key}`", _rule(hint)) for key, hint in hints.items()))
        return
    hints = typing.get_type_hints(kind, include_extras=True)
    yield from _table(
        ("key", "default", "takes", "meaning"),
        (
            (f"`{key}`", cell(f"`{_toml(defaults[name][key])}`"), _rule(hints[key]), _meaning(comments[key]))
            for key in (field.name for field in msgspec.structs.fields(kind))
            if f"{name}.{key}" not in explained()
        ),
    )


def _toml(value: object) -> str:
    """Return a value as it is written; of a long list its first two."""
    if isinstance(value, list):
        return "[" + ", ".join([*map(_toml, value[:2]), *(["..."] if len(value) > 2 else [])]) + "]"
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def _meaning(lines: list[str]) -> str:
    """Return a comment as one cell: an indented line begins again, one that is indented deeply goes on with it."""
    text = ""
    for line in lines:
        depth = len(line) - len(line.lstrip())
        text += ("<br>" if 2 <= depth < 8 else " ") + cell(" ".join(line.split()))
    return text.strip()


def _rule(hint: Any) -> str:  # noqa: ANN401  a type as it is annotated
    """Return what a type takes."""
    if get_origin(hint) is Annotated:
        inner, *more = get_args(hint)
        (meta,) = (one for one in more if isinstance(one, msgspec.Meta))
        bounds = [f"from {meta.ge:,}" if meta.ge is not None else "", f"to {meta.le:,}" if meta.le is not None else ""]
        return " ".join([_rule(inner), *filter(None, bounds)])
    if get_origin(hint) is Literal:
        return ", ".join(f'`"{value}"`' for value in get_args(hint))
    if get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_rule(one) for one in get_args(hint) if one is not type(None))
    if get_origin(hint) is tuple:
        return f"a list: {_rule(get_args(hint)[0])}"
    names = {bool: "`true`, `false`", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    return names.get(hint, _WRITTEN.get(hint.__name__, ""))


# Commands


def _commands() -> str:
    context = click.Context(cli, info_name="parapply", max_content_width=100)
    return _page(
        "Commands",
        "Every command as its `--help` describes it.",
        ["```text", cli.get_help(context), "```", "", *_help_of(cli, context)],
    )


def _help_of(group: click.Group, context: click.Context) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context, max_content_width=100)
        yield from (f"## {inner.command_path}", "", "```text", command.get_help(inner), "```", "")
        if isinstance(command, click.Group):
            yield from _help_of(command, inner)


# Checks, events, metrics, errors


def _checks() -> str:
    rows = [
        (f"`{code.text}`", severity.value + (", arguable" if code.value.is_arguable else ""), code.value.end.value,
         cell(code.value.why), cell(code.value.advice))
        for severity in Severity
        for code in Code
        if code.value.severity is severity
    ]  # fmt: skip
    return _page(
        "Checks",
        "Every finding of `parapply check`, which `parapply init` and `parapply migrate` also look for. A refusal that"
        " is *arguable* may be mended after `init`, which goes on with `--despite CODE`.",
        [
            *_table(("code", "severity", "end", "why it matters", "do"), rows),
            "## Rules of providers",
            "",
            "The rules that `--provider` and `--target-provider` add, each as the provider's page states it.",
            *_table(
                ("provider", "rule", "end", "statement of the page", "do"),
                (
                    (
                        rule.provider.value,
                        f"[{rule.name}]({rule.page})",
                        ", ".join(end.value for end in rule.ends),
                        cell(rule.says),
                        cell(rule.do),
                    )
                    for rule in RULES
                ),
            ),
        ],
    )


def _events() -> str:
    rows = [(name, *text.split(": ", 1)) for name, text in EVENTS.items()]
    return _page(
        "Log events",
        "Every event of the daemon's log, a line of JSON on standard error. An error needs you, a warning passes by"
        " itself, and `log.level` leaves out what is below it.",
        _table(
            ("event", "level", "meaning"),
            ((f"`{name}`", level, cell(text)) for each in _LEVELS for name, level, text in rows if level == each),
        ),
    )


def _metrics() -> str:
    head = ("name", "kind", "labels", "help")
    own, process = ([_metric(one) for one in metrics] for metrics in (table.METRICS, table.PROCESS_METRICS))
    return _page(
        "Metrics",
        "Every series of `/metrics`; [Monitor](../how-to/monitor.md) has expressions for dashboards and alarms. Each"
        " that begins with `parapply_` also has the label `slot`.",
        [*_table(head, own), "Of the process, as every client of Prometheus names them:", *_table(head, process)],
    )


def _metric(metric: table.Metric) -> tuple[str, str, str, str]:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"`{metric.name}`", metric.kind, labels, cell(metric.help)


def _said(text: str) -> str:
    return "the server's own words" if text == refusals.OPEN else cell(text)


def _errors() -> str:
    lines = [
        line
        for kind, found in refusals.by_class().items()
        for line in (
            f"## {kind.__name__}: exit {kind.exit_code}", "", cell((kind.__doc__ or "").splitlines()[0]),
            *_table(("message", "hint"), ((_said(one.message), _said(one.hint)) for one in found)),
        )
    ]  # fmt: skip
    return _page(
        "Errors",
        "Every error of the program, with the hint that it prints. `...` stands for a name or number of yours, or for"
        " the server's own words. The daemon tries again by itself after an error of a connection that ended.",
        lines,
    )

"""A report for people and for programs.

In: a `Report`. Out: text by severity, or one JSON document. SQL is never wrapped, so that it can be copied.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parapply.check.kinds import Severity, by_code
from parapply.check.providers import Status
from parapply.plan.table import Lane
from parapply.printable import printable
from parapply.quoting import copyable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from parapply.check.kinds import Code, Finding
    from parapply.check.look import Report
    from parapply.check.providers import Ruling

#: Columns of what stands before the words of a line, and of those words at least.
_HANG: Final = 5
_NARROWEST: Final = 20
#: Words of four letters and fewer that stand before a sentence.
_LABELS: Final = ("why", "do", "rule", "seen")
_SQL_STYLE: Final = "cyan"
#: Findings of one code that a person is shown; --json has all of them.
_MOST_SHOWN: Final = 20
_STYLES: Final = {Severity.REFUSED: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold"}


def show(report: Report, *, as_json: bool) -> None:
    """Print a report on standard output."""
    if as_json:
        click.echo(json.dumps(document(report), indent=2))
        return
    console = Console(highlight=False)
    for severity in Severity:
        found = report.of(severity)
        if found:
            console.print(Text(f"{severity.value.upper()} ({len(found):,})", style=_STYLES[severity]))
            for code, group in by_code(found).items():
                for text in _section(code, group):
                    _print(console, text)
            console.print()
    for text in _rules(report):
        _print(console, text)
    if report.plans:
        console.print(_lanes(report))
    console.print(Text(f"slot {report.slot!r}: {summary(report)}"), soft_wrap=True)


def _print(console: Console, text: Text) -> None:
    """Print a line: on a terminal words go to the next one below where they began, but not of SQL, which is copied."""
    begin = len(text.plain) - len(text.plain.lstrip())
    is_words = text.style != _SQL_STYLE and console.is_terminal
    if not is_words:
        # Soft: a terminal wraps, but the line stays one line for the reader who copies it.
        console.print(text, soft_wrap=True)
        return
    hang = begin + (_HANG if text.plain[begin:].startswith(_LABELS) else 2)
    first, *others = text.wrap(console, max(_NARROWEST, console.width - hang))
    for line in [first, *[Text.assemble(" " * hang, each) for each in others]]:
        console.print(line, soft_wrap=True)


def document(report: Report) -> dict[str, Any]:
    """Return the report as JSON has it."""
    findings = [
        {
            "severity": each.code.value.severity.value, "code": each.code.text, "end": each.code.value.end.value,
            "object": each.object, "found": each.found, "why": each.code.value.why, "advice": each.code.value.advice,
            "fix": each.fix, "is_arguable": each.code.value.is_arguable,
        }
        for each in report.findings
    ]  # fmt: skip
    tables = [
        {
            "schema_name": plan.relation.schema, "table_name": plan.relation.name, "lane": plan.lane.value,
            "is_table_exclusive": plan.is_table_exclusive, "reason": plan.reason,
        }
        for plan in report.plans
    ]  # fmt: skip
    return {
        "slot_name": report.slot, "is_known": report.is_known, "exit_code": report.exit_code, "findings": findings,
        "tables": tables, "provider_rules": [_ruling(each) for each in report.rulings],
    }  # fmt: skip


def _ruling(ruling: Ruling) -> dict[str, Any]:
    rule = ruling.rule
    return {
        "provider": rule.provider.value, "end": ruling.end.value, "name": rule.name, "status": ruling.status.value,
        "seen": ruling.seen, "says": rule.says, "do": rule.do, "page": rule.page,
    }  # fmt: skip


def _section(code: Code, findings: Sequence[Finding]) -> Iterator[Text]:
    yield Text.assemble(
        "  ",
        (code.text, _STYLES[code.value.severity]),
        f"  {code.value.end.value}" + (", arguable" if code.value.is_arguable else ""),
    )
    yield Text(f"    why  {code.value.why}")
    yield Text(f"    do   {code.value.advice}")
    for each in findings[:_MOST_SHOWN]:
        yield Text(f"    - {printable(each.found)}")
        if each.fix:
            yield Text(f"      {printable(copyable(each.fix))}", style=_SQL_STYLE)
    if len(findings) > _MOST_SHOWN:
        yield Text(f"    and {len(findings) - _MOST_SHOWN:,} more, which --json lists")


def _rules(report: Report) -> Iterator[Text]:
    """Yield the rules of the providers: what is kept without the step that keeps it."""
    for ruling in report.rulings:
        rule = ruling.rule
        style = "bold yellow" if ruling.status is Status.BROKEN else "bold"
        yield Text.assemble(
            "  ", (ruling.status.value, style), f"  {rule.provider.value}, {rule.name}  {ruling.end.value}"
        )
        yield Text(f"    rule {rule.says}")
        if ruling.seen:
            yield Text(f"    seen {printable(ruling.seen)}")
        if ruling.status is not Status.KEPT:
            yield Text(f"    do   {rule.do}")
        yield Text(f"    {rule.page}", style=_SQL_STYLE)
    if report.rulings:
        yield Text()


def _lanes(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("how tables would be applied")
    table.add_column("tables", justify="right")
    counts = Counter((plan.lane, plan.is_table_exclusive) for plan in report.plans)
    for lane in Lane:
        for is_exclusive in (False, True):
            if count := counts[lane, is_exclusive]:
                one_at_a_time = ", one batch at a time" if is_exclusive and lane is not Lane.SERIAL else ""
                table.add_row(lane.value + one_at_a_time, f"{count:,}")
    return table


def summary(report: Report) -> str:
    """Return the numbers of findings in words."""
    counts = ", ".join(f"{len(report.of(severity)):,} {severity.value}" for severity in Severity)
    known = "; the slot is followed already" if report.is_known else ""
    statuses = Counter(each.status for each in report.rulings)
    rules = ", ".join(f"{statuses[status]} {status.value}" for status in Status)
    return counts + known + (f"; rules of the providers: {rules}" if report.rulings else "")

"""``python -m parapply.cli.man`` prints parapply(1), made of the texts that ``--help`` shows.

Source: man(7), groff_man(7).
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import click

from parapply import __version__
from parapply.cli.main import cli

if TYPE_CHECKING:
    from collections.abc import Iterator

_ENVIRONMENT = """\
.SH ENVIRONMENT
.TP
.B PARAPPLY_SECTION__KEY
A key of the configuration, for example \\fBPARAPPLY_SOURCE__DSN\\fR.
.TP
.B PARAPPLY_SECTION__KEY_FILE
A file that holds the value.
.TP
.B PARAPPLY_COMPILED
\\fBauto\\fR, \\fBrequire\\fR or \\fBforbid\\fR the compiled hot path.
.TP
.B _PARAPPLY_COMPLETE
With \\fBbash_source\\fR, \\fBzsh_source\\fR or \\fBfish_source\\fR, print the completion for this shell.
.SH SEE ALSO
.BR psql (1),
.BR systemctl (1)
"""


def page() -> str:
    """Return the page for every command, in the format of man(7)."""
    context = click.Context(cli, info_name="parapply", help_option_names=["-h", "--help"])
    purpose = (cli.help or "").rstrip(".")
    head = [
        f'.TH PARAPPLY 1 "" "parapply {__version__}" "User Commands"',
        ".nh",
        ".ad l",
        ".SH NAME",
        rf"parapply \- {_text(purpose[0].lower() + purpose[1:])}",
        ".SH SYNOPSIS",
        r".B parapply",
        r"[\fIOPTIONS\fR] \fICOMMAND\fR [\fIARGUMENTS\fR]",
        ".SH DESCRIPTION",
        *_prose(cli.help or ""),
        ".SH OPTIONS",
        *_options(cli, context),
        ".SH COMMANDS",
        *_commands(cli, context),
        ".SH NOTES",
        *_prose(cli.epilog or ""),
    ]
    return "\n".join(head) + "\n" + _ENVIRONMENT


def _commands(group: click.Group, context: click.Context) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context)
        usage = " ".join(command.collect_usage_pieces(inner))
        yield f'.SS "{_text(inner.command_path)} {_text(usage)}"'
        yield from _prose(command.help or "")
        yield from _options(command, inner)
        yield from _prose(command.epilog or "")
        if isinstance(command, click.Group):
            yield from _commands(command, inner)


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        # Once is enough for what every command has.
        if record is not None and (command is cli or parameter.name != "help"):
            names, purpose = record
            # A list of choices may be wider than a line.
            yield from (".TP", rf"\fB{_text(names)}\fR".replace("|", r"|\:"), _text(purpose))


def _prose(text: str) -> Iterator[str]:
    """Return the paragraphs; a backspace alone on its first line is click's mark of one that keeps its lines."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        lines = paragraph.partition("\f")[0].splitlines()
        is_kept = bool(lines) and lines[0].strip() == "\b"
        yield ".PP"
        yield from (".nf", *(_text(line) for line in lines[1:]), ".fi") if is_kept else (_text(line) for line in lines)


def _text(text: str) -> str:
    r"""Return a line whose every character is printed: a first dot or quote begins a request, and - is a hyphen."""
    line = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{line}" if line[:1] in (".", "'") else line


if __name__ == "__main__":
    click.echo(page(), nl=False)

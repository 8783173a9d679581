"""The last line of a command that fails: an error of ours, or an output that takes nothing."""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from parapply.errors import ParapplyError

#: Errors of an output that takes nothing: a full disk, a quota, a terminal that has gone.
_UNWRITTEN: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def report(error: ParapplyError) -> int:
    """Print an error of ours on standard error, and return its exit code."""
    from parapply.errors import ConfigError  # noqa: PLC0415
    from parapply.logs import is_journal, prioritized, redact_text  # noqa: PLC0415

    # The configuration's errors come all at once, a line each; every other error is one line.
    lines = str(error).splitlines() if isinstance(error, ConfigError) and not error.hint else [error.line()]
    for line in lines:
        text = f"parapply: {redact_text(line)}"
        click.echo(prioritized(text.encode(), "error") if is_journal(sys.stderr) else text, err=True)
    return error.exit_code


def is_unwritten(error: OSError) -> bool:
    """Return whether an error comes from an open output, and not from a file by its name."""
    return error.errno in _UNWRITTEN and error.filename is None


def give_up_output(error: OSError) -> int:
    """Report in a line that standard output takes nothing; the rest is dropped, or Python tries it again."""
    click.echo(f"parapply: standard output: {error.strerror}", err=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1

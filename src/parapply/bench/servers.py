"""The servers of the benchmark: which programs, which settings.

In go options; out come a stage that is not entered yet, and what it is made of.
"""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING, Final

from parapply.demo.account import process_options, server_account
from parapply.demo.binaries import PgBinaries
from parapply.demo.errors import DemoError
from parapply.demo.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from parapply.bench.options import Options
    from parapply.demo.cluster import Setting
    from parapply.demo.interrupts import Interrupts

# No runner shall meet a vacuum that the others did not, nor read from disk what fits into memory.
_SETTINGS: Final[Mapping[str, Setting]] = {"autovacuum": False, "shared_buffers": "512MB"}
# `--version` prints and ends; this is for a directory on a file system that hangs.
_VERSION_TIMEOUT_S = 10.0


def make_stage(interrupts: Interrupts, options: Options) -> Stage:
    """Return the stage for one workload.

    Raises:
        DemoError: there are no such servers on this machine.
    """
    return Stage(
        interrupts,
        name="bench",
        settings=_SETTINGS,
        source_binaries=programs_in(options.bindir_source) if options.bindir_source else None,
        target_binaries=programs_in(options.bindir_target) if options.bindir_target else None,
    )


def versions(stage: Stage) -> dict[str, str]:
    """Return the versions of both servers, for the facts of a document."""
    return {"publisher": stage.source.binaries.version_text, "subscriber": stage.target.binaries.version_text}


def programs_in(directory: Path) -> PgBinaries:
    """Return PostgreSQL's programs in a directory of the user's choice.

    Raises:
        DemoError: it has no `postgres`, or the account that runs the servers cannot run it.
    """
    path = directory.absolute()
    try:
        answer = subprocess.run(  # noqa: S603 - the user's own choice, no shell
            [str(path / "postgres"), "--version"],
            capture_output=True, text=True, check=False, cwd="/", timeout=_VERSION_TIMEOUT_S,
            **process_options(server_account()),
        ).stdout  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        answer = ""
    match = re.search(r"\(PostgreSQL\) ((\d+)\S*)", answer)
    if match is None:
        raise DemoError(
            f"{directory} has no postgres that the server's account can run.",
            hint="name a directory with initdb and postgres that every user can read",
        )
    return PgBinaries(major=int(match[2]), bin_dir=path, version_text=match[1])

"""The servers of the benchmark: which programs, which settings.

In go options; out come a stage that is not entered yet, and what it is made of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from parapply.demo.binaries import programs_of
from parapply.demo.errors import DemoError
from parapply.demo.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from bench.options import Options
    from parapply.demo.binaries import PgBinaries
    from parapply.demo.cluster import Setting
    from parapply.demo.interrupts import Interrupts

# No runner shall meet a vacuum that the others did not, nor read from disk what fits into memory.
_SETTINGS: Final[Mapping[str, Setting]] = {"autovacuum": False, "shared_buffers": "512MB"}


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
        DemoError: it has no `initdb` and `postgres` that the account which runs servers can run.
    """
    found = programs_of(directory.absolute())
    if found is None:
        raise DemoError(
            f"{directory} has no initdb and postgres that the server's account can run.",
            hint="name a directory with initdb and postgres that every user can read",
        )
    return found

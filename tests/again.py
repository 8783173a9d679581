"""The tests that failed in the last session once more, alone: `make test` calls it where few did.

Four tests at a time share two cores with servers and a linter, and a wait may end there that is long enough alone. A
test that passes now is named, with its first failure above, because a race in the product looks the same. More than
`MOST` failures are no accident, and are not repeated.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import click

#: Failures that are repeated at most.
MOST: Final = 3
#: File of pytest's cache.
_LAST: Final = Path(".pytest_cache/v/cache/lastfailed")


def again(folder: Path, *, most: int = MOST) -> int:
    """Repeat the failed tests of a folder's last session, with its seed.

    Returns:
        Exit code: 0 if each of them passes now, else 1.
    """
    path = folder / _LAST
    failed = sorted(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else []
    # A file that cannot be collected is named without a test.
    if not 0 < len(failed) <= most or not all("::" in name for name in failed):
        return 1
    click.echo(f"== once more, alone: {len(failed)} failed")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--quiet", "--randomly-seed=last", *failed], cwd=folder, check=False
    )
    if done.returncode:
        return 1
    for name in failed:
        click.echo(f"PASSED ALONE ONLY: {name}: its first failure is above, find its cause")
    return 0


if __name__ == "__main__":
    sys.exit(again(Path()))

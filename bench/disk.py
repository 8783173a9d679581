"""A slow disk under the subscriber: a preloaded library that sleeps in page reads and in flushes.

In go microseconds; out come the variables and settings of a server whose disk can be made slow and fast again while it
runs. Only what is measured meets the slow disk: neither filling nor comparing does.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.options import FAST, Disk
from parapply.demo.errors import DemoError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from parapply.demo.cluster import Setting

_SOURCE: Final = Path(__file__).with_name("disk.c")
#: PostgreSQL 18's first version with `io_method`, by its number.
_IO_METHOD_MAJOR: Final = 18
_SHARED_BUFFERS: Final = "32MB"


class SlowDisk:
    """The library and the file that it reads its delays from."""

    def __init__(self, directory: Path) -> None:
        """Build the library in a directory that the server's account can enter.

        Raises:
            DemoError: no C compiler, or it failed.
        """
        library, self._delays = directory / "disk.so", directory / "delays"
        compiler = shutil.which(os.environ.get("CC") or "cc")
        if compiler is None:
            raise DemoError("A slow disk needs a C compiler to build its library.", hint="install gcc, or set CC")
        command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(_SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  no shell
        if done.returncode != 0:
            raise DemoError(f"The slow disk's library cannot be built: {done.stderr.strip()}")
        library.chmod(0o755)
        #: For the server's process.
        self.environment: Final[Mapping[str, str]] = {
            "LD_PRELOAD": os.pathsep.join(filter(None, [str(library), os.environ.get("LD_PRELOAD")])),
            "PARAPPLY_BENCH_DISK": str(self._delays),
        }
        self._write(FAST)
        self._delays.chmod(0o644)

    def settings(self, major: int) -> dict[str, Setting]:
        """Return the settings of a server that shall feel its disk: little memory, and reads by the session itself.

        With `io_method = worker`, the default of version 18, other processes read, so the sleeps of one session
        would be side by side.
        """
        settings: dict[str, Setting] = {"shared_buffers": _SHARED_BUFFERS}
        if major >= _IO_METHOD_MAJOR:
            settings["io_method"] = "sync"
        return settings

    def check(self, pid: int) -> None:
        """Do nothing if a process has the library.

        Raises:
            DemoError: it has not, so its disk is as fast as ever.
        """
        if self.environment["LD_PRELOAD"].split(os.pathsep)[0] not in Path(f"/proc/{pid}/maps").read_text("utf-8"):
            raise DemoError("The subscriber did not load the library that makes its disk slow.")

    @contextmanager
    def slowed(self, disk: Disk) -> Iterator[None]:
        """Have reads and flushes of all the server's processes take longer while the block runs."""
        self._write(disk)
        try:
            yield
        finally:
            self._write(FAST)

    def _write(self, disk: Disk) -> None:
        # Not made again: the server has this very file mapped.
        with self._delays.open("r+b" if self._delays.exists() else "wb") as file:
            file.write(struct.pack("=II", disk.read_us, disk.sync_us))


@contextmanager
def slow_disk() -> Iterator[SlowDisk]:
    """Give a disk whose files go when the block ends.

    Raises:
        DemoError: no C compiler, or it failed.
    """
    with tempfile.TemporaryDirectory(prefix="parapply-bench-disk-") as name:
        # The account that runs the servers passes through.
        Path(name).chmod(0o711)
        yield SlowDisk(Path(name))

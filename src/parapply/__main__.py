"""The command ``parapply``, also as ``python -m parapply``: what must hold before anything else is imported."""

from __future__ import annotations

import gc
import os
import signal
import sys


def run() -> int:
    """Run the command line and return its exit code."""
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        # Ctrl-C while modules are imported ends the process at once, and without a traceback of them.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _open_standard_files()
    # Modules make many objects and no garbage.
    gc.disable()
    from parapply.cli.main import main  # noqa: PLC0415  as said

    gc.enable()
    signal.signal(signal.SIGINT, interrupt)
    return main()


def _open_standard_files() -> None:
    """Put a file that takes everything in the place of each standard file that the caller has closed.

    Else a connection to a server would get its number, and what is written to the file would go there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(run())

"""Check that everything that the benchmark needs is installed: it has requirements that parapply has not."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

from parapply.demo.errors import DemoError

_TREE: Final = Path(__file__).parent


def check_installed(*, with_plot: bool) -> None:
    """Refuse to measure what cannot be measured, or could not be drawn in the end.

    Args:
        with_plot: a plot is to be written.

    Raises:
        DemoError: a package is missing.
    """
    hint = f"pip install -c {_TREE.parent / 'constraints.txt'} -r {_TREE / 'requirements.txt'}"
    if find_spec("psutil") is None:
        raise DemoError("The benchmark needs psutil.", hint=hint)
    if with_plot and find_spec("matplotlib") is None:
        raise DemoError("The plot needs matplotlib.", hint=f"{hint}, or leave the files out with --no-save")

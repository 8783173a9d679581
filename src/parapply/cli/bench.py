"""The command `parapply bench`: the benchmark is not in the package; a checkout of the source has it in `bench/`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Final

import click

from parapply.errors import ConfigError

_CHECKOUT: Final = Path(__file__).parents[3]


def find_bench() -> click.Command:
    """Return the benchmark's command where this package runs from a checkout, else one that says where it is."""
    if not (_CHECKOUT / "bench" / "command.py").is_file():
        return _elsewhere
    # In front, so that no other module of this general name is taken.
    sys.path.insert(0, str(_CHECKOUT))
    command: click.Command = importlib.import_module("bench.command").bench
    return command


@click.command(
    "bench", context_settings={"ignore_unknown_options": True}, epilog="From a checkout of the source: make bench"
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="...")
def _elsewhere(words: tuple[str, ...]) -> None:  # noqa: ARG001  whatever was asked for
    """Benchmark, from a checkout of the source only."""
    raise ConfigError(
        "The benchmark is part of the source, not of the installed package.",
        hint="get the source of this version, and run `make bench` there",
    )


bench: Final = find_bench()

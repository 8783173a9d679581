"""Names the plugins of the test suite, and what holds for every property."""

from __future__ import annotations

import gc
import os
import tempfile

import pytest
from hypothesis import settings

from tests.fixtures.memory import memory_directory

_PLUGINS = ("selection", "rotation", "clusters", "servers", "daemon", "ends", "spark", "captures")
pytest_plugins = [f"tests.fixtures.{name}" for name in _PLUGINS]

# How long an example takes says how busy the machine is, nothing else.
# Mutants of the planner were found by 50 examples where they were found by 100. For a search, add
# `--hypothesis-profile=thorough`.
settings.register_profile("parapply", deadline=None, max_examples=50)
settings.register_profile("thorough", deadline=None, max_examples=2000)
# For the inner loop, `make test-unit`.
settings.register_profile("quick", deadline=None, max_examples=10)
# The pass beside all tests, over the same sources uncompiled: other examples, and fewer.
settings.register_profile("interpreted", settings.get_profile("parapply"), max_examples=10)
settings.load_profile("interpreted" if os.environ.get("PARAPPLY_COMPILED") == "forbid" else "parapply")


def pytest_configure() -> None:
    """Make what is temporary in memory where that can be, also by the programs that tests start."""
    memory = memory_directory()
    if memory is not None:
        os.environ["TMPDIR"] = str(memory)
        tempfile.tempdir = None


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Search for no reference cycles while thousands of tests are made, which live to the end."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave the existing objects out of all later searches: each would walk through every test."""
    gc.freeze()
    gc.enable()

"""Names the plugins of the test suite, and what holds for every property."""

from __future__ import annotations

from hypothesis import settings

pytest_plugins = ["tests.fixtures.selection", "tests.fixtures.servers", "tests.fixtures.daemon", "tests.fixtures.spark"]

# How long an example takes says how busy the machine is, nothing else.
settings.register_profile("parapply", deadline=None)
settings.load_profile("parapply")

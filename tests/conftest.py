"""Names the plugins of the test suite."""

from __future__ import annotations

pytest_plugins = ["tests.fixtures.selection", "tests.fixtures.servers", "tests.fixtures.daemon", "tests.fixtures.spark"]
